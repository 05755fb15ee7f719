"""Optimizers and schedules.

An optimizer is an optax GradientTransformation that turns gradients into a direction; the step then
multiplies it by the learning rate and takes off weight decay, each as the parametrisation says.
A row of `OPTIMIZERS` is a function of Hyper, whose fields may be tracers. A row of `SCHEDULES` maps
(step, Hyper) to the learning rate's fraction of its peak.
"""

from modules.optim.adamw import adamw
from modules.optim.schedules import constant, warmup_cosine, warmup_stable_decay

OPTIMIZERS = {'adamw': adamw}
SCHEDULES = {
    'constant': constant,
    'warmup_cosine': warmup_cosine,
    'warmup_stable_decay': warmup_stable_decay,
}
