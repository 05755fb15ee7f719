"""Maps of each matrix of some roles: the shared parts of their rows."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax

from modules.choices import suggest_nearest
from modules.options import Option
from modules.params import ROLES, ParamSpec, matrix_axes, named_leaves
from modules.reparam.base import Reparam, keep_after_update, reparam_row

MATRIX_ROLES = tuple(role for role in ROLES if role != 'vector')

# The option of every row that maps matrices.
Roles = Annotated[str, Option(f'matrices to map: {", ".join(MATRIX_ROLES)}; several joined by +')]


def parse_roles(text: str) -> tuple[str, ...]:
    """Returns ('hidden', 'readout') for 'hidden+readout'.

    Raises ValueError for a role without matrices, and for a repeated role.
    """
    roles = tuple(text.split('+'))
    for role in roles:
        if role not in MATRIX_ROLES:
            what = 'has no matrices' if role == 'vector' else 'is no role'
            raise ValueError(
                f'reparam.roles={text!r}: {role!r} {what}. Choose one or more of '
                f'{", ".join(MATRIX_ROLES)}, joined by +.{suggest_nearest(role, MATRIX_ROLES)}'
            )
    if len(set(roles)) < len(roles):
        raise ValueError(f'reparam.roles={text!r} names a role twice. Name each role once.')
    return roles


def check_roles(recipe: Any, part: Any) -> None:
    """Raises ValueError for unknown roles, and for initial matrices too small to divide by."""
    roles = parse_roles(part.options['roles'])
    zeros = recipe.zero_starts if part.row.least_init_scale else ()
    for name in sorted(zeros):
        if ('hidden' if name == 'query' else name) in roles:
            raise ValueError(
                f'{part} divides by the norms of the initial matrices, but {name} starts at 0 '
                f'(scaling.zero_init={recipe.config.scaling.zero_init}, {recipe.scaling}). Leave '
                'one of them out, or remove this role from reparam.roles.'
            )
    scale, min_scale = recipe.config.scaling.init_scale, part.row.least_init_scale
    if scale < min_scale:
        raise ValueError(
            f'{part} divides by the norms of the initial matrices, so scaling.init_scale must be '
            f'at least {min_scale}; got {scale}'
        )


matrix_row = functools.partial(reparam_row, check=check_roles)  # decorates rows with `roles`


def map_matrices(
    roles: str,
    specs: Any,
    init: Callable[[ParamSpec, jax.Array], tuple[Any, Any]],
    apply: Callable[[ParamSpec, Any, Any], tuple[jax.Array, Any]],
    describe: Callable[[ParamSpec], Any] = lambda spec: spec,
    after_update: Callable[[ParamSpec, Any, Any], tuple[Any, Any]] | None = None,
    measure: Callable[[ParamSpec, Any, Any], dict[str, jax.Array]] = lambda *_: {},
) -> Reparam:
    """Maps each parameter of `roles`; other parameters, and frozen ones, are stored unchanged.

    `init`, `apply`, `after_update` and `measure` are the functions of a `Reparam` for a single
    parameter, with its spec as the first argument; a map without state has the state ().

    Args:
      roles: as `parse_roles` reads them.
      specs: a ParamSpec for each parameter.
      init: (spec, weight) -> (stored, state).
      apply: (spec, stored, state) -> (used, state).
      describe: spec -> specs of the arrays that are stored for a parameter, which take its place in
        trees like `specs`.
      after_update: (spec, stored, state) -> (stored, state).
      measure: (spec, stored, state) -> numbers of the parameter's matrices by name.

    Returns:
      The `Reparam`.

    Raises:
      ValueError: if no parameter has one of the roles.
    """
    mapped_roles = parse_roles(roles)
    leaves, tree = jax.tree.flatten(specs)

    def is_mapped(spec):
        return spec.role in mapped_roles and not spec.frozen

    for role in mapped_roles:
        if not any(spec.role == role and is_mapped(spec) for spec in leaves):
            hint = ' (with model.tie_embeddings=True the embedding is the readout)'
            raise ValueError(
                f'reparam.roles={roles}: no parameter has the role '
                f'{role!r}{hint if role == "readout" else ""}, so it would have no effect. Leave '
                'this role out.'
            )

    def map_pairs(map_one, *trees):
        """Returns two trees: the two values of map_one(spec, *parts) for each parameter."""
        columns = [tree.flatten_up_to(branch) for branch in trees]
        rows = [
            map_one(spec, *parts) if is_mapped(spec) else (*parts, ())[:2]
            for spec, *parts in zip(leaves, *columns, strict=True)
        ]
        return tuple(tree.unflatten(column) for column in zip(*rows, strict=True))

    def apply_all(stored, state, train):
        used, next_state = map_pairs(apply, stored, state)
        return used, next_state if train else state

    def measures(stored, state):
        numbers: dict[str, dict[str, jax.Array]] = {}
        parts = tree.flatten_up_to(stored), tree.flatten_up_to(state)
        for (path, spec), *part in zip(named_leaves(specs).items(), *parts, strict=True):
            for name, value in measure(spec, *part).items() if is_mapped(spec) else ():
                numbers.setdefault(name, {})[path] = value
        return numbers

    return Reparam(
        init=functools.partial(map_pairs, init),
        apply=apply_all,
        specs=jax.tree.map(lambda s: describe(s) if is_mapped(s) else s, specs),
        after_update=keep_after_update
        if after_update is None
        else functools.partial(map_pairs, after_update),
        measures=measures,
    )


def batch_spec(spec: ParamSpec) -> ParamSpec:
    """Describes a vector with a number for each matrix of a parameter."""
    batch, *_ = matrix_axes(spec)
    return ParamSpec('vector', tuple(spec.axes[i] for i in batch), part=spec.part)


def expand_per_matrix(numbers: jax.Array, spec: ParamSpec) -> jax.Array:
    """Appends axes of size 1 to numbers [...], one per matrix, to multiply a parameter by them."""
    return numbers.reshape(*numbers.shape, *(1,) * (len(spec.axes) - numbers.ndim))
