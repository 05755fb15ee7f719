"""Figures of a fit, as PNG and SVG."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from eval.fit.fitting import Fit
from eval.fit.laws import LOSS, D, N, U
from eval.fit.points import STEP, Points
from eval.report.figures import COLOURS, save

MOST_LINES = len(COLOURS)
HELD_OUT = {'marker': 'D', 'markerfacecolor': 'none'}


def write_figures(folder: Path, fit: Fit, fitted: Points, held: Points) -> list[Path]:
    """FOLDER/LAW.png and .svg: points, those held out as open diamonds, and the law as lines."""
    drawn = functools.partial(draw, fit=fit, fitted=fitted, held=held)
    return save(folder, {fit.law.name: drawn})


def draw(figure: Figure, fit: Fit, fitted: Points, held: Points) -> None:
    figure.set_size_inches(7.5, 3.2)
    left, right = figure.subplots(1, 2)
    if fit.law.curve is not None:
        along_runs(left, fit, fitted, held)
        relative_errors(right, fit, fitted, held, STEP)
    elif N in fit.law.columns:
        over(left, fit, fitted, held, N, D)
        over(right, fit, fitted, held, D, N)
        right.set_ylabel('')
    else:
        against_loss(left, fit, fitted, held)
        relative_errors(right, fit, fitted, held, LOSS)
    figure.suptitle(fit.law.equation, fontsize=8)


def over(axes: Axes, fit: Fit, fitted: Points, held: Points, along: str, by: str) -> None:
    """Loss over one column, a colour for each value of the other (at most MOST_LINES, between)."""
    everything = np.concatenate([fitted.at[by], held.at[by]])
    values, in_thousands = np.unique(everything), EngFormatter(sep='')
    if len(values) > MOST_LINES:
        values = np.geomspace(values[0], values[-1], MOST_LINES)
    ends = np.concatenate([fitted.at[along], held.at[along]])
    line = np.geomspace(ends.min(), ends.max(), 100)
    for value, colour in zip(values, COLOURS, strict=False):
        at = {along: line, by: np.full(100, value)}
        if U in fit.law.columns:  # without repetition
            at[U] = at[D]
        axes.plot(line, fit.predict(at), color=colour, label=f'{by} {in_thousands(value)}')
        for points, look in ((fitted, {'marker': 'o'}), (held, HELD_OUT)):
            near = np.argmin(np.abs(np.log(points.at[by][:, None] / values)), axis=1)
            own = values[near] == value
            shown = {'color': colour, 'ls': '', 'ms': 4} | look
            axes.plot(points.at[along][own], points.target[own], **shown)
    axes.set(xscale='log', yscale='log', xlabel=along, ylabel='loss, nats a token')
    for axis, between in ((axes.xaxis, (2, 5)), (axes.yaxis, (1.5, 2, 2.5, 3, 4, 5, 7))):
        axis.set_minor_locator(LogLocator(subs=between))
        axis.set_major_formatter(in_thousands)
        axis.set_minor_formatter(in_thousands)
    axes.legend(fontsize=6)


def along_runs(axes: Axes, fit: Fit, fitted: Points, held: Points) -> None:
    names = sorted({*fitted.runs, *held.runs})
    for i, name in enumerate(names):
        is_held = name in held.runs
        points = held if is_held else fitted
        own = points.take(points.runs == name)
        colour = COLOURS[i % len(COLOURS)]
        look = HELD_OUT if is_held else {'marker': 'o'}
        axes.plot(own.at[STEP], own.target, color=colour, ls='', ms=2, **look)
        dash = 'dashed' if is_held else 'solid'
        label = f'{name}{", held out" if is_held else ""}' if len(names) <= MOST_LINES else None
        axes.plot(own.at[STEP], fit.predict(own.columns), color=colour, ls=dash, label=label)
    axes.set(xlabel='step', ylabel='loss, nats a token')
    if len(names) <= MOST_LINES:
        axes.legend(fontsize=6)


def against_loss(axes: Axes, fit: Fit, fitted: Points, held: Points) -> None:
    ends = np.concatenate([fitted.at[LOSS], held.at[LOSS]])
    line = np.linspace(ends.min(), ends.max(), 100)
    axes.plot(line, fit.predict({LOSS: line}), color=COLOURS[0])
    axes.plot(fitted.at[LOSS], fitted.target, color=COLOURS[0], ls='', marker='o', ms=4)
    axes.plot(held.at[LOSS], held.target, color=COLOURS[1], ls='', ms=4, **HELD_OUT)
    axes.set(xlabel='loss, nats a token', ylabel='score')


def relative_errors(axes: Axes, fit: Fit, fitted: Points, held: Points, along: str) -> None:
    groups: Sequence = ((fitted, 'fitted', {'marker': 'o'}), (held, 'held out', HELD_OUT))
    for (points, label, look), colour in zip(groups, COLOURS, strict=False):
        if len(points.target):
            errors = fit.predict(points.columns) / points.target - 1
            axes.plot(points.at[along], errors, color=colour, ls='', ms=3, label=label, **look)
    axes.axhline(0, color='#333333', lw=0.8)
    axes.set(xlabel=along, ylabel='predicted / measured - 1')
    axes.legend(fontsize=6)
