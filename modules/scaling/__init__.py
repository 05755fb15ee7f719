"""How initial scale, learning rate and weight decay follow from what a parameter is.

An initialisation maps (ParamSpec, shape, blocks) to a standard deviation; a parametrisation maps
(ParamSpec, Growth, family of the optimizer) to Factors of that, of the weight where it is used, and
of its learning rate; a decay rule maps a Decay to the share of a weight that is taken off in one
step.
"""

from modules.scaling.decay import DECAY_RULES, Decay
from modules.scaling.growth import Factors, Growth, Scaling, growth_of, of_one_channel
from modules.scaling.init import INITS
from modules.scaling.parametrization import PARAMETRIZATIONS, scaling_of

__all__ = [
    'DECAY_RULES',
    'INITS',
    'PARAMETRIZATIONS',
    'Decay',
    'Factors',
    'Growth',
    'Scaling',
    'growth_of',
    'of_one_channel',
    'scaling_of',
]
