"""Reparametrisations: maps from the weights that are stored and optimised to the weights used.

Shaped like an optax transform and applied to the whole tree, so that layers never know. A new one
is a file here and a row in `REPARAMS`.
"""

from modules.reparam.base import Reparam, chain, none
from modules.reparam.shared import shared
from modules.reparam.weight_norm import weight_norm

__all__ = ['REPARAMS', 'Reparam', 'chain', 'shared']

REPARAMS = {'none': none, 'weight_norm': weight_norm}
