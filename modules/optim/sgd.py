"""Stochastic gradient descent."""

from typing import Annotated, Any

import jax.numpy as jnp
import optax

from modules.optim.adamw import BELOW_1
from modules.optim.base import of_family, per_parameter
from modules.options import Option

# Of the methods that keep one sum of gradients.
Momentum = Annotated[
    float, Option('share of the sum of gradients that is kept', 0, BELOW_1, traced=True)
]
Dampening = Annotated[
    float, Option('share of each gradient that the sum is spared', 0, 1, traced=True)
]
Nesterov = Annotated[bool, Option('whether the gradient is added to what it has just moved')]


@of_family('sgd')
def sgd(
    specs: Any,
    *,
    momentum: Momentum = 0.9,
    dampening: Dampening = 0.0,
    nesterov: Nesterov = False,
) -> optax.GradientTransformation:
    """m = momentum m + (1 - dampening) g; the direction is m, or g + momentum m with Nesterov.

    As torch.optim.SGD, whose first m is g all the same, whatever the dampening. Sources: heavy ball
    doi:10.1016/0041-5553(64)90137-5; Nesterov's in this form
    https://proceedings.mlr.press/v28/sutskever13.html.
    """

    def init(spec, weight):
        del spec
        return {'momentum': jnp.zeros_like(weight)}

    def update(spec, grad, kept, weight, count):
        del spec, weight
        share = jnp.where(count == 1, 1.0, 1 - dampening)
        moved = momentum * kept['momentum'] + share * grad
        return (grad + momentum * moved if nesterov else moved), {'momentum': moved}

    return per_parameter(specs, init, update)
