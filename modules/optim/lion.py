"""Lion."""

from typing import Any

import jax.numpy as jnp
import optax

from modules.optim.adamw import B1, B2
from modules.optim.base import of_family, per_parameter


@of_family('adam')
def lion(specs: Any, *, b1: B1 = 0.9, b2: B2 = 0.99) -> optax.GradientTransformation:
    """sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g (arXiv:2302.06675, algorithm 2).

    Each coordinate moves by the learning rate itself, so that it is a third to a tenth of AdamW's,
    and the weight decay as many times larger.
    """

    def init(spec, weight):
        del spec
        return {'momentum': jnp.zeros_like(weight)}

    def update(spec, grad, kept, weight, count):
        del spec, weight, count
        m = kept['momentum']
        return jnp.sign(b1 * m + (1 - b1) * grad), {'momentum': b2 * m + (1 - b2) * grad}

    return per_parameter(specs, init, update)
