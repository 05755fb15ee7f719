"""What a reparametrisation is, and how several make one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from modules.facts import demands_nothing, marks
from modules.params import named_leaves

# least_init_scale: of one that divides by norms of the initial matrices: below it their square is
# 0 in float32. maps_after_update: it has `after_update`. shares_blocks: blocks have one matrix.
reparam_row = marks(
    least_init_scale=0.0, maps_after_update=False, shares_blocks=False, check=demands_nothing
)
LEAST_NORM = 1e-15


def unchanged(stored: Any, state: Any) -> tuple[Any, Any]:
    """No map after the update."""
    return stored, state


def unmeasured(stored: Any, state: Any) -> dict[str, dict[str, jax.Array]]:
    """Nothing to report."""
    del stored, state
    return {}


class Reparam(NamedTuple):
    """init(params) -> (stored, state); apply(stored, state, train) -> (used, state).

    At the start used equals params, as far as the map can make them. `specs` describes each stored
    array, as `modules.params` does each parameter. `state` is what is carried but not optimised;
    evaluation (train=False) leaves it alone. after_update(stored, state) -> (stored, state) maps
    what an optimizer step has made, such as back onto a sphere. measures(stored, state) ->
    {'sigma': {path of a used weight: [...]}, ...}: what the map knows of a parameter's matrices, a
    number for each (`modules.params.matrix_axes`).
    """

    init: Callable[[Any], tuple[Any, Any]]
    apply: Callable[[Any, Any, bool], tuple[Any, Any]]
    specs: Any
    after_update: Callable[[Any, Any], tuple[Any, Any]] = unchanged
    measures: Callable[[Any, Any], dict[str, dict[str, jax.Array]]] = unmeasured


@reparam_row()
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

    def measures(stored, state):
        near_state, far_state = state
        between, _ = far.apply(stored, far_state, False)
        used = jax.eval_shape(lambda: near.apply(between, near_state, False)[0])
        found, of_near = far.measures(stored, far_state), near.measures(between, near_state)
        found = {name: _of_used(found[name], named_leaves(used)) for name in found}
        return {n: found.get(n, {}) | of_near.get(n, {}) for n in (found | of_near)}

    if far.after_update is unchanged:
        after_update = unchanged
    return Reparam(init, apply, far.specs, after_update, measures)


def _of_used(found: dict[str, jax.Array], used: dict[str, Any]) -> dict[str, jax.Array]:
    """By the path of the used weight: of 'up/direction', which is stored for it, 'up'."""

    def path_of(path):
        return path if path in used else path.rpartition('/')[0]

    return {path_of(path): value for path, value in found.items()}


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
