"""Quantities that a run recorded over its steps (`lm.training.diagnostics`): reads, thins, orders
them, and chooses which fit a page.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.record.run import Run
from lm.study.tables.results import Record

POINTS = 300  # of a curve; a figure is about a thousand pixels wide
MAP_NUMBERS = 400_000  # of all that layers record on a page, about 3 MB of JSON
MAP_STEPS = (6, 60)  # of one quantity, at least and at most

# What a page shows first: what tells early that a run goes unstable.
FEW = (
    'attention_entropy_share',
    'attention_largest_logit',
    'residual_rms',
    'update_ratio_hidden',
    'log_z_mean',
)
# What figures for papers are drawn of where more was recorded than MOST_FIGURES.
FIGURE_QUANTITIES = {
    *FEW,
    'attention_entropy',
    'attention_first_token',
    'residual_largest',
    'residual_sink',
    'layer_grad_norm',
    'layer_param_norm',
}
MOST_FIGURES = 12
BY_HEAD = ('attention_entropy', 'attention_largest', 'attention_logit', 'attention_first')
GROUPS = {  # name: how the quantities begin, the first group that fits
    'attention, by head': BY_HEAD,
    'residual stream': ('residual_',),
    'outputs of sublayers': ('attention_output_', 'mlp_output_'),
    'readout': ('log_z_', 'logit_'),
    'updates': ('update_',),
    'gradients': ('gradient_', 'layer_grad_norm'),
    'weights': ('weight_', 'layer_param_norm'),
    'singular values': ('singular_value_', 'sigma_', 'gamma_'),
}
OTHERS = 'others'

Curve = tuple[list[int], list[float | None]]  # steps, values
HeatMap = tuple[list[int], list[list[float | None]]]  # steps, values of each layer at each
HeadMap = tuple[list[int], list[list[list[float | None]]]]  # of each head of each layer at each


@dataclasses.dataclass(frozen=True)
class Series:
    """Everything that a run recorded over its steps. Losses are in nats per token.

    layers, heads, scalars: by name, the quantities recorded per layer, per head, and beside these
    for the whole model. `layers` has those per head too: the mean over heads, and the maximum where
    the name says `largest`.
    """

    training: Curve
    validation: Curve
    layers: dict[str, HeatMap]
    heads: dict[str, HeadMap] = dataclasses.field(default_factory=dict)
    scalars: dict[str, Curve] = dataclasses.field(default_factory=dict)
    rates: Curve = ([], [])


def read_series(record: Record) -> Series:
    """Reads all rows of the run's metrics.jsonl so far; None stands for what is no finite number.

    Raises ValueError, naming the file, where it cannot be read.
    """
    rows = Run(Path(record['workdir'])).rows()
    of_model = [row for row in rows if any(isinstance(v, list) for v in row.values())]
    found: dict[int, dict[str, None]] = {depth: {} for depth in (0, 1, 2)}
    for row in of_model:
        for name, value in row.items():
            found.get(_nesting_depth(value), {})[name] = None
    heads = {name: _read_maps(of_model, name, 2) for name in found[2]}
    layers = {name: _read_maps(of_model, name, 1) for name in found[1]}
    for name, (steps, values) in heads.items():
        over = max if 'largest' in name else lambda numbers: sum(numbers) / len(numbers)
        means = [[None if not h or None in h else over(h) for h in at_step] for at_step in values]
        layers[name] = steps, means
    scalars = {name: _read_column(of_model, name) for name in found[0] if name != 'step'}
    losses = _read_column(rows, 'ce'), _read_column(rows, 'validation_ce')
    return Series(*losses, layers, heads, scalars, _read_column(rows, 'lr'))


def _nesting_depth(value: Any) -> int:
    """0 for a number or None, 1 for one a layer, 2 for one a head; -1 for anything else."""
    if not isinstance(value, list):
        return 0 if value is None or isinstance(value, int | float) else -1
    inner = {_nesting_depth(one) for one in value}
    return 1 + inner.pop() if len(inner) == 1 and inner <= {0, 1} else -1


def _read_column(rows: Iterable[dict[str, Any]], name: str) -> Any:
    """The steps at which `name` was recorded, and its value at each."""
    found = [(row['step'], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [_replace_nonfinite(value) for _, value in found]


def _read_maps(rows: Iterable[dict[str, Any]], name: str, depth: int) -> Any:
    """A HeatMap, or a HeadMap with depth 2, of the rows that have the commonest shape."""
    rows = [row for row in rows if _nesting_depth(row.get(name)) == depth]
    [(shape, _)] = collections.Counter(_shape(row[name]) for row in rows).most_common(1)
    return _read_column([row for row in rows if _shape(row[name]) == shape], name)


def _shape(values: list[Any]) -> tuple[int, ...]:
    return (len(values), *(len(inner) for inner in values if isinstance(inner, list)))


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_nonfinite(inner) for inner in value]
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def thin_curve(curve: Curve, points: int = POINTS) -> Curve:
    """Keeps at most `points` of a curve, such that spikes stay: largest-triangle-three-buckets.

    Each bucket of neighbours gives the point that spans the largest triangle with the previously
    chosen one and with the mean of the next bucket (S. Steinarsson, Downsampling time series for
    visual representation, University of Iceland 2013).
    """
    steps, values = curve
    if len(steps) <= points:
        return curve
    x = np.asarray(steps, float)
    y = np.array([math.nan if value is None else value for value in values], float)
    filled = np.where(np.isnan(y), np.nanmean(y) if not np.isnan(y).all() else 0.0, y)
    edges = np.linspace(1, len(x) - 1, points - 1).astype(int)
    chosen = [0]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        after = slice(high, edges[i + 2] if i + 2 < len(edges) else len(x))
        x1, y1 = x[after].mean(), filled[after].mean()
        x0, y0 = x[chosen[-1]], filled[chosen[-1]]
        area = np.abs((x0 - x1) * (filled[low:high] - y0) - (x0 - x[low:high]) * (y1 - y0))
        chosen.append(low + int(area.argmax()))
    chosen.append(len(x) - 1)
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def smooth(curve: Curve, share: float) -> list[float | None]:
    """Returns the exponential average over `share` of all steps, unbiased from the first value on.

    weight_i = 1 - prod_j<=i keep_j, keep_i = exp(-(step_i - step_(i-1)) / tau): the plain average
    where steps are few. None stays, and is passed over. A damaged file may have steps in any order,
    equal or huge; each then counts by how far it is from the one before.
    """
    steps, values = curve
    tau = share * max(map(abs, steps), default=0)
    if not tau:
        return values
    total, weight = 0.0, 0.0
    found, before = [], 2 * steps[0] - steps[1] if len(steps) > 1 else 0
    for step, value in zip(steps, values, strict=True):
        keep, before = math.exp(-(abs(step - before) or 1) / tau), step
        if value is not None:
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        is_known = value is not None and weight  # 0 if a step is huge beside the others
        found.append(total / weight if is_known else value)
    return found


def thin_map(quantity_map: Any, steps: int) -> Any:
    """Keeps at most so many evenly spaced steps of a map, with the first and the last."""
    if len(quantity_map[0]) <= steps:
        return quantity_map
    kept = np.unique(np.linspace(0, len(quantity_map[0]) - 1, steps).round().astype(int))
    return [quantity_map[0][i] for i in kept], [quantity_map[1][i] for i in kept]


def mean_map(maps: Sequence[Any]) -> Any:
    """Returns the mean over runs, at the steps that all have; None where one has no number."""
    first = maps[0][0] if maps else []
    steps = [step for step in first if all(step in other[0] for other in maps)]
    at = [dict(zip(*one, strict=True)) for one in maps]
    means = [np.array([one[step] for one in at], float).mean(0) for step in steps]  # None is nan
    return steps, [_replace_nonfinite(one.tolist()) for one in means]


def quantity_group(name: str) -> str:
    return next((group for group, starts in GROUPS.items() if name.startswith(starts)), OTHERS)


def quantity_names(all_series: Iterable[Series]) -> list[str]:
    """The names of all that was recorded, the few that matter first, then by group."""
    groups = [*GROUPS, OTHERS]
    names = dict.fromkeys(name for one in all_series for name in (*one.layers, *one.scalars))
    by_group = sorted(names, key=lambda name: groups.index(quantity_group(name)))
    few = [name for name in FEW if name in names]
    return few + [name for name in by_group if name not in few]


def constant_quantities(all_series: Sequence[Series]) -> dict[str, float]:
    """Returns the quantities that have one value at all steps, layers and runs, with the value."""
    found = {}
    for name in quantity_names(all_series):
        maps = [one.layers.get(name) or one.scalars.get(name) for one in all_series]
        values = {value for one in maps if one for value in flatten_values(one[1])}
        if len(values) == 1 and None not in values:
            (found[name],) = values
    return found


def flatten_values(values: Any) -> Iterable[float | None]:
    """Yields the numbers of lists in lists."""
    return itertools.chain(*map(flatten_values, values)) if isinstance(values, list) else (values,)


def select_figures(all_series: Sequence[Series]) -> list[str]:
    """Returns what figures for papers show: all that varies, or DRAWN and FEW of many."""
    still = constant_quantities(all_series)
    names = [name for name in quantity_names(all_series) if name not in still]
    return [name for name in names if len(names) <= MOST_FIGURES or name in FIGURE_QUANTITIES]


def build_choices(names: Sequence[str]) -> list[dict[str, Any]]:
    """The page's choices: {'group', 'label', 'names'}, the few that matter first."""
    few = [name for name in names if name in FEW] or list(names[:3])
    found = [{'group': '', 'label': 'the few that matter', 'names': few}]
    for group in [*GROUPS, OTHERS]:
        own = [name for name in names if quantity_group(name) == group]
        if len(own) > 1:
            found.append({'group': group, 'label': f'{group}: all', 'names': own})
        found += [{'group': group, 'label': n.replace('_', ' '), 'names': [n]} for n in own]
    return found


def select_fitting(all_series: Sequence[Series]) -> tuple[int, list[str], list[str]]:
    """Chooses what fits a page, so that all has `MAP_NUMBERS` numbers at most.

    Where the fewest steps are too many, what matters less is left out, down to the few that matter.

    Returns:
        How many steps of each quantity there is room for, the names of the quantities that fit, and
        the names of those of which each head fits.
    """
    names = quantity_names(all_series)
    layers, heads = collections.Counter(), collections.Counter()
    for one in all_series:
        layers.update({name: len(values[0]) for name, (_, values) in one.layers.items() if values})
        layers.update(dict.fromkeys(one.scalars, 1))
        heads.update({name: sum(map(len, v[0])) for name, (_, v) in one.heads.items() if v})
    few, others = names[: len(FEW)], names[len(FEW) :]
    order = [(layers, few), (heads, few), (layers, others), (heads, others)]
    low, high = MAP_STEPS
    left, kept = MAP_NUMBERS // low, {id(layers): [], id(heads): []}
    for widths, own in order:
        for name in own:
            is_kept = widths is layers and own is few
            if name in widths and (is_kept or widths[name] <= left):
                left -= widths[name]
                kept[id(widths)].append(name)
    used = MAP_NUMBERS // low - left
    return min(high, max(low, MAP_NUMBERS // max(used, 1))), kept[id(layers)], kept[id(heads)]
