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
MAP_NUMBERS = 400_000  # of all heatmaps of a page together, about 3 MB of JSON
MAP_STEPS = (6, 60)  # of one heatmap, at least and at most

Curve = tuple[list[int], list[float | None]]  # steps, values
HeatMap = tuple[list[int], list[list[float | None]]]  # steps, values of each layer at each


@dataclasses.dataclass(frozen=True)
class Series:
    """Losses in nats per token; `layers` has what was recorded per layer, by name."""

    training: Curve
    validation: Curve
    layers: dict[str, HeatMap]


def read_series(record: Record) -> Series:
    """All rows of the run's metrics.jsonl, however far it is. Numbers that are not finite, or none,
    are None. Raises ValueError, naming the file, where it cannot be read.
    """
    rows = rows_of(Path(record['workdir']))
    names = dict.fromkeys(k for row in rows for k, v in row.items() if _is_per_layer(v))
    layers = {name: _layers(rows, name) for name in names}
    return Series(_column(rows, 'ce'), _column(rows, 'validation_ce'), layers)


def _is_per_layer(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(v, list) for v in value)


def _column(rows: Iterable[dict[str, Any]], name: str) -> Curve:
    found = [(row['step'], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [_finite(value) for _, value in found]


def _layers(rows: Iterable[dict[str, Any]], name: str) -> HeatMap:
    """Of rows that have as many layers as most."""
    found = [(row['step'], row[name]) for row in rows if _is_per_layer(row.get(name))]
    [(layers, _)] = collections.Counter(len(values) for _, values in found).most_common(1)
    kept = [(step, values) for step, values in found if len(values) == layers]
    return [step for step, _ in kept], [[_finite(value) for value in v] for _, v in kept]


def _finite(value: Any) -> float | None:
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


def thin_map(recorded: HeatMap, steps: int) -> HeatMap:
    """At most so many evenly spaced steps of it, with the first and the last."""
    kept = np.unique(np.linspace(0, len(recorded[0]) - 1, steps).round().astype(int))
    if len(recorded[0]) <= steps:
        return recorded
    return [recorded[0][i] for i in kept], [recorded[1][i] for i in kept]


def map_steps(all_series: Iterable[Series]) -> int:
    """How many steps of each map a page has room for (`MAP_NUMBERS`)."""
    widths = (len(values[0]) for s in all_series for _, values in s.layers.values() if values)
    low, high = MAP_STEPS
    return min(high, max(low, MAP_NUMBERS // max(sum(widths), 1)))


def mean_map(maps: list[HeatMap]) -> HeatMap:
    """The mean over runs, at the steps that all have; None where one of them has no number."""
    steps = [step for step in maps[0][0] if all(step in other[0] for other in maps)]
    at = [dict(zip(*one, strict=True)) for one in maps]
    stacked = [np.array([one[step] for one in at], float) for step in steps]  # None becomes nan
    means = [[None if math.isnan(v) else v for v in runs_RL.mean(0)] for runs_RL in stacked]
    return steps, means
