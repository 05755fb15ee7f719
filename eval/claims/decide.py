"""Verdicts: by its evidence a condition holds, fails or is undecided; claims follow from these.

A withdrawn claim has no verdict, whatever its evidence.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from eval.claims.claim import Claim, Condition, NuisanceSetting
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED, Estimate
from eval.claims.evidence import MEASURE, OPEN, OUT_OF_REACH, QUANTITIES, STALE, Evidence
from lm.study.statistics import CONFIDENCE, seeds_needed, t_quantile

if TYPE_CHECKING:  # record imports this module
    from eval.claims.record import RecordedEvidence

REPRODUCED, IN_PART, NOT_REPRODUCED = 'reproduced', 'partly reproduced', 'not reproduced'
INFEASIBLE, NOT_TESTED, WITHDRAWN = 'infeasible here', 'not yet tested', 'withdrawn'
NOT_VALID, NOT_CHECKED = 'not valid', 'not checked'
DEPENDS = 'setting-dependent'
# Verdicts for states of evidence that decide nothing; the states are stored in board.json.
UNFINISHED = {STALE: STALE, OPEN: NOT_TESTED, OUT_OF_REACH: INFEASIBLE}
DECIDED = (REPRODUCED, IN_PART, NOT_REPRODUCED)
# What a claim was tested on. Language models on text come first: they are what papers are about.
LANGUAGE_MODELS = 'language models on text'
OTHER_MODELS = 'small models of other data'
COMPUTATION = 'computation alone'
KINDS = (LANGUAGE_MODELS, OTHER_MODELS, COMPUTATION)
STANDING = (
    REPRODUCED,
    IN_PART,
    DEPENDS,
    NOT_REPRODUCED,
    UNDECIDED,
    NOT_VALID,
    NOT_CHECKED,
    INFEASIBLE,
    STALE,
    NOT_TESTED,
)
VERDICTS = (*STANDING, WITHDRAWN)

# What the conditions of a claim do, by its verdict.
OUTCOMES = {REPRODUCED: HOLDS, NOT_REPRODUCED: FAILS, IN_PART: 'holds in part'}

NORMAL_QUANTILE = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclasses.dataclass(frozen=True)
class ConditionResult:
    """A condition and its outcome.

    seeds: about how many would decide an undecided condition; None if no number would, or if the
    number is unknown.
    """

    condition: Condition
    text: str
    outcome: str
    estimate: Estimate | None
    seeds: int | None


@dataclasses.dataclass(frozen=True)
class SettingResult:
    """The outcomes of a claim's conditions, controls and broken methods in another setting."""

    setting: NuisanceSetting
    conditions: Sequence[ConditionResult]
    control: Sequence[ConditionResult]
    twin: Sequence[ConditionResult]

    @property
    def verdict(self) -> str:
        """The verdict by this setting alone.

        A difference that is found needs no control. Where a condition holds for arms that may be
        equal, the controls must hold, or a setting in which nothing matters would decide.
        """
        if not _is_measured(self.conditions):
            return NOT_TESTED
        may_be_equal = any(
            tested.outcome == HOLDS and tested.estimate.low <= 0 <= tested.estimate.high
            for tested in self.conditions
            if tested.estimate
        )
        if may_be_equal and not all(guard.outcome == HOLDS for guard in self.control):
            return NOT_VALID
        verdict = combine_outcomes([condition.outcome for condition in self.conditions])
        telling = _list_telling(self.twin, self.conditions)
        return NOT_VALID if _accepts_broken(telling, verdict) else verdict


@dataclasses.dataclass(frozen=True)
class Decision:
    """A claim and its verdict.

    why: the reason for unfinished, withdrawn and invalid verdicts. evidence: by the names that the
    claim gives its studies. control, twin: the results of the claim's guards. settings: the results
    at other values of nuisance factors.
    """

    claim: Claim
    verdict: str
    why: str
    conditions: Sequence[ConditionResult]
    evidence: Mapping[str, Evidence | RecordedEvidence]
    control: Sequence[ConditionResult] = ()
    twin: Sequence[ConditionResult] = ()
    settings: Sequence[SettingResult] = ()

    @property
    def kind(self) -> str:
        """One of KINDS: sweeps train language models on text, and measures anything else."""
        studies = self.evidence.values()
        if any(not study.name.startswith(MEASURE) for study in studies):
            return LANGUAGE_MODELS
        return OTHER_MODELS if any(study.trains for study in studies) else COMPUTATION

    @property
    def is_unfinished(self) -> bool:
        """Whether the evidence is missing, incomplete or stale."""
        return self.verdict in UNFINISHED.values()


def decide(claim: Claim, evidence: Mapping[str, Evidence]) -> Decision:
    """Returns the decision on a claim.

    Args:
      claim: the claim.
      evidence: evidence by study, named as in the claim's STUDIES.

    Raises:
      ValueError: if a condition names an unknown arm or value.
    """
    by_name = {name: evidence[study] for name, study in claim.studies.items()}

    def decide_conditions(group: Sequence[Condition]) -> list[ConditionResult]:
        return [_decide_condition(condition, by_name[condition.study]) for condition in group]

    conditions, control, twin = map(
        decide_conditions, (claim.conditions, claim.control, claim.twin)
    )
    settings = [evaluate_setting(setting, decide_conditions) for setting in claim.settings]
    if len(by_name) > 1:  # several studies may state a condition in the same words
        conditions = [
            dataclasses.replace(condition, text=f'{condition.condition.study}: {condition.text}')
            for condition in conditions
        ]
    return conclude(claim, conditions, by_name, control, twin, settings)


def evaluate_setting(
    setting: NuisanceSetting, evaluate: Callable[[Sequence[Condition]], Sequence[ConditionResult]]
) -> SettingResult:
    """Returns the outcomes of a setting.

    evaluate: function from conditions to their outcomes.
    """
    groups = setting.conditions, setting.control, setting.twin
    return SettingResult(setting, *map(evaluate, groups))


def conclude(
    claim: Claim,
    conditions: Sequence[ConditionResult],
    evidence: Mapping[str, Evidence | RecordedEvidence],
    control: Sequence[ConditionResult] = (),
    twin: Sequence[ConditionResult] = (),
    settings: Sequence[SettingResult] = (),
) -> Decision:
    """Returns a claim with its verdict.

    Args:
      claim: the claim; if its file has WITHDRAWN, so is the verdict.
      conditions: the outcomes of its conditions.
      evidence: by the names that the claim gives its studies. The state of an unfinished study of
        a condition determines the verdict.
      control: the outcomes of the effects that the test must find.
      twin: the outcomes of the conditions for a broken method.
      settings: the outcomes at other values of nuisance factors. If one decides otherwise, the
        verdict is DEPENDS.
    """
    control, twin = (_drop_unfinished(guards, evidence) for guards in (control, twin))
    settings = [
        SettingResult(
            repeated.setting,
            _drop_unfinished(repeated.conditions, evidence),
            _drop_unfinished(repeated.control, evidence),
            _drop_unfinished(repeated.twin, evidence),
        )
        for repeated in settings
    ]
    decision = Decision(claim, '', '', conditions, evidence, control, twin, settings)
    if claim.withdrawn:
        return dataclasses.replace(decision, verdict=WITHDRAWN, why=claim.withdrawn)
    studies = dict.fromkeys(condition.condition.study for condition in conditions)
    for state, verdict in UNFINISHED.items():
        reasons = [evidence[name].why for name in studies if evidence[name].state == state]
        if reasons:
            return dataclasses.replace(decision, verdict=verdict, why=reasons[0])
    verdict = combine_outcomes([condition.outcome for condition in conditions])
    if flaw := _find_flaw(decision, verdict):
        return dataclasses.replace(decision, verdict=NOT_VALID, why=flaw)
    if gap := _find_gap(decision, verdict):
        return dataclasses.replace(decision, verdict=NOT_CHECKED, why=gap)
    if contrast := _describe_contrast(settings, verdict):
        return dataclasses.replace(decision, verdict=DEPENDS, why=contrast)
    return dataclasses.replace(decision, verdict=verdict)


def _drop_unfinished(
    guards: Sequence[ConditionResult], evidence: Mapping[str, Evidence | RecordedEvidence]
) -> list[ConditionResult]:
    """Returns the guards, without the estimates of studies that are unfinished or stale."""
    return [
        dataclasses.replace(guard, estimate=None, outcome=UNDECIDED)
        if evidence[guard.condition.study].state
        else guard
        for guard in guards
    ]


def _find_flaw(decision: Decision, verdict: str) -> str:
    """Returns why the test of a claim cannot tell; '' if no guard shows that."""
    for guard in decision.control:
        if guard.estimate and guard.outcome != HOLDS:
            return f'it does not find what it must find: {_describe_guard(guard)}'
    telling = _list_telling(decision.twin, decision.conditions)
    if _accepts_broken(telling, verdict):
        return f'it does not reject a broken method: {_describe_guard(telling[0])}'
    return ''


def _find_gap(decision: Decision, verdict: str) -> str:
    """Returns which guard a decided claim lacks; '' if it lacks none, or if nothing is decided.

    A claim of which nothing holds needs no broken method: there is nothing to reject.
    """
    if verdict not in DECIDED:
        return ''
    if not _is_measured(decision.control):
        lack = 'the test has no effect that it must find'
    elif verdict != NOT_REPRODUCED and not _is_rejected(
        _list_telling(decision.twin, decision.conditions)
    ):
        lack = 'no broken method was tried on what holds'
    else:
        return ''
    return f'its conditions say "{verdict}", but {lack}'


def _describe_contrast(settings: Sequence[SettingResult], verdict: str) -> str:
    """Returns how the verdict depends on the setting; '' if no other setting contradicts it."""
    if verdict not in DECIDED:
        return ''
    return '; '.join(
        f'{repeated.setting.factor}: {OUTCOMES[verdict]} at {repeated.setting.reference}, '
        f'{OUTCOMES[repeated.verdict]} at {repeated.setting.value}'
        for repeated in settings
        if repeated.verdict in DECIDED and repeated.verdict != verdict
    )


def _is_measured(guards: Sequence[ConditionResult]) -> bool:
    return bool(guards) and all(guard.estimate for guard in guards)


def _list_telling(
    twin: Sequence[ConditionResult], conditions: Sequence[ConditionResult]
) -> list[ConditionResult]:
    """Returns the broken methods that repeat a condition which the method meets.

    That a broken method fails where the method fails too, or is undecided, shows nothing.
    """
    met = {_criterion(condition) for condition in conditions if condition.outcome == HOLDS}
    return [guard for guard in twin if _criterion(guard) in met]


def _criterion(tested: ConditionResult) -> tuple[str, float, float]:
    return tested.condition.quantity, tested.condition.low, tested.condition.high


def _accepts_broken(telling: Sequence[ConditionResult], verdict: str) -> bool:
    """Whether broken methods pass a test by which the claim holds, at least in part."""
    return verdict in (REPRODUCED, IN_PART) and _is_measured(telling) and not _is_rejected(telling)


def _is_rejected(telling: Sequence[ConditionResult]) -> bool:
    return any(guard.outcome == FAILS for guard in telling)


def _describe_guard(guard: ConditionResult) -> str:
    verb = {HOLDS: 'holds', FAILS: 'fails', UNDECIDED: 'is undecided'}[guard.outcome]
    return f'"{guard.condition.label}: {guard.condition.range_text}" {verb}'


def combine_outcomes(outcomes: Sequence[str]) -> str:
    """Returns the verdict of a claim from the outcomes of its conditions.

    A claim asserts that all conditions hold. It is UNDECIDED if an undecided condition can still
    change the verdict.
    """
    # One of each is IN_PART already, whatever the undecided conditions turn out to be.
    if HOLDS in outcomes and FAILS in outcomes:
        return IN_PART
    if UNDECIDED in outcomes:
        return UNDECIDED
    return NOT_REPRODUCED if FAILS in outcomes else REPRODUCED


def _decide_condition(condition: Condition, evidence: Evidence) -> ConditionResult:
    quantity, unit = evidence.describe(condition.quantity, condition.of)
    estimate = evidence.estimate(condition.quantity, condition.of)
    outcome = estimate.outcome(condition.low, condition.high) if estimate else UNDECIDED
    text = f'{quantity} {condition.range_text} {unit}'.strip()
    return ConditionResult(
        condition, text, outcome, estimate, count_needed_seeds(estimate, condition, outcome)
    )


def count_needed_seeds(estimate: Estimate | None, condition: Condition, outcome: str) -> int | None:
    """Estimates how many seeds would decide an undecided condition with a probability of 80%.

    Assumes that the estimate is the true value, and that the difference from the nearest end of the
    range has to be detected.

    Args:
      estimate: the quantity, if it is known.
      condition: the range.
      outcome: the condition's outcome by this estimate.

    Returns:
      The number of seeds, MAX_SEEDS + 1 for any larger number; None if the condition is decided, if
      the deviation is unknown, or if more seeds would not help because tuning left a wider gap.
    """
    if outcome != UNDECIDED or estimate is None or not estimate.deviation > 0:
        return None
    ends = {abs(estimate.value - end): end for end in (condition.low, condition.high)}
    distance, end = min(ends.items())
    half_width = (
        estimate.value - estimate.low if end < estimate.value else estimate.high - estimate.value
    )
    # The part of the interval that tuning adds does not shrink with more seeds. In measures it is
    # either nothing or an unknown end (0 for ratios): their intervals may be on another scale.
    is_unknown = math.isinf(half_width) or (end < estimate.value and estimate.low == 0.0)
    tuning = math.inf if is_unknown else 0.0
    if condition.quantity in QUANTITIES:
        sampling = t_quantile((1 + CONFIDENCE) / 2, estimate.n - 1) / math.sqrt(estimate.n)
        tuning = max(half_width - sampling * estimate.deviation, 0.0)
    effect = distance - tuning
    return seeds_needed(effect, estimate.deviation) if effect > 0 else None


def probability_if_equal(tested: ConditionResult) -> float | None:
    """Returns the probability that a condition holds if a difference of losses is 0.

    Assumes normal errors, and intervals as wide as the measured one.

    Args:
      tested: the outcome of a condition.

    Returns:
      The probability; None unless 0 is inside the range of a difference that has an interval.
    """
    condition, estimate = tested.condition, tested.estimate
    if condition.quantity != 'difference' or not condition.is_met_by_equals:
        return None
    if estimate is None or not 0 < estimate.high - estimate.low < math.inf:
        return None
    normal = statistics.NormalDist(0, (estimate.high - estimate.low) / (2 * NORMAL_QUANTILE))
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    return max(0.0, normal.cdf(condition.high - above) - normal.cdf(condition.low + below))
