"""How initial scale, learning rate and weight decay follow from what a parameter is.

A parametrisation maps (ParamSpec, shape) to a Scaling; a decay rule maps the weight decay and the
learning rates to the share of a weight taken off in one step.
"""

from modules.scaling.decay import decoupled, independent
from modules.scaling.parametrization import Scaling, standard

__all__ = ['DECAY_RULES', 'PARAMETRIZATIONS', 'Scaling']

PARAMETRIZATIONS = {'standard': standard}
DECAY_RULES = {'decoupled': decoupled, 'independent': independent}
