"""Optimizers, schedules and averages of the weights.

An optimizer is an optax GradientTransformation that turns gradients into a direction. Later stages
multiply the direction by the learning rate and apply weight decay, each as the parametrisation
determines. An optimizer that scales the weight decay of a parameter returns a Direction in place of
an array (`modules.optim.base`). A row of `OPTIMIZERS` maps the specs of the parameters, and its
numbers, which may be tracers, to an optimizer. `update` gets extra arguments, as in optax: `value`,
the loss; `means`, the mean of each of its terms over the target tokens; `grad`, the gradient before
clipping; and the fields of `BatchFunctions`, functions that cost nothing unless they are called.

Names of functions of parameters end with `_fn`; an optimizer for some roles gets them as functions
of its parameters (`partition_by_role`). `optimizer_row` states what an optimizer requires of a
model. A leaf of its state that is not shaped like its parameter is described by a box
(`modules.optim.base.state_specs`).

The stages of an update, among them the optimizer, are rows of `modules.optim.stages.STAGES`. A row
of `SCHEDULES` maps (step, steps, **numbers) to the learning rate's fraction of its peak. A row of
`AVERAGES` maps trained weights to the weights for evaluation (`modules.optim.averages`).
"""

from modules.optim.averages import AVERAGES, Average, mask_untrained
from modules.optim.base import (
    BatchFunctions,
    Direction,
    as_direction,
    partition,
    partition_by_role,
    state_specs,
    unbox_state,
)
from modules.optim.beyond_gradients import cge, gauss_newton, sophia, sven
from modules.optim.classic import adamw, scale, sgd
from modules.optim.low_rank import apollo, fira, galore
from modules.optim.muon import auon, hybrid_auon, muon, muon_spectral, normuon
from modules.optim.rotated import aro, conda, shampoo, soap, soap_muon
from modules.optim.schedules import SCHEDULES
from modules.optim.scion import scion
from modules.optim.variants import adafactor, adamp, ademamix, lion, normalized_gd, sgdp

__all__ = [
    'AVERAGES',
    'OPTIMIZERS',
    'SCHEDULES',
    'Average',
    'BatchFunctions',
    'Direction',
    'as_direction',
    'mask_untrained',
    'partition',
    'partition_by_role',
    'state_specs',
    'unbox_state',
]

OPTIMIZERS = {
    'adamw': adamw,
    'adafactor': adafactor,
    'adamp': adamp,
    'ademamix': ademamix,
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
    'normuon': normuon,
    'scale': scale,
    'scion': scion,
    'sgd': sgd,
    'sgdp': sgdp,
    'shampoo': shampoo,
    'soap': soap,
    'soap_muon': soap_muon,
    'sophia': sophia,
    'sven': sven,
}
