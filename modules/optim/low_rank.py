"""What optimizers share that keep Adam's moments of a projected gradient.

A matrix [I, O] is seen with its shorter side first, [..., K, N], the input side where both are
equally long; a projection P [..., K, r] makes P^T G [..., r, N] of it. Layers and experts are
matrices of their own.
"""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.optim.adamw import ABOVE_0
from modules.optim.base import Kept, boxed
from modules.options import Option
from modules.params import Described, ParamSpec, as_matrices, from_matrices

Rank = Annotated[
    int, Option('of the projected gradient; the shorter side of a matrix at most', 1, math.inf)
]
ProjectionEvery = Annotated[
    int, Option('steps that a projection is kept for', 1, math.inf, counted_in='steps')
]
GrowthLimit = Annotated[
    float,
    Option(
        'times the norm before it that the norm of an update may have',
        ABOVE_0,
        math.inf,
        traced=True,
    ),
]

EPS = 1e-8  # added to the norms that are divided by, in the code of Fira and APOLLO


def short_side_first(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """[..., K, N] with K <= N: the matrices of a parameter, transposed where I > O."""
    matrices = as_matrices(spec, x)
    rows, columns = matrices.shape[-2:]
    return jnp.swapaxes(matrices, -2, -1) if rows > columns else matrices


def as_parameter(spec: ParamSpec, matrices: jax.Array, like: jax.Array) -> jax.Array:
    """The parameter shaped as `like` whose `short_side_first` these are."""
    rows, columns = jax.eval_shape(lambda x: as_matrices(spec, x), like).shape[-2:]
    turned = jnp.swapaxes(matrices, -2, -1) if rows > columns else matrices
    return from_matrices(spec, turned, like.shape)


def empty_moments(spec: ParamSpec, weight: jax.Array, rank: int) -> Kept:
    """Adam's two moments of the projected gradient, [..., r, N] each, in their boxes."""
    *batch, short, long = _shape(spec, weight)
    zeros = jnp.zeros((*batch, min(rank, short), long), weight.dtype)
    return {name: boxed(spec, zeros, 'rank', 'long_side') for name in ('momentum', 'second')}


def empty_basis(spec: ParamSpec, weight: jax.Array, rank: int) -> Described:
    """The place of a projection [..., K, r], in its box."""
    *batch, short, _ = _shape(spec, weight)
    zeros = jnp.zeros((*batch, short, min(rank, short)), weight.dtype)
    return boxed(spec, zeros, 'short_side', 'rank')


def empty_norm(spec: ParamSpec, weight: jax.Array) -> Described:
    """The place of one norm [...] for each matrix, in its box."""
    return boxed(spec, jnp.zeros(_shape(spec, weight)[:-2], weight.dtype))


def singular_basis(x: jax.Array, rank: int) -> jax.Array:
    """[..., K, r]: the singular vectors of the shorter side of x [..., K, N], largest first.

    A singular vector is one up to its sign, and moments that outlive a projection read the sign:
    here the entry of each that is largest in size is positive, on every device.
    """
    vectors = jnp.linalg.svd(x, full_matrices=False)[0][..., :rank]
    largest = jnp.argmax(jnp.abs(vectors), -2, keepdims=True)
    sign = jnp.where(jnp.take_along_axis(vectors, largest, -2) < 0, -1.0, 1.0)
    return vectors * sign.astype(vectors.dtype)


def uncorrected_adam(
    low: jax.Array, kept: Kept, b1: Any, b2: Any, eps: Any
) -> tuple[jax.Array, Kept]:
    """(m / (sqrt(v) + eps), {'momentum': m, 'second': v}), the biases still in it.

    The published code of these methods multiplies the finished update by `bias_factor` instead.
    """
    b1, b2 = (jnp.asarray(b, low.dtype) for b in (b1, b2))  # rounded alike in what must cancel
    m = b1 * kept['momentum'] + (1 - b1) * low
    v = b2 * kept['second'] + (1 - b2) * jnp.square(low)
    return m / (jnp.sqrt(v) + eps), {'momentum': m, 'second': v}


def bias_factor(b1: Any, b2: Any, count: jax.Array, dtype: Any) -> jax.Array:
    """sqrt(1 - b2^t) / (1 - b1^t), to all digits of a dtype in which b2^t is almost 1."""
    first, second = (-jnp.expm1(count * jnp.log1p(jnp.asarray(b, dtype) - 1)) for b in (b1, b2))
    return jnp.sqrt(second) / first


def norm_ratio(adam: jax.Array, low: jax.Array, axes: int | tuple[int, int]) -> jax.Array:
    """|adam| / (|low| + EPS) over `axes`, which keep size 1: how Adam scales a gradient."""
    adam, low = (jnp.linalg.norm(x, axis=axes, keepdims=True) for x in (adam, low))
    return adam / (low + EPS)


def limited(update: jax.Array, before: jax.Array, most: Any) -> tuple[jax.Array, jax.Array]:
    """(the update [..., K, N] scaled to the norm `most` * before if it has more, its norm [...]).

    Nothing is scaled after an update of 0, `before` the first one and where gradients were zero:
    in the published code such a matrix could then hardly move any more.
    """
    norm = jnp.linalg.norm(update, axis=(-2, -1))
    ratio = norm / (before + EPS)
    divisor = jnp.where(before > 0, jnp.maximum(ratio / most, 1.0), 1.0)
    return update / divisor[..., None, None], norm / divisor


def _shape(spec: ParamSpec, weight: jax.Array) -> tuple[int, ...]:
    return jax.eval_shape(lambda x: short_side_first(spec, x), weight).shape
