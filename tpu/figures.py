"""A figure and a page of a plan: memory and the step of each program that was compiled."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import altair as alt

from eval.charts import FAIL_COLOUR, PASS_COLOUR, Chart, save_chart, write_page
from tpu.chips import GIB
from tpu.trials import Trial


def write_plan(
    path: Path,
    title: str,
    trials: Mapping[str, Trial],
    verdict: str,
    is_bad: bool,
    notes: Sequence[str],
) -> None:
    """Writes a page with a figure and a table, or the figure alone, by the path's ending."""
    charts = draw_panels(trials)
    if path.suffix != '.html':
        save_chart(alt.hconcat(*charts.values(), title=title), path)
        return
    ordered = sorted(trials.items(), key=lambda item: item[1].estimate is not None)
    write_page(
        path,
        charts,
        title=title,
        about='plan by the compiler; nothing was run',
        verdict=verdict,
        is_bad=is_bad,
        notes=notes,
        rows=[trial.table_row() | {'': name} for name, trial in ordered],
        failed=sum(trial.estimate is None for trial in trials.values()),
    )


def draw_panels(trials: Mapping[str, Trial]) -> dict[str, Chart]:
    """Bars of memory, with a line at what there is, and of the step, with a line from where all
    links are hidden to where none are, and a tick at its bound. A program that does not fit is in
    colour, and named; one that was not compiled has no bar. Where none fits there is no step.
    """
    rows = [
        {
            'program': name,
            'fits': trial.estimate is not None,
            'GiB': trial.needed / GIB,
            'there': trial.available / GIB,
        }
        | _step_ms(trial)
        for name, trial in trials.items()
        if trial.needed
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y('program:N', sort=None, title=None, axis=alt.Axis(labelLimit=280)),
        color=alt.Color('fits:N', legend=None).scale(
            domain=[True, False], range=[PASS_COLOUR, FAIL_COLOUR]
        ),
    )
    bars = base.mark_bar().encode(tooltip=['program:N', 'GiB:Q', 'ms:Q', 'bound:Q'])
    there = alt.Chart(base.data).mark_rule(strokeDash=[4, 3]).encode(x='max(there):Q')
    words = base.transform_filter(~alt.datum.fits).mark_text(
        text='does not fit', align='left', dx=4
    )
    bounds = (
        base.transform_filter(alt.datum.fits)
        .mark_tick(thickness=2)
        .encode(x='bound:Q', color=alt.value('black'))
    )
    memory = bars.encode(x=alt.X('GiB:Q', title='GiB a device needs; dashed: there are')) + there
    title = 'step, ms; line: links all hidden to none; tick: products at the peak'
    between = base.transform_filter(alt.datum.fits).mark_rule()
    step = bars.encode(x=alt.X('ms:Q', title=title)) + bounds + words.encode(x='ms:Q')
    step += between.encode(x='hidden:Q', x2='exposed:Q', color=alt.value('black'))
    size = {'width': 230, 'height': alt.Step(22)}
    found = {'memory': memory.properties(**size)}
    return found | ({'step': step.properties(**size)} if any(row['fits'] for row in rows) else {})


def _step_ms(trial: Trial) -> dict[str, float]:
    if (found := trial.estimate) is None:
        return {'ms': 0.0}
    seconds = {
        'ms': found.step_seconds,
        'hidden': found.step_seconds_hidden,
        'exposed': found.step_seconds_exposed,
        'bound': found.bound_seconds,
    }
    return {name: 1e3 * s for name, s in seconds.items()}
