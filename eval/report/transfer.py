"""Several sweeps with the same variants: which verdicts of the first hold in the others."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import altair

from eval.charts import Chart
from lm.record.remote.local_copy import fetch_records, split_checkpoint_url
from lm.record.workdir import SWEEP
from lm.storage.buckets import is_url
from lm.study.arm import UNITS
from lm.study.statistics import format_outcome
from lm.study.tables.results import gather, read_sweep
from lm.study.tables.text import format_number, format_table
from lm.study.tables.transfer import (
    VariantFindings,
    align_findings,
    describe_gaps,
    describe_transfer,
    find_metric,
)
from lm.study.tables.variants import find_base_differences

alt: Any = altair  # the types of its decorated methods are lost

LINEAR_BELOW = 0.02  # nats: the axis is linear there, and logarithmic beyond
BAND = 13  # pixels of a variant for each sweep


@dataclasses.dataclass(frozen=True)
class SweepComparison:
    """Verdicts of several sweeps by variant.

    Attributes:
      names: names of the sweeps; the first has the verdicts in question.
      rows: findings by variant, the baseline first.
      unit: unit of the losses.
      base_differences: field -> values, where the bases of the sweeps differ.
      gaps: the missing runs of each sweep, as text; '' if nothing is.
    """

    names: list[str]
    rows: list[VariantFindings]
    unit: str
    base_differences: dict[str, list[Any]]
    gaps: list[str]

    def format_lines(self) -> list[str]:
        """Returns a table of verdicts, how the sweeps differ, and which verdicts hold."""
        cells = [
            {'variant': row.name}
            | {
                name: str(finding or '')
                for name, finding in zip(self.names, row.findings, strict=True)
            }
            for row in self.rows
        ]
        settings = [
            f'{path} {", ".join(map(format_number, values))}'
            for path, values in self.base_differences.items()
        ]
        return [
            format_table(cells, ['variant', *self.names], 'table'),
            *([f'The sweeps differ in {"; ".join(settings)}.'] if settings else []),
            *describe_transfer(self.rows, self.names),
        ]


def compare_sweeps(workdirs: Sequence[str]) -> SweepComparison | None:
    """Returns the comparison of several sweeps; None if one of the folders holds no sweep.

    Raises:
      ValueError: if a folder is given twice, or the sweeps do not correspond (`align_findings`).
    """
    if any(is_url(workdir) and split_checkpoint_url(workdir)[1] for workdir in workdirs):
        return None
    folders = [fetch_records(workdir) for workdir in workdirs]
    if not all((folder / SWEEP).exists() for folder in folders):
        return None
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f'a sweep is listed twice: {", ".join(names)}; list each sweep once')
    sweeps, records = [*map(read_sweep, folders)], [*map(gather, folders)]
    return SweepComparison(
        names,
        align_findings(sweeps, records),
        UNITS[find_metric(sweeps[0])],
        find_base_differences(sweeps),
        [*map(describe_gaps, sweeps, records)],
    )


def draw_differences(comparison: SweepComparison) -> Chart:
    """Draws the difference of each variant and its interval, in a colour for each sweep.

    Decided differences are filled.
    """
    rows, names = comparison.rows, comparison.names
    points = [
        {
            'variant': row.name,
            'sweep': name,
            'difference': finding.difference,
            'low': finding.low,
            'high': finding.high,
            'verdict': format_outcome(finding.outcome),
            'is_decided': finding.is_decided,
            'seeds': finding.seeds,
        }
        for row in rows
        for name, finding in zip(names, row.findings, strict=True)
        if finding and not math.isnan(finding.difference)
    ]
    variants = [row.name for row in rows if row.name in {point['variant'] for point in points}]
    scale = alt.Scale(type='symlog', constant=LINEAR_BELOW, nice=False, padding=12)
    marks = [sign * size for size in (0.5, 0.2, 0.1, 0.05, 0.02) for sign in (-1, 1)]
    x = alt.X(
        'difference:Q',
        scale=scale,
        title=f'difference from the baseline ({comparison.unit})',
        axis=alt.Axis(values=sorted([0, 1, 2, *marks]), format='+.2~f'),
    )
    chart = alt.Chart(alt.Data(values=points)).encode(
        y=alt.Y('variant:N', sort=variants, title=None, axis=alt.Axis(labelLimit=320, grid=True)),
        yOffset=alt.YOffset('sweep:N', sort=names),
        color=alt.Color('sweep:N', sort=names, title=None),
    )
    tooltip = [
        *(alt.Tooltip(f'{name}:N') for name in ('variant', 'sweep', 'verdict')),
        *(alt.Tooltip(f'{name}:Q', format='+.4f') for name in ('difference', 'low', 'high')),
        alt.Tooltip('seeds:Q'),
    ]
    point = chart.encode(x=x, tooltip=tooltip)
    zero = alt.Chart(alt.Data(values=[{'difference': 0}])).mark_rule(strokeDash=[3, 3])
    layers = (
        zero.encode(x=x),
        chart.encode(x=alt.X('low:Q', scale=scale), x2='high:Q').mark_rule(strokeWidth=2),
        point.transform_filter(alt.datum.is_decided).mark_point(filled=True, size=60),
        point.transform_filter(~alt.datum.is_decided).mark_point(filled=False, size=60),
    )
    return alt.layer(*layers).properties(width=420, height=alt.Step(BAND))
