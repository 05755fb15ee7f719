"""Verdicts of one sweep that hold in others, such as those of larger models.

Variants of several sweeps correspond if they have the same values in all fields that any of the
sweeps varies, except seeds and learning rates, which change with the size of a model.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lm.record.names import FINAL
from lm.study.plan.settings import SEEDS, select_metric
from lm.study.statistics import (
    BETTER,
    ONE_SEED,
    UNDECIDED,
    WITHIN_NOISE,
    WORSE,
    format_outcome,
)
from lm.study.tables.ablation import (
    BASELINE,
    FAILED,
    WAITS,
    arm_results,
    describe_progress,
    read_ablation,
)
from lm.study.tables.columns import columns
from lm.study.tables.comparison import compare
from lm.study.tables.results import Record

RATES = r', \w+_lr [^,]+'  # in the name of a variant
HOLDS, REVERSED, OPEN = 'hold', 'reversed', 'not decided'
Key = tuple[tuple[str, Any], ...]  # columns and values of a variant


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict of a sweep on a variant.

    Attributes:
      name: name of the variant in its sweep.
      outcome: BETTER or WORSE than the baseline, UNDECIDED, BASELINE, ONE_SEED, FAILED or WAITS.
      difference: mean difference in loss from the baseline; nan without one.
      low: lower end of its interval, at the level of the sweep's verdicts.
      high: upper end of the same interval.
      seeds: seeds of the difference.
    """

    name: str
    outcome: str
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0

    @property
    def is_decided(self) -> bool:
        return self.outcome in (BETTER, WORSE)

    def __str__(self) -> str:
        if math.isnan(self.difference):
            return self.outcome
        return f'{self.difference:+.3f} {format_outcome(self.outcome)}'


@dataclasses.dataclass(frozen=True)
class VariantFindings:
    """A variant and the findings of several sweeps about it; None where a sweep lacks it."""

    name: str
    findings: tuple[Finding | None, ...]


def align_findings(
    sweeps: Sequence[Mapping[str, Any]], records: Sequence[Sequence[Record]]
) -> list[VariantFindings]:
    """Returns the findings of several sweeps by variant, in the order of the first sweep.

    Args:
      sweeps: each sweep's sweep.json.
      records: each sweep's records.

    Returns:
      A row for each variant, the baseline first.

    Raises:
      ValueError: if the losses have different units or the baselines differ, or if two variants of
        a sweep differ in seeds and learning rates only.
    """
    if len({find_metric(sweep) for sweep in sweeps}) > 1:
        raise ValueError(
            'the sweeps have losses in different units, since only some of them vary the text or '
            'the tokenizer; compare sweeps that vary the same fields'
        )
    paths = dict.fromkeys(path for sweep in sweeps for path in sweep['axes'])
    names = [columns()[path] for path in paths if path not in SEEDS and not _is_rate(path)]
    by_sweep = [
        _list_findings(sweep, sweep_records, names)
        for sweep, sweep_records in zip(sweeps, records, strict=True)
    ]
    baselines = [next(iter(findings), ()) for findings in by_sweep]
    for baseline in baselines[1:]:
        if baseline != baselines[0]:
            first, second = (
                ', '.join(f'{column} {value}' for column, value in set(key) - set(removed))
                for key, removed in ((baselines[0], baseline), (baseline, baselines[0]))
            )
            raise ValueError(
                f'the sweeps have different baselines: {first or "none"} and {second or "none"}. '
                'Compare sweeps with the same first variant'
            )
    keys = dict.fromkeys(key for findings in by_sweep for key in findings)
    rows = []
    for key in keys:
        findings = tuple(sweep_findings.get(key) for sweep_findings in by_sweep)
        name = next(finding.name for finding in findings if finding)
        rows.append(VariantFindings(re.sub(RATES, '', name), findings))
    return rows


def _is_rate(path: str) -> bool:
    return path.endswith(('.lr', '_lr'))


def find_metric(sweep: Mapping[str, Any]) -> str:
    """Returns the column with the losses of a sweep.json."""
    return sweep['tune']['metric'] if 'tune' in sweep else select_metric(sweep['axes'])


def describe_gaps(sweep: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Returns the progress of a sweep, '3 of 65 runs have ended'; '' at its end."""
    if ablation := read_ablation(sweep, records):
        return describe_progress(ablation)
    ended = sum(record['status'] in FINAL for record in records)
    return '' if ended == len(records) else f'{ended} of {len(records)} runs have ended'


def _list_findings(
    sweep: Mapping[str, Any], records: Sequence[Record], names: Sequence[str]
) -> dict[Key, Finding]:
    """Returns a sweep's findings by the values of the variant, the baseline first."""
    findings: dict[Key, Finding] = {}
    for variant_records, finding in _iterate_findings(sweep, records):
        key = tuple((name, variant_records[0][name]) for name in names)
        if key in findings:
            raise ValueError(
                f'{findings[key].name} and {finding.name} differ in learning rates or seeds only, '
                'which are left out where sweeps are compared. Compare them in one sweep'
            )
        findings[key] = finding
    return findings


def _iterate_findings(sweep: Mapping[str, Any], records: Sequence[Record]):
    """Yields (records, finding) of each variant that has records, the baseline first."""
    if ablation := read_ablation(sweep, records):
        for row in arm_results(ablation):
            if row.arm.is_judged and row.arm.records:
                verdict = row.verdict
                size = (verdict.difference, *verdict.look_interval, verdict.n) if verdict else ()
                yield [*row.arm.records.values()], Finding(row.arm.name, row.outcome, *size)
        return
    comparisons = compare(records, sweep)
    for c in sorted(comparisons, key=lambda c: not c.variant.is_baseline):
        if c.variant.is_baseline:
            yield c.variant.records, Finding(c.variant.name, BASELINE)
        elif c.diverged:
            yield c.variant.records, Finding(c.variant.name, FAILED)
        elif c.difference.n:
            outcome = UNDECIDED if c.verdict == WITHIN_NOISE else c.verdict
            mean, half = c.difference.mean, c.difference.half_width
            size = (mean, mean - half, mean + half, c.difference.n)
            yield c.variant.records, Finding(c.variant.name, outcome, *size)
        else:
            yield c.variant.records, Finding(c.variant.name, WAITS)


def describe_transfer(rows: Sequence[VariantFindings], names: Sequence[str]) -> list[str]:
    """Returns a sentence for each sweep after the first: how many verdicts of the first hold there.

    Args:
      rows: findings by variant.
      names: name of each sweep.

    Returns:
      Sentences such as 'Verdicts of small that hold in large: 6 of 8; reversed there: sigma; not
      decided there: muon.'
    """
    sentences = []
    for position in range(1, len(names)):
        by_fate = collections.defaultdict(list)
        for row in rows:
            first, finding = row.findings[0], row.findings[position]
            if first is None or not first.is_decided or finding is None:
                continue
            by_fate[_fate(first, finding)].append(row.name)
        n_decided, name = sum(map(len, by_fate.values())), names[position]
        parts = [
            f'Verdicts of {names[0]} that hold in {name}: {len(by_fate[HOLDS])} of {n_decided}'
        ]
        parts += [
            f'{fate} there: {", ".join(by_fate[fate])}'
            for fate in (REVERSED, OPEN)
            if by_fate[fate]
        ]
        sentences.append(f'{"; ".join(parts)}.')
        decided = [
            f'{row.name} ({finding.outcome})'
            for row in rows
            if (first := row.findings[0])
            and first.outcome in (UNDECIDED, ONE_SEED)
            and (finding := row.findings[position])
            and finding.is_decided
        ]
        if decided:
            sentences.append(f'Not decided in {names[0]}, but in {name}: {", ".join(decided)}.')
    return sentences


def _fate(first: Finding, finding: Finding) -> str:
    if not finding.is_decided:
        return OPEN
    return HOLDS if finding.outcome == first.outcome else REVERSED
