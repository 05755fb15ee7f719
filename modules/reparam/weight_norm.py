"""Weight normalization (arXiv:1602.07868)."""

from typing import Any

import jax
import jax.numpy as jnp

from modules.params import ParamSpec
from modules.reparam.base import Reparam, divides_by_norms, on_role


def sum_axes(spec: ParamSpec) -> tuple[int, ...]:
    return tuple(i for i, axis in enumerate(spec.axes) if axis in spec.fan_in)


def column_norm(spec: ParamSpec, weight: jax.Array) -> jax.Array:
    """L2 norm over the summed axes, those kept with size 1; float32."""
    return jnp.sqrt(jnp.sum(jnp.square(weight), sum_axes(spec), keepdims=True))


@divides_by_norms
def weight_norm(specs: Any, shapes: Any) -> Reparam:
    """W[:, o] = gain[o] * V[:, o] / ||V[:, o]|| for every hidden matrix.

    Stores `direction` V, drawn as W would be, and `gain`, which starts as ||V|| so that nothing
    changes at the start. The gain is a vector: no weight decay. The gradient of V is orthogonal to
    V, so its norm grows with training. Source: arXiv:1602.07868, equations 2 and 3.
    """
    del shapes

    def init(spec, weight):
        gain = jnp.squeeze(column_norm(spec, weight), sum_axes(spec))
        return {'direction': weight, 'gain': gain}

    def apply(spec, stored):
        direction = stored['direction']
        gain = jnp.expand_dims(stored['gain'], sum_axes(spec))
        return direction * (gain / column_norm(spec, direction))

    def describe(spec):
        kept = tuple(axis for axis in spec.axes if axis not in spec.fan_in)
        return {'direction': spec, 'gain': ParamSpec('vector', kept, part=spec.part)}

    return on_role('hidden', specs, init, apply, describe)
