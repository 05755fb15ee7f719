"""One set of matrices for all layers."""

from typing import Any

import jax
import jax.numpy as jnp

from modules.params import LAYER, NORM, ParamSpec
from modules.reparam.base import Reparam, reparam_row


@reparam_row(shares_blocks=True)
def shared(specs: Any, shapes: Any) -> Reparam:
    """W_l = W for every layer l and hidden matrix that is no norm's: stored once, used everywhere.

    Vectors and norms stay with their layer. The start is the first layer's, and the gradient the
    sum over layers. Saves parameters and optimizer state; a step costs what it would unshared, the
    copies that layers read included. `shapes` are those of the parameters that `specs` describes.
    Sources: arXiv:1909.11942; with norms of their own arXiv:2107.11817.
    """

    def where(map_one, other):
        def one(spec, leaf, *more):
            is_shared = spec.role == 'hidden' and spec.part != NORM and LAYER in spec.axes
            return map_one(spec, leaf, *more) if is_shared else other(spec, leaf)

        return one

    def as_it_is(spec, leaf):
        return leaf

    def first(spec, weight):
        return jnp.take(weight, 0, spec.axes.index(LAYER))

    def repeat(spec, weight, shape):
        return jnp.broadcast_to(jnp.expand_dims(weight, spec.axes.index(LAYER)), shape.shape)

    def describe(spec: ParamSpec, _):
        return spec.without(LAYER)

    return Reparam(
        init=lambda params: (jax.tree.map(where(first, as_it_is), specs, params), ()),
        apply=lambda stored, state, train: (
            jax.tree.map(where(repeat, as_it_is), specs, stored, shapes),
            state,
        ),
        specs=jax.tree.map(where(describe, lambda spec, _: spec), specs, specs),
    )
