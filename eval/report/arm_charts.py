"""Loss over what was tuned: one picture of all arms, with a panel for each field."""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np

from eval.charts import Chart
from eval.report.figures import CROSS, Rows, line_encodings, tooltips, with_log, zoom_parameter
from eval.report.tables import UNITS
from lm.study.arm import Ablation, TuningLine
from lm.study.plan.curve import OCTAVE, Means, fit_curve, is_convex, near_best_range
from lm.study.plan.search import edge_side

SHOWN_OCTAVES = 3  # octaves around each best value that a panel shows
PANEL = {1: (760, 340), 2: (460, 320), 3: (330, 300)}  # width, height, by how many there are
AXIS_MARGIN = 1.1  # beyond the outermost value shown
STEPS = 48  # of a fitted curve
MARGIN = 2.5  # losses are shown up to so many times the rise over an octave
Curve = tuple[np.ndarray, np.ndarray]  # places along a line, and losses there


def fitted_curve(means: Means, s: float) -> Curve | None:
    """Returns the fitted curve of means over an octave to both sides of the best; None where there
    is no fit.

    The fit has no height of its own: it goes through the mean of the losses, by their seeds.
    """
    if len(means.finite.k) < 3 or not is_convex(means, s):
        return None
    found, known = fit_curve(means, s), means.finite
    near = np.abs(known.k - known.k[known.best_position]) <= OCTAVE
    k, mean, n = known.k[near], known.mean[near], known.n[near]
    least = np.average(mean - found.rise(k), weights=n)
    ks = np.linspace(min(k.min(), found.vertex_R[0]), max(k.max(), found.vertex_R[0]), STEPS)
    return ks, least + found.rise(ks)


def loss_at(means: Means, fitted: Curve | None, k: np.ndarray) -> np.ndarray:
    """Returns the loss at places: of the fit where there is one, else between the means."""
    known = means.finite
    between = np.interp(k, known.k, known.mean)
    if fitted is None:
        return between
    is_fitted = (k >= fitted[0][0]) & (k <= fitted[0][-1])
    return np.where(is_fitted, np.interp(k, *fitted), between)


def draw_tuned_losses(ablation: Ablation) -> Chart:
    """Draws loss over each tuned field, a panel for each: means and seeds of all arms, the fit, the
    values that are as good as the best as a band, crosses for divergence, diamonds at the values
    chosen.
    """
    drawn = [arm for arm in ablation.arms if arm.length == 1]
    names = [arm.name for arm in drawn]
    look = line_encodings(names, names[:1])
    fields = list(ablation.tune.fields)
    width, height_ = PANEL[len(fields)]
    panels = []
    for along, path in enumerate(fields):
        rows = _panel_rows(ablation, along)
        if rows:
            panel = _draw_panel(rows, path, look, f'final {UNITS[ablation.metric]}')
            panels.append(panel.properties(width=width, height=height_))
    pick = alt.selection_point('arm', fields=['line'], bind='legend')
    panels[0] = panels[0].add_params(pick)
    found = alt.hconcat(*panels).transform_filter(pick)
    return with_log(found, y='log loss')


def _panel_rows(ablation: Ablation, along: int) -> dict[str, Rows]:
    """Rows that a panel shows, by their marks; {} where nothing has ended."""
    found: dict[str, Rows] = {n: [] for n in ('mean', 'seed', 'fit', 'good', 'cross', 'best')}
    frames = []
    for i, arm in enumerate(ablation.arms):
        if arm.length != 1:
            continue
        line, at = ablation.tuning_line(i, along), functools.partial(ablation.value, i, along)
        of_runs = _run_rows(line, arm.name, at)
        if len(line.means.finite.k):
            pick = ablation.pick(i)
            of_runs |= _fit_rows(ablation, line.means, arm.name, at, pick and pick.k[along])
            frames.append((_arm_limits(line.means, at), edge_side(line.means) != 0))
        for mark, rows in of_runs.items():
            found[mark] += rows
    if not any(found.values()):
        return {}
    # An arm at an edge, which may lie far off, should not make the others small.
    inside = [frame for frame, is_edge in frames if not is_edge] or [f for f, _ in frames]
    values = [row['value'] for row in found['cross']]
    inside = inside or [PanelLimits(min(values), max(values), 0.0, 1.0)]
    first, last, low, top = zip(*inside, strict=True)
    seen = [*found['mean'], *found['good'], *found['best']]
    losses = [row['loss'] for row in seen if min(first) <= row['value'] <= max(last)]
    least, most = min([*low, *losses]), max(top)
    # What is smaller than what matters is not made to look large.
    frame = PanelLimits(
        min(first), max(last), least, max(most, least + ablation.tune.smallest_effect)
    )
    found['frame'] = [_stack_crosses(found['cross'], frame)._asdict()]
    return found


class PanelLimits(NamedTuple):
    """Limits of a panel: values from first to last, losses from low to top."""

    first: float
    last: float
    low: float
    top: float


def _arm_limits(means: Means, at: Callable[[float], float]) -> PanelLimits:
    """Limits to see an arm in: some octaves around its best, as far as it was tried, and
    losses above its best by a multiple of what an octave costs.
    """
    known, best = means.finite, int(means.k[means.best_position])
    first, last = (
        max(best - SHOWN_OCTAVES * OCTAVE, means.k[0]),
        min(best + SHOWN_OCTAVES * OCTAVE, means.k[-1]),
    )
    near, low = np.abs(known.k - best) <= OCTAVE, float(known.mean.min())
    return PanelLimits(at(first), at(last), low, low + MARGIN * float(known.mean[near].max() - low))


def _stack_crosses(crosses: Rows, frame: PanelLimits) -> PanelLimits:
    """Sets crosses above all losses, one above the other; returns the frame with room for them."""
    room = 0.06 * (frame.top - frame.low)
    heights = collections.Counter()
    for row in crosses:
        heights[row['value']] += 1
        row['loss'] = frame.top + (heights[row['value']] - 0.4) * room
    top = frame.top + (max(heights.values(), default=0) + 0.5) * room
    return frame._replace(low=frame.low - room, top=top)


def _run_rows(line: TuningLine, name: str, at: Callable[[float], float]) -> dict[str, Rows]:
    """Means, seeds, and crosses of values at which any run diverged."""
    found: dict[str, Rows] = {'mean': [], 'seed': [], 'cross': []}
    for k, mean, n in zip(*line.means.cache_key, strict=True):
        finite = [loss for loss in line.losses.get(k, ()) if math.isfinite(loss)]
        row = {'line': name, 'value': at(k)}
        found['seed'] += [row | {'loss': loss} for loss in finite]
        if math.isfinite(mean):
            found['mean'].append(row | {'loss': mean, 'seeds': n})
        else:
            lost = f'{n - len(finite)} of {n} diverged' if k in line.losses else 'diverged'
            found['cross'].append(row | {'runs': lost})
    return found


def _fit_rows(
    ablation: Ablation, means: Means, name: str, at: Callable[[float], float], k: int | None
) -> dict[str, Rows]:
    """The fit; and where values have been chosen, the chosen one and those that are as good."""
    spread = ablation.spread
    fitted = fitted_curve(means, spread.s)

    def curve_rows(ks: np.ndarray) -> Rows:
        pairs = zip(ks, loss_at(means, fitted, ks), strict=True)
        return [{'line': name, 'value': at(one), 'loss': float(loss)} for one, loss in pairs]

    found = {'fit': curve_rows(fitted[0]) if fitted else []}
    if k is not None:
        low, high = near_best_range(means, spread)
        ends = max(low, float(means.k[0])), min(high, float(means.k[-1]))
        found['good'] = curve_rows(np.linspace(*ends, STEPS))
        found['best'] = [
            row | {'seeds': int(means.n.sum())} for row in curve_rows(np.array([float(k)]))
        ]
    return found


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
    plain = {'x': x, 'y': y, 'color': look['color']}

    def draw(kind: str) -> alt.Chart:
        return alt.Chart(alt.Data(values=rows[kind]))

    seen = [
        alt.Tooltip('line:N'),
        alt.Tooltip('value:Q'),
        *tooltips('loss'),
        alt.Tooltip('seeds:Q'),
    ]
    ring = {'filled': True, 'size': 240, 'stroke': 'white', 'strokeWidth': 1.5}
    lost = [alt.Tooltip('line:N'), alt.Tooltip('value:Q'), alt.Tooltip('runs:N')]
    layers = [
        draw('good').mark_line(strokeWidth=13, opacity=0.22, clip=True).encode(**plain),
        draw('mean').mark_line(strokeWidth=1, opacity=0.45, clip=True).encode(**plain),
        draw('seed').mark_point(size=12, filled=True, opacity=0.4, clip=True).encode(**plain),
        draw('mean').mark_point(size=34, filled=True, clip=True).encode(tooltip=seen, **plain),
        draw('fit').mark_line(strokeWidth=2.4, clip=True).encode(**plain | look),
        draw('cross').mark_point(clip=True, **CROSS).encode(tooltip=lost, **plain),
        draw('best').mark_point(shape='diamond', clip=True, **ring).encode(tooltip=seen, **plain),
    ]
    return alt.layer(*layers).add_params(zoom_parameter(f'zoom_{path.replace(".", "_")}'))


def _axis_values(values: Sequence[float]) -> list[float]:
    """At most about a dozen of the values, none nearer to another than most of an octave."""
    found: list[float] = []
    for value in values:
        if not found or value > 1.8 * found[-1]:
            found.append(value)
    return found
