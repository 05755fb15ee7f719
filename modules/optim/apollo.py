"""APOLLO: gradients scaled as Adam scales their random projection."""

import dataclasses
import math
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import B1, B2, Eps
from modules.optim.base import of_family, per_parameter
from modules.optim.low_rank import (
    GrowthLimit,
    ProjectionEvery,
    Rank,
    as_parameter,
    bias_factor,
    empty_moments,
    empty_norm,
    limited,
    norm_ratio,
    short_side_first,
    uncorrected_adam,
)
from modules.optim.rotations import turned
from modules.options import Option
from modules.params import ParamSpec

# What a factor is taken over: all of the rank for one index of the longer side, or the whole.
OVER = {'channel': -2, 'tensor': (-2, -1)}


@of_family('adam', roles=('hidden',))
def apollo(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-6,
    rank: Rank = 128,
    projection_every: ProjectionEvery = 200,
    apollo_factors: Annotated[
        str, Option('one for each channel of the longer side, or one a tensor', choices=tuple(OVER))
    ] = 'channel',
    apollo_scale: Annotated[
        float, Option('whose root multiplies the update', 0, sys.float_info.max, traced=True)
    ] = 1.0,
    growth_limit: GrowthLimit = 1.01,
) -> optax.GradientTransformation:
    """sqrt(apollo_scale) f G, f = |Adam(R)| / |R|, R = P^T G, P random (arXiv:2412.05270).

    P [K, r] of the shorter side is normal with variance 1 / r; it is drawn again for every
    `projection_every` updates, and kept nowhere. The norm of f G grows at most `growth_limit`-fold
    from one update to the next. APOLLO-Mini is rank=1, apollo_factors=tensor, apollo_scale=128.
    As zhuhanqing/APOLLO, whose rank is a quarter of the width; its factors, and the limit on them,
    precede Adam's bias correction. Where the scale is multiplied there, before the limit or after
    it (`scale_front`), makes no difference, as the limit is one of ratios.
    """

    def init(spec, weight):
        spec = spec.spec
        return empty_moments(spec, weight, rank) | {'norm': empty_norm(spec, weight)}

    def update(numbered, grad, kept, weight, count):
        del weight
        spec, g = numbered.spec, short_side_first(numbered.spec, grad)
        shape = (*g.shape[:-1], kept['momentum'].shape[-2])
        period = (count - 1) // projection_every
        basis = random_projection(numbered.number, period, shape, g.dtype)
        low = turned(g, {'left': basis})
        adam, moments = uncorrected_adam(low, kept, b1, b2, eps)
        factors = norm_ratio(adam, low, OVER[apollo_factors])
        found, norm = limited(factors * g, kept['norm'], growth_limit)
        found = jnp.sqrt(apollo_scale) * bias_factor(b1, b2, count, grad.dtype) * found
        return as_parameter(spec, found, grad), moments | {'norm': norm}

    return per_parameter(numbered(specs), init, update)


def random_projection(number: int, period: jax.Array, shape: tuple[int, ...], dtype: Any):
    """[..., K, r]: that of a parameter in a period, another for each of its matrices."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), period)
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-1])


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A leaf: the spec of a parameter and its number, which what is drawn for it depends on."""

    spec: ParamSpec
    number: int


def numbered(specs: Any) -> Any:
    """The specs, numbered in the order of the tree."""
    leaves, tree = jax.tree.flatten(specs)
    return tree.unflatten([Numbered(spec, number) for number, spec in enumerate(leaves)])
