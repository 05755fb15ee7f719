"""Evaluates checkpoints with suites and stores the results in their workdirs.

    python -m eval --checkpoint=WORKDIR --suite=NAME[:VALUE][,NAME ...]
        [--NAME.OPTION=VALUE ...] [--step=N|all] [--out=FILE.json] [--json]

Prints the numbers as JSON. For several checkpoints (--checkpoint repeated, a
sweep or --step=all), prints a table of each number over steps and seeds
instead. Results are stored in WORKDIR/evaluations: repeat a command to read
them, or to resume an interrupted evaluation. Run it without arguments to list
the suites, or with --helpfull to list their options.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import functools
import sys

from absl import flags

from eval.console.json_line import define_json, print_json
from eval.evaluation.program import evaluate_checkpoints
from eval.evaluation.suite_flags import (
    define_suites,
    format_suites,
    parse_suite_flags,
    read_option_flags,
    read_suites,
)
from lm.launch.command import run_program
from lm.launch.path_flags import define_path

CHECKPOINT = define_path(
    'checkpoint',
    [],  # ty: ignore[invalid-argument-type]  # a flag that may be repeated has a list
    'Workdir, sweep, WORKDIR/checkpoints/STEP or URL to evaluate; may be repeated.',
    is_multi=True,
)
SUITE = define_suites()
STEP = flags.DEFINE_string('step', None, 'Step of the checkpoint, or all; default: the newest.')
AGAIN = flags.DEFINE_bool('again', False, 'Recompute stored results.')
JSON = define_json()
OUT = define_path('out', None, 'JSON file to write the numbers to.')
PAGE = define_path(
    'page', None, 'HTML page to write; default with several checkpoints: next to --out.'
)


def main(_) -> None:
    if not CHECKPOINT.value and not SUITE.value:
        raise ValueError(
            '--checkpoint=WORKDIR and --suite=NAME[,NAME] are required. Suites:\n' + format_suites()
        )
    if not SUITE.value:
        raise ValueError('--suite=NAME[,NAME] is required. Suites:\n' + format_suites())
    if not CHECKPOINT.value:
        raise ValueError('--checkpoint=WORKDIR is required: the workdir of a run or a sweep.')
    record, text = evaluate_checkpoints(
        CHECKPOINT.value,
        read_suites(SUITE.value or '', read_option_flags()),
        step=STEP.value,
        again=AGAIN.value,
        json_path=OUT.value,
        page_path=PAGE.value,
        say=functools.partial(print, file=sys.stderr),
    )
    print(text)
    if JSON.value:
        print_json(record)


if __name__ == '__main__':
    run_program(main, parse_suite_flags)
