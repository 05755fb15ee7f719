"""Maps of each matrix of some roles on its own."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax

from modules.choices import nearest
from modules.options import Option
from modules.params import ROLES, ParamSpec, matrix_axes, named_leaves
from modules.reparam.base import Reparam, unchanged

MATRIX_ROLES = tuple(role for role in ROLES if role != 'vector')

# The option of every row that maps matrices.
Roles = Annotated[str, Option(f'which matrices: {", ".join(MATRIX_ROLES)}, joined by +')]


def parse_roles(text: str) -> tuple[str, ...]:
    """('hidden', 'readout') for 'hidden+readout'; ValueError for one that has no matrices, or that
    is given twice.
    """
    roles = tuple(text.split('+'))
    for role in roles:
        if role not in MATRIX_ROLES:
            what = 'has no matrices' if role == 'vector' else 'is no role'
            raise ValueError(
                f'reparam.roles={text!r}: {role!r} {what}; give one or several of '
                f'{", ".join(MATRIX_ROLES)}, joined by +.{nearest(role, MATRIX_ROLES)}'
            )
    if len(set(roles)) < len(roles):
        raise ValueError(f'reparam.roles={text!r} names a role twice; give each once')
    return roles


def known_roles(recipe: Any, part: Any) -> None:
    """Raises ValueError for roles that are none."""
    del recipe
    parse_roles(part.options['roles'])


def on_matrices(
    roles: str,
    specs: Any,
    init: Callable[[ParamSpec, jax.Array], tuple[Any, Any]],
    apply: Callable[[ParamSpec, Any, Any], tuple[jax.Array, Any]],
    describe: Callable[[ParamSpec], Any] = lambda spec: spec,
    after_update: Callable[[ParamSpec, Any, Any], tuple[Any, Any]] | None = None,
    measure: Callable[[ParamSpec, Any, Any], dict[str, jax.Array]] = lambda *_: {},
) -> Reparam:
    """A map of each parameter of `roles` on its own; the others are stored as they are.

    What is stored of a parameter, and what is carried for it, stand in its place in trees like
    `specs`; a map that carries nothing has the state (). Evaluation drops the state that `apply`
    gives. Raises ValueError where no parameter has one of the roles.
    """
    wanted = parse_roles(roles)
    leaves, tree = jax.tree.flatten(specs)
    for role in wanted:
        if not any(spec.role == role for spec in leaves):
            hint = ' (model.tie_embeddings reads out with the embedding)'
            raise ValueError(
                f'no parameter has the role {role!r}{hint if role == "readout" else ""}, so this '
                'reparametrisation would do nothing there; leave it out of reparam.roles'
            )

    def pairs(map_one, *trees):
        """Two trees, of what map_one(spec, *parts) gives for each parameter."""
        columns = [tree.flatten_up_to(one) for one in trees]
        found = [
            map_one(spec, *parts) if spec.role in wanted else (*parts, ())[:2]
            for spec, *parts in zip(leaves, *columns, strict=True)
        ]
        return tuple(tree.unflatten(column) for column in zip(*found, strict=True))

    def apply_all(stored, state, train):
        used, new = pairs(apply, stored, state)
        return used, new if train else state

    def measures(stored, state):
        found: dict[str, dict[str, jax.Array]] = {}
        parts = tree.flatten_up_to(stored), tree.flatten_up_to(state)
        for (path, spec), *part in zip(named_leaves(specs).items(), *parts, strict=True):
            for name, value in measure(spec, *part).items() if spec.role in wanted else ():
                found.setdefault(name, {})[path] = value
        return found

    return Reparam(
        init=functools.partial(pairs, init),
        apply=apply_all,
        specs=jax.tree.map(lambda s: describe(s) if s.role in wanted else s, specs),
        after_update=unchanged if after_update is None else functools.partial(pairs, after_update),
        measures=measures,
    )


def batch_spec(spec: ParamSpec) -> ParamSpec:
    """Of a vector with one number for each matrix of a parameter."""
    batch, *_ = matrix_axes(spec)
    return ParamSpec('vector', tuple(spec.axes[i] for i in batch), part=spec.part)


def per_matrix(numbers: jax.Array, spec: ParamSpec) -> jax.Array:
    """Numbers [...], one for each matrix, with dimensions of size 1 to be multiplied with what
    `spec` describes. Batch axes come first.
    """
    return numbers.reshape(*numbers.shape, *(1,) * (len(spec.axes) - numbers.ndim))
