"""Tables of a config, for a terminal: its parameters, and its learning rate over the run."""

import collections
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.table import Table

from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.devices.mesh import param_sharding
from lm.model.parameters import is_zero_init, optimizer_field
from lm.training.state import Learner, State, make_hyper
from lm.training.update import bind_rows, decay_shares, peak_lrs
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
    shares = named_leaves(decay_shares(described, rule, flat, 1.0, peaks))
    for path, spec in named_leaves(described.specs).items():
        scaling, weight, share = scalings[path], _used_path(path, used_specs), float(shares[path])
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
                'role': spec.role,
                'optimizer': flat[optimizer_field(spec)] if trainable[path] else 'frozen',
                'init std': std,
                'lr': f'{trainable[path] * peaks[optimizer_field(spec)] * scaling.lr_factor:.4g}',
                'decay/step': f'{share:.4g}',
                'horizon (steps)': f'{1 / share:,.0f}' if share else '-',
                'reparam': _format_reparam(recipe, used_specs[weight], spec),
                'sharding': _format_sharding(param_sharding(mesh, spec, shape).spec),
            }
        )
    return rows


# Columns of the parameter table that groups of parameters share.
GROUP_COLUMNS = (
    *('role', 'optimizer', 'init std', 'lr', 'decay/step', 'horizon (steps)'),
    *('reparam', 'sharding'),
)


def group_parameters(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Returns a row for each group of parameters with equal settings, and the common settings.

    A setting that all parameters have in common is left out of the rows.

    Args:
      rows: the rows of `parameter_rows`.
    """
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in GROUP_COLUMNS), []).append(row)
    roles = collections.Counter(settings[0] for settings in groups)
    varying = [c for c in GROUP_COLUMNS if c == 'role' or len({row[c] for row in rows}) > 1]
    common = {c: rows[0][c] for c in GROUP_COLUMNS if c not in varying}
    lines = []
    for members in groups.values():
        count = sum(math.prod(map(int, row['shape'].split(' x '))) for row in members)
        settings = {column: members[0][column] for column in varying}
        if roles[role := settings.pop('role')] > 1:
            names = [row['parameter'].rpartition('/')[2] for row in members]
            role += f': {names[0]}' + f' and {len(names) - 1} more' * (len(names) > 1)
        lines.append({'role': role, 'parameters': f'{count:,}'} | settings)
    return lines, common


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
    """Returns the learning rates at evenly spaced steps and at changes of the slope, with bars."""
    steps, peaks = recipe.train.steps, {'lr': recipe.optim.lr}
    if recipe.optim.others_lr is not None:
        peaks['others_lr'] = recipe.optim.others_lr
    listed = np.unique(np.linspace(1, steps, min(ROWS, steps)).round().astype(np.int64))
    if steps <= MAX_CORNER_STEPS:
        listed = np.union1d(
            listed, find_corners(schedule_fractions(recipe, np.arange(1, steps + 1)))
        )
    width = max(len(f'{steps:,}'), len('step'))
    lines = [f'optim.schedule={recipe.optim.schedule}']
    lines += [f'{"step":>{width}}' + ''.join(f'{name:>12}' for name in peaks)]
    for step, fraction in zip(listed, schedule_fractions(recipe, listed), strict=True):
        rates = ''.join(f'{peak * fraction:>12.4g}' for peak in peaks.values())
        lines.append(f'{step:>{width},}{rates}  {"#" * round(BAR_WIDTH * fraction)}'.rstrip())
    return '\n'.join(lines) + '\n'


def schedule_fractions(recipe: Recipe, steps: np.ndarray) -> np.ndarray:
    """Returns fractions of the peak at steps counted from 1, as in metrics.jsonl."""
    hyper = make_hyper(recipe)
    schedule = bind_rows(recipe, hyper)['optim.schedule']
    fractions = schedule(jnp.asarray(steps - 1, jnp.int32), hyper['train.steps'])
    return np.asarray(jax.device_get(fractions), float)


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
