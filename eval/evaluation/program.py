"""Evaluates checkpoints with suites for `python -m eval`; prints, writes and draws the results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.evaluation.kept import to_json
from eval.evaluation.suite_flags import SuiteRequest
from eval.evaluation.targets import Evaluation, Say, evaluate_all, find_targets
from lm.storage.buckets import parse_local_path
from lm.storage.files import write_json
from lm.study.tables.text import format_table


def evaluate_checkpoints(
    checkpoints: Sequence[str],
    requests: Sequence[SuiteRequest],
    step: str | None = None,
    again: bool = False,
    json_path: str | Path | None = None,
    page_path: str | Path | None = None,
    say: Say = print,
) -> tuple[dict[str, Any], str]:
    """Evaluates checkpoints, and writes the record and the page if their paths are given.

    Args:
      checkpoints: workdirs, sweeps, WORKDIR/checkpoints/STEP, or URLs.
      requests: the suites.
      step: of the checkpoints; 'all'; None: the newest.
      again: whether stored results are computed again.
      json_path: .json file for the numbers.
      page_path: .html file; None: beside `json_path` for several checkpoints, otherwise no page.
      say: receives messages about stored results and skipped checkpoints.

    Returns:
      (record, text): the record for JSON, and the text to print: the numbers of a single checkpoint
      as JSON, or a table for several.

    Raises:
      ValueError: if a checkpoint is missing or unreadable, or if a path has another ending, with
        which one file would replace the other.
    """
    json_path = parse_local_path(json_path, '--out', ('.json',)) if json_path else None
    page_path = parse_local_path(page_path, '--page', ('.html',)) if page_path else None
    targets = find_targets(checkpoints, step, say)
    if not all(target.keeps_results for target in targets) and not json_path:
        say('NOTE: results are not stored in a bucket; add --out=FILE.json to keep the numbers')
    evaluations = list(evaluate_all(targets, requests, again, say))
    record, text = (
        summarise_one(evaluations[0]) if len(evaluations) == 1 else summarise_many(evaluations)
    )
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_json(json_path, to_json(record))
    if not page_path and json_path and len(evaluations) > 1:
        page_path = json_path.with_suffix('.html')
    if page_path:
        from eval.evaluation.page import write_evaluation_page  # importing Altair is slow

        write_evaluation_page(page_path, evaluations, requests)
        say(f'page: {page_path}')
    return to_json(record), text


def make_record(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the record of a checkpoint: its numbers by suite."""
    numbers = {
        label: dict(suite_result.numbers) for label, suite_result in evaluation.results.items()
    }
    return {'checkpoint': evaluation.run, 'step': evaluation.step} | numbers


def summarise_one(evaluation: Evaluation) -> tuple[dict[str, Any], str]:
    """Returns the record of a checkpoint, and the same as text."""
    record = make_record(evaluation)
    return record, json.dumps(to_json(record), indent=2, allow_nan=False)


def summarise_many(evaluations: Sequence[Evaluation]) -> tuple[dict[str, Any], str]:
    """Returns the record of several checkpoints, and a table over steps and seeds."""
    from eval.evaluation.traces import collect_traces, format_traces  # imports Arrow

    traces = collect_traces(evaluations)
    rows = format_traces(traces)
    record = {
        'evaluations': [make_record(evaluation) for evaluation in evaluations],
        'traces': [trace.record for trace in traces],
    }
    return record, format_table(rows, list(rows[0]), 'table')
