"""AdamP and SGDP: directions without the part that only makes a scale-invariant weight longer."""

import math
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import ABOVE_0, B1, B2, Eps
from modules.optim.base import Direction, of_family, per_parameter
from modules.optim.sgd import Dampening, Momentum, Nesterov
from modules.options import Option
from modules.params import ParamSpec, as_matrices, from_matrices

SGDP_EPS = 1e-8  # of the norms in the projection; SGDP has no other denominator

Delta = Annotated[
    float,
    Option(
        'cosine of gradient and weight, times the root of their size, below which is projected',
        ABOVE_0,
        sys.float_info.max,
        traced=True,
    ),
]
DecayRatio = Annotated[
    float, Option('share of the weight decay where it is projected', 0, 1, traced=True)
]


def decay_is_taken_off(recipe: Any, part: Any) -> None:
    """Raises ValueError where weight decay is in the gradient, so that no share can be left."""
    is_penalty = recipe.decay.row.in_gradient and recipe.optim.weight_decay
    if is_penalty and part.options['adamp_decay_ratio'] != 1.0:
        raise ValueError(
            f'{recipe.decay} adds weight decay to the gradient, so that {part} cannot take less of '
            'it off. Choose optim.decay_rule=decoupled, or optim.adamp_decay_ratio=1.0.'
        )


@of_family('adam', check=decay_is_taken_off)
def adamp(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    nesterov: Nesterov = False,
    adamp_delta: Delta = 0.1,
    adamp_decay_ratio: DecayRatio = 0.1,
) -> optax.GradientTransformation:
    """Adam's direction, `without_radial` for matrices (arXiv:2006.08217, algorithm 2).

    As the PyPI package adamp 0.3.0 does it: with `nesterov` the first moment is moved once more,
    b1 m + (1 - b1) g, and is divided by 1 - b1^t all the same. Where a matrix is projected, only
    adamp_decay_ratio (its wd_ratio) of the weight decay is taken off it.
    """

    def init(spec, weight):
        del spec
        return {'momentum': jnp.zeros_like(weight), 'second': jnp.zeros_like(weight)}

    def update(spec, grad, kept, weight, count):
        m = b1 * kept['momentum'] + (1 - b1) * grad
        v = b2 * kept['second'] + (1 - b2) * grad**2
        moved = b1 * m + (1 - b1) * grad if nesterov else m
        direction = moved / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps)
        direction = without_radial(
            spec, direction, grad, weight, adamp_delta, eps, adamp_decay_ratio
        )
        return direction, {'momentum': m, 'second': v}

    return per_parameter(specs, init, update)


@of_family('sgd', check=decay_is_taken_off)
def sgdp(
    specs: Any,
    *,
    momentum: Momentum = 0.9,
    dampening: Dampening = 0.0,
    nesterov: Nesterov = False,
    adamp_delta: Delta = 0.1,
    adamp_decay_ratio: DecayRatio = 0.1,
) -> optax.GradientTransformation:
    """SGD's direction, `without_radial` for matrices (arXiv:2006.08217, algorithm 1).

    The sum of gradients is kept as it is, as the paper has it: the PyPI package adamp projects it
    in place and keeps that, but with `nesterov`. Its first sum is dampened as all are, so here too,
    where torch.optim.SGD spares it. Momentum 0.9 is that of the package's example, which has
    `nesterov` too; its signature has 0 and without. Weight decay is as in `adamp`, at the learning
    rate: the package divides it by 1 - momentum, so that its 1e-5 is 1e-4 here.
    """

    def init(spec, weight):
        del spec
        return {'momentum': jnp.zeros_like(weight)}

    def update(spec, grad, kept, weight, count):
        del count
        moved = momentum * kept['momentum'] + (1 - dampening) * grad
        direction = grad + momentum * moved if nesterov else moved
        direction = without_radial(
            spec, direction, grad, weight, adamp_delta, SGDP_EPS, adamp_decay_ratio
        )
        return direction, {'momentum': moved}

    return per_parameter(specs, init, update)


def without_radial(
    spec: ParamSpec,
    direction: jax.Array,
    grad: jax.Array,
    weight: jax.Array,
    delta: Any,
    eps: Any,
    ratio: Any,
) -> jax.Array | Direction:
    """A direction less its part along the weight, where the gradient is almost orthogonal to it.

    A weight whose length changes nothing has an orthogonal gradient, and a sum of gradients that
    only lengthens it. Each matrix is taken by output unit, and an embedding by token: if the
    largest |cos(grad, weight)| of all of them is below delta / sqrt(entries of one), each loses
    p <- p - w <w, p> / |w|^2. Otherwise the whole matrix is taken so, as one. A matrix that has
    lost it gets `ratio` of its weight decay. A vector is left.
    """
    if spec.role == 'vector':
        return direction
    p_IO, g_IO, w_IO = (as_matrices(spec, x) for x in (direction, grad, weight))
    unit = (-1,) if spec.role == 'embedding' else (-2,)
    found, share = p_IO, jnp.ones((*p_IO.shape[:-2], 1, 1), p_IO.dtype)
    for axes in ((-2, -1), unit):
        size = math.prod(w_IO.shape[axis] for axis in axes)
        cosine = jnp.abs(jnp.sum(g_IO * w_IO, axes, keepdims=True))
        for x_IO in (g_IO, w_IO):
            cosine /= jnp.maximum(jnp.linalg.norm(x_IO, axis=axes, keepdims=True), eps)
        fires = jnp.max(cosine, (-2, -1), keepdims=True) < delta / math.sqrt(size)
        along_IO = w_IO / (jnp.linalg.norm(w_IO, axis=axes, keepdims=True) + eps)
        radial_IO = along_IO * jnp.sum(along_IO * p_IO, axes, keepdims=True)
        found, share = jnp.where(fires, p_IO - radial_IO, found), jnp.where(fires, ratio, share)
    batch = share.shape[:-2]
    share = share.reshape(*batch, *(1,) * (weight.ndim - len(batch)))
    return Direction(from_matrices(spec, found, weight.shape), share)
