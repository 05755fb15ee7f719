"""Evaluates what the flags of `python -m eval` name: what is printed, written, and drawn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.evaluation.kept import to_json
from eval.evaluation.suite_flags import SuiteRequest
from eval.evaluation.targets import Evaluation, Say, evaluate_all, find_targets
from lm.storage.files import write_json
from lm.study.tables.text import format_table


def evaluate_checkpoints(
    checkpoints: Sequence[str],
    requests: Sequence[SuiteRequest],
    step: str | None = None,
    again: bool = False,
    json_path: Path | None = None,
    page_path: Path | None = None,
    say: Say = print,
) -> str:
    """Evaluates checkpoints, and writes the record and the page where they are asked for.

    Args:
      checkpoints: workdirs, sweeps, WORKDIR/checkpoints/STEP, or URLs.
      requests: the suites.
      step: of which checkpoint; 'all'; None: the newest.
      again: whether what is kept is computed too.
      out: JSON file for the numbers.
      page: HTML file; None: beside `out` where there are several checkpoints, otherwise none.
      say: is told of results that are read, and of what is left out.

    Returns:
      What is printed: the numbers of one checkpoint as JSON, or a table of those of several.

    Raises:
      ValueError: where a checkpoint is not there or cannot be read.
    """
    targets = find_targets(checkpoints, step, say)
    if not all(target.keeps_results for target in targets) and not json_path:
        say('NOTE: results are not kept in a bucket; --out=FILE.json keeps the numbers')
    evaluations = list(evaluate_all(targets, requests, again, say))
    record, text = (
        summarise_one(evaluations[0]) if len(evaluations) == 1 else summarise_many(evaluations)
    )
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_json(json_path, to_json(record))
    if page_path or (json_path and len(evaluations) > 1):
        from eval.evaluation.page import write_evaluation_page  # Altair takes its time

        path = page_path or json_path.with_suffix('.html')
        write_evaluation_page(path, evaluations, requests)
        say(f'page: {path}')
    return text


def make_record(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the record of a checkpoint: its numbers by suite."""
    results = {label: dict(result.numbers) for label, result in evaluation.results.items()}
    return {'checkpoint': evaluation.run, 'step': evaluation.step} | results


def summarise_one(evaluation: Evaluation) -> tuple[dict[str, Any], str]:
    """Returns the record of a checkpoint, and the same as text."""
    record = make_record(evaluation)
    return record, json.dumps(to_json(record), indent=2, allow_nan=False)


def summarise_many(evaluations: Sequence[Evaluation]) -> tuple[dict[str, Any], str]:
    """Returns the record of several checkpoints, and a table over steps and seeds."""
    from eval.evaluation.traces import collect_traces, format_traces  # brings Arrow

    traces = collect_traces(evaluations)
    rows = format_traces(traces)
    record = {
        'evaluations': [make_record(one) for one in evaluations],
        'traces': [trace.record for trace in traces],
    }
    return record, format_table(rows, list(rows[0]), 'table')
