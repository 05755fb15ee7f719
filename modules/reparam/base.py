"""What a reparametrisation is, and how several make one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from modules.params import ParamSpec


def unchanged(stored: Any, state: Any) -> tuple[Any, Any]:
    """No map after the update."""
    return stored, state


class Reparam(NamedTuple):
    """init(params) -> (stored, state); apply(stored, state, train) -> (used, state).

    At the start used equals params, as far as the map can make them. `specs` describes each stored
    array, as `modules.params` does each parameter. `state` is what is carried but not optimised;
    evaluation (train=False) leaves it alone. after_update(stored, state) -> (stored, state) maps
    what an optimizer step has made, such as back onto a sphere.
    """

    init: Callable[[Any], tuple[Any, Any]]
    apply: Callable[[Any, Any, bool], tuple[Any, Any]]
    specs: Any
    after_update: Callable[[Any, Any], tuple[Any, Any]] = unchanged


def divides_by_norms(make: Callable[..., Reparam]) -> Callable[..., Reparam]:
    """Marks a row that divides by norms of the initial matrices: these must not be 0 in float32,
    which the square of a smaller scale is.
    """
    make.least_init_scale = 1e-15
    return make


def none(specs: Any, shapes: Any) -> Reparam:
    """Stored weights are used as they are."""
    del shapes
    return Reparam(lambda params: (params, ()), lambda stored, state, train: (stored, state), specs)


def chain(near: Reparam, far: Reparam) -> Reparam:
    """Stored weights go through `far`, whose results `near` hands to the model.

    Raises ValueError where `near` has a map after the update, which knows nothing of what is
    stored.
    """
    if near.after_update is not unchanged:
        raise ValueError(
            'a reparametrisation with a map after the update must be the last of several, nearest '
            'to the stored weights'
        )

    def init(params):
        between, near_state = near.init(params)
        stored, far_state = far.init(between)
        return stored, (near_state, far_state)

    def apply(stored, state, train):
        near_state, far_state = state
        between, far_state = far.apply(stored, far_state, train)
        used, near_state = near.apply(between, near_state, train)
        return used, (near_state, far_state)

    def after_update(stored, state):
        near_state, far_state = state
        stored, far_state = far.after_update(stored, far_state)
        return stored, (near_state, far_state)

    if far.after_update is unchanged:
        after_update = unchanged
    return Reparam(init, apply, far.specs, after_update)


def multiplied(specs: Any, factors: Any) -> Reparam:
    """W_used = factor * W for each parameter; `factors` are numbers in a tree like `specs`."""
    return Reparam(
        init=lambda params: (jax.tree.map(lambda w, f: w / f, params, factors), ()),
        apply=lambda stored, state, train: (
            jax.tree.map(lambda w, f: w * f, stored, factors),
            state,
        ),
        specs=specs,
    )


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
