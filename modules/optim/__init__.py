"""Optimizers, schedules and averages of the weights.

An optimizer is an optax GradientTransformation that turns gradients into a direction; stages behind
it multiply that by the learning rate and apply weight decay, each as the parametrisation says.
An optimizer that scales its own weight decay returns a Direction in place of an array
(`modules.optim.base`). A row of `OPTIMIZERS` maps the specs of the parameters, and its numbers,
which may be tracers, to one. Its `update` gets optax's extra arguments: `value`, the loss; `means`,
the mean of each of its terms over the target tokens; `grad`, the gradient before clipping; and the
fields of `BatchFunctions`, functions that cost nothing if they are not called.

Names of functions of parameters end with `_fn`; an optimizer of some roles gets them as functions
of its own parameters (`by_role`). `optimizer_row` states what an optimizer needs of a model, and what
it does without. A leaf of its state that is not shaped like its parameter is described by a box
(`modules.optim.base.state_specs`).
The stages of an update, of which the optimizer is one, are rows of `modules.optim.stages.STAGES`.
A row of `SCHEDULES` maps (step, steps, **numbers) to the learning rate's fraction of its peak.
A row of `AVERAGES` says which weights evaluation uses (`modules.optim.averages`).
"""

from modules.optim.averages import AVERAGES, Average, mask_untrained
from modules.optim.base import (
    BatchFunctions,
    Direction,
    as_direction,
    partition_by_role,
    state_specs,
    unbox_state,
)
from modules.optim.beyond_gradients import cge, gauss_newton, sophia, sven
from modules.optim.classic import adamw, scale, sgd
from modules.optim.low_rank import apollo, fira, galore
from modules.optim.muon import auon, hybrid_auon, muon, muon_spectral
from modules.optim.rotated import aro, conda, shampoo, soap
from modules.optim.schedules import SCHEDULES
from modules.optim.variants import adafactor, adamp, lion, normalized_gd, sgdp

__all__ = [
    'AVERAGES',
    'OPTIMIZERS',
    'SCHEDULES',
    'Average',
    'BatchFunctions',
    'Direction',
    'as_direction',
    'mask_untrained',
    'partition_by_role',
    'state_specs',
    'unbox_state',
]

OPTIMIZERS = {
    'adamw': adamw,
    'adafactor': adafactor,
    'adamp': adamp,
    'apollo': apollo,
    'aro': aro,
    'auon': auon,
    'cge': cge,
    'conda': conda,
    'fira': fira,
    'galore': galore,
    'gauss_newton': gauss_newton,
    'hybrid_auon': hybrid_auon,
    'lion': lion,
    'muon': muon,
    'muon_spectral': muon_spectral,
    'normalized_gd': normalized_gd,
    'scale': scale,
    'sgd': sgd,
    'sgdp': sgdp,
    'shampoo': shampoo,
    'soap': soap,
    'sophia': sophia,
    'sven': sven,
}
