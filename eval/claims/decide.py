"""Verdicts: conditions hold, fail or are undecided by their evidence, and so are claims. A claim
that is withdrawn has no verdict, whatever its evidence says.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from eval.claims.claim import Claim, Condition
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED, Estimate
from eval.claims.evidence import OPEN, OUT_OF_REACH, STALE, Evidence
from lm.study.statistics import CONFIDENCE, MOST_SEEDS, seeds_needed, student

REPRODUCED, NOT_REPRODUCED, IN_PART = 'reproduced', 'not reproduced', 'in part'
WITHDRAWN = 'withdrawn'
STANDING = (REPRODUCED, IN_PART, NOT_REPRODUCED, UNDECIDED, OUT_OF_REACH, STALE, OPEN)
VERDICTS = (*STANDING, WITHDRAWN)
UNFINISHED = (STALE, OPEN, OUT_OF_REACH)  # states of evidence that decide nothing


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
    """A claim and its verdict. why: of UNFINISHED and WITHDRAWN ones. evidence: by the claim's
    names for it.
    """

    claim: Claim
    verdict: str
    why: str
    conditions: Sequence[Judged]
    evidence: Mapping[str, Evidence]

    @property
    def trains(self) -> bool:
        """Whether any of the evidence has trained weights: other claims are computed."""
        return any(one.trains for one in self.evidence.values())


def decide(claim: Claim, evidence: Mapping[str, Evidence]) -> Decided:
    """Returns what is known of a claim. evidence: by what the claim's STUDIES say. Raises
    ValueError where a condition names no arm, or no value.
    """
    own = {name: evidence[which] for name, which in claim.studies.items()}
    judged = [_judged(one, own[one.study]) for one in claim.conditions]
    if len(own) > 1:  # a condition is told apart from that of another study
        judged = [
            dataclasses.replace(one, words=f'{one.condition.study}: {one.words}') for one in judged
        ]
    return conclude(claim, judged, own)


def conclude(claim: Claim, judged: Sequence[Judged], evidence: Mapping[str, Evidence]) -> Decided:
    """Returns a claim with the verdict of its conditions and of the states of its evidence, by the
    claim's names for it; WITHDRAWN where its file says so.
    """
    if claim.withdrawn:
        return Decided(claim, WITHDRAWN, claim.withdrawn, judged, evidence)
    for state in UNFINISHED:
        why = [one.why for one in evidence.values() if one.state == state]
        if why:
            return Decided(claim, state, why[0], judged, evidence)
    return Decided(claim, verdict([one.said for one in judged]), '', judged, evidence)


def verdict(said: Sequence[str]) -> str:
    """Returns the verdict on a claim that says that all its conditions hold; UNDECIDED where one
    that is undecided can still change it.
    """
    if HOLDS in said and FAILS in said:
        return IN_PART
    if UNDECIDED in said:
        return UNDECIDED
    return NOT_REPRODUCED if FAILS in said else REPRODUCED


def _judged(condition: Condition, own: Evidence) -> Judged:
    quantity, unit = own.words(condition.quantity, condition.of)
    found = own.estimate(condition.quantity, condition.of)
    said = found.said(condition.low, condition.high) if found else UNDECIDED
    words = f'{quantity} {condition.range_words} {unit}'.strip()
    return Judged(condition, words, said, found, seeds_to_tell(found, condition, said))


def seeds_to_tell(found: Estimate | None, condition: Condition, said: str) -> int | None:
    """Returns the seeds that tell a number that is where it seems to be from the nearest end of the
    range, with a chance of 80%; None where no number of them would, as what tuning left open is
    wider, and where that is not known.
    """
    if said != UNDECIDED or found is None or not found.deviation > 0:
        return None
    ends = {abs(found.value - end): end for end in (condition.low, condition.high)}
    nearest, end = min(ends.items())
    half = student((1 + CONFIDENCE) / 2, found.n - 1) * found.deviation / math.sqrt(found.n)
    side = found.value - found.low if end < found.value else found.high - found.value
    effect = nearest - max(side - half, 0.0)
    needed = seeds_needed(effect, found.deviation) if effect > 0 else MOST_SEEDS + 1
    return needed if needed <= MOST_SEEDS else None
