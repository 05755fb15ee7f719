"""Compares checkpoints item by item: each RUN with the first RUN, the baseline.

    python -m eval.compare RUN RUN ... [--suite=NAME[:VALUE]] [--NAME.OPTION=VALUE] [--json]
    python -m eval.compare SWEEP [--json]
    python -m eval.compare SWEEP SWEEP ... [--figure=FILE] [--json]

For a sweep with config.tune, prints the verdict on each arm instead. For several
sweeps with the same variants, such as sizes of a model, prints which verdicts of
the first hold in the others. A RUN is a workdir, a cell of a sweep,
WORKDIR/checkpoints/STEP or a URL. Stored results are read; missing ones are
computed, as by `python -m eval`. The 95% interval is from a bootstrap over the
shared items. p is from a permutation test, adjusted for the number of runs (Holm).
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from eval.console.json_line import define_json, print_json
from eval.evaluation.paired import (
    CONFIDENCE,
    MIN_ITEMS,
    Difference,
    compute_difference,
    pair_items,
)
from eval.evaluation.suite_flags import (
    SuiteRequest,
    define_suites,
    parse_suite_flags,
    read_option_flags,
    read_suites,
)
from eval.evaluation.targets import Evaluation, Say, Target, evaluate_all, find_targets
from eval.suites import SUITES
from eval.suites.base import Suite
from lm.config.resolve import flatten
from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.record.names import PARAMETER_ROWS
from lm.record.remote.local_copy import fetch_records
from lm.record.run import Run
from lm.record.workdir import SWEEP
from lm.run.tables import format_table
from lm.storage.buckets import is_url
from lm.storage.files import expand_home
from lm.study.statistics import BETTER, WITHIN_NOISE, WORSE, format_outcome, holm_adjust
from lm.study.tables.parameters import INHERITS, compare_parameters, read_parameters

DEFAULT = 'perplexity'


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """A run compared with the baseline.

    Attributes:
      difference: its p is adjusted.
      n_items: items that both have.
      line: the comparison as a sentence.
    """

    run: str
    baseline: str
    verdict: str
    difference: Difference
    n_items: int
    line: str


def compare(
    targets: Sequence[Target], request: SuiteRequest, say: Say, again: bool = False
) -> list[RunComparison]:
    """Compares each run with the first by the items of a suite.

    Args:
      targets: the checkpoints (`find_target`); at least two.
      request: the suite.
      say: receives lines about results that are read, and about items of a single run.
      again: whether kept results are computed anew.

    Returns:
      A comparison for each run but the first.

    Raises:
      ValueError: if the suite has nothing to compare, and if two runs were evaluated with different
        options.
    """
    suite = request.suite
    if not suite.score:
        suitable = [name for name, row in SUITES.items() if row.score]
        raise ValueError(
            f'{request.name} cannot be compared: it does not score single items. Suites that do: '
            f'{", ".join(suitable)}.'
        )
    evaluations = [
        evaluation
        for target in targets
        for evaluation in evaluate_all([target], [request], again, say)
    ]
    baseline, *remaining = evaluations
    return compare_evaluations(baseline, remaining, request, say)


def find_target(run: str, say: Say) -> Target:
    """Returns the newest checkpoint of a run. Raises ValueError for a sweep's folder."""
    targets = find_targets([run], None, say)
    # The checkpoint of a run lies in its own folder, a checkpoint of a sweep in a cell below it.
    if not is_url(run) and targets[0].folder.parent.resolve() not in (
        Path(run).resolve(),
        *Path(run).resolve().parents,
    ):
        raise ValueError(
            f'{run} is a sweep; eval.compare compares runs. Name its cells, such as '
            f'{" ".join(target.run for target in targets[:2])}. To compare its variants over '
            f'seeds, run python -m eval.report --workdir={run}'
        )
    return dataclasses.replace(targets[0], run=run if is_url(run) else str(Path(run)))


def compare_arms(run: str, say: Say) -> list[str] | None:
    """Returns the verdict on each arm of a sweep with config.tune, from fresh seeds, as sentences.

    Returns None if `run` is no such sweep. `say` receives a note if the sweep is not finished.
    """
    from lm.study.tables.ablation import describe_progress, format_verdicts, read_ablation
    from lm.study.tables.results import gather, read_sweep

    folder = fetch_records(run)
    if not (folder / SWEEP).exists():
        return None
    sweep = read_sweep(folder)
    if 'tune' not in sweep:
        return None
    ablation = read_ablation(sweep, gather(folder))
    assert ablation is not None  # because the sweep has `tune`
    if progress := describe_progress(ablation):
        say(f'NOTE: the sweep is not finished: {progress}')
    return format_verdicts(ablation)


def compare_evaluations(
    baseline: Evaluation, evaluations: Sequence[Evaluation], request: SuiteRequest, say: Say
) -> list[RunComparison]:
    """Compares evaluations with the baseline.

    Args:
      baseline: the evaluation of the first run.
      evaluations: the evaluations of the other runs.
      request: the suite.
      say: receives lines about items of a single run.

    Returns:
      A comparison for each evaluation.
    """
    suite, first = request.suite, baseline.results[request.label]
    pairs_of_each, differences = [], []
    for evaluation in evaluations:
        try:
            pairs = pair_items(first, evaluation.results[request.label], suite)
        except ValueError as error:
            raise ValueError(
                f'{evaluation.run} cannot be compared with {baseline.run}: {error}'
            ) from error
        if pairs.only_first or pairs.only_second:
            say(
                f'NOTE: {len(pairs)} shared {suite.item_noun} are compared; skipped: '
                f'{pairs.only_first} only in {baseline.run}, {pairs.only_second} only in '
                f'{evaluation.run}'
            )
        pairs_of_each.append(pairs)
        differences.append(compute_difference(pairs, suite.scale))
    adjusted = holm_adjust([effect.p for effect in differences])
    comparisons = []
    for evaluation, pairs, effect, p in zip(
        evaluations, pairs_of_each, differences, adjusted, strict=True
    ):
        effect = dataclasses.replace(effect, p=p)
        verdict = decide_verdict(effect, suite)
        line = comparison_sentence(evaluation.run, baseline.run, verdict, effect, len(pairs), suite)
        comparisons.append(
            RunComparison(evaluation.run, baseline.run, verdict, effect, len(pairs), line)
        )
    return comparisons


def decide_verdict(effect: Difference, suite: Suite) -> str:
    """Returns BETTER or WORSE if the p-value allows it, otherwise WITHIN_NOISE."""
    if not effect.p < 1 - CONFIDENCE:
        return WITHIN_NOISE
    return BETTER if (effect.value < 0) == suite.lower_is_better else WORSE


def comparison_sentence(
    run: str, baseline: str, verdict: str, effect: Difference, n_items: int, suite: Suite
) -> str:
    """Returns the comparison as a sentence.

    Examples are 'b is better than a by 0.012 bits per byte (95% interval 0.008 to 0.016), p =
    0.0004, 412 documents' and 'b vs a is inconclusive: p = 0.21, needs p < 0.05; difference ...'.

    Args:
      run: name of the run.
      baseline: name of the baseline.
      verdict: the verdict.
      effect: the difference.
      n_items: items that both have.
      suite: names the unit and the items.
    """
    unit = suite.unit or (f'{suite.score} per {suite.weight}' if suite.weight else suite.score)
    sample = f'{n_items} {suite.item_noun}'
    if math.isnan(effect.p):
        reason = f'a score is not finite, {sample}'
        if n_items < MIN_ITEMS:
            reason = f'one item has no interval; difference {effect.value:+.3g} {unit}'
        return f'{run} vs {baseline} is {format_outcome(verdict)}: {reason}'
    sign = -1 if effect.value < 0 and verdict != WITHIN_NOISE else 1
    form = '+.3g' if verdict == WITHIN_NOISE else '.3g'
    low, high = sorted((sign * effect.low, sign * effect.high))
    size = (
        f'{sign * effect.value:{form}} {unit} '
        f'({CONFIDENCE:.0%} interval {low:{form}} to {high:{form}})'
    )
    if verdict == WITHIN_NOISE:
        return (
            f'{run} vs {baseline} is {format_outcome(verdict)}: p = {effect.p:.2g}, needs p < '
            f'{1 - CONFIDENCE:.2g}; difference {size}, {sample}'
        )
    return f'{run} is {verdict} than {baseline} by {size}, p = {effect.p:.2g}, {sample}'


def print_parameters(baseline: Target, target: Target, say: Say) -> None:
    """Prints the settings of parameters that differ between two runs, by group.

    Args:
      baseline: the first run.
      target: the other run.
      say: receives a line if a run has no parameter table.
    """
    folders = [target.folder.parent for target in (baseline, target)]
    base_table, table = map(read_parameters, folders)
    if not base_table or not table:
        folder = folders[1] if base_table else folders[0]
        say(f'NOTE: parameters are not compared, because {folder} has no {PARAMETER_ROWS}')
        return
    base_fields, fields = (flatten(Run(folder).read_recipe()) for folder in folders)
    if rows := compare_parameters(base_table, table, base_fields, fields):
        print(f'\nparameters of {target.run} that differ from {baseline.run}:')
        print(format_table(rows), end='')
        if field := next((row['note'] for row in rows if row['note'].startswith(INHERITS)), ''):
            setting = field.rpartition('.')[2]
            print(
                f'Groups inherit optim.{setting} unless they have their own, such as '
                f'optim.others_{setting}.'
            )


def report_sweeps(runs: Sequence[str], say: Say) -> bool:
    """Prints which verdicts of the first sweep hold in the others, and draws them with --figure.

    Args:
      runs: the sweeps.
      say: receives a note for each sweep that is not finished.

    Returns:
      Whether all of `runs` are sweeps; nothing is printed otherwise.
    """
    from eval.charts import save_chart
    from eval.report.transfer import compare_sweeps, draw_differences

    comparison = compare_sweeps(runs)
    if comparison is None:
        return False
    for name, gap in zip(comparison.names, comparison.gaps, strict=True):
        if gap:
            say(f'NOTE: {name} is not finished: {gap}')
    lines = comparison.format_lines()
    print('\n'.join(lines))
    if flags.FLAGS.figure:
        print(save_chart(draw_differences(comparison), Path(flags.FLAGS.figure)))
    if flags.FLAGS.json:
        variants = [
            {'name': row.name, 'findings': [f and dataclasses.asdict(f) for f in row.findings]}
            for row in comparison.rows
        ]
        print_json({'sweeps': comparison.names, 'variants': variants, 'lines': lines[1:]})
    return True


def refuse_figure(compared: str) -> None:
    """Raises ValueError if --figure is set. `compared` says which runs have no such figure."""
    if flags.FLAGS.figure:
        raise ValueError(
            f'--figure={flags.FLAGS.figure} draws the differences in several sweeps; got '
            f'{compared}. Leave it out, or draw one sweep with python -m eval.report --figures=DIR'
        )


def main(argv: list[str]) -> None:
    runs, say = [*map(expand_home, argv[1:])], functools.partial(print, file=sys.stderr)
    requests = read_suites(flags.FLAGS.suite, read_option_flags())
    if len(runs) == 1:
        refuse_figure('one')
    arm_verdicts = compare_arms(runs[0], say) if len(runs) == 1 else None
    if arm_verdicts is not None:
        print('\n'.join(arm_verdicts))
        if flags.FLAGS.json:
            print_json({'runs': runs, 'verdicts': arm_verdicts})
        return
    if len(runs) > 1 and report_sweeps(runs, say):
        return
    if len(runs) < 2:
        raise ValueError(
            'name at least two runs: python -m eval.compare BASELINE RUN [RUN ...], or one sweep '
            'with config.tune'
        )
    refuse_figure('runs')
    targets = [find_target(run, say) for run in runs]
    comparisons = []
    for request in requests:
        for comparison in compare(targets, request, say, flags.FLAGS.again):
            print(comparison.line)
            outcome = {'verdict': format_outcome(comparison.verdict)}
            comparisons.append(
                {'suite': request.label, **dataclasses.asdict(comparison), **outcome}
            )
    for target in targets[1:]:
        print_parameters(targets[0], target, say)
    if flags.FLAGS.json:
        print_json({'runs': runs, 'comparisons': comparisons})


if __name__ == '__main__':
    define_suites(DEFAULT)
    flags.DEFINE_bool('again', False, 'Recompute stored results.')
    text = 'Chart of several sweeps to write: a .png or .svg file.'
    define_path('figure', None, text, is_local=True, endings=('.png', '.svg'))
    define_json()
    run_program(main, parse_suite_flags)
