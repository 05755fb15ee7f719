"""A figure and a page of a plan: memory and step time of each compiled program."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from eval.charts import FAIL_COLOUR, PASS_COLOUR, Chart, save_chart, write_page
from tpu.chips import GIB
from tpu.trials import Trial

BAR_HEIGHT, LINE_HEIGHT = 16, 12  # pixels
LABEL_WIDTH = 24  # characters; with the bars, a label then fits the screen of a phone


def write_plan(
    path: Path,
    title: str,
    trials: Mapping[str, Trial],
    verdict: str,
    is_bad: bool,
    notes: Sequence[str],
) -> None:
    """Writes a page with a figure and a table, or the figure alone, by the suffix of the path.

    Args:
      path: .html for a page, .png or .svg for the figure.
      title: heading of the page or figure.
      trials: trials by name.
      verdict: a line on whether the step fits.
      is_bad: whether to colour the verdict as a failure.
      notes: further lines of the page.
    """
    charts: dict[str, Any] = draw_panels(trials)
    if path.suffix != '.html':
        save_chart(alt.hconcat(*charts.values(), title=title), path)
        return
    ordered = sorted(trials.items(), key=lambda pair: pair[1].estimate is not None)
    write_page(
        path,
        charts,
        title=title,
        about='estimated from the compiled program, nothing was run',
        verdict=verdict,
        is_bad=is_bad,
        notes=notes,
        rows=[trial.table_row() | {'': name} for name, trial in ordered],
        failed=sum(trial.estimate is None for trial in trials.values()),
    )


def draw_panels(trials: Mapping[str, Trial]) -> dict[str, Chart]:
    """Draws bars of memory and of step time.

    A dashed line marks the available memory. A line at each step ranges from communication fully
    hidden to not hidden, with a tick at the lower bound. A program that does not fit is coloured
    and labelled; a program that was not compiled has no bar. If none fits, there is no panel of
    step times.
    """
    rows = [
        {
            'program': '\n'.join(textwrap.wrap(name, LABEL_WIDTH, break_on_hyphens=False)),
            'fits': trial.estimate is not None,
            'GiB': trial.needed / GIB,
            'there': trial.available / GIB,
        }
        | _step_ms(trial)
        for name, trial in trials.items()
        if trial.needed
    ]
    n_lines = max((str(row['program']).count('\n') + 1 for row in rows), default=1)
    # Vega centres the first line of a label on its bar; the offset centres all of the longest.
    offset = -LINE_HEIGHT * (n_lines - 1) / 2
    split = "split(datum.label, '\\n')"
    label_axis = alt.Axis(labelLimit=200, labelExpr=split, labelOffset=offset)
    # Altair's stubs lose the chart's type behind its mark methods.
    base: Any = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y('program:N', sort=None, title=None, axis=label_axis),
        color=alt.Color('fits:N', legend=None).scale(
            domain=[True, False], range=[PASS_COLOUR, FAIL_COLOUR]
        ),
    )
    bars = base.mark_bar(size=BAR_HEIGHT).encode(tooltip=['program:N', 'GiB:Q', 'ms:Q', 'bound:Q'])
    limits: Any = alt.Chart(base.data).mark_rule(strokeDash=[4, 3])
    limit = limits.encode(x='max(there):Q')
    labels = base.transform_filter(~alt.datum.fits).mark_text(
        text='does not fit', align='left', dx=4
    )
    bound_ticks = (
        base.transform_filter(alt.datum.fits)
        .mark_tick(thickness=2, size=BAR_HEIGHT)
        .encode(x='bound:Q', color=alt.value('black'))
    )
    axis = alt.Axis(tickCount=4, labelFlush=False, labelSeparation=6)
    memory_title = ['GiB needed per device', '(dashed: available)']
    memory = bars.encode(x=alt.X('GiB:Q', title=memory_title, axis=axis)) + limit
    step_title = ['step, ms (tick: lower bound; line:', 'communication hidden to exposed)']
    ranges = base.transform_filter(alt.datum.fits).mark_rule()
    step = bars.encode(x=alt.X('ms:Q', title=step_title, axis=axis)) + bound_ticks
    step += labels.encode(x='ms:Q')
    step += ranges.encode(x='hidden:Q', x2='exposed:Q', color=alt.value('black'))
    size = {'width': 190, 'height': alt.Step(10 + LINE_HEIGHT * n_lines)}
    panels = {'memory': memory.properties(**size)}
    return panels | ({'step': step.properties(**size)} if any(row['fits'] for row in rows) else {})


def _step_ms(trial: Trial) -> dict[str, float]:
    """Returns the milliseconds of a step, for the panel; 0 without an estimate."""
    if (estimate := trial.estimate) is None:
        return {'ms': 0.0}
    seconds = {
        'ms': estimate.step_seconds,
        'hidden': estimate.step_seconds_hidden,
        'exposed': estimate.step_seconds_exposed,
        'bound': estimate.bound_seconds,
    }
    return {name: 1e3 * sec for name, sec in seconds.items()}
