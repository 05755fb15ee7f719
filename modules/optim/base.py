"""What optimizers have in common: their family, their partition by role, their state's specs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from modules.params import Described, ParamSpec, named_leaves, path_name

FAMILIES = ('adam', 'sgd', 'spectral')  # how the size of an update follows from the gradient's


def of_family(family: str) -> Callable[[Callable], Callable]:
    """Marks an optimizer as adam-like (no matter how large the gradient), sgd-like (as large as
    the gradient) or spectral (of given singular values): what a parametrisation scales it by.
    """
    if family not in FAMILIES:
        raise ValueError(f'family must be one of {", ".join(FAMILIES)}; got {family!r}')

    def mark(make):
        make.family = family
        return make

    return mark


def by_role(
    specs: Any, others: optax.GradientTransformation | None = None, **roles: Any
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for each role, and `others` for the roles that are not named.

    Raises ValueError for a parameter that no optimizer covers, and for a role that no parameter
    has.
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
    transforms = dict(roles) | ({} if others is None else {'others': others})
    labels = jax.tree.map(lambda spec: spec.role if spec.role in roles else 'others', specs)
    return optax.partition(transforms, labels)


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
