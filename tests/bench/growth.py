"""How cost grows: a power law fitted to each curve, beside that of its work.

    uv run python -m tests.bench.growth [--only=NAME ...] [--figures=FOLDER] [--sizes=3]

A curve is the seconds of a part of the project over a size, from small to large. Its exponent is
the slope of log(seconds) over log(size), by least squares over all sizes (`exponent`) and between
the last two (`at the end`), where fixed costs weigh least. The work has an exponent too: of the
operations of a training step, or of the cells, bytes or documents that are read. A curve whose end
is steeper than that of its work by more than TOLERANCE is marked: then something is read, computed
or compared more often than once. With --figures the numbers go to FOLDER/growth.json, where later
commands add theirs, so that the curves may be measured one at a time; the table and the pictures
are of all curves in the file. --sizes leaves out all but the smallest sizes.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # as train.py does

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair
import numpy as np

from eval.charts import save_chart
from lm.study.tables.text import format_markdown
from tests.bench.growth_curves import CURVES, GROUPS, Point

alt: Any = altair  # the types of its decorated methods are lost

TOLERANCE = 0.15  # of exponents, which vary by so much between two rounds
HEAD = ('curve', 'seconds of', 'sizes', 'seconds, first to last', 'exponent', 'at the end')
HEAD_WORK = ('of the work', 'at the end', '')


@dataclasses.dataclass(frozen=True)
class Growth:
    """A power law of seconds, and of work, over a size.

    Attributes:
      exponent: slope of the logarithms, by least squares.
      end: slope between the last two sizes.
    """

    exponent: float
    end: float


def fit_growth(sizes: Sequence[float], values: Sequence[float]) -> Growth:
    """Fits a power law; nan for fewer than two sizes."""
    if len(sizes) < 2:
        return Growth(math.nan, math.nan)
    x, y = np.log(sizes), np.log(values)
    return Growth(float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2])))


def is_too_fast(seconds: Growth, work: Growth) -> bool:
    """Returns whether the seconds grow faster than the work at the largest sizes."""
    return seconds.end > work.end + TOLERANCE


def table_rows(name: str, points: Sequence[Point]) -> list[list[str]]:
    """Returns a row for each part of a curve."""
    sizes = [point.size for point in points]
    rows = []
    for part in points[0].seconds:
        work = fit_growth(sizes, [point.work.get(part, point.size) for point in points])
        seconds = [point.seconds[part] for point in points]
        growth = fit_growth(sizes, seconds)
        row = [
            *(name, part, f'{sizes[0]:,} to {sizes[-1]:,}'),
            f'{seconds[0]:.3g} to {seconds[-1]:.3g}',
        ]
        row += [f'{slope:+.2f}' for slope in (growth.exponent, growth.end, work.exponent, work.end)]
        rows.append([*row, 'too fast' if is_too_fast(growth, work) else ''])
    return rows


def draw_panel(name: str, points: Sequence[Point]) -> altair.LayerChart:
    """Draws the parts of a curve on logarithmic axes; the dashed line through the last point of a
    part has the slope of its work.
    """
    last, rows, ideal = points[-1], [], []
    for part in last.seconds:
        for point in points:
            row = {'size': point.size, 'part': part}
            share = point.work.get(part, point.size) / last.work.get(part, last.size)
            rows.append(row | {'seconds': point.seconds[part]})
            ideal.append(row | {'seconds': last.seconds[part] * share})
    floor = min(row['seconds'] for row in rows) / 3
    ideal = [row for row in ideal if row['seconds'] >= floor]
    axis = alt.Axis(values=[point.size for point in points], format=',', grid=True)
    legend = alt.Legend(title=None, orient='bottom', columns=2, symbolType='stroke')
    scale = alt.Scale(type='log', nice=False, padding=6)
    encoding = {
        'x': alt.X('size:Q', title=None, scale=scale, axis=axis),
        'y': alt.Y('seconds:Q', scale=scale, axis=alt.Axis(format='~g')),
        'color': alt.Color('part:N', sort=list(last.seconds), legend=legend),
    }
    lines = alt.Chart(alt.Data(values=rows)).mark_line(point=True).encode(**encoding)
    dashed = alt.Chart(alt.Data(values=ideal)).mark_line(strokeDash=[3, 3], strokeWidth=1)
    layers = alt.layer(lines, dashed.encode(**encoding))
    return layers.properties(width=210, height=170, title=name)


def draw_group(curves: dict[str, list[Point]]) -> altair.ConcatChart:
    """Draws a panel for each curve, each with its own axes and colours."""
    panels = [draw_panel(name, points) for name, points in curves.items()]
    return alt.concat(*panels, columns=3).resolve_scale(color='independent')


def load_points(path: Path) -> dict[str, list[Point]]:
    """Returns the curves in a growth.json; {} if there is none."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    return {name: [Point(**point) for point in points] for name, points in stored.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', nargs='*', default=list(CURVES), choices=[[], *CURVES])
    parser.add_argument('--figures', type=Path, help='folder for growth.json and the pictures')
    parser.add_argument('--sizes', type=int, help='how many sizes of each curve; default: all')
    options = parser.parse_args()
    path = options.figures and options.figures / 'growth.json'
    curves = load_points(path) if path else {}
    for name in options.only:
        curves[name] = []
        for point in CURVES[name].measure(CURVES[name].sizes[: options.sizes]):
            curves[name].append(point)
            parts = ', '.join(f'{part} {sec:.3g} s' for part, sec in point.seconds.items())
            print(f'{name} {point.size:,}: {parts}', flush=True)
    curves = {name: curves[name] for name in CURVES if name in curves}
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {name: [*map(dataclasses.asdict, points)] for name, points in curves.items()}
        path.write_text(json.dumps(stored, indent=1) + '\n')
        for group, names in GROUPS.items():
            if members := {name: curves[name] for name in names if name in curves}:
                save_chart(draw_group(members), options.figures / f'growth_{group}.svg')
    lines = [row for name, points in curves.items() for row in table_rows(name, points)]
    print(format_markdown([[*HEAD, *HEAD_WORK], *lines]))


if __name__ == '__main__':
    main()
