"""Losses. A new one is a file here and a row in `LOSSES`.

Each maps (activations [..., D], readout, labels [...], weights [...], **numbers) to sums over
tokens by name: `objective`, what is minimised; `ce`, -log p(label) in nats, what models are
compared on; and any other term, which is recorded. `logits_loss` makes one of a function of logits.
A row of `AUXILIARIES` weighs what layers sow under its name.
"""

from modules.losses.adversarial import adversarial_comp_sum
from modules.losses.auxiliary import balance_loss
from modules.losses.base import logits_loss, with_error_probability
from modules.losses.chunked import by_chunks, chunks_of, cut, tokens_at_a_time
from modules.losses.comp_sum import comp_sum, dice, focal
from modules.losses.cross_entropy import cross_entropy
from modules.losses.dco import dco
from modules.losses.ldr import aldr_kl, ldr_kl
from modules.losses.spherical import spherical_z, taylor_softmax

__all__ = [
    'AUXILIARIES',
    'LOSSES',
    'by_chunks',
    'chunks_of',
    'cut',
    'logits_loss',
    'tokens_at_a_time',
    'with_error_probability',
]

LOSSES = {
    'cross_entropy': cross_entropy,
    'comp_sum': comp_sum,
    'adversarial_comp_sum': adversarial_comp_sum,
    'focal': focal,
    'dice': dice,
    'dco': dco,
    'spherical_z': spherical_z,
    'taylor_softmax': taylor_softmax,
    'ldr_kl': ldr_kl,
    'aldr_kl': aldr_kl,
}
AUXILIARIES = {'balance_loss': balance_loss}
