"""Losses. A new loss is a function here and a row in `LOSSES`.

A loss maps (activations [..., D], readout, labels [...], weights [...], **numbers) to sums over
tokens by name: `objective` is minimised; `ce`, -log p(label) in nats, compares models; other terms
are recorded. `logits_loss` makes a loss from a function of logits. A row of `AUXILIARIES` weighs
the scalars that layers sow under its name.
"""

from typing import Any

from modules.losses.base import (
    add_error_probability,
    balance_loss,
    cross_entropy,
    logits_loss,
    router_z_loss,
)
from modules.losses.chunked import chunk_loss, count_chunks, select_chunk_size, split_chunks
from modules.losses.label_probability import comp_sum, dco, dice, focal
from modules.losses.ldr import aldr_kl, ldr_kl
from modules.losses.linear_readout import adversarial_comp_sum, spherical_z, taylor_softmax
from modules.losses.next_tokens import (
    parse_token_weights,
    shift_targets,
    token_weights_at,
    weigh_next_tokens,
)

__all__ = [
    'AUXILIARIES',
    'LOSSES',
    'add_error_probability',
    'chunk_loss',
    'count_chunks',
    'logits_loss',
    'parse_token_weights',
    'select_chunk_size',
    'shift_targets',
    'split_chunks',
    'token_weights_at',
    'weigh_next_tokens',
]

LOSSES: dict[str, Any] = {
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
#: Weights of sown scalars, which are added to the objective.
AUXILIARIES = {'balance_loss': balance_loss, 'router_z_loss': router_z_loss}
