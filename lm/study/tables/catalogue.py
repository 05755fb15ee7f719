"""A catalogue: what each of many runs and sweeps asked, and what it answered."""

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm.record.names import CONFIG, SWEEP
from lm.record.remote.local_copy import fetch_records
from lm.record.time_use import read_starts
from lm.study.statistics import ONE_SEED, format_outcome
from lm.study.tables.ablation import describe_progress, format_verdicts, read_ablation
from lm.study.tables.comparison import Comparison, compare
from lm.study.tables.results import UNREADABLE, Record, gather, has_runs, read_sweep
from lm.study.tables.text import format_number

COLUMNS = ('workdir', 'began', 'question', 'runs', 'answer')
MOST_VERDICTS = 4  # of a sweep without tuning; a tuned one has all of its sentences


def list_studies(workdirs: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Returns a row of COLUMNS for each run and sweep, the latest first.

    The question is the first paragraph of the docstring of the config file, from the record of the
    first start (`lm.record.time_use`); '' if the runs are older than that record.

    Args:
      workdirs: folders or URLs, each a run, a sweep, or a folder of them.

    Raises:
      ValueError: if a folder holds neither run nor sweep.
    """
    rows = []
    for workdir in workdirs:
        folder = fetch_records(workdir)
        inner = [path for path in sorted(folder.glob('*')) if has_runs(path)]
        folders = [folder] if has_runs(folder) else inner
        if not folders:
            raise ValueError(
                f'{workdir} contains no run and no sweep, and neither have its subfolders. Set '
                '--workdir to a folder that train.py wrote'
            )
        rows += [_describe_folder(path) for path in folders]
    return sorted(rows, key=lambda row: row['began'], reverse=True)


def search_studies(rows: Iterable[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Returns the rows that contain every word of a text, in any column and in any case."""
    words = text.lower().split()
    return [
        row
        for row in rows
        if all(word in ' '.join(map(str, row.values())).lower() for word in words)
    ]


def _describe_folder(folder: Path) -> dict[str, Any]:
    try:
        records = gather(folder)
        answer = _answer_sweep(folder, records) if (folder / SWEEP).exists() else _answer(records)
        statuses = [record['status'] for record in records]
    except (ValueError, OSError) as error:
        answer, statuses = f'{UNREADABLE}: {error}', []
    starts = _first_starts(folder)
    first = min(starts, key=lambda start: start['began'], default={})
    question = (first.get('question') or '').split('\n\n')[0]
    return {
        'workdir': str(folder),
        'began': first.get('began') or _modification_time(folder),
        'question': ' '.join(question.split()),
        'runs': f'{statuses.count("done")} of {len(statuses)}',
        'answer': answer,
    }


def _first_starts(folder: Path) -> list[Record]:
    """Returns the first start of a run, or of each cell of a sweep."""
    folders = [folder, *(path.parent for path in folder.glob(f'*/{CONFIG}'))]
    return [starts[0] for path in folders if (starts := read_starts(path))]


def _modification_time(folder: Path) -> str:
    """Returns when the config or the sweep was last written; '' if it is gone."""
    paths = [path for name in (SWEEP, CONFIG) if (path := folder / name).exists()]
    if not paths:
        return ''
    seconds = min(path.stat().st_mtime for path in paths)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _answer(records: Sequence[Record]) -> str:
    """Returns the outcome of a single run."""
    (record,) = records
    loss = '' if record['ce'] is None else f', loss {record["ce"]:.4f}'
    return f'{record["status"]}{loss}'


def _answer_sweep(folder: Path, records: Sequence[Record]) -> str:
    """Returns the verdicts of a sweep; of a tuned one those of fresh seeds."""
    sweep = read_sweep(folder)
    if (ablation := read_ablation(sweep, records)) is not None:
        progress = describe_progress(ablation)
        return '; '.join(
            [*format_verdicts(ablation, with_caveats=False), *filter(None, [progress])]
        )
    comparisons = compare(records, sweep)
    judged = [c for c in comparisons if c.verdict and c.verdict != ONE_SEED]
    if judged:
        judged.sort(key=lambda comparison: comparison.difference.mean)
        parts = [_describe_verdict(comparison) for comparison in judged[:MOST_VERDICTS]]
        n_further = len(judged) - MOST_VERDICTS
        return '; '.join([*parts, *([f'and {n_further} more'] if n_further > 0 else [])])
    ended = [c for c in comparisons if c.loss.n]
    if not ended:
        return 'no run has ended'
    best = min(ended, key=lambda comparison: comparison.loss.mean)
    rate = f', lr {format_number(best.best_lr)}' if best.best_lr is not None else ''
    return f'lowest loss {best.loss.mean:.4f} ({best.variant.name}{rate})'


def _describe_verdict(comparison: Comparison) -> str:
    outcome, difference = format_outcome(comparison.verdict), comparison.difference
    return (
        f'{comparison.variant.name} {outcome} ({difference.mean:+.4f} ± '
        f'{difference.half_width:.4f})'
    )
