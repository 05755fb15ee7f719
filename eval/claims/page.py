"""The page of a claim: the statement of the paper, the test, its numbers and the verdict."""

import collections
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.claims.claim import Claim
from eval.claims.decide import (
    DEPENDS,
    INFEASIBLE,
    NOT_CHECKED,
    NOT_REPRODUCED,
    NOT_TESTED,
    NOT_VALID,
    OUTCOMES,
    WITHDRAWN,
    ConditionResult,
    Decision,
    SettingResult,
    probability_if_equal,
)
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED
from eval.claims.evidence import MEASURE, OUT_OF_REACH, STALE, Evidence, MeasureEvidence
from eval.claims.measures.rows import MEASURES
from eval.claims.record import RecordedEvidence
from eval.claims.register import Entries, entry_note
from lm.study.statistics import POWER, format_seeds
from lm.study.tables.text import format_count, format_markdown

RESULTS = Path('configs/studies/results')
RESULT_PAGE = re.compile(r'configs/studies/results/\w+\.md')
ARXIV = re.compile(r'arXiv:(\d{4}\.\d{4,5})')
TUNING_GUIDE = Path('docs/guide/tuning.md')
CONDITION_MEANINGS = {
    HOLDS: 'The condition holds: the whole 95% interval is in the required range.',
    FAILS: 'The condition fails: the whole 95% interval is outside the required range.',
    UNDECIDED: 'The condition is undecided: the 95% interval extends across the end of the '
    'required range.',
}


def render_page(decision: Decision, folder: Path, entries: Entries) -> str:
    """Returns the page of a claim.

    Args:
      decision: the claim with its verdict.
      folder: the folder of the board, from which links start.
      entries: register entries by claim name.
    """
    claim = decision.claim
    texts = {heading: _link_papers(_format_sentence(text)) for heading, text in claim.texts.items()}
    lines = [f'# {claim.title.rstrip(".")}', '']
    if decision.verdict == WITHDRAWN:
        lines += [
            f'**Withdrawn.** {_format_sentence(decision.why)} The numbers below were measured, but '
            'they decide nothing.',
            '',
        ]
    if claim.caution:
        lines += [f'**Caution.** {_link_study_pages(_format_sentence(claim.caution), folder)}', '']
    lines += ['## What the paper claims', '', texts['Says'], '', f'Source: {texts["Paper"]}', '']
    lines += ['## How it was tested', '', texts['Here'], '', _describe_method(decision, folder), '']
    lines += [_describe_fidelity(claim), '']
    lines += [f'**Criterion.** {texts["Counts"]}', '']
    if note := entry_note(claim, entries):
        lines += [f'**Registration.** {_format_sentence(note)}', '']
    head = ['quantity', 'measured, 95% interval', 'required', 'outcome', 'seeds']
    body = [
        [
            describe_quantity(condition),
            format_effect(condition),
            condition.condition.range_text,
            condition.outcome if condition.estimate else 'not measured',
            _format_seeds(condition),
        ]
        for condition in decision.conditions
    ]
    lines += ['## Results', '', format_markdown([head, *body]), '']
    lines += _describe_guards(decision)
    lines += _describe_settings(decision)
    lines += [f'## Verdict: {decision.verdict}', '', _explain_verdict(decision), '']
    if not decision.is_unfinished and decision.verdict not in (WITHDRAWN, NOT_VALID, NOT_CHECKED):
        notes = [f'- {_format_sentence(text)}' for text in power_notes(decision)]
        lines += [*notes, ''] if notes else []
    lines += ['## Repeat it', '', 'The last command prints the verdict.', '']
    for evidence in decision.evidence.values():
        is_planned = not isinstance(evidence, MeasureEvidence) and evidence.state == OUT_OF_REACH
        commands = [evidence.plan_command] if is_planned else []
        lines += [
            f'    uv run python {shlex.join(command)}' for command in [*commands, evidence.command]
        ]
    lines += [f'    uv run python -m eval.claims --only={claim.name}', '', 'Cost:', '']
    for study in decision.evidence.values():
        lines += [f'- {_format_cost(study)}{_study_link(study, folder)}']
    return '\n'.join(lines).rstrip() + '\n'


def describe_quantity(condition: ConditionResult) -> str:
    """Returns the label of a condition; without a label, its text without the range."""
    if condition.condition.label:
        return condition.condition.label
    quantity, _, unit = condition.text.partition(f' {condition.condition.range_text}')
    return f'{quantity} ({unit.strip()})' if unit.strip() else quantity


def format_effect(condition: ConditionResult) -> str:
    estimate = condition.estimate
    if estimate is None:
        return ''
    # An arm that diverges at every rate has no loss to subtract (`evidence.loss_difference`).
    if math.isinf(estimate.value):
        arm = 'this arm' if estimate.value > 0 else 'the other arm'
        return f'{arm} diverges at every learning rate'
    sign = '+' if condition.condition.quantity == 'difference' else ''
    numbers = estimate.value, estimate.low, estimate.high
    # Three decimals, unless these would show a number as zero that is not.
    form = '#.3g' if any(x and round(x, 3) == 0 for x in numbers) else 'z.3f'
    value, low, high = (
        'unknown' if math.isinf(x) else f'{x:{sign}{form}}'.rstrip('.') for x in numbers
    )
    if estimate.low == estimate.value == estimate.high and estimate.n == 1:
        return value
    return f'{value} [{low}, {high}]'


def _format_seeds(condition: ConditionResult) -> str:
    """Returns the number of seeds; 'exact' for a number that does not depend on a seed."""
    if condition.estimate is None:
        return ''
    return 'exact' if condition.estimate.n == 1 else str(condition.estimate.n)


def list_undecided(decision: Decision) -> list[ConditionResult]:
    return [
        condition
        for condition in decision.conditions
        if condition.outcome == UNDECIDED and condition.estimate is not None
    ]


def power_notes(decision: Decision) -> Iterator[str]:
    """Yields a note for each undecided condition: what would decide it."""
    for condition in list_undecided(decision):
        text = f'{describe_quantity(condition)}, {condition.condition.range_text}'
        if condition.seeds:
            yield (
                f'{text}: {format_seeds(condition.seeds)} would decide this with a probability of '
                f'{POWER:.0%}'
            )
        else:
            yield (
                f'{text}: more seeds would not decide this. A finer or wider search of the '
                'learning rate, or longer runs, might'
            )


def _describe_guards(decision: Decision) -> list[str]:
    """Returns a section on whether the test can tell: its control and a broken method."""
    if not decision.control and not decision.twin:
        return []
    chances = [(c, probability_if_equal(c)) for c in decision.conditions]
    chances = [(c, chance) for c, chance in chances if chance is not None]
    power = [
        _format_sentence(
            f'{f"{describe_quantity(c)}: if it" if len(chances) > 1 else "if the difference"} were '
            f'0, a test with this spread would show "{c.condition.range_text}" with a probability '
            f'of {chance:.0%}'
        )
        for c, chance in chances
    ]
    head = ['role', 'quantity', 'measured, 95% interval', 'range', 'outcome']
    must_fail = 'must fail' if len(decision.twin) == 1 else 'one must fail'
    rows = [('control, must hold', guard) for guard in decision.control]
    rows += [(f'broken method, {must_fail}', guard) for guard in decision.twin]
    body = [
        [
            kind,
            guard.condition.label,
            format_effect(guard),
            guard.condition.range_text,
            guard.outcome if guard.estimate else 'not measured',
        ]
        for kind, guard in rows
    ]
    text = [format_markdown([head, *body]), '', '\n\n'.join(power)]
    return ['## Can the test tell?', '', '\n'.join(text).rstrip(), '']


def _describe_settings(decision: Decision) -> list[str]:
    """Returns a section on the conditions at other values of nuisance factors."""
    if not decision.settings:
        return []
    head = ['factor', 'in the test', 'repeated at', 'quantity', 'measured, 95% interval', 'outcome']
    body = [
        [
            *(repeated.setting.factor, repeated.setting.reference, repeated.setting.value),
            f'{role}{_label(row)}',
            format_effect(row),
            row.outcome if row.estimate else 'not measured',
        ]
        for repeated in decision.settings
        for role, rows in (
            ('', repeated.conditions),
            ('control: ', repeated.control),
            ('broken method: ', repeated.twin),
        )
        for row in rows
    ]
    return [
        '## Does it depend on the setting?',
        '',
        format_markdown([head, *body]),
        '',
        *(_explain_setting(repeated) for repeated in decision.settings),
        '',
    ]


def _label(row: ConditionResult) -> str:
    return f'{describe_quantity(row)}: {row.condition.range_text}'


def _explain_setting(repeated: SettingResult) -> str:
    setting = repeated.setting
    place = f'With {setting.value} as the {setting.factor}'
    if repeated.verdict == NOT_TESTED:
        return f'{place}, the claim has not been tested.'
    if repeated.verdict == NOT_VALID:
        return (
            f'{place}, the test does not find its control or does not reject a broken method, so '
            'that nothing follows from it.'
        )
    return f'{place}, the claim {OUTCOMES.get(repeated.verdict, "is undecided")}.'


def _describe_fidelity(claim: Claim) -> str:
    """Returns a table of the setting of each arm, here and as published."""
    head = ['arm', 'here', 'published', 'source']
    body = [
        [arm, fidelity.setting, fidelity.published, _link_papers(fidelity.source)]
        for arm, fidelity in claim.fidelity.items()
    ]
    return format_markdown([head, *body])


def _describe_method(decision: Decision, folder: Path) -> str:
    """Returns how the evidence was produced: by tuned sweeps, or by measures."""
    measures = [name for name in decision.claim.studies.values() if name.startswith(MEASURE)]
    texts = []
    if len(measures) < len(decision.claim.studies):
        guide = os.path.relpath(TUNING_GUIDE, folder)
        texts += [
            'All variants, the baseline included, are tuned with the same budget and compared on '
            f'new seeds that played no part in tuning ([how]({guide})).'
        ]
    for name in measures:
        module = MEASURES[name.removeprefix(MEASURE)].function.__module__
        path = Path(module.replace('.', '/')).with_suffix('.py')
        texts += [
            f'The numbers are computed by the measure `{name.removeprefix(MEASURE)}` in '
            f'[{path}]({os.path.relpath(path, folder)}).'
        ]
    return ' '.join(texts)


def _explain_verdict(decision: Decision) -> str:
    """Returns the verdict in sentences."""
    if decision.verdict == INFEASIBLE:
        return f'This machine cannot run the test: {decision.why}.'
    if decision.verdict == WITHDRAWN:
        return 'The reason is at the top of this page.'
    if decision.verdict == NOT_VALID:
        return f'The test cannot tell: {decision.why}.'
    if decision.verdict == NOT_CHECKED:
        return f'There is no verdict: {decision.why}.'
    if decision.is_unfinished:
        return _format_sentence(decision.why)
    if decision.verdict == DEPENDS:
        return _format_sentence(f'the claim depends on the {decision.why}')
    if len(decision.conditions) == 1:
        text = CONDITION_MEANINGS[decision.conditions[0].outcome]
    else:
        text = _count_outcomes([condition.outcome for condition in decision.conditions])
    if decision.verdict == NOT_REPRODUCED:
        text += ' This result is for the setting above; it does not refute the paper.'
    return text


def _count_outcomes(outcomes: Sequence[str]) -> str:
    """Returns 'Both conditions hold.' or 'Of 3 conditions, 2 hold and 1 is undecided.'."""
    count = collections.Counter(outcomes)
    verbs = {HOLDS: ('holds', 'hold'), FAILS: ('fails', 'fail')}
    verbs[UNDECIDED] = 'is undecided', 'are undecided'
    if len(count) == 1:
        conditions = 'Both conditions' if len(outcomes) == 2 else f'All {len(outcomes)} conditions'
        return f'{conditions} {verbs[outcomes[0]][1]}.'
    parts = [f'{count[name]} {verbs[name][count[name] > 1]}' for name in verbs if count[name]]
    return f'Of {len(outcomes)} conditions, {", ".join(parts[:-1])} and {parts[-1]}.'


def _link_papers(text: str) -> str:
    """Returns the text with a link for each arXiv number."""
    return ARXIV.sub(r'[arXiv:\1](https://arxiv.org/abs/\1)', text)


def _link_study_pages(text: str, folder: Path) -> str:
    """Returns the text with a link for each result page of a study that it mentions."""
    return RESULT_PAGE.sub(lambda m: f'[{m[0]}]({os.path.relpath(m[0], folder)})', text)


def _format_sentence(text: str) -> str:
    """Returns a text with a capital and a full stop."""
    is_name = text.startswith('arXiv')
    return f'{text if is_name else text[0].upper() + text[1:]}'.rstrip('.') + '.'


def _format_cost(study: Evidence | RecordedEvidence) -> str:
    name = study.name.removeprefix(MEASURE)
    if study.state and not study.core_seconds:
        return f'`{name}`: {"runs are stale" if study.state == STALE else "not run yet"}'
    runs = f'{format_count(study.runs, "run")}, ' if study.runs else ''
    hours = study.core_seconds / 3600
    return f'`{name}`: {runs}{hours:.2f} core-hours ({_format_minutes(30 * hours)} on two cores)'


def _format_minutes(minutes: float) -> str:
    return 'under a minute' if minutes < 1 else f'about {format_count(round(minutes), "minute")}'


def _study_link(study: Evidence | RecordedEvidence, folder: Path) -> str:
    """Returns a link to the result page of a study; '' if it has none."""
    page = RESULTS / f'{Path(study.name).name.partition(".")[0]}.md'
    return f'; [results]({os.path.relpath(page, folder)})' if page.exists() else ''
