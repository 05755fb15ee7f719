"""The answer of a tuned sweep: the table of its arms, and loss over what was tuned."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np

from eval.charts import Chart
from eval.report.figures import CROSS, Rows, by_line, tooltip, with_log, zoom
from eval.report.tables import UNITS, Cell
from eval.tables.ablation import (
    BASELINE,
    FAILED,
    LENGTH,
    WAITS,
    Ablation,
    Line,
    Result,
    progress,
    results,
    sentences,
    tokens_words,
)
from eval.tables.comparison import CONFIDENCE
from eval.tables.text import number
from lm.tuning.curve import OCTAVE, Means, as_good, fit, is_convex
from lm.tuning.search import DIVERGED, EDGE, edge
from lm.tuning.verdicts import BETTER, UNDECIDED, WORSE

MARKS = {BETTER: '▼', WORSE: '▲', UNDECIDED: '≈', FAILED: '✕'}
ORDER = (BETTER, WORSE, UNDECIDED, FAILED)
VALUE_DIGITS = 3
FEW = 3  # verdicts that the answer has as sentences
SHOWN = 3  # octaves around each best value that a panel shows
PANEL = {1: (760, 340), 2: (460, 320), 3: (330, 300)}  # width, height, by how many there are
ROOM = 1.1  # beyond the outermost value shown
STEPS = 48  # of a fitted curve
MARGIN = 2.5  # losses are shown up to so many times the rise over an octave
Curve = tuple[np.ndarray, np.ndarray]  # places along a line, and losses there


@dataclasses.dataclass(frozen=True)
class ArmRow:
    color: str
    cells: dict[str, Cell]  # by the head of their column
    verdict: str
    notes: list[str]


def arm_rows(ablation: Ablation, colors: Sequence[str]) -> list[ArmRow]:
    """Returns the table of arms, the baseline first, without columns that say nothing here."""
    every = results(ablation)
    hidden = {
        'verdict': len(every) < 2,
        'difference': len(every) < 2,
        'sensitivity': all(math.isnan(row.sensitivity) for row in every),
        'speed-up': all(row.speedup is None for row in every),
        'steps': len({row.steps for row in every}) < 2,
    }
    found = []
    for row, color in zip(every, colors, strict=True):
        cells = {'arm': Cell(row.arm.name)} | _cells(ablation, row)
        shown = {head: cell for head, cell in cells.items() if not hidden.get(head)}
        found.append(ArmRow(color, shown, row.said, [_sentence(one) for one in row.remains]))
    return found


def _cells(ablation: Ablation, row: Result) -> dict[str, Cell]:
    return {
        'verdict': _verdict(row),
        'difference': _difference(row),
        'tuned loss': _loss(row, ablation.tune.seeds),
        **{
            f'best {path.partition(".")[2]}': Cell(number(row.values.get(path), VALUE_DIGITS))
            for path in ablation.tune.fields
        },
        f'as good {next(iter(ablation.tune.fields)).partition(".")[2]}': Cell(_range(row.as_good)),
        'sensitivity': Cell('' if math.isnan(row.sensitivity) else f'{row.sensitivity:.3f}'),
        'speed-up': _speedup(row),
        'steps': Cell('' if row.steps is None else f'{row.steps:,}'),
        'runs': Cell(str(sum(row.runs)), _shares(*row.runs)),
        'seconds': Cell(f'{sum(row.seconds):,.0f}', _shares(*(f'{s:,.0f}' for s in row.seconds))),
        'state': Cell(', '.join(row.states) or WAITS),
    }


def _verdict(row: Result) -> Cell:
    if row.said == FAILED:
        n = row.runs[1]
        return Cell(f'{MARKS[FAILED]} {FAILED}', (f'{row.diverged} of {n} fresh' if n else 'all',))
    if row.verdict is None:
        return Cell(row.said)
    p = f'p {row.verdict.p:.2g}' if row.verdict.p >= 1e-4 else 'p < 0.0001'
    return Cell(f'{MARKS[row.said]} {row.said}', (p, f'{row.verdict.n} seeds'))


def _difference(row: Result) -> Cell:
    if row.verdict is None:
        return Cell('')
    low, high = row.verdict.low, row.verdict.high
    return Cell(f'{row.verdict.difference:+.4f}', (f'{low:+.4f} to {high:+.4f}',))


def _loss(row: Result, seeds: int) -> Cell:
    """The loss over fresh seeds; until there are any that which the values were chosen by."""
    if math.isnan(row.loss.mean):
        return Cell('')
    if not row.is_fresh:
        return Cell(f'{row.loss.mean:.4f}', ('by the seeds that chose it',))
    half = () if math.isnan(row.loss.half) else (f'± {row.loss.half:.4f}',)
    left = (f'{row.loss.n} of {seeds} fresh seeds',) if row.loss.n + row.diverged < seeds else ()
    return Cell(f'{row.loss.mean:.4f}', half + left)


def _speedup(row: Result) -> Cell:
    if row.speedup is None:
        return Cell('')
    low, high = row.speedup.low, row.speedup.high
    ends = (f'from {low:.3g}' * (low > 0), f'to {high:.3g}' * math.isfinite(high))
    return Cell(str(row.speedup), tuple(filter(None, (' '.join(filter(None, ends)),))))


def _range(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return ''
    low, high = (number(float(end), VALUE_DIGITS) for end in ends)
    if ends[0] == 0:
        return 'all tried' if math.isinf(ends[1]) else f'up to {high}'
    return f'from {low}' if math.isinf(ends[1]) else f'{low} to {high}'


def _shares(tuning: Any, fresh: Any) -> tuple[str]:
    return (f'{tuning} + {fresh} fresh',)


def _sentence(text: str) -> str:
    return f'{text[0].upper()}{text[1:]}.'


def findings(ablation: Ablation) -> list[str]:
    """Returns the answer in a few lines."""
    every, lines = results(ablation), []
    if going := progress(ablation):
        lines.append(f'Not finished: {going}. What follows is known so far.')
    groups = {said: [row.arm.name for row in every if row.said == said] for said in ORDER}
    told = [f'{len(own)} {said} ({", ".join(own)})' for said, own in groups.items() if own]
    if told and len(every) <= FEW + 1:
        lines += [_sentence(one) for one in sentences(ablation, with_rest=False)]
    elif told:
        lines.append(f'Against {every[0].arm.name}, each at its best values: {"; ".join(told)}.')
    known = [row for row in every if row.is_fresh and row.said != LENGTH and not row.diverged]
    if len(known) > 1:
        best = min(known, key=lambda row: row.loss.mean)
        values = ', '.join(f'{p} {number(v, VALUE_DIGITS)}' for p, v in best.values.items())
        lines.append(
            f'Lowest tuned loss: {best.loss.mean:.4f} {ablation.unit}, of {best.arm.name} at '
            f'{values}.'
        )
    edges = [row.arm.name for row in every if EDGE in row.states]
    if edges:
        lines.append(
            f'At the edge of what was tried: {", ".join(edges)}. The loss there is a bound, as the '
            'best values lie further out.'
        )
    if every[0].said == BASELINE and DIVERGED in every[0].states:
        lines.append(f'The baseline, {every[0].arm.name}, diverged at every value tried.')
    return lines


def content(ablation: Ablation, base: Mapping[str, Any], colors: Sequence[str]) -> dict[str, Any]:
    """Returns what the templates show of the arms."""
    rows = arm_rows(ablation, colors)
    settings = {
        name: ', '.join(f'{path} {_centre(value)}' for path, value in given.items())
        if name == 'fields'
        else ', '.join(map(number, given))
        if isinstance(given, list)
        else number(given)
        for name, given in ablation.settings.items()
        if given not in (None, [], '')
    }
    return {
        'rows': rows,
        'unit': UNITS[ablation.metric],
        'confidence': f'{CONFIDENCE:.0%}',
        'heads': list(rows[0].cells),
        'remains': {row.cells['arm'].text: row.notes for row in rows if row.notes},
        'sentences': [_sentence(one) for one in sentences(ablation)],
        'settings': settings,
        'length': tokens_words(ablation, base),
        'tried': tried(ablation),
        'fields': list(ablation.tune.fields),
        'test': ablation.tune.test,
        'seeds': ablation.tune.seeds,
    }


def _centre(value: Any) -> str:
    if value is None:
        return "around each arm's own"
    return f'from {value[0]:g} to {value[1]:g}' if isinstance(value, list) else f'around {value:g}'


def tried(ablation: Ablation) -> list[list[str]]:
    """Returns a head and a line for each arm and value that chose its best: mean loss and seeds."""
    rows = [['arm', *ablation.tune.fields, 'mean loss', 'seeds', 'diverged']]
    for arm in ablation.arms:
        by_place: dict[tuple[int, ...], list[float]] = {}
        for point, loss in sorted(arm.tuning.items()):
            by_place.setdefault(point.k, []).append(loss)
        for k, losses in by_place.items():
            finite = [loss for loss in losses if math.isfinite(loss)]
            values = [number(value, VALUE_DIGITS) for value in arm.grid.values(k).values()]
            mean = f'{np.mean(finite):.4f}' if finite else ''
            lost = str(len(losses) - len(finite))
            rows.append([arm.name, *values, mean, str(len(losses)), lost])
    return rows


def curve(means: Means, s: float) -> Curve | None:
    """Returns the fitted curve of means over an octave to both sides of the best; None where there
    is no fit.

    The fit has no height of its own: it goes through the mean of the losses, by their seeds.
    """
    if len(means.finite.k) < 3 or not is_convex(means, s):
        return None
    found, known = fit(means, s), means.finite
    near = np.abs(known.k - known.k[known.best]) <= OCTAVE
    k, mean, n = known.k[near], known.mean[near], known.n[near]
    least = np.average(mean - found.rise(k), weights=n)
    ks = np.linspace(min(k.min(), found.vertex_R[0]), max(k.max(), found.vertex_R[0]), STEPS)
    return ks, least + found.rise(ks)


def height(means: Means, fitted: Curve | None, k: np.ndarray) -> np.ndarray:
    """Returns the loss at places: of the fit where there is one, else between the means."""
    known = means.finite
    between = np.interp(k, known.k, known.mean)
    if fitted is None:
        return between
    is_fitted = (k >= fitted[0][0]) & (k <= fitted[0][-1])
    return np.where(is_fitted, np.interp(k, *fitted), between)


def tuned_losses(ablation: Ablation) -> Chart:
    """Draws loss over each tuned field, a panel for each: means and seeds of all arms, the fit, the
    values that are as good as the best as a band, crosses for divergence, diamonds at the values
    chosen.
    """
    drawn = [arm for arm in ablation.arms if arm.length == 1]
    names = [arm.name for arm in drawn]
    look = by_line(names, names[:1])
    fields = list(ablation.tune.fields)
    width, height_ = PANEL[len(fields)]
    panels = []
    for along, path in enumerate(fields):
        rows = _rows(ablation, along)
        if rows:
            panel = _panel(rows, path, look, f'final {UNITS[ablation.metric]}')
            panels.append(panel.properties(width=width, height=height_))
    pick = alt.selection_point('arm', fields=['line'], bind='legend')
    panels[0] = panels[0].add_params(pick)
    found = alt.hconcat(*panels).transform_filter(pick)
    return with_log(found, y='log loss')


def _rows(ablation: Ablation, along: int) -> dict[str, Rows]:
    """What a panel shows, by its marks; {} where nothing has ended."""
    found: dict[str, Rows] = {n: [] for n in ('mean', 'seed', 'fit', 'good', 'cross', 'best')}
    frames = []
    for i, arm in enumerate(ablation.arms):
        if arm.length != 1:
            continue
        line, at = ablation.line(i, along), functools.partial(ablation.value, i, along)
        of_runs = _run_rows(line, arm.name, at)
        if len(line.means.finite.k):
            pick = ablation.pick(i)
            of_runs |= _fit_rows(ablation, line.means, arm.name, at, pick and pick.k[along])
            frames.append((_frame(line.means, at), edge(line.means) != 0))
        for mark, rows in of_runs.items():
            found[mark] += rows
    if not any(found.values()):
        return {}
    # An arm at an edge, which may lie far off, should not make the others small.
    inside = [frame for frame, is_edge in frames if not is_edge] or [f for f, _ in frames]
    values = [row['value'] for row in found['cross']]
    inside = inside or [Frame(min(values), max(values), 0.0, 1.0)]
    first, last, low, top = zip(*inside, strict=True)
    seen = [row['loss'] for row in found['mean'] if min(first) <= row['value'] <= max(last)]
    frame = Frame(min(first), max(last), min([*low, *seen]), max(top))
    found['frame'] = [_stacked(found['cross'], frame)._asdict()]
    return found


class Frame(NamedTuple):
    """What a panel reaches: values from first to last, losses from low to top."""

    first: float
    last: float
    low: float
    top: float


def _frame(means: Means, at: Callable[[float], float]) -> Frame:
    """What an arm should be seen at: some octaves around its best, as far as it was tried, and
    losses above its best by a multiple of what an octave costs.
    """
    known, best = means.finite, int(means.k[means.best])
    first, last = max(best - SHOWN * OCTAVE, means.k[0]), min(best + SHOWN * OCTAVE, means.k[-1])
    near, low = np.abs(known.k - best) <= OCTAVE, float(known.mean.min())
    return Frame(at(first), at(last), low, low + MARGIN * float(known.mean[near].max() - low))


def _stacked(crosses: Rows, frame: Frame) -> Frame:
    """Sets crosses above all losses, one above the other; returns the frame with room for them."""
    room = max(0.06 * (frame.top - frame.low), 1e-4 * abs(frame.top))
    heights = collections.Counter()
    for row in crosses:
        heights[row['value']] += 1
        row['loss'] = frame.top + (heights[row['value']] - 0.4) * room
    top = frame.top + max(heights.values(), default=0) * room
    return frame._replace(low=frame.low - room, top=top)


def _run_rows(line: Line, name: str, at: Callable[[float], float]) -> dict[str, Rows]:
    """Means, seeds, and crosses of values at which any run diverged."""
    found: dict[str, Rows] = {'mean': [], 'seed': [], 'cross': []}
    for k, mean, n in zip(*line.means.key, strict=True):
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
    fitted = curve(means, spread.s)

    def rows(ks: np.ndarray) -> Rows:
        pairs = zip(ks, height(means, fitted, ks), strict=True)
        return [{'line': name, 'value': at(one), 'loss': float(loss)} for one, loss in pairs]

    found = {'fit': rows(fitted[0]) if fitted else []}
    if k is not None:
        low, high = as_good(means, spread)
        ends = max(low, float(means.k[0])), min(high, float(means.k[-1]))
        found['good'] = rows(np.linspace(*ends, STEPS))
        found['best'] = [row | {'seeds': int(means.n.sum())} for row in rows(np.array([float(k)]))]
    return found


def _panel(rows: dict[str, Rows], path: str, look: dict[str, Any], title: str) -> Chart:
    (frame,) = rows['frame']
    values = sorted({row['value'] for kind in ('mean', 'cross') for row in rows[kind]})
    first, last = frame['first'], frame['last']
    values = [value for value in values if first <= value <= last]
    reach = [first / ROOM, last * ROOM]
    scale = alt.Scale(type='log', nice=False, domain=reach)
    axis = alt.Axis(format='.2~g', grid=True, values=_octaves(values))
    x = alt.X('value:Q', title=path, scale=scale, axis=axis)
    domain = alt.Scale(zero=False, nice=False, domain=[frame['low'], frame['top']])
    y = alt.Y('loss:Q', title=title, scale=domain)
    plain = {'x': x, 'y': y, 'color': look['color']}

    def of(kind: str) -> alt.Chart:
        return alt.Chart(alt.Data(values=rows[kind]))

    seen = [alt.Tooltip('line:N'), alt.Tooltip('value:Q'), *tooltip('loss'), alt.Tooltip('seeds:Q')]
    ring = {'filled': True, 'size': 240, 'stroke': 'white', 'strokeWidth': 1.5}
    lost = [alt.Tooltip('line:N'), alt.Tooltip('value:Q'), alt.Tooltip('runs:N')]
    layers = [
        of('good').mark_line(strokeWidth=13, opacity=0.22, clip=True).encode(**plain),
        of('mean').mark_line(strokeWidth=1, opacity=0.45, clip=True).encode(**plain),
        of('seed').mark_point(size=12, filled=True, opacity=0.4, clip=True).encode(**plain),
        of('mean').mark_point(size=34, filled=True, clip=True).encode(tooltip=seen, **plain),
        of('fit').mark_line(strokeWidth=2.4, clip=True).encode(**plain | look),
        of('cross').mark_point(clip=True, **CROSS).encode(tooltip=lost, **plain),
        of('best').mark_point(shape='diamond', clip=True, **ring).encode(tooltip=seen, **plain),
    ]
    return alt.layer(*layers).add_params(zoom(f'zoom_{path.replace(".", "_")}'))


def _octaves(values: Sequence[float]) -> list[float]:
    """At most about a dozen of the values, none nearer to another than most of an octave."""
    found: list[float] = []
    for value in values:
        if not found or value > 1.8 * found[-1]:
            found.append(value)
    return found
