"""Optimizers and schedules.

An optimizer is an optax GradientTransformation that turns gradients into a direction; the step then
multiplies it by the learning rate and takes off weight decay, each as the parametrisation says.
A row of `OPTIMIZERS` maps the specs of the parameters, and its numbers, which may be tracers, to
one. What it needs beside gradients comes as optax's extra arguments of `update`: `value`, the loss;
`grad`, the gradient before clipping; and `value_fn(params)`, the loss of the batch, to be
differentiated in any direction (`jax.jvp` needs kernels.attention=reference). A leaf of its state
that is not shaped like its parameter is described by a box (`modules.optim.base.state_specs`).
A row of `SCHEDULES` maps (step, steps, **numbers) to the learning rate's fraction of its peak.
"""

from modules.optim.adamw import adamw
from modules.optim.aro import aro
from modules.optim.base import by_role, state_specs, unboxed
from modules.optim.conda import conda
from modules.optim.lion import lion
from modules.optim.schedules import constant, warmup_cosine, warmup_stable_decay
from modules.optim.sgd import sgd
from modules.optim.shampoo import shampoo
from modules.optim.soap import soap

__all__ = ['OPTIMIZERS', 'SCHEDULES', 'by_role', 'state_specs', 'unboxed']

OPTIMIZERS = {
    'adamw': adamw,
    'aro': aro,
    'conda': conda,
    'lion': lion,
    'sgd': sgd,
    'shampoo': shampoo,
    'soap': soap,
}
SCHEDULES = {
    'constant': constant,
    'warmup_cosine': warmup_cosine,
    'warmup_stable_decay': warmup_stable_decay,
}
