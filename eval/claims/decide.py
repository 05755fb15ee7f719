"""What records say of a claim: each condition holds, fails or is undecided; with them the claim."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import Claim, Condition
from eval.claims.quantities import QUANTITIES, Estimate
from eval.tables.ablation import Ablation, progress, read_ablation
from eval.tables.results import gather, read_sweep
from lm.config.resolve import resolve, to_dict
from lm.launch.command import ConfigParser
from lm.record.workdir import SWEEP
from lm.sweep.arms import Ablation as Arms
from lm.sweep.cells import split_sweep
from lm.tuning.verdicts import MOST_SEEDS, seeds_for

HOLDS, FAILS, UNDECIDED = 'holds', 'fails', 'undecided'
REPRODUCED, NOT_REPRODUCED, IN_PART = 'reproduced', 'not reproduced', 'in part'
OPEN, STALE = 'open', 'stale'
VERDICTS = (REPRODUCED, IN_PART, NOT_REPRODUCED, UNDECIDED, STALE, OPEN)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study of claims. state: OPEN, STALE or '', ended. why: of a state, in words. ablation: None
    before its first run.
    """

    config: str
    folder: Path
    arms: Arms
    state: str
    why: str
    ablation: Ablation | None

    @property
    def runs(self) -> int:
        """Returns how many runs have ended."""
        every = range(len(self.arms.arms)) if self.ablation else ()
        return sum(sum(self.ablation.runs(i)) for i in every)

    @property
    def core_seconds(self) -> float:
        """Returns the seconds that its runs took, times the cores of each's machine."""
        if self.ablation is None:
            return 0.0
        records = [record for arm in self.ablation.arms for record in arm.records.values()]
        return sum(
            (r['wall_sec'] or 0.0) / (r['side_by_side'] or 1) * cores_of(r['device'])
            for r in records
        )

    def arm(self, changes: Mapping[str, Any] | None) -> int:
        """Returns the arm that has these changes among its own and no more than the others that
        have them; 0, the baseline, for None. Raises ValueError where none or several do.
        """
        if changes is None:
            return 0
        every = [one.changes for one in self.arms.arms if one.is_judged]
        found = [i for i, own in enumerate(every) if changes.items() <= own.items()]
        least = min((len(every[i]) for i in found), default=0)
        found = [i for i in found if len(every[i]) == least]
        if len(found) != 1:
            raise ValueError(f'{self.config} has {len(found)} arms with {dict(changes)}; name one')
        return found[0]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A condition and what is known of it. seeds: which would decide it where it is undecided; None
    where no number of them would, or it is not known.
    """

    condition: Condition
    words: str
    said: str
    estimate: Estimate | None
    seeds: int | None


@dataclasses.dataclass(frozen=True)
class Decided:
    """A claim and its verdict. why: of OPEN and STALE."""

    claim: Claim
    verdict: str
    why: str
    conditions: Sequence[Judged]
    studies: Mapping[str, Study]

    @property
    def runs(self) -> int:
        return sum(study.runs for study in self.studies.values())


def cores_of(device: str | None) -> int:
    """Returns 2 of '2-core x86_64 CPU', and 8 of '8 x TPU v5e', whose devices are counted."""
    known = re.match(r'(\d+)(-core| x )', device or '')
    return int(known[1]) if known else 1


def folder_of(workdir: Path, config: str) -> Path:
    """Returns the folder of a study: 'configs/studies/tuned.py:half' has WORKDIR/tuned-half."""
    path, _, given = config.partition(':')
    return workdir / '-'.join(filter(None, (Path(path).stem, given)))


def open_study(config: str, workdir: Path) -> Study:
    """Reads a study's config, and the records it has. Raises ValueError for one without
    config.tune, and where a record cannot be read.
    """
    base, sweep, tune = split_sweep(ConfigParser('config').parse(config))
    if tune is None:
        raise ValueError(f'{config} has no config.tune, so that its arms have no verdicts')
    arms, folder = Arms(base, sweep, tune), folder_of(workdir, config)
    if not (folder / SWEEP).exists():
        return Study(config, folder, arms, OPEN, 'no run has begun', None)
    record = read_sweep(folder)
    ablation = read_ablation(record, gather(folder))
    going = progress(ablation) if ablation else ''
    state, why = (OPEN, going) if going else ('', '')
    if ablation is None or _asked(record) != (to_dict(resolve(base)), _plain(arms.record())):
        state, why = STALE, f'{config} has changed since its runs in {folder}'
        return Study(config, folder, arms, state, why, None)
    return Study(config, folder, arms, state, why, ablation)


def _asked(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record['base'], _plain(record['tune'])


def _plain(tune: Mapping[str, Any]) -> Any:
    """What makes a study another one: as it is stored, without the version of the search."""
    return json.loads(json.dumps({k: v for k, v in tune.items() if k != 'search_version'}))


def decide(claim: Claim, studies: Mapping[str, Study]) -> Decided:
    """Returns what is known of a claim. studies: by config. Raises ValueError where a condition
    names no arm.
    """
    own = {name: studies[config] for name, config in claim.studies.items()}
    judged = [_judged(one, own[one.study]) for one in claim.conditions]
    states = [study.state for study in own.values()]
    for state in (STALE, OPEN):
        if state in states:
            why = next(study.why for study in own.values() if study.state == state)
            return Decided(claim, state, why, judged, own)
    return Decided(claim, verdict([one.said for one in judged]), '', judged, own)


def verdict(said: Sequence[str]) -> str:
    """Returns the verdict on a claim that says that all its conditions hold."""
    if UNDECIDED in said:
        return UNDECIDED
    if FAILS not in said:
        return REPRODUCED
    return IN_PART if HOLDS in said else NOT_REPRODUCED


def _judged(condition: Condition, study: Study) -> Judged:
    arm, against = study.arm(condition.arm), study.arm(condition.against)
    names = [study.arms.arms[i].name for i in (arm, against)]
    words = condition.words(*names)
    if study.ablation is None:
        return Judged(condition, words, UNDECIDED, None, None)
    words = condition.words(*(study.ablation.arms[i].name for i in (arm, against)))
    found = QUANTITIES[condition.quantity].of(study.ablation, arm, against)
    said = said_of(found, condition.low, condition.high)
    return Judged(condition, words, said, found, seeds_needed(found, condition, said))


def said_of(found: Estimate | None, low: float, high: float) -> str:
    """Returns HOLDS where all of an interval lies in the range, FAILS where none of it does."""
    if found is None or math.isnan(found.value):
        return UNDECIDED
    if low <= found.low and found.high <= high:
        return HOLDS
    if found.low > high or found.high < low:
        return FAILS
    return UNDECIDED


def seeds_needed(found: Estimate | None, condition: Condition, said: str) -> int | None:
    """Returns the seeds that tell a number that is where it seems to be from the nearest end of the
    range, with a chance of 80%; None where that is not known.
    """
    if said != UNDECIDED or found is None or not math.isfinite(found.deviation):
        return None
    nearest = min(abs(found.value - end) for end in (condition.low, condition.high))
    needed = seeds_for(nearest, found.deviation)
    return needed if needed <= MOST_SEEDS else None
