"""The record of a board; pages can be made from it without the runs.

`--pages` writes board.json beside the pages, and `--record=board.json` reads evidence from it that
a workdir lacks. It holds estimates and outcomes of conditions, but no verdicts: these follow from
the outcomes and from the claim's file, which may have been withdrawn since.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import Claim, Condition
from eval.claims.decide import (
    ConditionResult,
    Decision,
    SettingResult,
    conclude,
    count_needed_seeds,
    evaluate_setting,
)
from eval.claims.estimates import UNDECIDED, Estimate
from eval.claims.evidence import (
    CHANGED,
    MEASURE,
    NO_RUNS,
    NOT_COMPUTED,
    OPEN,
    OUT_OF_REACH,
    STALE,
    Evidence,
    MeasureEvidence,
    StudyEvidence,
    measure_digest,
)
from eval.claims.measures.rows import MEASURES
from eval.claims.register import Entries
from lm.storage.files import read_json

FILE = 'board.json'
EVIDENCE_FIELDS = ('state', 'why', 'runs', 'core_seconds', 'command', 'trains')


@dataclasses.dataclass(frozen=True)
class RecordedEvidence:
    """Evidence of a study or a measure on a board.

    `StudyEvidence` and `MeasureEvidence` have the same fields. plan_command: of a study out of
    reach. code: the digest of a measure when it was recorded.
    """

    name: str
    state: str
    why: str
    runs: int
    core_seconds: float
    command: Sequence[str]
    trains: bool
    plan_command: Sequence[str] = ()
    code: str = ''


def board_record(decisions: Sequence[Decision], entries: Entries) -> dict[str, Any]:
    """Returns the record of a board, for `write_json`."""
    evidence = {study.name: study for decision in decisions for study in decision.evidence.values()}
    return {
        'evidence': {name: _evidence_record(study) for name, study in sorted(evidence.items())},
        'claims': {
            decision.claim.name: {
                'asked': decision.claim.digest,  # these keys are in published files
                'entry': entries.get(decision.claim.name),
                'conditions': [_condition_record(condition) for condition in decision.conditions],
                'guards': [
                    _guard_record(decision.claim, guard) for guard in _list_guards(decision)
                ],
            }
            for decision in sorted(decisions, key=lambda decision: decision.claim.name)
        },
    }


def _list_guards(decision: Decision) -> Iterator[ConditionResult]:
    """Yields the outcomes of controls, broken methods and settings."""
    yield from (*decision.control, *decision.twin)
    for repeated in decision.settings:
        yield from (*repeated.conditions, *repeated.control, *repeated.twin)


def _evidence_record(evidence: Evidence | RecordedEvidence) -> dict[str, Any]:
    plan, code = {}, {}
    if not isinstance(evidence, MeasureEvidence) and evidence.state == OUT_OF_REACH:
        plan = {'plan_command': evidence.plan_command}
    if not isinstance(evidence, StudyEvidence) and evidence.name.startswith(MEASURE):
        code = {'code': evidence.code}
    return {name: getattr(evidence, name) for name in EVIDENCE_FIELDS} | plan | code


def _condition_record(condition: ConditionResult) -> dict[str, Any]:
    numbers = condition.estimate and {
        name: str(value) if isinstance(value, float) else value  # JSON has no inf, and no nan
        for name, value in dataclasses.asdict(condition.estimate).items()
    }
    return {
        'words': condition.text,
        'said': condition.outcome,
        'estimate': numbers,
        'seeds': condition.seeds,
    }


def read_record(path: Path, claims: Sequence[Claim]) -> tuple[dict[str, Decision], Entries]:
    """Returns the claims that a record decides.

    A claim is left out if its conditions or studies have changed since. Its entry is kept.

    Returns:
      ({name: decision}, entries by claim name).

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is not the record of a board.
    """
    record = read_json(path)
    if record.keys() != {'evidence', 'claims'}:
        raise ValueError(
            f'{path} must be a {FILE} that eval.claims --pages wrote, but its keys are '
            f'{", ".join(record)}. Set --record to such a file.'
        )
    evidence = {name: _parse_evidence(name, fields) for name, fields in record['evidence'].items()}
    estimates = _collect_estimates(record['claims'], claims)
    decisions, entries = {}, {}
    for claim in claims:
        row = record['claims'].get(claim.name)
        if row is None:
            continue
        if row['entry']:
            entries[claim.name] = row['entry']
        if row['asked'] != claim.digest:
            continue
        conditions = [
            _read_condition(condition, saved)
            for condition, saved in zip(claim.conditions, row['conditions'], strict=True)
        ]
        by_name = {
            name: evidence.get(study) or _unread_study(study)
            for name, study in claim.studies.items()
        }
        read_guards = functools.partial(_read_guards, claim, estimates)
        settings = [evaluate_setting(setting, read_guards) for setting in claim.settings]
        control, twin = read_guards(claim.control), read_guards(claim.twin)
        decisions[claim.name] = conclude(claim, conditions, by_name, control, twin, settings)
    return decisions, entries


def _read_condition(condition: Condition, saved: Mapping[str, Any]) -> ConditionResult:
    estimate, outcome = _parse_estimate(saved['estimate']), saved['said']
    seeds = saved['seeds']  # of older records, which have no deviation
    if estimate and not math.isnan(estimate.deviation):
        seeds = count_needed_seeds(estimate, condition, outcome)
    return ConditionResult(condition, saved['words'], outcome, estimate, seeds)


def _unread_study(study: str) -> RecordedEvidence:
    """Returns the evidence of a study that a claim has named since it was recorded."""
    return RecordedEvidence(study, OPEN, NO_RUNS, 0, 0.0, (), trains=True)


def merge_decisions(recorded: Decision, decision: Decision, studies: Collection[str]) -> Decision:
    """Returns a claim decided by a record, except for the named studies.

    Args:
      recorded: the decision by the record.
      decision: the decision by a workdir.
      studies: names of the studies, in the claim, whose records in the workdir count.
    """

    def merge(
        saved: Sequence[ConditionResult], trained: Sequence[ConditionResult]
    ) -> list[ConditionResult]:
        return [
            measured if measured.condition.study in studies else recalled
            for recalled, measured in zip(saved, trained, strict=True)
        ]

    settings = [
        SettingResult(
            saved.setting,
            merge(saved.conditions, trained.conditions),
            merge(saved.control, trained.control),
            merge(saved.twin, trained.twin),
        )
        for saved, trained in zip(recorded.settings, decision.settings, strict=True)
    ]
    evidence = {
        name: (decision if name in studies else recorded).evidence[name]
        for name in recorded.evidence
    }
    return conclude(
        decision.claim,
        merge(recorded.conditions, decision.conditions),
        evidence,
        merge(recorded.control, decision.control),
        merge(recorded.twin, decision.twin),
        settings,
    )


def _quantity_key(claim: Claim, condition: Condition) -> str:
    """Returns a key of a quantity, which other claims on the same study may have too."""
    study = claim.studies[condition.study]
    return json.dumps([study, condition.quantity, condition.of], sort_keys=True)


def _guard_record(claim: Claim, guard: ConditionResult) -> dict[str, Any]:
    key = _quantity_key(claim, guard.condition)
    return {'quantity': key, 'estimate': _condition_record(guard)['estimate']}


def _collect_estimates(
    rows: Mapping[str, Any], claims: Sequence[Claim]
) -> dict[str, Estimate | None]:
    """Returns the recorded estimates of the quantities of all claims, by `_quantity_key`.

    Where a guard and a condition have the same quantity, that of the condition counts: a guard may
    have been recorded before the quantity was measured.
    """
    current = [
        (claim, row)
        for claim in claims
        if (row := rows.get(claim.name)) and row['asked'] == claim.digest
    ]
    estimates = {
        guard['quantity']: _parse_estimate(guard['estimate'])
        for _, row in current
        for guard in row.get('guards', ())  # older files have none
    }
    return estimates | {
        _quantity_key(claim, condition): _parse_estimate(saved['estimate'])
        for claim, row in current
        for condition, saved in zip(claim.conditions, row['conditions'], strict=True)
    }


def _read_guards(
    claim: Claim, estimates: Mapping[str, Estimate | None], guards: Sequence[Condition]
) -> list[ConditionResult]:
    """Returns the outcomes of all but the claim's own conditions, by the recorded quantities.

    Args:
      claim: the claim that has the guards.
      estimates: by `_quantity_key`.
      guards: conditions of its controls, broken methods and settings.
    """
    outcomes = []
    for condition in guards:
        estimate = estimates.get(_quantity_key(claim, condition))
        outcome = estimate.outcome(condition.low, condition.high) if estimate else UNDECIDED
        text = f'{condition.label} {condition.range_text}'
        outcomes += [ConditionResult(condition, text, outcome, estimate, None)]
    return outcomes


def _parse_evidence(name: str, fields: Mapping[str, Any]) -> RecordedEvidence:
    """Reads the evidence of a record; a measure is STALE if its code has changed since."""
    evidence = RecordedEvidence(name, **fields)
    short = name.removeprefix(MEASURE)
    if evidence.state == OPEN and not evidence.runs:  # the record may have an older text
        why = NO_RUNS if short == name else NOT_COMPUTED
        return dataclasses.replace(evidence, why=why)
    if (
        short == name
        or evidence.state
        or (short in MEASURES and evidence.code == measure_digest(short))
    ):
        return evidence
    return dataclasses.replace(evidence, state=STALE, why=CHANGED.format(name))


def _parse_estimate(numbers: Mapping[str, Any] | None) -> Estimate | None:
    if numbers is None:
        return None
    fields: dict[str, Any] = {n: x if n == 'n' else float(x) for n, x in numbers.items()}
    return Estimate(**fields)
