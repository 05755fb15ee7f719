"""Reparametrisations by the size of a matrix's columns, of its elements, or of the whole matrix."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.options import Option
from modules.params import ParamSpec, as_matrices, matrix_axes, named_leaves
from modules.reparam.base import MIN_NORM, Reparam, reparam_row
from modules.reparam.matrices import (
    Roles,
    check_roles,
    expand_per_matrix,
    map_matrices,
    matrix_row,
    parse_roles,
)

STANDARDIZATION_EPS = 1e-5  # as published
NEAR_BOUND = 0.99  # the largest inverted weight, as a share of the compander's bound


def _column_gains(
    roles: str,
    specs: Any,
    name: str,
    columns: Callable[[ParamSpec, jax.Array, tuple[int, ...]], tuple[jax.Array, jax.Array]],
) -> Reparam:
    """W[:, o] = gain[o] * direction[:, o] / length[o], of a matrix V that is stored as `name`.

    columns(spec, V, its row axes) -> (direction, length), the latter with row axes of size 1. The
    gain starts as the length of the initial W; it is a vector, so that it has no weight decay.
    """

    def init(spec, weight):
        _, rows, _ = matrix_axes(spec)
        _, length = columns(spec, weight, rows)
        return {name: weight, 'gain': jnp.squeeze(length, rows)}, ()

    def apply(spec, stored, state):
        _, rows, _ = matrix_axes(spec)
        gain = jnp.expand_dims(stored['gain'], rows)
        direction, length = columns(spec, stored[name], rows)
        return direction * (gain / length), state

    def describe(spec):
        _, rows, _ = matrix_axes(spec)
        axes = tuple(axis for i, axis in enumerate(spec.axes) if i not in rows)
        return {name: spec, 'gain': ParamSpec('vector', axes, part=spec.part)}

    return map_matrices(roles, specs, init, apply, describe)


@matrix_row(least_init_scale=MIN_NORM, reads_names=True)
def weight_norm(
    specs: Any,
    shapes: Any,
    *,
    roles: Roles = 'hidden',
    norm_gradient: Annotated[
        str,
        Option(
            'gradient through ||V||; published: constant with lora (DoRA), else full',
            choices=('published', 'full', 'constant'),
        ),
    ] = 'published',
    names: tuple[str, ...] = (),
) -> Reparam:
    """Weight normalization (arXiv:1602.07868): `W[:, o] = g_o V[:, o] / ||V[:, o]||`.

    This applies to every column `o` of every matrix. `V` is stored as `direction`, initialised as
    `W` would be, and `g` as `gain`. The gain starts as the norms of the columns, so that the
    weights are unchanged at the start. The gradient of `V` is orthogonal to `V`, so that the norm
    of `V` grows during training. Source: equations 2 and 3.

    Before lora, in DoRA (arXiv:2402.09353, section 4.3), the gradient treats `||V||` as a constant,
    as that paper proposes and PEFT does. The gradient of `V` is then not orthogonal to `V`.
    `norm_gradient` selects either form for any chain.
    """
    published = 'constant' if 'lora' in names else 'full'
    is_constant = (published if norm_gradient == 'published' else norm_gradient) == 'constant'

    def columns(spec, weight, rows):
        length = jnp.sqrt(jnp.sum(jnp.square(weight), rows, keepdims=True))
        return weight, jax.lax.stop_gradient(length) if is_constant else length

    return _column_gains(roles, specs, 'direction', columns)


@matrix_row()
def weight_standardization(specs: Any, shapes: Any, *, roles: Roles = 'hidden') -> Reparam:
    """Weight standardization (arXiv:1903.10520): `W[:, o] = g_o (V[:, o] - m_o) / (sqrt(I) sqrt(v_o
    + eps))`.

    `m_o` and `v_o` are the mean and the unbiased variance, as in the published code, of the `I`
    entries of column `o` of `V`. `V` is stored as `matrix` and `g` as `gain`. The published map has
    neither the gain nor `sqrt(I)`, since a norm follows each of its matrices. With both
    (arXiv:2101.08692), a gain of 1 gives columns of length 1. The gain starts such that the initial
    matrix loses the mean of each column and keeps its spread. Source: the paper and its code.
    Raises ValueError for matrices of a single row, which have no spread.
    """

    def n_rows(spec: ParamSpec, weight: Any) -> int:
        return jax.eval_shape(lambda w: as_matrices(spec, w), weight).shape[-2]

    mapped_roles = parse_roles(roles)
    for path, spec in named_leaves(specs).items():
        if spec.role in mapped_roles and n_rows(spec, named_leaves(shapes)[path]) < 2:
            raise ValueError(
                'model.reparam=weight_standardization needs matrices with at least two rows, but '
                f'{path} has one, so its columns have no variance. Make the model wider.'
            )

    def columns(spec, weight, rows):
        terms, mean = n_rows(spec, weight), jnp.mean(weight, rows, keepdims=True)
        variance = jnp.sum(jnp.square(weight - mean), rows, keepdims=True) / (terms - 1)
        length = jnp.sqrt(terms * (variance + STANDARDIZATION_EPS))
        return weight - mean, length

    return _column_gains(roles, specs, 'matrix', columns)


def check_projection(recipe: Any, part: Any) -> None:
    """Raises ValueError as `check_roles`, and if updates are relative to norms that are free."""
    check_roles(recipe, part)
    optim, roles = recipe.optim, parse_roles(part.options['roles'])
    is_relative = optim.match_norm is not None or optim.match_norm_floor is not None
    if is_relative and (free := set(optim.match_norm_roles.split('+')) - set(roles)):
        raise ValueError(
            f'optim.match_norm_roles={optim.match_norm_roles} makes updates relative to the norm '
            f'of their matrix, but {part} does not project the role {min(free)!r}. Set '
            f'reparam.roles to {optim.match_norm_roles}, or leave this role out of '
            'optim.match_norm_roles.'
        )


@reparam_row(least_init_scale=MIN_NORM, maps_after_update=True, check=check_projection)
def normalize_and_project(specs: Any, shapes: Any, *, roles: Roles = 'hidden') -> Reparam:
    """Normalize-and-project (arXiv:2407.01800), after each optimizer step:
    `W <- W ||W_0||_F / ||W||_F`.

    Every matrix is scaled back to its initial Frobenius norm `||W_0||_F`, which is stored; the
    optimizer state is unchanged. The method requires norms before each nonlinearity: choose them
    with `model.norm` and `model.qk_norm`. Their gains are not projected. Weight decay has almost no
    effect on a projected matrix, so its effective learning rate follows the schedule alone.

    With `optim.match_norm=1`, which gives updates the norm of their matrix, the learning rate is
    the tangent of the angle by which a step turns a matrix: any optimizer on a hyperball
    (arXiv:2606.16899), such as AdamH or MuonH.
    """

    def frobenius_norm(spec, weight):
        return jnp.sqrt(jnp.sum(jnp.square(as_matrices(spec, weight)), (-2, -1)))

    def init(spec, weight):
        return weight, frobenius_norm(spec, weight)

    def after_update(spec, weight, initial_norm):
        return weight * expand_per_matrix(
            initial_norm / frobenius_norm(spec, weight), spec
        ), initial_norm

    return map_matrices(
        roles, specs, init, lambda spec, stored, state: (stored, state), after_update=after_update
    )


@matrix_row(least_init_scale=MIN_NORM)
def weight_compander(
    specs: Any,
    shapes: Any,
    *,
    roles: Roles = 'hidden',
    compander_width: Annotated[
        float, Option('a, in units of the root mean square of the initial matrix', 1e-3, 1e6)
    ] = 4.0,
    compander_slope: Annotated[float, Option('slope at 0, a / b', 1e-3, 1e3)] = 2.0,
) -> Reparam:
    """Weight compander (arXiv:2306.16993): `W_used = a arctan(V / b)`.

    The map acts on each element; it is steep at 0 and bounded by `a pi / 2`. `V` is stored. It
    starts as `b tan(W / a)`, so that the weights are unchanged at the start; an imported matrix is
    clipped at NEAR_BOUND of the bound. The state stores `a` for each matrix, `compander_width`
    times the root mean square of `W` at the start. `b` is `a` over `compander_slope`.

    The arctan, `a` and `b` are our reading of the paper, whose formula we could not see. `a` and
    `b` are not learned here.
    """

    def init(spec, weight):
        squares = jnp.square(as_matrices(spec, weight))
        a = compander_width * jnp.sqrt(jnp.mean(squares, (-2, -1)))
        angle = weight / expand_per_matrix(a, spec)
        bound = NEAR_BOUND * math.pi / 2
        return jnp.tan(jnp.clip(angle, -bound, bound)) * expand_per_matrix(
            a / compander_slope, spec
        ), a

    def apply(spec, stored, a):
        return expand_per_matrix(a, spec) * jnp.arctan(
            stored / expand_per_matrix(a / compander_slope, spec)
        ), a

    return map_matrices(roles, specs, init, apply)
