"""What a reparametrisation is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from modules.params import ParamSpec


class Reparam(NamedTuple):
    """init(params) -> (stored, state); apply(stored, state, train) -> (used, state).

    At the start used equals params. `specs` describes each stored array, as `modules.params` does
    each parameter. `state` is what is carried but not optimised; evaluation (train=False) leaves it
    alone.
    """

    init: Callable[[Any], tuple[Any, Any]]
    apply: Callable[[Any, Any, bool], tuple[Any, Any]]
    specs: Any


def none(specs: Any) -> Reparam:
    """Stored weights are used as they are."""
    return Reparam(lambda params: (params, ()), lambda stored, state, train: (stored, state), specs)


def chain(near: Reparam, far: Reparam) -> Reparam:
    """near after far: stored weights go through `far`, whose results `near` hands to the model."""

    def init(params):
        between, near_state = near.init(params)
        stored, far_state = far.init(between)
        return stored, (near_state, far_state)

    def apply(stored, state, train):
        near_state, far_state = state
        between, far_state = far.apply(stored, far_state, train)
        used, near_state = near.apply(between, near_state, train)
        return used, (near_state, far_state)

    return Reparam(init, apply, far.specs)


def on_role(
    role: str,
    specs: Any,
    init: Callable[[ParamSpec, jax.Array], dict[str, jax.Array]],
    apply: Callable[[ParamSpec, dict[str, jax.Array]], jax.Array],
    describe: Callable[[ParamSpec], dict[str, ParamSpec]],
) -> Reparam:
    """A stateless map of each parameter of `role` on its own; the others are stored as they are.

    A stored parameter is a small dict, in the parameter's place in the tree. Raises ValueError
    where no parameter has the role.
    """
    if not any(spec.role == role for spec in jax.tree.leaves(specs)):
        raise ValueError(
            f'no parameter has the role {role!r}, so this reparametrisation does nothing'
        )

    def where(map_one):
        return lambda spec, leaf: map_one(spec, leaf) if spec.role == role else leaf

    return Reparam(
        init=lambda params: (jax.tree.map(where(init), specs, params), ()),
        apply=lambda stored, state, train: (jax.tree.map(where(apply), specs, stored), state),
        specs=jax.tree.map(lambda spec: describe(spec) if spec.role == role else spec, specs),
    )
