"""The table printed at start: everything that is decided about each parameter."""

import math

from jax.sharding import Mesh
from rich.table import Table

from lm.mesh import param_sharding
from lm.state import Learner
from modules.params import named_leaves


def parameter_rows(learner: Learner, mesh: Mesh) -> list[dict[str, str]]:
    """One row a parameter, with what each consumer of its spec makes of it."""
    config, described = learner.config, learner.described
    shapes, scalings = named_leaves(described.shapes), named_leaves(described.scalings)
    trainable = named_leaves(described.trainable)
    rows = []
    for path, spec in named_leaves(described.specs).items():
        scaling = scalings[path]
        std = 'declared'
        if scaling.init_std is not None:
            std = f'{config.scaling.init_scale * scaling.init_std:.4g}'
        decay = config.optim.weight_decay * scaling.decay_factor
        axes = [axis or '-' for axis in param_sharding(mesh, spec).spec]
        sharding = ', '.join(axes) if set(axes) - {'-'} else 'replicated'
        rows.append(
            {
                'parameter': path,
                'shape': ' x '.join(map(str, shapes[path].shape)),
                'role': spec.role,
                'optimizer': config.optim.name if trainable[path] else 'frozen',
                'init std': std,
                'lr': f'{trainable[path] * config.optim.lr * scaling.lr_factor:.4g}',
                'weight decay': f'{trainable[path] * decay:.4g}',
                'reparam': config.model.reparam,
                'sharding': sharding,
            }
        )
    return rows


def parameter_count(learner: Learner) -> int:
    return sum(math.prod(s.shape) for s in named_leaves(learner.described.shapes).values())


def as_table(rows: list[dict[str, str]]) -> Table:
    """Rows with equal keys, ready to print."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for column in rows[0]:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table
