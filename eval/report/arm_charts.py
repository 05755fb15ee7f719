"""Loss over the tuned fields: one picture of all arms, with a panel for each field."""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import altair
import numpy as np

from eval.charts import Chart
from eval.report.figures import CROSS, Rows, line_encodings, tooltips, with_log, zoom_parameter
from eval.report.tables import UNITS
from lm.study.arm import Ablation, TuningLine
from lm.study.plan.curve import OCTAVE, Means, fit_curve, is_convex, near_best_range
from lm.study.plan.search import edge_side

alt: Any = altair  # the types of its decorated methods are lost

SHOWN_OCTAVES = 3  # octaves around each best value that a panel shows
PANEL = {1: (760, 340), 2: (460, 320), 3: (330, 300)}  # width, height, by how many there are
AXIS_MARGIN = 1.1  # beyond the outermost value shown
STEPS = 48  # of a fitted curve
MARGIN = 2.5  # losses are shown up to so many times the rise over an octave
Curve = tuple[np.ndarray, np.ndarray]  # places along a line, and losses there


def fitted_curve(means: Means, s: float) -> Curve | None:
    """Returns the fitted curve of an arm, an octave to each side of the best; None without a fit.

    The fit determines only the shape: the curve goes through the mean of the losses, weighted by
    seeds.
    """
    if len(means.finite.k) < 3 or not is_convex(means, s):
        return None
    shape, finite = fit_curve(means, s), means.finite
    is_near = np.abs(finite.k - finite.k[finite.best_position]) <= OCTAVE
    k, mean, n = finite.k[is_near], finite.mean[is_near], finite.n[is_near]
    lowest_loss = np.average(mean - shape.rise(k), weights=n)
    ks = np.linspace(min(k.min(), shape.vertex_R[0]), max(k.max(), shape.vertex_R[0]), STEPS)
    return ks, lowest_loss + shape.rise(ks)


def loss_at(means: Means, fitted: Curve | None, k: np.ndarray) -> np.ndarray:
    """Returns the loss at positions along a line.

    Args:
      means: mean losses of an arm.
      fitted: its fitted curve, used within its range.
      k: positions.

    Returns:
      Losses, interpolated between the means outside of the fit.
    """
    finite = means.finite
    interpolated = np.interp(k, finite.k, finite.mean)
    if fitted is None:
        return interpolated
    is_fitted = (k >= fitted[0][0]) & (k <= fitted[0][-1])
    return np.where(is_fitted, np.interp(k, *fitted), interpolated)


def draw_tuned_losses(ablation: Ablation) -> Chart:
    """Draws the loss over each tuned field in a separate panel.

    A panel shows means and seeds of all arms, their fits, a band of values that are as good as the
    best, crosses for divergence, and diamonds at the selected values.
    """
    arms = [arm for arm in ablation.arms if arm.length == 1]
    names = [arm.name for arm in arms]
    look = line_encodings(names, names[:1])
    fields = list(ablation.tune.fields)
    width, height = PANEL[len(fields)]
    panels = []
    for axis, path in enumerate(fields):
        rows = _panel_rows(ablation, axis)
        if rows:
            panel = _draw_panel(rows, path, look, f'final {UNITS[ablation.metric]}')
            panels.append(panel.properties(width=width, height=height))
    pick = alt.selection_point('arm', fields=['line'], bind='legend')
    panels[0] = panels[0].add_params(pick)
    figure = alt.concat(*panels, columns=len(panels)).transform_filter(pick)
    return with_log(figure, y='log loss')


def _panel_rows(ablation: Ablation, axis: int) -> dict[str, Rows]:
    """Returns the rows of a panel by mark; {} if no run has ended."""
    rows_by_mark: dict[str, Rows] = {
        n: [] for n in ('mean', 'seed', 'fit', 'good', 'cross', 'best')
    }
    frames = []
    for i, arm in enumerate(ablation.arms):
        if arm.length != 1:
            continue
        line, value_at = ablation.tuning_line(i, axis), functools.partial(ablation.value, i, axis)
        arm_marks = _run_rows(line, arm.name, value_at)
        if len(line.means.finite.k):
            pick = ablation.pick(i)
            k = None if pick is None else pick.k[axis]
            arm_marks |= _fit_rows(ablation, line.means, arm.name, value_at, k)
            frames.append((_arm_limits(line.means, value_at), edge_side(line.means) != 0))
        for mark, rows in arm_marks.items():
            rows_by_mark[mark] += rows
    if not any(rows_by_mark.values()):
        return {}
    # An arm at an edge, which may lie far off, should not make the others small.
    inside = [frame for frame, is_edge in frames if not is_edge] or [frame for frame, _ in frames]
    values = [row['value'] for row in rows_by_mark['cross']]
    inside = inside or [PanelLimits(min(values), max(values), 0.0, 1.0)]
    first, last, low, top = zip(*inside, strict=True)
    visible = [*rows_by_mark['mean'], *rows_by_mark['good'], *rows_by_mark['best']]
    losses = [row['loss'] for row in visible if min(first) <= row['value'] <= max(last)]
    lowest, highest = min([*low, *losses]), max(top)
    # What is smaller than what matters is not made to look large.
    frame = PanelLimits(
        min(first), max(last), lowest, max(highest, lowest + ablation.tune.smallest_effect)
    )
    rows_by_mark['frame'] = [_stack_crosses(rows_by_mark['cross'], frame)._asdict()]
    return rows_by_mark


class PanelLimits(NamedTuple):
    """Limits of a panel: values from first to last, losses from low to top."""

    first: float
    last: float
    low: float
    top: float


def _arm_limits(means: Means, at: Callable[[float], float]) -> PanelLimits:
    """Returns limits that show an arm: some octaves around its best value, within the values tried,
    and losses up to a multiple of the rise over an octave.
    """
    finite, best = means.finite, int(means.k[means.best_position])
    first, last = (
        max(best - SHOWN_OCTAVES * OCTAVE, means.k[0]),
        min(best + SHOWN_OCTAVES * OCTAVE, means.k[-1]),
    )
    is_near, low = np.abs(finite.k - best) <= OCTAVE, float(finite.mean.min())
    return PanelLimits(
        at(first), at(last), low, low + MARGIN * float(finite.mean[is_near].max() - low)
    )


def _stack_crosses(crosses: Rows, frame: PanelLimits) -> PanelLimits:
    """Stacks crosses above all losses; returns the limits with space for them."""
    room = 0.06 * (frame.top - frame.low)
    heights = collections.Counter()
    for row in crosses:
        heights[row['value']] += 1
        row['loss'] = frame.top + (heights[row['value']] - 0.4) * room
    top = frame.top + (max(heights.values(), default=0) + 0.5) * room
    return frame._replace(low=frame.low - room, top=top)


def _run_rows(line: TuningLine, name: str, at: Callable[[float], float]) -> dict[str, Rows]:
    """Returns rows of means, of seeds, and of crosses at values where any run diverged."""
    rows_by_mark: dict[str, Rows] = {'mean': [], 'seed': [], 'cross': []}
    for k, mean, n in zip(*line.means.cache_key, strict=True):
        finite = [loss for loss in line.losses.get(k, ()) if math.isfinite(loss)]
        row = {'line': name, 'value': at(k)}
        rows_by_mark['seed'] += [row | {'loss': loss} for loss in finite]
        if math.isfinite(mean):
            rows_by_mark['mean'].append(row | {'loss': mean, 'seeds': n})
        else:
            note = f'{n - len(finite)} of {n} diverged' if k in line.losses else 'diverged'
            rows_by_mark['cross'].append(row | {'runs': note})
    return rows_by_mark


def _fit_rows(
    ablation: Ablation, means: Means, name: str, at: Callable[[float], float], k: int | None
) -> dict[str, Rows]:
    """Returns rows of the fit and, if values have been selected, of the best value and of those as
    good.
    """
    spread = ablation.spread
    fitted = fitted_curve(means, spread.s)

    def curve_rows(ks: np.ndarray) -> Rows:
        pairs = zip(ks, loss_at(means, fitted, ks), strict=True)
        return [
            {'line': name, 'value': at(position), 'loss': float(loss)} for position, loss in pairs
        ]

    rows_by_mark = {'fit': curve_rows(fitted[0]) if fitted else []}
    if k is not None:
        low, high = near_best_range(means, spread)
        ends = max(low, float(means.k[0])), min(high, float(means.k[-1]))
        rows_by_mark['good'] = curve_rows(np.linspace(*ends, STEPS))
        rows_by_mark['best'] = [
            row | {'seeds': int(means.n.sum())} for row in curve_rows(np.array([float(k)]))
        ]
    return rows_by_mark


def _draw_panel(rows: dict[str, Rows], path: str, look: dict[str, Any], title: str) -> Chart:
    (frame,) = rows['frame']
    values = sorted({row['value'] for kind in ('mean', 'cross') for row in rows[kind]})
    first, last = frame['first'], frame['last']
    values = [value for value in values if first <= value <= last]
    reach = [first / AXIS_MARGIN, last * AXIS_MARGIN]
    scale = alt.Scale(type='log', nice=False, domain=reach)
    axis = alt.Axis(format='.2~g', grid=True, values=_axis_values(values))
    x = alt.X('value:Q', title=path, scale=scale, axis=axis)
    domain = alt.Scale(zero=False, nice=False, domain=[frame['low'], frame['top']])
    y = alt.Y('loss:Q', title=title, scale=domain)
    encoding = {'x': x, 'y': y, 'color': look['color']}

    def draw(kind: str) -> Any:
        return alt.Chart(alt.Data(values=rows[kind]))

    loss_tooltip = [
        alt.Tooltip('line:N'),
        alt.Tooltip('value:Q'),
        *tooltips('loss'),
        alt.Tooltip('seeds:Q'),
    ]
    ring = {'filled': True, 'size': 240, 'stroke': 'white', 'strokeWidth': 1.5}
    run_tooltip = [alt.Tooltip('line:N'), alt.Tooltip('value:Q'), alt.Tooltip('runs:N')]
    layers = [
        draw('good').mark_line(strokeWidth=13, opacity=0.22, clip=True).encode(**encoding),
        draw('mean').mark_line(strokeWidth=1, opacity=0.45, clip=True).encode(**encoding),
        draw('seed').mark_point(size=12, filled=True, opacity=0.4, clip=True).encode(**encoding),
        draw('mean')
        .mark_point(size=34, filled=True, clip=True)
        .encode(tooltip=loss_tooltip, **encoding),
        draw('fit').mark_line(strokeWidth=2.4, clip=True).encode(**encoding | look),
        draw('cross').mark_point(clip=True, **CROSS).encode(tooltip=run_tooltip, **encoding),
        draw('best')
        .mark_point(shape='diamond', clip=True, **ring)
        .encode(tooltip=loss_tooltip, **encoding),
    ]
    return alt.layer(*layers).add_params(zoom_parameter(f'zoom_{path.replace(".", "_")}'))


def _axis_values(values: Sequence[float]) -> list[float]:
    """Returns about a dozen of the values at most, at least 1.8 times apart."""
    selected: list[float] = []
    for value in values:
        if not selected or value > 1.8 * selected[-1]:
            selected.append(value)
    return selected
