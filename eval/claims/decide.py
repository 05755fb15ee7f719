"""Verdicts: conditions hold, fail or are undecided by their evidence, and so are claims. A claim
that is withdrawn has no verdict, whatever its evidence says.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from eval.claims.claim import Claim, Condition
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED, Estimate
from eval.claims.evidence import OPEN, OUT_OF_REACH, STALE, Evidence
from lm.study.statistics import CONFIDENCE, MAX_SEEDS, seeds_needed, t_quantile

REPRODUCED, NOT_REPRODUCED, IN_PART = 'reproduced', 'not reproduced', 'in part'
WITHDRAWN = 'withdrawn'
STANDING = (REPRODUCED, IN_PART, NOT_REPRODUCED, UNDECIDED, OUT_OF_REACH, STALE, OPEN)
VERDICTS = (*STANDING, WITHDRAWN)
UNFINISHED = (STALE, OPEN, OUT_OF_REACH)  # states of evidence that decide nothing


@dataclasses.dataclass(frozen=True)
class ConditionResult:
    """A condition and what is known of it. seeds: which would decide it where it is undecided; None
    where no number of them would, or it is not known.
    """

    condition: Condition
    text: str
    outcome: str
    estimate: Estimate | None
    seeds: int | None


@dataclasses.dataclass(frozen=True)
class Decision:
    """A claim and its verdict. why: of UNFINISHED and WITHDRAWN ones. evidence: by the claim's
    names for it.
    """

    claim: Claim
    verdict: str
    why: str
    conditions: Sequence[ConditionResult]
    evidence: Mapping[str, Evidence]

    @property
    def trains(self) -> bool:
        """Whether any of the evidence has trained weights: other claims are computed."""
        return any(one.trains for one in self.evidence.values())


def decide(claim: Claim, evidence: Mapping[str, Evidence]) -> Decision:
    """Returns what is known of a claim. evidence: by what the claim's STUDIES say. Raises
    ValueError where a condition names no arm, or no value.
    """
    own = {name: evidence[which] for name, which in claim.studies.items()}
    judged = [_decide_condition(one, own[one.study]) for one in claim.conditions]
    if len(own) > 1:  # a condition is told apart from that of another study
        judged = [
            dataclasses.replace(one, text=f'{one.condition.study}: {one.text}') for one in judged
        ]
    return conclude(claim, judged, own)


def conclude(
    claim: Claim, conditions: Sequence[ConditionResult], evidence: Mapping[str, Evidence]
) -> Decision:
    """Returns a claim with the verdict of its conditions and of the states of its evidence, by the
    claim's names for it; WITHDRAWN where its file says so.
    """
    if claim.withdrawn:
        return Decision(claim, WITHDRAWN, claim.withdrawn, conditions, evidence)
    for state in UNFINISHED:
        why = [one.why for one in evidence.values() if one.state == state]
        if why:
            return Decision(claim, state, why[0], conditions, evidence)
    return Decision(
        claim, combine_outcomes([one.outcome for one in conditions]), '', conditions, evidence
    )


def combine_outcomes(outcomes: Sequence[str]) -> str:
    """Returns the verdict on a claim that says that all its conditions hold; UNDECIDED where one
    that is undecided can still change it.
    """
    if HOLDS in outcomes and FAILS in outcomes:
        return IN_PART
    if UNDECIDED in outcomes:
        return UNDECIDED
    return NOT_REPRODUCED if FAILS in outcomes else REPRODUCED


def _decide_condition(condition: Condition, evidence: Evidence) -> ConditionResult:
    quantity, unit = evidence.describe(condition.quantity, condition.of)
    found = evidence.estimate(condition.quantity, condition.of)
    said = found.outcome(condition.low, condition.high) if found else UNDECIDED
    words = f'{quantity} {condition.range_text} {unit}'.strip()
    return ConditionResult(
        condition, words, said, found, count_needed_seeds(found, condition, said)
    )


def count_needed_seeds(estimate: Estimate | None, condition: Condition, outcome: str) -> int | None:
    """Returns the seeds that tell a number that is where it seems to be from the nearest end of the
    range, with a chance of 80%; None where no number of them would, as what tuning left open is
    wider, and where that is not known.
    """
    if outcome != UNDECIDED or estimate is None or not estimate.deviation > 0:
        return None
    ends = {abs(estimate.value - end): end for end in (condition.low, condition.high)}
    nearest, end = min(ends.items())
    half = (
        t_quantile((1 + CONFIDENCE) / 2, estimate.n - 1)
        * estimate.deviation
        / math.sqrt(estimate.n)
    )
    side = estimate.value - estimate.low if end < estimate.value else estimate.high - estimate.value
    effect = nearest - max(side - half, 0.0)
    needed = seeds_needed(effect, estimate.deviation) if effect > 0 else MAX_SEEDS + 1
    return needed if needed <= MAX_SEEDS else None
