"""The table printed at start: everything that is decided about each parameter."""

import math
from collections.abc import Collection

import jax
from jax.sharding import Mesh, PartitionSpec
from rich.table import Table

from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.devices.mesh import param_sharding
from lm.model.parameters import optimizer_of, starts_at_0
from lm.training.state import Learner, State, peaks_of
from lm.training.update import decay_shares
from modules.params import LAYER, ParamSpec, named_leaves
from modules.reparam.matrices import parse_roles


def parameter_rows(learner: Learner, mesh: Mesh) -> list[dict[str, str]]:
    """One row a parameter, with what each consumer of its spec makes of it.

    `decay` is the share that a step takes off at the peak of the schedule, `over steps` the number
    of steps whose updates the weight is then an average of.
    """
    recipe, described = learner.recipe, learner.described
    shapes, scalings = named_leaves(described.shapes), named_leaves(described.scalings)
    trainable = named_leaves(described.trainable)
    used = named_leaves(described.used_specs)
    rows, flat = [], flatten(recipe)
    peaks = peaks_of(flat)
    shares = named_leaves(decay_shares(learner, flat, 1.0, peaks))
    shares = {path: float(share) for path, share in shares.items()}
    for path, spec in named_leaves(described.specs).items():
        scaling = scalings[path]
        std = 'declared'
        if scaling.init_std is not None:
            drawn = drawn_with(recipe, used_path(path, used), spec, scaling.init_std)
            std = f'{recipe.config.scaling.init_scale * drawn:.4g}'
        sharding = sharding_words(param_sharding(mesh, spec, shapes[path].shape).spec)
        rows.append(
            {
                'parameter': path,
                'shape': ' x '.join(map(str, shapes[path].shape)) or '1',
                'role': spec.role,
                'optimizer': flat[optimizer_of(spec)] if trainable[path] else 'frozen',
                'init std': std,
                'lr': f'{trainable[path] * peaks[optimizer_of(spec)] * scaling.lr_factor:.4g}',
                'decay': f'{shares[path]:.4g}',
                'over steps': f'{1 / shares[path]:,.0f}' if shares[path] else '-',
                'reparam': reparam_of(recipe, used[used_path(path, used)], spec),
                'sharding': sharding,
            }
        )
    return rows


def sharding_words(over: PartitionSpec) -> str:
    """'fsdp, -, tensor+expert': of each dimension."""
    if not any(over):
        return 'replicated'
    of_each = [(axes,) if isinstance(axes, str) else axes or '-' for axes in over]
    return ', '.join('+'.join(axes) for axes in of_each)


def drawn_with(recipe: Recipe, path: str, spec: ParamSpec, std: float) -> float:
    if starts_at_0(recipe, path, spec):
        return 0.0
    asked = recipe.config.scaling.embedding_std
    return std if asked is None or spec.role != 'embedding' else asked


def used_path(path: str, used: Collection[str]) -> str:
    """'layers/mlp/up' of 'layers/mlp/up/gain': the weight that it is stored for."""
    while path not in used:
        path = path.rpartition('/')[0]
    return path


def reparam_of(recipe: Recipe, used: ParamSpec, stored: ParamSpec) -> str:
    """The rows of model.reparam that map a weight: 'shared+weight_norm'."""

    def maps(part):
        roles = part.options.get('roles')
        if roles is None:
            return LAYER in used.axes and LAYER not in stored.axes
        return used.role in parse_roles(roles)

    return '+'.join(part.name for part in recipe.reparam if maps(part)) or 'none'


def parameter_count(learner: Learner) -> int:
    return sum(math.prod(s.shape) for s in named_leaves(learner.described.shapes).values())


def optimizer_state_bytes(state_shapes: State) -> int:
    """What the optimizer, and the average of the weights, keep beside the parameters, of one run,
    from the shapes alone.
    """
    leaves = jax.tree.leaves((state_shapes.opt_state, state_shapes.average))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def as_table(rows: list[dict[str, str]]) -> Table:
    """Rows with equal keys, ready to print."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for column in rows[0]:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table
