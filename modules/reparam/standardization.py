"""Weight standardization."""

from typing import Any

import jax
import jax.numpy as jnp

from modules.params import ParamSpec, as_matrices, matrix_axes, named_leaves
from modules.reparam.base import Reparam, reparam_row
from modules.reparam.matrices import Roles, known_roles, on_matrices, parse_roles
from modules.reparam.weight_norm import column_spec

EPS = 1e-5  # as published


def column_moments(spec: ParamSpec, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean, variance) of each column, whose row axes are kept with size 1; float32. The variance
    is the unbiased one, as in the published code.
    """
    _, rows, _ = matrix_axes(spec)
    mean = jnp.mean(weight, rows, keepdims=True)
    terms = spec_rows(spec, weight)
    return mean, jnp.sum(jnp.square(weight - mean), rows, keepdims=True) / (terms - 1)


def spec_rows(spec: ParamSpec, weight: Any) -> int:
    """The number of rows of the matrices of a parameter."""
    return jax.eval_shape(lambda w: as_matrices(spec, w), weight).shape[-2]


@reparam_row(check=known_roles)
def weight_standardization(specs: Any, shapes: Any, *, roles: Roles = 'hidden') -> Reparam:
    """W[:, o] = gain[o] / sqrt(I) * (V[:, o] - mean) / sqrt(var + eps), over the I rows of V.

    Stores `matrix` V and `gain`, a vector: no weight decay. The published map has neither the gain
    nor 1 / sqrt(I), as a norm follows each of its matrices; with both (arXiv:2101.08692) a gain of
    1 gives columns of length 1. The gain starts such that the drawn matrix loses the mean of each
    column and keeps its spread. Source: arXiv:1903.10520 and its code. ValueError for matrices of
    one row, which have no spread.
    """
    wanted = parse_roles(roles)
    for path, spec in named_leaves(specs).items():
        if spec.role in wanted and spec_rows(spec, named_leaves(shapes)[path]) < 2:
            raise ValueError(
                f'weight_standardization needs matrices of two rows or more, and {path} has one: a '
                'column of one number has no spread. Make the model wider.'
            )

    def init(spec, weight):
        _, rows, _ = matrix_axes(spec)
        _, variance = column_moments(spec, weight)
        gain = jnp.sqrt(spec_rows(spec, weight) * (variance + EPS))
        return {'matrix': weight, 'gain': jnp.squeeze(gain, rows)}, ()

    def apply(spec, stored, state):
        _, rows, _ = matrix_axes(spec)
        mean, variance = column_moments(spec, stored['matrix'])
        gain = jnp.expand_dims(stored['gain'], rows)
        length = jnp.sqrt(spec_rows(spec, stored['matrix']) * (variance + EPS))
        return (stored['matrix'] - mean) * (gain / length), state

    def describe(spec):
        return {'matrix': spec, 'gain': column_spec(spec)}

    return on_matrices(roles, specs, init, apply, describe)
