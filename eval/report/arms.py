"""The answer of a tuned sweep: the table of its arms, and loss over what was tuned."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
    Result,
    progress,
    results,
    sentences,
    tokens_words,
)
from eval.tables.comparison import CONFIDENCE
from eval.tables.text import number
from lm.tuning.curve import OCTAVE, Means, as_good, fits
from lm.tuning.search import DIVERGED, EDGE, Line
from lm.tuning.verdicts import BETTER, UNDECIDED, WORSE

MARKS = {BETTER: '▼', WORSE: '▲', UNDECIDED: '≈', FAILED: '✕'}
ORDER = (BETTER, WORSE, UNDECIDED, FAILED)
VALUE_DIGITS = 3
PANEL = {1: (760, 340), 2: (460, 320), 3: (330, 300)}  # width, height, by how many there are
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
        lines.append(f'Not finished. {_sentence(going)} What follows is what is known so far.')
    groups = {said: [row.arm.name for row in every if row.said == said] for said in ORDER}
    told = [f'{len(own)} {said} ({", ".join(own)})' for said, own in groups.items() if own]
    if told:
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
            f'At the edge of what was tried: {", ".join(edges)}. Their losses are bounds: the best '
            'values lie further out.'
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


def curve(line: Line, s: float) -> Curve | None:
    """Returns the fitted curve of a line over an octave to both sides of its best value; None where
    there is no fit.

    The fit has no height of its own: it goes through the mean of the losses, by their seeds.
    """
    means = line.means
    if len(means.finite.k) < 3:
        return None
    found = fits(means.k, means.mean[None], means.n, s)
    if found.left_R[0] + found.right_R[0] == 0:
        return None
    known = means.finite
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
        rows = _rows(ablation, along, path)
        if rows:
            panel = _panel(rows, path, look, f'final {UNITS[ablation.metric]}')
            panels.append(panel.properties(width=width, height=height_))
    pick = alt.selection_point('arm', fields=['line'], bind='legend')
    panels[0] = panels[0].add_params(pick)
    found = alt.hconcat(*panels).transform_filter(pick)
    return with_log(found, y='log loss')


def _rows(ablation: Ablation, along: int, path: str) -> dict[str, Rows]:
    """What a panel shows, by its marks; {} where nothing has ended."""
    found: dict[str, Rows] = {n: [] for n in ('mean', 'seed', 'fit', 'good', 'cross', 'best')}
    lows, reaches = [], []
    for i, arm in enumerate(ablation.arms):
        if arm.length != 1:
            continue
        line = _line(ablation, i, along)
        told = {'line': arm.name}

        def at(k: float, line=line, arm=arm) -> float:
            return arm.grid.values(line.place(k))[path]

        for k, losses in line.by_index().items():
            finite = [loss for loss in losses if math.isfinite(loss)]
            row = told | {'value': at(k)}
            found['seed'] += [row | {'loss': loss} for loss in finite]
            if len(finite) == len(losses):
                found['mean'].append(row | {'loss': float(np.mean(finite)), 'seeds': len(losses)})
            else:
                lost = f'{len(losses) - len(finite)} of {len(losses)} diverged'
                found['cross'].append(row | {'runs': lost})
        means = line.means
        if not len(means.finite.k):
            continue
        fitted = curve(line, ablation.spread.s)
        best = float(means.finite.mean.min())
        lows.append(best)
        reaches.append(_reach(means, best))
        if fitted:
            pairs = zip(*fitted, strict=True)
            found['fit'] += [told | {'value': at(k), 'loss': float(loss)} for k, loss in pairs]
        pick = ablation.pick(i)
        if pick is not None:
            k = np.array([pick.k[along]])
            row = told | {'value': at(pick.k[along]), 'seeds': sum(means.n)}
            found['best'].append(row | {'loss': float(height(means, fitted, k)[0])})
            low, high = as_good(means, ablation.spread)
            ends = max(low, float(means.k[0])), min(high, float(means.k[-1]))
            ks = np.linspace(*ends, STEPS)
            pairs = zip(ks, height(means, fitted, ks), strict=True)
            found['good'] += [told | {'value': at(k), 'loss': float(loss)} for k, loss in pairs]
    if not any(found.values()):
        return {}
    _stack(found, min(lows, default=0.0), max(lows, default=1.0) + max(reaches, default=1.0))
    return found


def _line(ablation: Ablation, arm: int, along: int) -> Line:
    """The line along a field with all runs that have ended, those of an open wave too."""
    known, fields = ablation.arms[arm].tuning, len(ablation.tune.fields)
    for line in ablation.lines(arm):
        if line.along == along:
            return dataclasses.replace(line, known=known)
    return Line((0,) * fields, along, known)


def _reach(means: Means, best: float) -> float:
    """How far above the best loss a panel has to reach: what an octave off costs, times MARGIN."""
    known = means.finite
    near = np.abs(known.k - known.k[known.best]) <= OCTAVE
    return MARGIN * float(known.mean[near].max() - best)


def _stack(found: dict[str, Rows], low: float, top: float) -> None:
    """Sets crosses above all losses, one above the other; and what the axis reaches."""
    room = 0.06 * (top - low) or 1.0
    heights: dict[float, int] = {}
    for row in found['cross']:
        heights[row['value']] = heights.get(row['value'], 0) + 1
        row['loss'] = top + (heights[row['value']] - 0.4) * room
    stacked = max(heights.values(), default=0)
    found['ends'] = [{'low': low - room, 'high': top + stacked * room}]


def _panel(rows: dict[str, Rows], path: str, look: dict[str, Any], title: str) -> Chart:
    (ends,) = rows['ends']
    values = sorted({row['value'] for kind in ('mean', 'cross') for row in rows[kind]})
    scale = alt.Scale(type='log', nice=False, padding=12)
    axis = alt.Axis(format='.2~g', grid=True, values=_octaves(values))
    x = alt.X('value:Q', title=path, scale=scale, axis=axis)
    domain = alt.Scale(zero=False, nice=False, domain=[ends['low'], ends['high']])
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
        of('cross').mark_point(**CROSS).encode(tooltip=lost, **plain),
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
