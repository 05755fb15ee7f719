"""Weight normalization (arXiv:1602.07868)."""

from typing import Any

import jax
import jax.numpy as jnp

from modules.params import ParamSpec, matrix_axes
from modules.reparam.base import LEAST_NORM, Reparam, reparam_row
from modules.reparam.matrices import Roles, known_roles, on_matrices


def column_norm(spec: ParamSpec, weight: jax.Array) -> jax.Array:
    """L2 norm over the rows, whose axes are kept with size 1; float32."""
    _, rows, _ = matrix_axes(spec)
    return jnp.sqrt(jnp.sum(jnp.square(weight), rows, keepdims=True))


def column_spec(spec: ParamSpec) -> ParamSpec:
    """Of a vector with one number for each column of each matrix."""
    _, rows, _ = matrix_axes(spec)
    kept = tuple(axis for i, axis in enumerate(spec.axes) if i not in rows)
    return ParamSpec('vector', kept, part=spec.part)


@reparam_row(least_init_scale=LEAST_NORM, check=known_roles)
def weight_norm(specs: Any, shapes: Any, *, roles: Roles = 'hidden') -> Reparam:
    """W[:, o] = gain[o] * V[:, o] / ||V[:, o]|| for every matrix.

    Stores `direction` V, drawn as W would be, and `gain`, which starts as ||V|| so that nothing
    changes at the start. The gain is a vector: no weight decay. The gradient of V is orthogonal to
    V, so its norm grows with training. Source: arXiv:1602.07868, equations 2 and 3.
    """
    del shapes

    def init(spec, weight):
        _, rows, _ = matrix_axes(spec)
        gain = jnp.squeeze(column_norm(spec, weight), rows)
        return {'direction': weight, 'gain': gain}, ()

    def apply(spec, stored, state):
        _, rows, _ = matrix_axes(spec)
        direction = stored['direction']
        gain = jnp.expand_dims(stored['gain'], rows)
        return direction * (gain / column_norm(spec, direction)), state

    def describe(spec):
        return {'direction': spec, 'gain': column_spec(spec)}

    return on_matrices(roles, specs, init, apply, describe)
