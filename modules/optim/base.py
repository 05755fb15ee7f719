"""Shared parts of optimizers: options, facts of a row, partition by role, specs of the state."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.facts import accept_any, longest_horizon, row_decorator
from modules.losses import LOSSES
from modules.optim.groups import ROLE_OF
from modules.options import Option
from modules.params import ROLES, ParamBox, ParamSpec, batch_axes, is_box, named_leaves, path_name

# Bounds are inclusive, so these replace exclusive 0 and 1; float32 distinguishes them.
ABOVE_0, BELOW_1 = 1e-37, 1 - 1e-7

below_1 = functools.partial(Option, minimum=0, maximum=BELOW_1, traced=True)
up_to_1 = functools.partial(Option, minimum=0, maximum=1, traced=True)
from_0 = functools.partial(Option, minimum=0, maximum=sys.float_info.max, traced=True)
above_0 = functools.partial(Option, minimum=ABOVE_0, maximum=sys.float_info.max, traced=True)
steps_between = functools.partial(Option, minimum=1, time_unit='steps')

B1 = Annotated[float, below_1('exponential decay rate of the first moment')]
B2 = Annotated[float, below_1('exponential decay rate of the second moment')]
Eps = Annotated[float, above_0('added to the denominator')]
Momentum = Annotated[float, below_1('share of the momentum buffer kept at each step')]
Dampening = Annotated[float, up_to_1('share of each gradient left out of the momentum buffer')]
Nesterov = Annotated[bool, Option('whether to use Nesterov momentum')]

FAMILIES = ('adam', 'sgd', 'spectral')  # how the size of an update follows from the gradient's


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of an optimizer beyond a gradient, and properties that it lacks."""

    max_parameters: int | None = None  # None: any number
    gradient: bool = True  # whether it reads the gradient of its parameters
    forward_mode: str = ''  # differentiates 'logits' or the 'gradient' in forward mode, or nothing
    error_probability: bool = False  # whether it reads that entry of `means`
    convex_loss: bool = False  # whether it is only for losses that are convex in the logits
    # Whether it reads the loss, so that no penalty or factor may be in the gradient alone.
    evaluates_loss: bool = False


def check_needs(recipe: Any, part: Any) -> None:
    """Raises ValueError if an optimizer does not get the parameters or the loss that it needs."""
    groups = [g for g, optimizer in recipe.group_optimizers.items() if optimizer is part]
    missing = sorted({ROLE_OF[g] for g in groups if g in ROLE_OF} - set(part.row.roles))
    if missing:
        raise ValueError(
            f'{part} does not support parameters with the roles {", ".join(missing)}, only '
            f'{", ".join(part.row.roles)}. Use it for hidden matrices, optim.name={part.name}, '
            'with another optimizer for the rest, such as optim.others=adamw.'
        )
    needs = part.row.needs
    if needs.convex_loss and not recipe.loss.row.convex:
        convex = [name for name, row in LOSSES.items() if row.convex]
        raise ValueError(
            f'{part} needs a loss that is convex in the logits: loss.name={"|".join(convex)}; got '
            f'{recipe.loss.name}'
        )
    if needs.evaluates_loss and recipe.decay.row.in_gradient and recipe.optim.weight_decay:
        raise ValueError(
            f'{part} evaluates the loss itself, but {recipe.decay} adds weight decay only to the '
            'gradient. Choose optim.decay_rule=decoupled.'
        )
    shrinks = recipe.optim.embedding_gradient_shrink is not None
    if needs.evaluates_loss and 'embedding' in groups and shrinks:
        raise ValueError(
            f'{part} evaluates the loss itself, but optim.embedding_gradient_shrink changes only '
            'the gradient. Leave one of them out.'
        )


def optimizer_row(
    family: str,
    roles: tuple[str, ...] = ROLES,
    other_sizes: Mapping[str, Any] = MappingProxyType({}),
    check: Callable[[Any, Any], None] = accept_any,
    lasts: Callable[..., int] = longest_horizon,
    **needs: Any,
) -> Callable[[Callable], Callable]:
    """Makes a decorator of optimizers, which sets facts that other code reads.

    A parametrisation scales updates by family: 'adam' (the size of updates does not depend on the
    gradient's), 'sgd' (as large as the gradient) or 'spectral' (given singular values).

    Args:
      family: a row of FAMILIES.
      roles: of the parameters that the optimizer is for.
      other_sizes: values of options that give updates another size than the family's.
      check: checks the rest of a config (`modules.facts`).
      lasts: the steps after which it behaves as published, from its options that count steps.
      **needs: fields of `Needs`.

    Returns:
      The decorator.
    """
    if family not in FAMILIES:
        raise ValueError(f'family must be one of {", ".join(FAMILIES)}; got {family!r}')
    facts = {'family': family, 'roles': roles, 'needs': Needs(**needs), 'lasts': lasts}

    def check_all(recipe, part):
        check_needs(recipe, part)
        check(recipe, part)

    return row_decorator(**facts, other_sizes=other_sizes, check=check_all)()


class PerParameter(NamedTuple):
    """State of `per_parameter`."""

    count: jax.Array  # updates done
    of: dict[
        str, Any
    ]  # {name: a tree like the parameters}, optax.MaskedNode for parameters without it


class Direction(NamedTuple):
    """An update of a parameter with its share of the weight decay."""

    value: jax.Array  #: the update
    decay_share: Any = 1.0  #: broadcasts with the weight


def as_direction(direction: jax.Array | Direction) -> Direction:
    """Returns a Direction; an array gets all of the weight decay.

    Args:
      direction: an update of a parameter, with or without a share.
    """
    return direction if isinstance(direction, Direction) else Direction(direction)


def map_updates(function: Callable[..., jax.Array], facts: Any, updates: Any, *arrays: Any) -> Any:
    """Computes function(fact, update, *arrays) for each parameter; a Direction keeps its share of
    the decay.

    Args:
      function: of one parameter.
      facts: a leaf for each parameter, such as its ParamSpec.
      updates: an array or a Direction for each.
      *arrays: trees with an array for each, such as the weights.

    Returns:
      The mapped updates.
    """

    def apply(fact, update, *arrays):
        if isinstance(update, Direction):
            return update._replace(value=function(fact, update.value, *arrays))
        return function(fact, update, *arrays)

    return jax.tree.map(apply, facts, updates, *arrays)


class BatchFunctions(NamedTuple):
    """Functions of the stored parameters and a batch, besides its gradient.

    They cost nothing unless called. Each microbatch starts from the layers' state at the start of
    the step; in the pass of the gradient that state goes from microbatch to microbatch. All
    functions have gradients. For `jax.jvp`, logits_fn and share_from_logits need
    kernels.attention=reference. The gradient of value_fn has a forward-mode derivative with blocked
    too, but value_fn has none if the loss is chunked.
    """

    rows: Any  #: the batch in its microbatches [n, b, ...]
    weights: jax.Array  #: [n, b, T], of target tokens
    value_fn: Callable[[Any], jax.Array]  #: (params) -> the loss of the batch
    share_fn: Callable[[Any, Any], jax.Array]  #: (params, some rows) -> their share of it
    #: (params, rows) -> (x [b, T, D], the readout that maps x to logits)
    activations_fn: Callable[[Any, Any], tuple[jax.Array, Any]]
    logits_fn: Callable[[Any, Any], jax.Array]  #: (params, rows) -> their logits [b, T, V]
    #: (logits, rows) -> the rows' share of the loss, without terms that layers add
    share_from_logits: Callable[[jax.Array, Any], jax.Array]
    tokens_at_a_time: int  #: tokens whose logits may be in memory; 0: all


# State of one parameter: {name: an array like the parameter, or an array in a box}.
ParamState = dict[str, Any]


def init_zeros(*names: str) -> Callable[[ParamSpec, jax.Array], ParamState]:
    """Returns the `init` of `per_parameter` that stores zeros like the parameter by each name."""
    return lambda spec, weight: {name: jnp.zeros_like(weight) for name in names}


def per_parameter(
    specs: Any,
    init: Callable[[Any, jax.Array], ParamState],
    update: Callable[..., tuple[jax.Array | Direction, ParamState]],
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer that treats each parameter separately.

    Args:
      specs: a ParamSpec for each parameter.
      init: (spec, weight) -> state. An array that is not shaped like the parameter is in a box,
        ParamBox(value, ParamSpec(role, axes)), which `update` does not see.
      update: (spec, grad, state, weight, count) -> (direction, next state); `count` is 1 at the
        first update.

    Returns:
      The optimizer.
    """
    leaves, tree = jax.tree.flatten(specs)

    def join_states(count, states):
        names = dict.fromkeys(name for state in states for name in state)
        columns = {
            name: [state.get(name, optax.MaskedNode()) for state in states] for name in names
        }
        return PerParameter(count, {n: tree.unflatten(column) for n, column in columns.items()})

    def init_all(params):
        weights = tree.flatten_up_to(params)
        return join_states(jnp.int32(0), [init(s, w) for s, w in zip(leaves, weights, strict=True)])

    def update_all(updates, state, params=None, **_):
        columns = {name: tree.flatten_up_to(column) for name, column in state.of.items()}
        count, directions, states = state.count + 1, [], []
        weights = tree.flatten_up_to(params)
        for i, (spec, grad) in enumerate(zip(leaves, tree.flatten_up_to(updates), strict=True)):
            param_state = {
                n: column[i] for n, column in columns.items() if not _is_masked(column[i])
            }
            direction, new_state = update(spec, grad, param_state, weights[i], count)
            directions.append(direction)
            states.append(new_state)
        return tree.unflatten(directions), join_states(count, states)

    return optax.GradientTransformationExtraArgs(init_all, update_all)


def box_state(spec: ParamSpec, value: jax.Array, *axes: str) -> ParamBox:
    """Returns an array [batch axes of the parameter, *axes] in a box that names its axes."""
    batch = tuple(spec.axes[i] for i in batch_axes(spec))
    return ParamBox(value, ParamSpec('vector', (*batch, *axes)))


@jax.custom_batching.custom_vmap
def _any_run(due: jax.Array) -> jax.Array:
    return due


@_any_run.def_vmap
def _any_run_vmap(size, is_mapped, due):
    return jnp.any(due), False


def compute_if(due: jax.Array, compute: Callable[[], Any], otherwise: Any) -> Any:
    """Returns compute() if `due`, else `otherwise`.

    Under `vmap` over runs, compute runs for all runs if any is due, and for none if none is.
    `lax.cond` alone would always compute it, as the predicate differs between runs.

    Args:
      due: a bool.
      compute: makes a tree like `otherwise`.
      otherwise: a tree of arrays.
    """

    def compute_and_select():
        return jax.tree.map(
            lambda computed, fallback: jnp.where(due, computed, fallback), compute(), otherwise
        )

    return jax.lax.cond(_any_run(due), compute_and_select, lambda: otherwise)


MakeOptimizer = Callable[[Any], optax.GradientTransformation]  # specs -> optimizer
FROZEN = 'frozen'  # the label of parameters that are not trained


def partition_by_role(
    specs: Any, default: MakeOptimizer | None = None, trained: Any = None, **roles: MakeOptimizer
) -> optax.GradientTransformationExtraArgs:
    """Partitions the parameters (`partition`): an optimizer for each role, `default` for the rest.

    Args:
      specs: a ParamSpec for each parameter.
      default: makes an optimizer from the specs of the remaining parameters; None: none may remain.
      trained: a bool for each parameter; None: all are trained.
      **roles: for each role, a function that makes its optimizer from the specs of its parameters.

    Returns:
      One optimizer of all parameters.

    Raises:
      ValueError: for a parameter that no optimizer covers, and for a role that no parameter has.
    """
    by_path = named_leaves(specs)
    present = {spec.role for spec in by_path.values()}
    if unused := sorted(set(roles) - present):
        raise ValueError(f'an optimizer is given for the roles {unused}, but no parameter has them')
    uncovered = [path for path, spec in by_path.items() if spec.role not in roles]
    if uncovered and default is None:
        raise ValueError(
            f'no optimizer covers {", ".join(uncovered)}; pass an optimizer for their roles, or a '
            'default'
        )
    labels = jax.tree.map(lambda spec: spec.role if spec.role in roles else 'others', specs)
    makers = dict(roles) | ({} if default is None else {'others': default})
    return partition(specs, labels, makers, trained)


def partition(
    specs: Any, labels: Any, makers: Mapping[str, MakeOptimizer], trained: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Partitions the parameters: an optimizer for each label.

    Parameters of other optimizers are optax.MaskedNode in an optimizer's trees. Extra arguments
    with names that end with `_fn` are wrapped to take such trees too.

    Args:
      specs: a ParamSpec for each parameter.
      labels: a label for each parameter. Labels are keys of the state, and so of paths in
        checkpoints.
      makers: for each label, a function that makes its optimizer from the specs of its parameters.
      trained: a bool for each parameter; for False there is no state, and the direction is 0. A
        label without a trained parameter has no optimizer. None: all are trained.

    Returns:
      One optimizer of all parameters.
    """
    if trained is not None:
        labels = jax.tree.map(lambda label, t: label if t else FROZEN, labels, trained)
        makers = {label: make for label, make in makers.items() if label in jax.tree.leaves(labels)}

    def select_specs(label):
        return jax.tree.map(
            lambda s, spec_label: s if spec_label == label else optax.MaskedNode(), specs, labels
        )

    transforms: dict[Hashable, optax.GradientTransformation] = {
        label: make(select_specs(label)) for label, make in makers.items()
    }
    transforms |= {} if trained is None else {FROZEN: optax.set_to_zero()}
    partitioned = optax.partition(transforms, labels)

    def update(updates, state, params=None, **batch):
        def take_partial_tree(name, value):
            if not name.endswith('_fn'):
                return value
            # An optimizer varies only its own parameters: the others keep their present values.
            return lambda partial, *args: value(fill_masked(partial, params), *args)

        batch = {name: take_partial_tree(name, value) for name, value in batch.items()}
        return partitioned.update(updates, state, params, **batch)

    return optax.GradientTransformationExtraArgs(partitioned.init, update)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def fill_masked(part: Any, whole: Any) -> Any:
    """Returns `part` with the leaves of `whole` in place of its optax.MaskedNodes."""
    return jax.tree.map(lambda p, w: w if _is_masked(p) else p, part, whole, is_leaf=_is_masked)


def mask_like(whole: Any, part: Any) -> Any:
    """Returns `whole` with optax.MaskedNode wherever `part` has it."""
    return jax.tree.map(lambda p, w: p if _is_masked(p) else w, part, whole, is_leaf=_is_masked)


def jvp_along(
    function: Callable,
    params: Any,
    direction: Any,
    name='logits of this model',
    supported='reference',
) -> tuple[Any, Any]:
    """Computes a function and its derivative along a direction, in forward mode.

    Args:
      function: of the parameters.
      params: the point.
      direction: a tree like `params`.
      name: of the function, for the error.
      supported: kernels.attention that have a forward-mode derivative, for the error.

    Returns:
      (function(params), its derivative).

    Raises:
      ValueError: if a part of the function has no such derivative.
    """
    try:
        return jax.jvp(function, (params,), (direction,))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f'the {name} cannot be differentiated in forward mode; choose '
            f'kernels.attention={supported}. JAX says: {error}'
        ) from error


def divide_or_zero(numerator: Any, denominator: jax.Array) -> jax.Array:
    """Returns the quotient, or 0 where the denominator is not positive."""
    is_positive = denominator > 0
    return jnp.where(is_positive, numerator / jnp.where(is_positive, denominator, 1.0), 0.0)


def unbox_state(opt_state: Any) -> Any:
    """Returns a state without the boxes that describe its leaves.

    Args:
      opt_state: from `init` of an optimizer.
    """
    return jax.tree.map(
        lambda leaf: leaf.value if is_box(leaf) else leaf, opt_state, is_leaf=is_box
    )


def state_specs(opt_state: Any, shapes: Any, specs: Any) -> Any:
    """Returns a ParamSpec for each leaf of an optimizer's state.

    A leaf in a box has the spec of that box. A leaf with a path that ends with the path of a
    parameter of its shape has the spec of that parameter. A scalar has no axes.

    Args:
      opt_state: from `init`, or its shapes.
      shapes: an array or ShapeDtypeStruct for each parameter.
      specs: a ParamSpec for each parameter.

    Returns:
      A tree like `opt_state`.

    Raises:
      ValueError: for any other leaf.
    """
    shapes, specs = named_leaves(shapes), named_leaves(specs)

    def find_spec(path, leaf):
        if is_box(leaf):
            return leaf.spec
        if not leaf.shape:
            return ParamSpec('vector', ())
        name = path_name(path)
        parts = name.split('/')
        endings = ('/'.join(parts[i:]) for i in range(len(parts)))
        owner = next((ending for ending in endings if ending in specs), None)
        if owner is None or leaf.shape != shapes[owner].shape:
            raise ValueError(
                f'the optimizer state {name} of shape {leaf.shape} does not match any parameter; '
                'let init return it in a box: ParamBox(value, ParamSpec(role, axes))'
            )
        return specs[owner]

    return jax.tree_util.tree_map_with_path(find_spec, opt_state, is_leaf=is_box)
