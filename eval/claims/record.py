"""The record of a board: what its pages are made of, so that they can be made without the runs.

`--pages` writes board.json beside the pages, and `--record=board.json` takes from it what a workdir
has no records of. It holds estimates and what they say of each condition. The verdict is not in it:
it follows from these, and from the claim's file, which may have withdrawn it since.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import Claim
from eval.claims.decide import ConditionResult, Decision, conclude
from eval.claims.estimates import Estimate
from eval.claims.evidence import CHANGED, MEASURE, OUT_OF_REACH, STALE, Evidence, measure_digest
from eval.claims.measures.rows import MEASURES
from eval.claims.register import Entries
from lm.storage.files import read_json

FILE = 'board.json'
EVIDENCE_FIELDS = ('state', 'why', 'runs', 'core_seconds', 'command', 'trains')


@dataclasses.dataclass(frozen=True)
class RecordedEvidence:
    """Evidence of a study or a measure as a board had it. Fields: as of `StudyEvidence` and
    `MeasureEvidence`; plan_command: of what is out of reach. code: of a measure, its digest then.
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
    evidence = {one.name: one for each in decisions for one in each.evidence.values()}
    return {
        'evidence': {name: _evidence_record(one) for name, one in sorted(evidence.items())},
        'claims': {
            one.claim.name: {
                'asked': one.claim.digest,
                'entry': entries.get(one.claim.name),
                'conditions': [_condition_record(each) for each in one.conditions],
            }
            for one in sorted(decisions, key=lambda one: one.claim.name)
        },
    }


def _evidence_record(evidence: Evidence | RecordedEvidence) -> dict[str, Any]:
    plan = {'plan_command': evidence.plan_command} if evidence.state == OUT_OF_REACH else {}
    code = {'code': evidence.current_digest} if evidence.name.startswith(MEASURE) else {}
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
    """Returns ({name: the claim with its verdict}, entries) of the claims that a record has. One
    whose conditions or studies have changed since is not among them.

    Raises OSError or ValueError for a file that cannot be read, or is no record of a board.
    """
    record = read_json(path)
    if record.keys() != {'evidence', 'claims'}:
        raise ValueError(f'{path} is no {FILE} of eval.claims --pages; it has {", ".join(record)}')
    evidence = {name: _parse_evidence(name, fields) for name, fields in record['evidence'].items()}
    decided, entries = {}, {}
    for claim in claims:
        row = record['claims'].get(claim.name)
        if row is None or row['asked'] != claim.digest:
            continue
        judged = [
            ConditionResult(
                condition, one['words'], one['said'], _parse_estimate(one['estimate']), one['seeds']
            )
            for condition, one in zip(claim.conditions, row['conditions'], strict=True)
        ]
        of_claim = {name: evidence[which] for name, which in claim.studies.items()}
        decided[claim.name] = conclude(claim, judged, of_claim)
        if row['entry']:
            entries[claim.name] = row['entry']
    return decided, entries


def _parse_evidence(name: str, fields: Mapping[str, Any]) -> RecordedEvidence:
    """Reads one back; a measure that is computed by other code now is STALE."""
    found = RecordedEvidence(name, **fields)
    short = name.removeprefix(MEASURE)
    if short == name or found.state or (short in MEASURES and found.code == measure_digest(short)):
        return found
    return dataclasses.replace(found, state=STALE, why=CHANGED.format(name))


def _parse_estimate(numbers: Mapping[str, Any] | None) -> Estimate | None:
    if numbers is None:
        return None
    return Estimate(**{name: x if name == 'n' else float(x) for name, x in numbers.items()})
