"""Initial scale, learning rate and weight decay of a parameter, from its description.

An initialisation maps (ParamSpec, shape, blocks) to a standard deviation. A parametrisation maps
(ParamSpec, Growth, family of the optimizer) to Factors of the deviation, of the used weight, and of
its learning rate. A decay rule maps DecayInputs to the share of a weight that a step removes.
"""

from modules.scaling.decay import DECAY_RULES, DecayInputs
from modules.scaling.init import INITS
from modules.scaling.parametrization import (
    PARAMETRIZATIONS,
    Factors,
    Growth,
    Scaling,
    compute_growth,
    compute_scaling,
    one_channel_shape,
)

__all__ = [
    'DECAY_RULES',
    'INITS',
    'PARAMETRIZATIONS',
    'DecayInputs',
    'Factors',
    'Growth',
    'Scaling',
    'compute_growth',
    'compute_scaling',
    'one_channel_shape',
]
