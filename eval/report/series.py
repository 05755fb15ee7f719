"""What a run recorded over its steps, thinned to what a figure can show."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eval.results import rows_of
from eval.runs import Record

POINTS = 300  # of a curve; a figure is about a thousand pixels wide
RATE_POINTS = 100  # of the learning rate, which has no noise
MAP_NUMBERS = 400_000  # of all that layers record on a page, about 3 MB of JSON
MAP_STEPS = (6, 60)  # of one quantity, at least and at most

Curve = tuple[list[int], list[float | None]]  # steps, values
HeatMap = tuple[list[int], list[list[float | None]]]  # steps, values of each layer at each
HeadMap = tuple[list[int], list[list[list[float | None]]]]  # of each head of each layer at each


@dataclasses.dataclass(frozen=True)
class Series:
    """Losses in nats per token; by name what was recorded per layer, per head, and beside these of
    the whole model; the learning rate. `layers` has what was recorded per head too: the mean over
    heads, and the most where the name says `largest`.
    """

    training: Curve
    validation: Curve
    layers: dict[str, HeatMap]
    heads: dict[str, HeadMap] = dataclasses.field(default_factory=dict)
    scalars: dict[str, Curve] = dataclasses.field(default_factory=dict)
    rates: Curve = ([], [])


def read_series(record: Record) -> Series:
    """All rows of the run's metrics.jsonl, however far it is. Numbers that are not finite, or none,
    are None. Raises ValueError, naming the file, where it cannot be read.
    """
    rows = rows_of(Path(record['workdir']))
    of_model = [row for row in rows if any(isinstance(v, list) for v in row.values())]
    found: dict[int, dict[str, None]] = {depth: {} for depth in (0, 1, 2)}
    for row in of_model:
        for name, value in row.items():
            found.get(_depth(value), {})[name] = None
    heads = {name: _maps(of_model, name, 2) for name in found[2]}
    layers = {name: _maps(of_model, name, 1) for name in found[1]}
    layers |= {name: (steps, _over_heads(name, v)) for name, (steps, v) in heads.items()}
    scalars = {name: _column(of_model, name) for name in found[0] if name != 'step'}
    losses = _column(rows, 'ce'), _column(rows, 'validation_ce')
    return Series(*losses, layers, heads, scalars, _column(rows, 'lr'))


def _depth(value: Any) -> int:
    """0 for a number or None, 1 for one a layer, 2 for one a head; -1 for anything else."""
    if not isinstance(value, list):
        return 0 if value is None or isinstance(value, int | float) else -1
    inner = {_depth(one) for one in value}
    return 1 + inner.pop() if len(inner) == 1 and inner <= {0, 1} else -1


def _over_heads(name: str, values: list[list[list[float | None]]]) -> list[list[float | None]]:
    reduce = max if 'largest' in name else lambda numbers: sum(numbers) / len(numbers)
    return [
        [None if not of_head or None in of_head else reduce(of_head) for of_head in of_layer]
        for of_layer in values
    ]


def _column(rows: Iterable[dict[str, Any]], name: str) -> Curve:
    found = [(row['step'], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [_finite(value) for _, value in found]


def _maps(rows: Iterable[dict[str, Any]], name: str, depth: int) -> Any:
    """A HeatMap, or a HeadMap with depth 2, of the rows that have as many layers, and heads, as
    most.
    """
    found = [(row['step'], row[name]) for row in rows if _depth(row.get(name)) == depth]
    [(shape, _)] = collections.Counter(_shape(values) for _, values in found).most_common(1)
    kept = [(step, values) for step, values in found if _shape(values) == shape]
    return [step for step, _ in kept], [_finite(values) for _, values in kept]


def _shape(values: list[Any]) -> tuple[int, ...]:
    return (len(values), *(len(inner) for inner in values if isinstance(inner, list)))


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def thin_curve(curve: Curve, points: int = POINTS) -> Curve:
    """At most `points` of it, such that spikes stay: largest-triangle-three-buckets.

    Of each bucket of neighbours the point that spans the largest triangle with the one chosen
    before and with the mean of the next bucket (S. Steinarsson, Downsampling time series for visual
    representation, University of Iceland 2013).
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


def thin_map(recorded: Any, steps: int) -> Any:
    """At most so many evenly spaced steps of it, with the first and the last."""
    kept = np.unique(np.linspace(0, len(recorded[0]) - 1, steps).round().astype(int))
    if len(recorded[0]) <= steps:
        return recorded
    return [recorded[0][i] for i in kept], [recorded[1][i] for i in kept]


def mean_map(maps: list[HeatMap]) -> HeatMap:
    """The mean over runs, at the steps that all have; None where one of them has no number."""
    steps = [step for step in maps[0][0] if all(step in other[0] for other in maps)]
    at = [dict(zip(*one, strict=True)) for one in maps]
    stacked = [np.array([one[step] for one in at], float) for step in steps]  # None becomes nan
    means = [[None if math.isnan(v) else v for v in runs_RL.mean(0)] for runs_RL in stacked]
    return steps, means
