"""Losses. A new one is a file here and a row in `LOSSES`.

Each maps (activations [..., D], readout, labels [...], weights [...], **numbers) to sums over
tokens by name: `objective`, what is minimised; `ce`, -log p(label) in nats, what models are
compared on; and any other term, which is recorded. `logits_loss` makes one of a function of logits.
A row of `AUXILIARIES` weighs what layers sow under its name.
"""

from modules.losses.auxiliary import balance_loss
from modules.losses.base import logits_loss
from modules.losses.cross_entropy import cross_entropy

__all__ = ['AUXILIARIES', 'LOSSES', 'logits_loss']

LOSSES = {
    'cross_entropy': cross_entropy,
}
AUXILIARIES = {'balance_loss': balance_loss}
