"""Base of reparametrisations, the rows that need no matrices, and chains of several rows."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.facts import accept_any, row_decorator
from modules.params import LAYER, NORM, ParamSpec, named_leaves

# least_init_scale: for a row that divides by norms of the initial matrices: below it their squares
# are 0 in float32. maps_after_update: has `after_update`. shares_blocks: blocks share matrices.
# reads_names: takes `names`, all rows of its chain. starts_at_zero: stores a matrix of zeros.
reparam_row = row_decorator(
    least_init_scale=0.0,
    maps_after_update=False,
    shares_blocks=False,
    reads_names=False,
    starts_at_zero=False,
    check=accept_any,
)
MIN_NORM = 1e-15


def keep_after_update(stored: Any, state: Any) -> tuple[Any, Any]:
    """Returns both arguments unchanged: no map after the update."""
    return stored, state


def keep_init(stored: Any, key: jax.Array) -> Any:
    """Returns stored weights unchanged: none of them is random."""
    return stored


class Reparam(NamedTuple):
    """Functions of a reparametrisation.

    At the start the used weights equal params, as far as the map can produce them. `state` is
    stored but not optimised; evaluation (train=False) does not change it.
    """

    init: Callable[[Any], tuple[Any, Any]]  #: (params) -> (stored, state)
    apply: Callable[[Any, Any, bool], tuple[Any, Any]]  #: (stored, state, train) -> (used, state)
    specs: Any  #: describes each stored array, as `modules.params` does each parameter
    #: (stored, state) -> (stored, state) after an optimizer step, such as a projection.
    after_update: Callable[[Any, Any], tuple[Any, Any]] = keep_after_update
    #: (stored, state) -> {'sigma': {path of a used weight: [...]}, ...}: a number per matrix of a
    #: parameter (`modules.params.matrix_axes`).
    measures: Callable[[Any, Any], dict[str, dict[str, jax.Array]]] = lambda stored, state: {}
    #: (stored, key) -> stored: draws arrays that are 0 after `init` and must not start at 0.
    draw: Callable[[Any, jax.Array], Any] = keep_init


@reparam_row()
def none(specs: Any, shapes: Any) -> Reparam:
    """Stored weights are used unchanged."""
    return Reparam(lambda params: (params, ()), lambda stored, state, train: (stored, state), specs)


@reparam_row(shares_blocks=True)
def shared(specs: Any, shapes: Any) -> Reparam:
    """The same weights in all layers (arXiv:1909.11942): `W_l = W for l = 1, ..., L`.

    Each hidden matrix outside of norms is stored once and used in every layer `l`. Vectors and
    norms stay separate for each layer (arXiv:2107.11817). Training starts with the weights of the
    first layer, and the gradient is the sum over layers. This saves parameters and optimizer state;
    a step costs as much as without sharing, including the copies that layers read. `shapes` belong
    to the parameters that `specs` describes.
    """

    def is_shared(spec: ParamSpec) -> bool:
        return spec.role == 'hidden' and spec.part != NORM and LAYER in spec.axes

    def take_first(spec, weight):
        return jnp.take(weight, 0, spec.axes.index(LAYER)) if is_shared(spec) else weight

    def repeat_layers(spec, weight, shape):
        if not is_shared(spec):
            return weight
        return jnp.broadcast_to(jnp.expand_dims(weight, spec.axes.index(LAYER)), shape.shape)

    return Reparam(
        init=lambda params: (jax.tree.map(take_first, specs, params), ()),
        apply=lambda stored, state, train: (
            jax.tree.map(repeat_layers, specs, stored, shapes),
            state,
        ),
        specs=jax.tree.map(lambda spec: spec.drop_axis(LAYER) if is_shared(spec) else spec, specs),
    )


def chain(near: Reparam, far: Reparam) -> Reparam:
    """Maps stored weights by `far`, and its output by `near` to the weights that the model reads.

    Args:
      near: has no map after the update, as it would not see stored weights (`reparametrise` refuses
        it), and draws nothing.
      far: is made from the specs and stored shapes of `near`.

    Returns:
      One `Reparam`, whose state is (near's, far's).
    """

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
        used = named_leaves(jax.eval_shape(lambda: near.apply(between, near_state, False)[0]))
        far_measures, near_measures = (
            far.measures(stored, far_state),
            near.measures(between, near_state),
        )

        def used_path(path):  # 'up/direction' is stored for 'up'
            return path if path in used else path.rpartition('/')[0]

        far_measures = {
            n: {used_path(p): value for p, value in far_measures[n].items()} for n in far_measures
        }
        return {
            n: far_measures.get(n, {}) | near_measures.get(n, {})
            for n in (far_measures | near_measures)
        }

    update_map = keep_after_update if far.after_update is keep_after_update else after_update
    return Reparam(init, apply, far.specs, update_map, measures, far.draw)


def multiply_weights(specs: Any, factors: Any) -> Reparam:
    """Multiplies each weight where it is used: W_used = factor * W.

    Args:
      specs: a ParamSpec for each parameter.
      factors: numbers in a tree like `specs`.

    Returns:
      The `Reparam`; it has no state.
    """
    return Reparam(
        init=lambda params: (jax.tree.map(operator.truediv, params, factors), ()),
        apply=lambda stored, state, train: (jax.tree.map(operator.mul, stored, factors), state),
        specs=specs,
    )
