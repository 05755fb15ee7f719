"""Evaluates what the flags of `python -m eval` name: what is printed, written, and drawn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.evaluation.kept import plain
from eval.evaluation.suite_flags import SuiteRequest
from eval.evaluation.targets import Evaluation, Say, evaluate_all, targets_of
from lm.storage.files import write_json
from lm.study.tables.text import render


def evaluate_checkpoints(
    checkpoints: Sequence[str],
    requests: Sequence[SuiteRequest],
    step: str | None = None,
    again: bool = False,
    out: Path | None = None,
    page: Path | None = None,
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
    targets = targets_of(checkpoints, step, say)
    if not all(target.keeps for target in targets) and not out:
        say('NOTE: results are not kept in a bucket; --out=FILE.json keeps the numbers')
    evaluations = list(evaluate_all(targets, requests, again, say))
    record, text = of_one(evaluations[0]) if len(evaluations) == 1 else of_many(evaluations)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, plain(record))
    if page or (out and len(evaluations) > 1):
        from eval.evaluation.page import write_evaluation_page  # Altair takes its time

        path = page or out.with_suffix('.html')
        write_evaluation_page(path, evaluations, requests)
        say(f'page: {path}')
    return text


def numbers_of(one: Evaluation) -> dict[str, Any]:
    """Returns the record of a checkpoint: its numbers by suite."""
    results = {label: dict(result.numbers) for label, result in one.results.items()}
    return {'checkpoint': one.run, 'step': one.step} | results


def of_one(one: Evaluation) -> tuple[dict[str, Any], str]:
    """Returns the record of a checkpoint, and the same as text."""
    record = numbers_of(one)
    return record, json.dumps(plain(record), indent=2, allow_nan=False)


def of_many(evaluations: Sequence[Evaluation]) -> tuple[dict[str, Any], str]:
    """Returns the record of several checkpoints, and a table over steps and seeds."""
    from eval.evaluation.traces import rows_of, traces_of  # brings Arrow

    traces = traces_of(evaluations)
    rows = rows_of(traces)
    record = {
        'evaluations': [numbers_of(one) for one in evaluations],
        'traces': [trace.record for trace in traces],
    }
    return record, render(rows, list(rows[0]), 'table')
