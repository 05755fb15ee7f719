"""Evaluates checkpoints by suites, and keeps the results beside them.

    python -m eval --checkpoint=WORKDIR --suite=NAME[,NAME[:VALUE]] [--NAME.OPTION=VALUE ...]
        [--step=N|all] [--again] [--out=FILE.json] [--page=FILE.html]

Results lie in WORKDIR/evaluations: the same command reads them, and one that was killed goes on.
Several --checkpoint, a sweep's workdir or --step=all give a table: each number over the steps, with
its monotonicity, and over seeds with its spread. Without arguments the suites are listed.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from eval.evaluation.asked import (
    asked_for,
    define_suites,
    given_options,
    listing,
    parse_suite_flags,
)
from eval.evaluation.kept import plain
from eval.evaluation.targets import Evaluation, evaluate_all, targets_of
from eval.tables.text import render
from lm.launch.command import run_main
from lm.storage.buckets import local_path
from lm.storage.files import write_json

CHECKPOINT = flags.DEFINE_multi_string(
    'checkpoint', [], 'Workdir, sweep, WORKDIR/checkpoints/STEP, or a URL; may be given again.'
)
SUITE = define_suites()
STEP = flags.DEFINE_string('step', None, 'Updates of the checkpoint, or all; default the newest.')
AGAIN = flags.DEFINE_bool('again', False, 'Compute what is kept too.')
OUT = flags.DEFINE_string('out', None, 'JSON file to write the numbers to.')
PAGE = flags.DEFINE_string(
    'page', None, 'HTML file to write tables and charts to; several checkpoints: beside --out.'
)


def main(_) -> None:
    if not CHECKPOINT.value or not SUITE.value:
        raise ValueError(
            '--checkpoint=WORKDIR and --suite=NAME[,NAME] are needed. Suites:\n' + listing()
        )
    out = local_path(OUT.value, '--out') if OUT.value else None
    page = local_path(PAGE.value, '--page') if PAGE.value else None
    asked = asked_for(SUITE.value, given_options())
    say = functools.partial(print, file=sys.stderr)
    targets = targets_of(CHECKPOINT.value, STEP.value, say)
    if not all(target.keeps for target in targets) and not out:
        say('NOTE: results are not kept in a bucket; --out=FILE.json keeps the numbers')
    found = list(evaluate_all(targets, asked, AGAIN.value, say))
    record = report_one(found[0]) if len(found) == 1 else report_many(found)
    if out:
        write_json(out, plain(record))
    if page or (out and len(found) > 1):
        from eval.evaluation.page import write_evaluation_page  # Altair takes its time

        path = page or out.with_suffix('.html')
        write_evaluation_page(path, found, asked)
        say(f'page: {path}')


def numbers_of(one: Evaluation) -> dict[str, Any]:
    """Returns the record of a checkpoint: its numbers by suite."""
    results = {label: dict(result.numbers) for label, result in one.results.items()}
    return {'checkpoint': one.run, 'step': one.step} | results


def report_one(one: Evaluation) -> dict[str, Any]:
    """Prints the record of a checkpoint as JSON, and returns it."""
    print(json.dumps(plain(numbers_of(one)), indent=2, allow_nan=False))
    return numbers_of(one)


def report_many(found: Sequence[Evaluation]) -> dict[str, Any]:
    """Prints a table of numbers over steps and seeds, and returns all of it for JSON."""
    from eval.evaluation.traces import rows_of, traces_of  # brings Arrow

    traces = traces_of(found)
    rows = rows_of(traces)
    print(render(rows, list(rows[0]), 'table'))
    return {
        'evaluations': [numbers_of(one) for one in found],
        'traces': [trace.record for trace in traces],
    }


if __name__ == '__main__':
    app.run(run_main(main), flags_parser=parse_suite_flags)
