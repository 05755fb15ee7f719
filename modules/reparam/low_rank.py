"""A frozen or trained matrix plus a product of two thin matrices."""

import math
import zlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.options import Option
from modules.params import LORA, ParamSpec, as_matrices, from_matrices, matrix_axes, path_name
from modules.reparam.base import Reparam, reparam_row
from modules.reparam.matrices import Roles, check_roles, map_matrices

RANK = 'factor'  # the axis shared by the two factors


def check_last(recipe: Any, part: Any) -> None:
    """Raises ValueError as `check_roles`, and if another row would map the factors."""
    check_roles(recipe, part)
    *near, last = recipe.reparam
    if last.row is not part.row:
        names = [row.name for row in recipe.reparam if row.row is not part.row]
        raise ValueError(
            f'model.reparam={recipe.model.reparam}: lora must come last, because a '
            'reparametrisation after it would map its factors, one of which is 0. Write '
            f'{"+".join([*names, "lora"])}.'
        )
    for row in near:
        if row.row.maps_after_update:
            raise ValueError(
                f'model.reparam={recipe.model.reparam}: {row.name} changes the stored weights '
                'after each update and does not support the factors of lora. Leave one of them '
                'out.'
            )


@reparam_row(check=check_last, starts_at_zero=True)
def lora(
    specs: Any,
    shapes: Any,
    *,
    roles: Roles = 'hidden',
    rank: Annotated[int, Option('rank r of the factors a and b', 1)] = 8,
    alpha: Annotated[float, Option('the factor of a b is alpha / rank', 0, 1e6)] = 8.0,
    rslora: Annotated[bool, Option('whether to divide alpha by sqrt(rank) instead')] = False,
) -> Reparam:
    """LoRA, a low-rank correction of every matrix (arXiv:2106.09685): `W_used = W + s a b`.

    `W` is stored as `base`, next to the factors `a` [I, r] and `b` [r, O]. `r` is the option
    `rank`, and `s = alpha / r` with the option
    ``alpha``; both defaults are PEFT's. With `rslora`, `s = alpha /
    sqrt(r)` (arXiv:2312.03732). Set `train.trainable=lora` to train only the factors. `b` starts at
    0, so that the weights are unchanged at the start; `a` is uniform within `1 / sqrt(I)`, the
    Kaiming start of the published code. In an embedding, rows are looked up, so `I` counts as 1.

    `model.reparam=weight_norm+lora` is DoRA (arXiv:2402.09353), with norms of columns:

    `W_used = m V / ||V|| with V = W + s a b`

    `m` is trained too, and the gradient treats `||V||` as a constant (see the option of
    `weight_norm`).

    The matrix is formed once per step. LoRA reduces the memory of the optimizer, but not the
    operations of the backward pass. Source: the paper and its code. Raises ValueError if lora is
    not the last of several rows.
    """
    scale = alpha / (math.sqrt(rank) if rslora else rank)

    def init(spec, weight):
        batch, rows, columns = (tuple(weight.shape[i] for i in axes) for axes in matrix_axes(spec))
        a, b = jnp.zeros((*batch, *rows, rank)), jnp.zeros((*batch, rank, *columns))
        return {'base': weight, 'a': a.astype(weight.dtype), 'b': b.astype(weight.dtype)}, ()

    def describe(spec):
        batch, rows, columns = (tuple(spec.axes[i] for i in axes) for axes in matrix_axes(spec))
        role = 'embedding' if spec.role == 'embedding' else 'hidden'
        return {
            'base': spec,
            'a': ParamSpec(role, (*batch, *rows, RANK), spec.fan_in, part=LORA),
            'b': ParamSpec('hidden', (*batch, RANK, *columns), (RANK,), part=LORA),
        }

    def apply(spec, stored, state):
        specs_by_name = describe(spec)
        product = jnp.matmul(
            as_matrices(specs_by_name['a'], stored['a']),
            as_matrices(specs_by_name['b'], stored['b']),
            precision=jax.lax.Precision.HIGHEST,  # a map of weights, not a layer's matmul
        )
        base = stored['base']
        return base + scale * from_matrices(spec, product, base.shape), state

    def draw(stored, key):
        def draw_factor(path, spec, value):
            if spec.part != LORA or RANK in spec.fan_in:
                return value
            bound = spec.fan_in_size(value.shape) ** -0.5
            # A key from the path: it does not change when other parameters are added.
            factor_key = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
            return jax.random.uniform(factor_key, value.shape, value.dtype, -bound, bound)

        return jax.tree_util.tree_map_with_path(draw_factor, reparam.specs, stored)

    reparam = map_matrices(roles, specs, init, apply, describe)
    return reparam._replace(draw=draw)
