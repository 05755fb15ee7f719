"""Optimizers, schedules and averages of the weights.

An optimizer is an optax GradientTransformation that turns gradients into a direction; the step then
multiplies it by the learning rate and takes off weight decay, each as the parametrisation says. One
that has a part in its weight decay gives a Direction in place of an array (`modules.optim.base`).
A row of `OPTIMIZERS` maps the specs of the parameters, and its numbers, which may be tracers, to
one. What it needs beside gradients comes as optax's extra arguments of `update`: `value`, the loss;
`means`, that of each of its terms over the target tokens; `grad`, the gradient before clipping; and
functions, each of which costs nothing where it is not called:

    value_fn(params)           the loss of the batch, as `value`
    share_fn(params, rows)     what some rows add to it; `rows` has all, in microbatches [n, b, ...]
    logits_fn(params, rows)    their logits [b, T, V]
    of_logits(logits, rows)    their share from these, without what layers add to the loss

All have gradients. For `jax.jvp`, logits_fn and of_logits need kernels.attention=reference; the
gradient of value_fn has it with blocked too, and value_fn itself has not where the loss is taken by
chunks. Those of parameters end with `_fn`; for an optimizer of some roles
they are functions of its own (`by_role`). What an optimizer needs of a model, and what it does
without, is in `of_family`. A leaf of its state that is not shaped like its parameter is described
by a box (`modules.optim.base.state_specs`).
A row of `SCHEDULES` maps (step, steps, **numbers) to the learning rate's fraction of its peak.
A row of `AVERAGES` says which weights evaluation uses (`modules.optim.averages`).
"""

from modules.optim.adafactor import adafactor
from modules.optim.adamp import adamp, sgdp
from modules.optim.adamw import adamw
from modules.optim.apollo import apollo
from modules.optim.aro import aro
from modules.optim.auon import auon, hybrid_auon
from modules.optim.averages import AVERAGES, Average
from modules.optim.base import Direction, by_role, state_specs, unboxed, with_share
from modules.optim.cge import cge
from modules.optim.conda import conda
from modules.optim.galore import fira, galore
from modules.optim.gauss_newton import gauss_newton
from modules.optim.lion import lion
from modules.optim.muon import muon, muon_spectral
from modules.optim.normalized_gd import normalized_gd
from modules.optim.scale import scale
from modules.optim.schedules import (
    constant,
    cyclic,
    exponential,
    inverse_sqrt,
    linear,
    power,
    warmup_cosine,
    warmup_stable_decay,
)
from modules.optim.sgd import sgd
from modules.optim.shampoo import shampoo
from modules.optim.soap import soap
from modules.optim.sophia import sophia
from modules.optim.sven import sven

__all__ = [
    'AVERAGES',
    'OPTIMIZERS',
    'SCHEDULES',
    'Average',
    'Direction',
    'by_role',
    'state_specs',
    'unboxed',
    'with_share',
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
SCHEDULES = {
    'constant': constant,
    'cyclic': cyclic,
    'exponential': exponential,
    'inverse_sqrt': inverse_sqrt,
    'linear': linear,
    'power': power,
    'warmup_cosine': warmup_cosine,
    'warmup_stable_decay': warmup_stable_decay,
}
