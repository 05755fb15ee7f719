"""Reads, thins, orders and selects the quantities of a run over its steps for a page.

The quantities are described in `lm.training.diagnostics`.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.record.run import SUITE, TEXT, Run
from lm.study.tables.results import Record

POINTS = 300  # of a curve; a figure is about a thousand pixels wide
MAP_NUMBERS = 400_000  # of all that layers record on a page, about 3 MB of JSON
MAP_STEPS = (6, 60)  # of one quantity, at least and at most

# Shown first on a page: early signs that a run becomes unstable.
FEW = (
    'attention_entropy_share',
    'attention_largest_logit',
    'residual_rms',
    'update_ratio_hidden',
    'log_z_mean',
)
# Drawn as figures for papers if more than MOST_FIGURES quantities were recorded.
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
TEXTS = 'texts_'  # begins the means over eval.texts
GROUPS = {  # name: prefixes of quantities; the first match counts
    'attention by head': BY_HEAD,
    'residual stream': ('residual_',),
    'sublayer outputs': ('attention_output_', 'mlp_output_'),
    'readout': ('log_z_', 'logit_'),
    'updates': ('update_',),
    'gradients': ('gradient_', 'layer_grad_norm'),
    'weights': ('weight_', 'layer_param_norm'),
    'experts': ('expert_',),
    'singular values': ('singular_value_', 'sigma_', 'gamma_'),
    'held-out texts': (TEXT, TEXTS),
    'suites': (SUITE,),
}
OTHERS = 'other'

Curve = tuple[list[int], list[float | None]]  # steps, values
HeatMap = tuple[list[int], list[list[float | None]]]  # steps, values of each layer at each
HeadMap = tuple[list[int], list[list[list[float | None]]]]  # of each head of each layer at each


@dataclasses.dataclass(frozen=True)
class Series:
    """Everything that a run recorded over its steps. Losses are in nats per token.

    layers, heads, scalars: quantities by name, recorded per layer, per head, and for the whole
    model; the numbers of held-out texts and suites are among `scalars`. `layers` includes the
    quantities per head: their mean over heads, or the maximum if the name contains `largest`.
    training_before, validation_before: of the runs that a branch continues, up to its first step.
    stage_starts: the steps of the run before each later stage.
    """

    training: Curve
    validation: Curve
    layers: dict[str, HeatMap]
    heads: dict[str, HeadMap] = dataclasses.field(default_factory=dict)
    scalars: dict[str, Curve] = dataclasses.field(default_factory=dict)
    rates: Curve = ([], [])
    training_before: Curve = ([], [])
    validation_before: Curve = ([], [])
    stage_starts: Sequence[int] = ()


def read_series(record: Record) -> Series:
    """Reads all rows of the run's metrics.jsonl so far; missing or non-finite numbers are None.

    Raises ValueError, with the path, if the file cannot be read.
    """
    run = Run(Path(record['workdir']))
    rows, before = run.rows(), run.ancestor_rows
    model_rows = [row for row in rows if any(isinstance(v, list) for v in row.values())]
    names_by_depth: dict[int, dict[str, None]] = {depth: {} for depth in (0, 1, 2)}
    for row in model_rows:
        for name, value in row.items():
            names_by_depth.get(_nesting_depth(value), {})[name] = None
    heads = {name: _read_maps(model_rows, name, 2) for name in names_by_depth[2]}
    layers = {name: _read_maps(model_rows, name, 1) for name in names_by_depth[1]}
    for name, (steps, values) in heads.items():
        reduce = max if 'largest' in name else lambda numbers: sum(numbers) / len(numbers)
        means = [
            [
                None if not numbers_of_head or None in numbers_of_head else reduce(numbers_of_head)
                for numbers_of_head in at_step
            ]
            for at_step in values
        ]
        layers[name] = steps, means
    scalars = {name: _read_column(model_rows, name) for name in names_by_depth[0] if name != 'step'}
    numbers = {name: None for row in rows for name in row if name.startswith((TEXT, TEXTS, SUITE))}
    scalars |= {name: _read_column(rows, name) for name in numbers}
    losses = _read_column(rows, 'ce'), _read_column(rows, 'validation_ce')
    curves_before = _read_column(before, 'ce'), _read_column(before, 'validation_ce')
    rates, stages = _read_column(rows, 'lr'), ()
    if record.get('train_stages'):
        stages = run.read_recipe().stages[1:]
    starts = [stage.start for stage in stages]
    return Series(*losses, layers, heads, scalars, rates, *curves_before, starts)


def _nesting_depth(value: Any) -> int:
    """Returns 0 for a number or None, 1 for numbers of layers, 2 for numbers of heads, else -1."""
    if not isinstance(value, list):
        return 0 if value is None or isinstance(value, int | float) else -1
    inner = {_nesting_depth(inner_value) for inner_value in value}
    return 1 + inner.pop() if len(inner) == 1 and inner <= {0, 1} else -1


def _read_column(rows: Iterable[dict[str, Any]], name: str) -> Any:
    """Returns the steps with a record of `name`, and its values."""
    recorded = [(row['step'], row[name]) for row in rows if name in row]
    return [step for step, _ in recorded], [_replace_nonfinite(value) for _, value in recorded]


def _read_maps(rows: Iterable[dict[str, Any]], name: str, depth: int) -> Any:
    """Returns a HeatMap, or a HeadMap for depth 2, of the rows with the commonest shape."""
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
    """Returns at most `points` of a curve, preserving spikes: largest-triangle-three-buckets.

    Each bucket of neighbours gives the point that spans the largest triangle with the previously
    selected point and with the mean of the next bucket (S. Steinarsson, Downsampling time series
    for visual representation, University of Iceland 2013).
    """
    steps, values = curve
    if len(steps) <= points:
        return curve
    x = np.asarray(steps, float)
    y = np.array([math.nan if value is None else value for value in values], float)
    filled = np.where(np.isnan(y), np.nanmean(y) if not np.isnan(y).all() else 0.0, y)
    edges = np.linspace(1, len(x) - 1, points - 1).astype(int)
    selected = [0]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        after = slice(high, edges[i + 2] if i + 2 < len(edges) else len(x))
        x1, y1 = x[after].mean(), filled[after].mean()
        x0, y0 = x[selected[-1]], filled[selected[-1]]
        area = np.abs((x0 - x1) * (filled[low:high] - y0) - (x0 - x[low:high]) * (y1 - y0))
        selected.append(low + int(area.argmax()))
    selected.append(len(x) - 1)
    return [steps[i] for i in selected], [values[i] for i in selected]


def smooth(curve: Curve, share: float) -> list[float | None]:
    """Returns the exponential average over `share` of all steps, unbiased from the first value on.

    weight_i = 1 - prod_j<=i keep_j, keep_i = exp(-(step_i - step_(i-1)) / tau): the plain average
    if there are few steps. None is preserved and skipped. A damaged file may have steps in any
    order, equal or huge; each counts by its distance from the previous step.
    """
    steps, values = curve
    tau = share * max(map(abs, steps), default=0)
    if not tau:
        return values
    total, weight = 0.0, 0.0
    smoothed, before = [], 2 * steps[0] - steps[1] if len(steps) > 1 else 0
    for step, value in zip(steps, values, strict=True):
        keep, before = math.exp(-(abs(step - before) or 1) / tau), step
        if value is not None:
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        has_average = value is not None and weight  # 0 if a step is huge beside the others
        smoothed.append(total / weight if has_average else value)
    return smoothed


def thin_map(quantity_map: Any, steps: int) -> Any:
    """Returns at most `steps` evenly spaced steps of a map, including the first and the last."""
    if len(quantity_map[0]) <= steps:
        return quantity_map
    selected = np.unique(np.linspace(0, len(quantity_map[0]) - 1, steps).round().astype(int))
    return [quantity_map[0][i] for i in selected], [quantity_map[1][i] for i in selected]


def mean_map(maps: Sequence[Any]) -> Any:
    """Returns the mean over runs at their shared steps; None if any run has no number."""
    values_by_step = [dict(zip(*quantity_map, strict=True)) for quantity_map in maps]
    first = maps[0][0] if maps else []
    steps = [step for step in first if all(step in run_values for run_values in values_by_step)]
    means = [
        np.array([run_values[step] for run_values in values_by_step], float).mean(0)
        for step in steps
    ]  # None is nan
    return steps, [_replace_nonfinite(mean.tolist()) for mean in means]


def quantity_group(name: str) -> str:
    """Returns the group of a quantity, by the start of its name."""
    return next((group for group, starts in GROUPS.items() if name.startswith(starts)), OTHERS)


def quantity_names(all_series: Iterable[Series]) -> list[str]:
    """Returns the names of all recorded quantities: first FEW, then by group."""
    groups = [*GROUPS, OTHERS]
    names = dict.fromkeys(
        name for series in all_series for name in (*series.layers, *series.scalars)
    )
    by_group = sorted(names, key=lambda name: groups.index(quantity_group(name)))
    few = [name for name in FEW if name in names]
    return few + [name for name in by_group if name not in few]


def constant_quantities(all_series: Sequence[Series]) -> dict[str, float]:
    """Returns the quantities with a single value at all steps, layers and runs, with that value."""
    constants = {}
    for name in quantity_names(all_series):
        maps = [series.layers.get(name) or series.scalars.get(name) for series in all_series]
        values: set[Any] = {
            value
            for quantity_map in maps
            if quantity_map
            for value in flatten_values(quantity_map[1])
        }
        if len(values) == 1 and None not in values:
            (constants[name],) = values
    return constants


def flatten_values(values: Any) -> Iterable[float | None]:
    """Yields the numbers of nested lists."""
    return itertools.chain(*map(flatten_values, values)) if isinstance(values, list) else (values,)


def select_figures(all_series: Sequence[Series]) -> list[str]:
    """Returns the quantities of figures for papers: all that vary, or FIGURE_QUANTITIES if there
    are many.
    """
    constants = constant_quantities(all_series)
    names = [name for name in quantity_names(all_series) if name not in constants]
    return [name for name in names if len(names) <= MOST_FIGURES or name in FIGURE_QUANTITIES]


def build_choices(names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the page's choices, {'group', 'label', 'names'}, with FEW first."""
    few = [name for name in names if name in FEW] or list(names[:3])
    choices = [{'group': '', 'label': 'key quantities', 'names': few}]
    for group in [*GROUPS, OTHERS]:
        members = [name for name in names if quantity_group(name) == group]
        if len(members) > 1:
            choices.append({'group': group, 'label': f'{group}: all', 'names': members})
        choices += [{'group': group, 'label': n.replace('_', ' '), 'names': [n]} for n in members]
    return choices


def select_fitting(all_series: Sequence[Series]) -> tuple[int, list[str], list[str]]:
    """Selects the quantities that fit a page of at most `MAP_NUMBERS` numbers.

    If even the fewest steps are too many, less important quantities are left out, but none of FEW.

    Returns:
        The number of steps of each quantity, the names of the quantities that fit, and the names of
        quantities that fit for each head.
    """
    names = quantity_names(all_series)
    layers, heads = collections.Counter(), collections.Counter()
    for series in all_series:
        layers.update(
            {name: len(values[0]) for name, (_, values) in series.layers.items() if values}
        )
        layers.update(dict.fromkeys(series.scalars, 1))
        heads.update(
            {name: sum(map(len, values[0])) for name, (_, values) in series.heads.items() if values}
        )
    few, rest_names = names[: len(FEW)], names[len(FEW) :]
    order = [(layers, few), (heads, few), (layers, rest_names), (heads, rest_names)]
    low, high = MAP_STEPS
    # Counters are not hashable: their ids are the keys.
    budget, selected = MAP_NUMBERS // low, {id(layers): [], id(heads): []}
    for widths, quantities in order:
        for name in quantities:
            is_required = widths is layers and quantities is few
            if name in widths and (is_required or widths[name] <= budget):
                budget -= widths[name]
                selected[id(widths)].append(name)
    used = MAP_NUMBERS // low - budget
    return (
        min(high, max(low, MAP_NUMBERS // max(used, 1))),
        selected[id(layers)],
        selected[id(heads)],
    )
