"""Adam's moments of a projected gradient: GaLore, Fira and APOLLO.

A matrix [I, O] is used with its shorter side first, [..., K, N] (the input side, if both have the
same length). A projection P [..., K, r] gives P^T G [..., r, N]. Layers and experts are separate
matrices. The published code of these methods leaves the biases in the moments and multiplies the
finished update by `bias_factor`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import (
    B1,
    B2,
    Eps,
    ParamState,
    above_0,
    box_state,
    compute_if,
    from_0,
    optimizer_row,
    per_parameter,
    steps_between,
)
from modules.optim.matrices import rotate, rotate_back
from modules.options import Option
from modules.params import ParamSpec, as_matrices, from_matrices

Rank = Annotated[
    int, Option('rank of the projected gradient; at most the shorter side of a matrix', 1)
]
ProjectionEvery = Annotated[int, steps_between('steps between new projections')]
GrowthLimit = Annotated[
    float,
    above_0('largest growth of the norm of an update from one step to the next', maximum=math.inf),
]
GaloreScale = Annotated[float, from_0('factor of the update in the subspace')]

EPS = 1e-8  # added to norms in denominators, as in the code of Fira and APOLLO
# Axes of [..., r, N] that share a factor of APOLLO: those of an index of the longer side, or all.
FACTOR_AXES = {'channel': -2, 'tensor': (-2, -1)}


@optimizer_row('adam', roles=('hidden',))
def galore(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-6,
    rank: Rank = 128,
    projection_every: ProjectionEvery = 200,
    galore_scale: GaloreScale = 0.25,
) -> optax.GradientTransformation:
    """GaLore (arXiv:2403.03507): `u = c P Adam(P^T G)`.

    `P` [K, r] holds the first `r` (`rank`) singular vectors of the shorter side of the gradient
    `G`, and `c` is `galore_scale`. `P` is recomputed from the gradient every `projection_every`
    updates, from the first on. Adam's moments [r, N] are not rotated with it, so they depend on the
    signs of the vectors. Here the largest entry of each vector is positive; in other code the sign
    comes from LAPACK or cuSOLVER. For equal singular values, the vectors are any basis of their
    space.

    Follows jiaweizzhao/GaLore, whose bias correction leaves eps out. The defaults of rank and scale
    are from its 60M-parameter model of width 512.

    With `model.reparam=weight_norm`, `projection_every=250` and `optim.others=adamw` this is
    GradNormLoRP (arXiv:2412.19616), projected on one side as in its code: the gradient of the
    direction is projected, and the gain of each output has Adam. That code overwrites the gains,
    and leaves the gradient's part along the direction in it.
    """

    def update(spec, grad, state, weight, count):
        basis, low = _project_gradient(short_side_first(spec, grad), state, count, projection_every)
        adam, moments = uncorrected_adam(low, state, b1, b2, eps)
        factor = galore_scale * bias_factor(b1, b2, count, grad.dtype)
        projected_back = factor * rotate_back(adam, {'left': basis})
        return from_short_side_first(spec, projected_back, grad), moments | {'basis': basis}

    return per_parameter(specs, init_projected(rank, 'basis'), update)


@optimizer_row('adam', roles=('hidden',))
def fira(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-6,
    rank: Rank = 128,
    projection_every: ProjectionEvery = 200,
    galore_scale: GaloreScale = 0.25,
    growth_limit: GrowthLimit = 1.01,
) -> optax.GradientTransformation:
    """Fira (arXiv:2410.01623): GaLore plus the scaled remainder `S` of the gradient.

    `u = c P Adam(R) + S with R = P^T G`
    `S = f (G - c P R), f = |Adam(R)| / |R|`

    `P` and `c` are those of `galore`, with the same signs. `f` is a number for each of the `N`
    indices of the longer side. From one update to the next, the norm of `S` grows at most by the
    factor `growth_limit`.

    Follows xichen-fy/Fira. The paper has `G - P R`, the whole remainder of GaLore, but its code
    multiplies `P R` by the scale too. As in that code, `f` and the limit come before Adam's bias
    correction.
    """

    def update(spec, grad, state, weight, count):
        g = short_side_first(spec, grad)
        basis, low = _project_gradient(g, state, count, projection_every)
        adam, moments = uncorrected_adam(low, state, b1, b2, eps)
        residual = g - galore_scale * rotate_back(low, {'left': basis})
        residual, norm = limit_growth(
            norm_ratio(adam, low, -2) * residual, state['norm'], growth_limit
        )
        direction = bias_factor(b1, b2, count, grad.dtype) * (
            galore_scale * rotate_back(adam, {'left': basis}) + residual
        )
        return from_short_side_first(spec, direction, grad), moments | {
            'basis': basis,
            'norm': norm,
        }

    return per_parameter(specs, init_projected(rank, 'basis', 'norm'), update)


@optimizer_row('adam', roles=('hidden',))
def apollo(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-6,
    rank: Rank = 128,
    projection_every: ProjectionEvery = 200,
    apollo_factors: Annotated[
        str,
        Option(
            'one factor per channel of the longer side, or one per tensor',
            choices=tuple(FACTOR_AXES),
        ),
    ] = 'channel',
    apollo_scale: Annotated[float, from_0('the update is multiplied by its square root')] = 1.0,
    growth_limit: GrowthLimit = 1.01,
) -> optax.GradientTransformation:
    """APOLLO (arXiv:2412.05270): `u = sqrt(c) f G with f = |Adam(R)| / |R|, R = P^T G`.

    `P` [K, r] projects the shorter side to `r` (`rank`) dimensions. Its entries are normal with
    variance `1 / r`, drawn again every `projection_every` updates and not stored. `c` is
    `apollo_scale`. `f` is a number for each index of the longer side, or one for the whole matrix
    with `apollo_factors=tensor`. From one update to the next, the norm of `f G` grows at most by
    the factor `growth_limit`. APOLLO-Mini is `rank=1`, `apollo_factors=tensor`, `apollo_scale=128`.

    Follows zhuhanqing/APOLLO, which sets the rank to a quarter of the width. Its factors, and the
    limit on them, come before Adam's bias correction. The scale may be applied before or after the
    limit (`scale_front`) without a difference, since the limit is on ratios.
    """

    def update(leaf, grad, state, weight, count):
        spec, g = leaf.spec, short_side_first(leaf.spec, grad)
        shape = (*g.shape[:-1], state['momentum'].shape[-2])
        period = (count - 1) // projection_every
        low = rotate(g, {'left': random_projection(leaf.number, period, shape, g.dtype)})
        adam, moments = uncorrected_adam(low, state, b1, b2, eps)
        factors = norm_ratio(adam, low, FACTOR_AXES[apollo_factors])
        direction, norm = limit_growth(factors * g, state['norm'], growth_limit)
        direction = jnp.sqrt(apollo_scale) * bias_factor(b1, b2, count, grad.dtype) * direction
        return from_short_side_first(spec, direction, grad), moments | {'norm': norm}

    init = init_projected(rank, 'norm')
    return per_parameter(number_specs(specs), lambda leaf, weight: init(leaf.spec, weight), update)


def random_projection(
    number: int, period: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Draws [..., K, r] for a parameter in a period, with other numbers for each of its matrices.

    Args:
      number: of the parameter.
      period: of `projection_every` updates.
      shape: [..., K, r].
      dtype: of the projection.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), period)
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-1])


@dataclasses.dataclass(frozen=True)
class SeededSpec:
    """A leaf: the spec of a parameter, and a number that seeds its random projections."""

    spec: ParamSpec
    number: int


def number_specs(specs: Any) -> Any:
    """Numbers the specs in the order of the tree."""
    leaves, tree = jax.tree.flatten(specs)
    return tree.unflatten([SeededSpec(spec, number) for number, spec in enumerate(leaves)])


def short_side_first(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Returns the matrices [..., K, N] of a parameter with K <= N: transposed if I > O."""
    matrices = as_matrices(spec, x)
    rows, columns = matrices.shape[-2:]
    return jnp.swapaxes(matrices, -2, -1) if rows > columns else matrices


def from_short_side_first(spec: ParamSpec, matrices: jax.Array, like: jax.Array) -> jax.Array:
    """Inverts `short_side_first`.

    Args:
      spec: describes the parameter.
      matrices: [..., K, N].
      like: an array of the shape of the parameter.

    Returns:
      The parameter.
    """
    rows, columns = jax.eval_shape(lambda x: as_matrices(spec, x), like).shape[-2:]
    matrices = jnp.swapaxes(matrices, -2, -1) if rows > columns else matrices
    return from_matrices(spec, matrices, like.shape)


def init_projected(rank: int, *extra: str) -> Callable[[ParamSpec, jax.Array], ParamState]:
    """Returns the `init` of `per_parameter` that stores zeros, each in its box.

    They are Adam's moments [..., r, N] of the projected gradient, and `extra`: the projection
    'basis' [..., K, r], and a 'norm' [...] for each matrix.
    """

    def init(spec, weight):
        *batch, short, long = jax.eval_shape(lambda x: short_side_first(spec, x), weight).shape
        sizes = {'rank': min(rank, short), 'short_side': short, 'long_side': long}
        axes = {'basis': ('short_side', 'rank'), 'norm': ()}
        state = {}
        for name in ('momentum', 'second', *extra):
            axis_names = axes.get(name, ('rank', 'long_side'))
            zeros = jnp.zeros((*batch, *(sizes[n] for n in axis_names)), weight.dtype)
            state[name] = box_state(spec, zeros, *axis_names)
        return state

    return init


def _project_gradient(g, state, count, period):
    """Returns (basis [..., K, r], the coordinates of g [..., K, N] in it)."""
    previous = state['basis']
    basis = compute_if(
        (count - 1) % period == 0, lambda: singular_basis(g, previous.shape[-1]), previous
    )
    return basis, rotate(g, {'left': basis})


def singular_basis(x: jax.Array, rank: int) -> jax.Array:
    """Returns [..., K, r]: singular vectors of the shorter side of x [..., K, N], largest first.

    A singular vector is unique up to its sign, and moments that outlive a projection depend on the
    sign. The largest entry in magnitude of each vector is made positive, equally on every device.
    """
    vectors = jnp.linalg.svd(x, full_matrices=False)[0][..., :rank]
    largest = jnp.argmax(jnp.abs(vectors), -2, keepdims=True)
    sign = jnp.where(jnp.take_along_axis(vectors, largest, -2) < 0, -1.0, 1.0)
    return vectors * sign.astype(vectors.dtype)


def uncorrected_adam(
    low: jax.Array, moments: ParamState, b1, b2, eps
) -> tuple[jax.Array, ParamState]:
    """Returns (m / (sqrt(v) + eps), {'momentum': m, 'second': v}), without bias correction.

    Args:
      low: the projected gradient.
      moments: 'momentum' and 'second'.
      b1: share of m that is kept.
      b2: share of v that is kept.
      eps: added to the denominator.
    """
    b1, b2 = (
        jnp.asarray(b, low.dtype) for b in (b1, b2)
    )  # equal rounding, for terms that must cancel
    m = b1 * moments['momentum'] + (1 - b1) * low
    v = b2 * moments['second'] + (1 - b2) * jnp.square(low)
    return m / (jnp.sqrt(v) + eps), {'momentum': m, 'second': v}


def bias_factor(b1: Any, b2: Any, count: jax.Array, dtype: Any) -> jax.Array:
    """Returns sqrt(1 - b2^t) / (1 - b1^t), accurate even if b2^t rounds to almost 1.

    Args:
      b1: share of the first moment that is kept.
      b2: share of the second moment that is kept.
      count: t.
      dtype: of the result.
    """
    first, second = (-jnp.expm1(count * jnp.log1p(jnp.asarray(b, dtype) - 1)) for b in (b1, b2))
    return jnp.sqrt(second) / first


def norm_ratio(adam: jax.Array, low: jax.Array, axes: int | tuple[int, int]) -> jax.Array:
    """Returns |adam| / (|low| + EPS), by which Adam scales a gradient.

    Args:
      adam: Adam's direction of the projected gradient.
      low: the projected gradient.
      axes: of the norms; they keep size 1.
    """
    adam, low = (jnp.linalg.norm(x, axis=axes, keepdims=True) for x in (adam, low))
    return adam / (low + EPS)


def limit_growth(
    update: jax.Array, previous_norm: jax.Array, limit: Any
) -> tuple[jax.Array, jax.Array]:
    """Limits the norm of an update to `limit` times the norm of the previous update.

    Nothing is limited after an update of 0, such as the first previous norm or after zero
    gradients: in the published code such a matrix could hardly move again.

    Args:
      update: [..., K, N].
      previous_norm: [...].
      limit: the largest growth.

    Returns:
      (update, its norm [...]).
    """
    norm = jnp.linalg.norm(update, axis=(-2, -1))
    ratio = norm / (previous_norm + EPS)
    divisor = jnp.where(previous_norm > 0, jnp.maximum(ratio / limit, 1.0), 1.0)
    return update / divisor[..., None, None], norm / divisor
