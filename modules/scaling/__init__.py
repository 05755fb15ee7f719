"""How initial scale, learning rate and weight decay follow from what a parameter is.

A parametrisation maps (ParamSpec, shape, Growth, family of the optimizer) to a Scaling; a decay
rule maps a Decay to the share of a weight that is taken off in one step.
"""

from modules.scaling.decay import Decay, decoupled, independent
from modules.scaling.parametrization import Growth, Scaling, growth_of, standard

__all__ = ['DECAY_RULES', 'PARAMETRIZATIONS', 'Decay', 'Growth', 'Scaling', 'growth_of']

PARAMETRIZATIONS = {'standard': standard}
DECAY_RULES = {'decoupled': decoupled, 'independent': independent}
