"""What optimizers have in common: their family, their partition by role, their state's specs."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.facts import demands_nothing, longest
from modules.params import (
    ROLES,
    Described,
    ParamSpec,
    batch_axes,
    named_leaves,
    path_name,
)

FAMILIES = ('adam', 'sgd', 'spectral')  # how the size of an update follows from the gradient's


@dataclasses.dataclass(frozen=True)
class Needs:
    """What an optimizer asks for, beyond a gradient, or does without.

    most_parameters: how many it serves at most; None: any number. gradient: whether it reads that
    of its parameters. forward_mode: what it differentiates in forward mode: 'logits', their
    'gradient', or nothing.
    error_probability: whether it reads the mean of that name. convex_loss: whether it is for losses
    alone that are convex in the logits. own_loss: whether it reads the loss itself, of which a
    penalty in the gradient, or a factor of it, is no part.
    """

    most_parameters: int | None = None
    gradient: bool = True
    forward_mode: str = ''
    error_probability: bool = False
    convex_loss: bool = False
    own_loss: bool = False


def of_family(
    family: str,
    roles: tuple[str, ...] = ROLES,
    other_sizes: Mapping[str, Any] = MappingProxyType({}),
    check: Callable[[Any, Any], None] = demands_nothing,
    **needs: Any,
) -> Callable[[Callable], Callable]:
    """Marks an optimizer as adam-like (no matter how large the gradient), sgd-like (as large as
    the gradient) or spectral (of given singular values): what a parametrisation scales it by; with
    the roles of the parameters that it is for; with its `Needs`; with the values of options by
    which its updates are of another size than those of its family; and with its own rule
    (`modules.facts`).
    """
    if family not in FAMILIES:
        raise ValueError(f'family must be one of {", ".join(FAMILIES)}; got {family!r}')

    def mark(make):
        make.family, make.roles, make.needs = family, roles, Needs(**needs)
        make.other_sizes, make.check, make.lasts = other_sizes, check, longest
        return make

    return mark


class PerParameter(NamedTuple):
    """count: updates done; of: by name a tree like the parameters, where each has what is kept of
    it, and optax.MaskedNode where that is nothing.
    """

    count: jax.Array
    of: dict[str, Any]


class Direction(NamedTuple):
    """What an update may give of a parameter in place of an array: its direction, and the share of
    the weight decay that its weights get, with dimensions of size 1 to be multiplied with them.
    """

    of: jax.Array
    decayed: Any


def with_share(direction: jax.Array | Direction) -> Direction:
    """Of an array, all of the weight decay."""
    return direction if isinstance(direction, Direction) else Direction(direction, 1.0)


Kept = dict[str, Any]  # of one parameter, by name: an array like it, or another in a box


def per_parameter(
    specs: Any,
    init: Callable[[ParamSpec, jax.Array], Kept],
    update: Callable[..., tuple[jax.Array | Direction, Kept]],
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of each parameter on its own.

    `init(spec, weight)` gives what is kept of it; `update(spec, grad, kept, weight, count)` the
    direction (or a Direction) and what is kept next, `count` being that of this update, from 1.
    What is not shaped like the parameter is in a box at first, Described(value, ParamSpec(role,
    axes)), and without it in updates.
    """
    leaves, tree = jax.tree.flatten(specs)

    def joined(count, each):
        names = dict.fromkeys(name for kept in each for name in kept)
        columns = {name: [kept.get(name, optax.MaskedNode()) for kept in each] for name in names}
        return PerParameter(count, {n: tree.unflatten(column) for n, column in columns.items()})

    def init_all(params):
        weights = tree.flatten_up_to(params)
        return joined(jnp.int32(0), [init(s, w) for s, w in zip(leaves, weights, strict=True)])

    def update_all(grads, state, params=None, **more):
        del more
        columns = {name: tree.flatten_up_to(kept) for name, kept in state.of.items()}
        count, directions, each = state.count + 1, [], []
        weights = tree.flatten_up_to(params)
        for i, (spec, grad) in enumerate(zip(leaves, tree.flatten_up_to(grads), strict=True)):
            kept = {name: column[i] for name, column in columns.items()}
            kept = {n: one for n, one in kept.items() if not isinstance(one, optax.MaskedNode)}
            direction, later = update(spec, grad, kept, weights[i], count)
            directions.append(direction)
            each.append(later)
        return tree.unflatten(directions), joined(count, each)

    return optax.GradientTransformationExtraArgs(init_all, update_all)


def boxed(spec: ParamSpec, value: jax.Array, *axes: str) -> Described:
    """An array [batch axes of the parameter, *axes] in the box that says so."""
    batch = tuple(spec.axes[i] for i in batch_axes(spec))
    return Described(value, ParamSpec('vector', (*batch, *axes)))


@jax.custom_batching.custom_vmap
def _anywhere(due: jax.Array) -> jax.Array:
    return due


@_anywhere.def_vmap
def _anywhere_of_runs(size, is_mapped, due):
    del size, is_mapped
    return jnp.any(due), False


def when(due: jax.Array, found: Callable[[], Any], kept: Any) -> Any:
    """found() where `due`, and `kept` otherwise, a tree like it.

    Of runs that are mapped over, found is computed for all where one is due, and for none where
    none is: `lax.cond` alone would compute it every time, as each run has a count of its own.
    """

    def chosen():
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), found(), kept)

    return jax.lax.cond(_anywhere(due), chosen, lambda: kept)


Make = Callable[[Any], optax.GradientTransformation]  # from specs


def by_role(
    specs: Any, others: Make | None = None, **roles: Make
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for each role, and `others` for the roles that are not named.

    Each is made from the specs of its own parameters, with optax.MaskedNode in the place of those
    of others, as in the trees that it gets and in those that it gives to functions of parameters:
    the extra arguments whose names end with `_fn`. Raises ValueError for a parameter that no
    optimizer covers, and for a role that no parameter has.
    """
    found = named_leaves(specs)
    present = {spec.role for spec in found.values()}
    if unused := sorted(set(roles) - present):
        raise ValueError(f'an optimizer is given for {unused}, and no parameter has that role')
    if others is None:
        uncovered = [path for path, spec in found.items() if spec.role not in roles]
        if uncovered:
            raise ValueError(
                f'no optimizer covers {", ".join(uncovered)}; name its role, or others'
            )
    labels = jax.tree.map(lambda spec: spec.role if spec.role in roles else 'others', specs)

    def own(label):
        return jax.tree.map(lambda s, of: s if of == label else optax.MaskedNode(), specs, labels)

    makers = dict(roles) | ({} if others is None else {'others': others})
    transforms = {label: make(own(label)) for label, make in makers.items()}
    partition = optax.partition(transforms, labels)

    def update(grads, state, params=None, **more):
        def of_part(function):
            return lambda part, *rest: function(filled(part, params), *rest)

        given = {name: of_part(one) if name.endswith('_fn') else one for name, one in more.items()}
        return partition.update(grads, state, params, **given)

    return optax.GradientTransformationExtraArgs(partition.init, update)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def filled(part: Any, whole: Any) -> Any:
    """A tree with the leaves of `whole` where `part` has optax.MaskedNode."""
    return jax.tree.map(
        lambda own, other: other if _is_masked(own) else own, part, whole, is_leaf=_is_masked
    )


def restricted(whole: Any, part: Any) -> Any:
    """`whole`, such as the extra argument `grad`, with optax.MaskedNode where `part` has it."""
    return jax.tree.map(
        lambda own, other: own if _is_masked(own) else other, part, whole, is_leaf=_is_masked
    )


def along(function: Callable[[Any], Any], params: Any, direction: Any) -> tuple[Any, Any]:
    """(function(params), its derivative along a direction), in forward mode.

    ValueError where a part of the function has no such derivative.
    """
    try:
        return jax.jvp(function, (params,), (direction,))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            'the logits of this model cannot be differentiated in forward mode, which is asked '
            'for; choose kernels.attention=reference. JAX says: '
            f'{error}'
        ) from error


def unboxed(opt_state: Any) -> Any:
    """A state without the boxes that an optimizer describes its leaves with."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Described) else leaf,
        opt_state,
        is_leaf=lambda leaf: isinstance(leaf, Described),
    )


def state_specs(opt_state: Any, shapes: Any, specs: Any) -> Any:
    """A ParamSpec for each leaf of an optimizer's state, as `init` returned it.

    A leaf in a box (`modules.params.Described`) has that box's; one at the end of whose path stands
    the path of a parameter of its shape is described as that parameter; a scalar has no axes.
    `shapes` and `specs` are those of the parameters. Raises ValueError for any other leaf.
    """
    shapes, specs = named_leaves(shapes), named_leaves(specs)

    def of(path, leaf):
        if isinstance(leaf, Described):
            return leaf.spec
        if not leaf.shape:
            return ParamSpec('vector', ())
        name = path_name(path)
        owner = _owner(name, specs)
        if owner is None or leaf.shape != shapes[owner].shape:
            raise ValueError(
                f'the optimizer state {name} of shape {leaf.shape} is like no parameter; let init '
                'return it in a box: Described(value, ParamSpec(role, axes))'
            )
        return specs[owner]

    return jax.tree_util.tree_map_with_path(
        of, opt_state, is_leaf=lambda leaf: isinstance(leaf, Described)
    )


def _owner(name: str, specs: Mapping[str, ParamSpec]) -> str | None:
    """The longest path of a parameter that `name` ends with."""
    parts = name.split('/')
    endings = ('/'.join(parts[i:]) for i in range(len(parts)))
    return next((ending for ending in endings if ending in specs), None)
