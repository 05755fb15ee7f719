"""What a page says of runs that went wrong: their warnings, and what was last seen of a run that
diverged.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.report.series import Series
from eval.results import results_of, rows_of
from eval.runs import Record
from eval.variants import has_diverged
from lm.files import read_json
from lm.record.upgrade import stored_config
from lm.record.workdir import CONFIG, SUMMARY
from lm.run.warnings import Watch

MOST_RUNS = 12  # that diverged, of which a page shows the last diagnostics
OVER_HEADS = {'mean': np.mean, 'least': np.min, 'largest': np.max}
# Columns of the last diagnostics: head, quantity, and over heads which of OVER_HEADS.
BY_LAYER = (
    ('entropy share', 'attention_entropy_share', 'mean'),
    ('of its lowest head', 'attention_entropy_share', 'least'),
    ('largest logit', 'attention_largest_logit', 'largest'),
    ('first token', 'attention_first_token', 'mean'),
    ('residual rms', 'residual_rms', ''),
    ('residual largest', 'residual_largest', ''),
    ('attention output rms', 'attention_output_rms', ''),
    ('mlp output rms', 'mlp_output_rms', ''),
    ('gradient norm', 'layer_grad_norm', ''),
    ('update / weight', 'update_ratio_hidden', ''),
)
OF_MODEL = ('log_z_mean', 'logit_largest', 'update_ratio_embedding', 'update_ratio_readout')
WARNINGS = ('run', 'step', 'warning', 'layer', 'head', 'what was seen', 'known to help')


def warnings_of(record: Record) -> list[dict[str, Any]]:
    """Those in its summary; of a run without one, those that its rows so far give rise to. [] where
    there is nothing to be read.
    """
    folder = Path(record['workdir'])
    try:
        if (folder / SUMMARY).exists():
            return results_of(folder).get('warnings') or []
        watch = Watch(stored_config(read_json(folder / CONFIG)), [])
        return [warning for row in rows_of(folder) for warning in watch.read(row)]
    except (ValueError, OSError):
        return []


def warning_rows(
    records: Sequence[Record], named: Callable[[Record], str]
) -> list[dict[str, str | list[str]]]:
    """Of the table of warnings, by `WARNINGS`; what helps is a list of lines with their sources."""
    rows = []
    for record in records:
        for warning in warnings_of(record):
            values = (
                named(record),
                str(warning['step']),
                warning['kind'].replace('_', ' '),
                str(warning['layer'] or ''),
                str(warning['head'] or ''),
                warning['seen'],
                [f'{line} ({source})' for line, source in warning['help']],
            )
            rows.append(dict(zip(WARNINGS, values, strict=True)))
    return rows


@dataclasses.dataclass(frozen=True)
class Last:
    """The last diagnostics of a run that diverged: `table` has a head and a row for each layer."""

    run: str
    reason: str
    step: int
    of_model: dict[str, str]
    table: list[list[str]]


def last_of_diverged(
    records: Sequence[Record], series: Mapping[str, Series], named: Callable[[Record], str]
) -> list[Last]:
    """Of every run that diverged and recorded any of `BY_LAYER`."""
    found = []
    for record in records:
        one = series[record['workdir']]
        if has_diverged(record) and any(quantity in one.layers for _, quantity, _ in BY_LAYER):
            found.append(_last(record, one, named(record)))
    return found


def _last(record: Record, one: Series, name: str) -> Last:
    step = max(one.layers[name][0][-1] for _, name, _ in BY_LAYER if name in one.layers)
    columns = {}
    for head, quantity, over in BY_LAYER:
        steps, values = (one.heads if over else one.layers).get(quantity, ([], []))
        if step in steps:
            of_layers = np.array(values[steps.index(step)], float)
            columns[head] = OVER_HEADS[over](of_layers, -1) if over else of_layers
    scalars = {}
    for quantity in OF_MODEL:
        steps, values = one.scalars.get(quantity, ([], []))
        if step in steps:
            scalars[quantity.replace('_', ' ')] = _short(values[steps.index(step)])
    layers = len(next(iter(columns.values()), ()))
    rows = [[str(i + 1), *(_short(c[i]) for c in columns.values())] for i in range(layers)]
    return Last(name, record['reason'] or '', step, scalars, [['layer', *columns], *rows])


def _short(value: float | None) -> str:
    return 'not finite' if value is None or not math.isfinite(value) else f'{value:.3g}'


def as_tables(
    rows: Sequence[Mapping[str, Any]], found: Sequence[Last]
) -> dict[str, tuple[str, list[list[str]]]]:
    """heading -> (caption, head and rows), for Markdown."""
    tables = {}
    if rows:
        lines = [[', '.join(v) if isinstance(v, list) else v for v in row.values()] for row in rows]
        tables['Warnings'] = ('Each kind once for a run and layer.', [list(WARNINGS), *lines])
    for one in found[:MOST_RUNS]:
        scalars = ''.join(f', {name} {value}' for name, value in one.of_model.items())
        tables[f'Before it diverged: {one.run}'] = (
            f'Diverged: {one.reason}. Last seen at step {one.step}{scalars}.',
            one.table,
        )
    return tables
