"""Tables of a config, for a terminal: its parameters, and its learning rate over the run."""

import collections
import math
from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.table import Table

from lm.config.groups import LR, LR_FACTOR, OPTIMIZER_OPTIONS, SCHEDULE_OPTIONS, group_settings
from lm.config.recipe import Part, Recipe
from lm.config.resolve import flatten
from lm.devices.mesh import param_sharding
from lm.model.parameters import is_zero_init
from lm.record.names import PARAMETER_ROWS, PARAMETERS
from lm.storage.files import format_json, write_text
from lm.training.state import Learner, State, make_hyper
from lm.training.update import bind_rows, decay_shares, group_fractions, peak_lrs
from modules.optim.groups import HIDDEN, find_group
from modules.params import LAYER, LORA, ParamSpec, named_leaves
from modules.reparam.matrices import parse_roles

ROWS, BAR_WIDTH = 21, 40
MAX_CORNER_STEPS = 10**6  # longer runs show evenly spaced steps alone


def parameter_rows(learner: Learner, mesh: Mesh) -> list[dict[str, str]]:
    """Returns a row for each parameter, with all settings that apply to it.

    `decay/step` is the share that a step removes at the peak of the schedule. `horizon (steps)` is
    the number of steps over which the weight then averages updates.
    """
    recipe, described = learner.recipe, learner.description
    shapes, scalings = named_leaves(described.shapes), named_leaves(described.scalings)
    trainable, used_specs = named_leaves(described.trainable), named_leaves(described.used_specs)
    rows, flat = [], flatten(recipe)
    peaks, embedding_std = peak_lrs(flat), recipe.config.scaling.embedding_std
    rule = bind_rows(recipe, flat)['optim.decay_rule']
    shares = named_leaves(decay_shares(described, rule, flat, dict.fromkeys(peaks, 1.0), peaks))
    for path, spec in named_leaves(described.specs).items():
        scaling, weight, share = scalings[path], _used_path(path, used_specs), float(shares[path])
        group, optimizer = find_group(spec), recipe.find_optimizer(spec)
        shape, std = shapes[path].shape, 'declared'
        if (
            scaling.init_std is not None and spec.part != LORA
        ):  # adapters have their own initial values
            is_given = spec.role == 'embedding' and embedding_std is not None
            init_std = embedding_std if is_given else scaling.init_std
            init_std = 0.0 if is_zero_init(recipe, weight, spec) else init_std
            std = f'{recipe.config.scaling.init_scale * init_std:.4g}'
        rows.append(
            {
                'parameter': path,
                'shape': ' x '.join(map(str, shape)) or '1',
                'group': group,
                'role': spec.role,
                'optimizer': optimizer.name if trainable[path] else 'frozen',
                'options': _format_options(optimizer) if trainable[path] else '-',
                'init std': std,
                'lr': f'{trainable[path] * peaks[group] * scaling.lr_factor:.4g}',
                'decay/step': f'{share:.4g}',
                'horizon (steps)': f'{1 / share:,.0f}' if share else '-',
                'reparam': _format_reparam(recipe, used_specs[weight], spec),
                'sharding': _format_sharding(param_sharding(mesh, spec, shape).spec),
            }
        )
    return rows


# Columns of the parameter table that groups of parameters share.
GROUP_COLUMNS = (
    *('group', 'optimizer', 'options', 'init std', 'lr', 'decay/step', 'horizon (steps)'),
    *('reparam', 'sharding'),
)


def group_parameters(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Returns a row for each set of parameters with equal settings, and the common settings.

    A setting that all parameters have in common is left out of the rows, and so are options of
    optimizers, unless parameters with the same optimizer differ in them.

    Args:
      rows: the rows of `parameter_rows`.
    """
    sets: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        sets.setdefault(tuple(row[column] for column in GROUP_COLUMNS), []).append(row)
    count_by_group = collections.Counter(settings[0] for settings in sets)
    n_values = {c: len({row[c] for row in rows}) for c in GROUP_COLUMNS}
    n_settings = len({(row['optimizer'], row['options']) for row in rows})
    columns = [c for c in GROUP_COLUMNS if c != 'options' or n_settings > n_values['optimizer']]
    varying = [c for c in columns if c == 'group' or n_values[c] > 1]
    common = {c: rows[0][c] for c in columns if c not in varying}
    lines = []
    for members in sets.values():
        count = sum(math.prod(map(int, row['shape'].split(' x '))) for row in members)
        settings = {column: members[0][column] for column in varying}
        if count_by_group[group := settings.pop('group')] > 1:
            names = [row['parameter'].rpartition('/')[2] for row in members]
            group += f': {names[0]}' + f' and {len(names) - 1} more' * (len(names) > 1)
        lines.append({'group': group, 'parameters': f'{count:,}'} | settings)
    return lines, common


def _format_options(optimizer: Part) -> str:
    """Returns the numbers of an optimizer that groups may replace, such as 'b1=0.9 eps=1e-08'."""
    options = {
        name: optimizer.options[name] for name in OPTIMIZER_OPTIONS if name in optimizer.options
    }
    return ' '.join(f'{name}={value:g}' for name, value in options.items()) or '-'


def _format_sharding(over: PartitionSpec) -> str:
    """Returns the mesh axes of each dimension, such as 'fsdp, -, tensor+expert'."""
    if not any(over):
        return 'replicated'
    mesh_axes = [(axes,) if isinstance(axes, str) else axes or '-' for axes in over]
    return ', '.join('+'.join(axes) for axes in mesh_axes)


def _used_path(path: str, used: Collection[str]) -> str:
    """Returns the weight to which a parameter belongs: 'layers/mlp/up' for 'layers/mlp/up/gain'."""
    while path not in used:
        path = path.rpartition('/')[0]
    return path


def _format_reparam(recipe: Recipe, used: ParamSpec, stored: ParamSpec) -> str:
    """Returns the rows of model.reparam that map a weight, such as 'shared+weight_norm'."""

    def maps(part):
        roles = part.options.get('roles')
        if roles is None:
            return LAYER in used.axes and LAYER not in stored.axes
        return used.role in parse_roles(roles)

    return '+'.join(part.name for part in recipe.reparam if maps(part)) or 'none'


def parameter_count(learner: Learner) -> int:
    return sum(math.prod(s.shape) for s in named_leaves(learner.description.shapes).values())


def trained_count(learner: Learner) -> int:
    """Returns the number of parameters that training changes."""
    pairs = zip(
        jax.tree.leaves(learner.description.shapes),
        jax.tree.leaves(learner.description.trainable),
        strict=True,
    )
    return sum(math.prod(leaf.shape) for leaf, is_trained in pairs if is_trained)


def optimizer_state_bytes(state_shapes: State) -> int:
    """Returns the bytes that the optimizer and the average of a run hold beside its parameters."""
    leaves = jax.tree.leaves((state_shapes.opt_state, state_shapes.average))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def format_table(rows: list[dict[str, str]]) -> str:
    """Returns rows with equal keys as lines of text, with a header."""
    lines = [dict(zip(rows[0], rows[0], strict=True)), *rows]
    widths = {column: max(len(line[column]) for line in lines) for column in rows[0]}
    padded = ('  '.join(f'{text:{widths[c]}}' for c, text in line.items()) for line in lines)
    return ''.join(f'{line.rstrip()}\n' for line in padded)


def write_parameters(folder: Path, rows: list[dict[str, str]]) -> None:
    """Writes the rows of `parameter_rows` for people and for programs."""
    write_text(folder / PARAMETERS, format_table(rows))
    write_text(folder / PARAMETER_ROWS, format_json({'parameters': rows}))


def make_table(rows: list[dict[str, str]]) -> Table:
    """Returns a table to print, from rows with equal keys.

    If the terminal is too narrow, cells are wrapped between words.
    """
    table = Table(box=None, pad_edge=False, header_style='bold')
    for column in rows[0]:
        words = ' '.join([column, *(row[column] for row in rows)]).split()
        table.add_column(column, min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*row.values())
    return table


def format_schedule(recipe: Recipe) -> str:
    """Returns the learning rates at evenly spaced steps and at changes of the slope, with bars.

    A group with a rate or a schedule other than that of its parent has a column.
    """
    steps, flat = recipe.train.steps, flatten(recipe)
    settings = [f'_{name}' for name in (LR, LR_FACTOR, *SCHEDULE_OPTIONS)]
    columns = {'lr': HIDDEN} | {
        f'{group}_lr': group
        for group, paths in group_settings(flat).items()
        if any(path == f'optim.{group}{setting}' for path in paths for setting in settings)
    }
    listed = np.unique(np.linspace(1, steps, min(ROWS, steps)).round().astype(np.int64))
    if steps <= MAX_CORNER_STEPS:
        for group in columns.values():
            fractions = schedule_fractions(recipe, np.arange(1, steps + 1), group)
            listed = np.union1d(listed, find_corners(fractions))
    step_width = max(len(f'{steps:,}'), len('step'))
    widths = {name: max(12, len(name) + 2) for name in columns}
    lines = [f'optim.schedule={recipe.optim.schedule}']
    lines += [f'{"step":>{step_width}}' + ''.join(f'{n:>{w}}' for n, w in widths.items())]
    peaks = peak_lrs(flat)
    rates = {
        name: peaks[group] * schedule_fractions(recipe, listed, group)
        for name, group in columns.items()
    }
    bars = BAR_WIDTH * schedule_fractions(recipe, listed)
    for i, step in enumerate(listed):
        numbers = ''.join(f'{rates[name][i]:>{width}.4g}' for name, width in widths.items())
        lines.append(f'{step:>{step_width},}{numbers}  {"#" * round(bars[i])}'.rstrip())
    return '\n'.join(lines) + '\n'


def schedule_fractions(recipe: Recipe, steps: np.ndarray, group: str = HIDDEN) -> np.ndarray:
    """Returns the fractions of the peak at steps counted from 1, as in metrics.jsonl.

    Args:
      recipe: names the schedule.
      steps: their numbers.
      group: HIDDEN or a row of GROUPS.
    """
    fractions = group_fractions(recipe, make_hyper(recipe), jnp.asarray(steps - 1, jnp.int32))
    return np.asarray(jax.device_get(fractions[group]), float)


def find_corners(fractions: np.ndarray) -> np.ndarray:
    """Returns the steps, from 1, at which the slope changes by half or more.

    None are returned if there are many. A change of less than a tenth of one fall over the whole
    run is part of a curve.
    """
    slopes = np.diff(fractions)
    if len(slopes) < 2:
        return np.array([], np.int64)
    steeper = np.maximum(np.abs(slopes[1:]), np.abs(slopes[:-1]))
    change = np.abs(np.diff(slopes))
    (indices,) = np.nonzero((change > 0.5 * steeper) & (change > 0.1 / len(fractions)))
    return indices + 2 if len(indices) <= ROWS else indices[:0]
