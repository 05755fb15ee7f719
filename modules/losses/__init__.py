"""Losses. A new one is a function here and a row in `LOSSES`.

Each maps (activations [..., D], readout, labels [...], weights [...], **numbers) to sums over
tokens by name: `objective` is minimised; `ce`, -log p(label) in nats, compares models; any other
term is recorded. `logits_loss` makes a loss of a function of logits. A row of `AUXILIARIES` weighs
what layers sow under its name.
"""

from modules.losses.base import balance_loss, cross_entropy, logits_loss, with_error_probability
from modules.losses.chunked import by_chunks, chunks_of, cut, tokens_at_a_time
from modules.losses.label_probability import comp_sum, dco, dice, focal
from modules.losses.ldr import aldr_kl, ldr_kl
from modules.losses.linear_readout import adversarial_comp_sum, spherical_z, taylor_softmax

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
#: Weights of what layers sow, which are added to the objective.
AUXILIARIES = {'balance_loss': balance_loss}
