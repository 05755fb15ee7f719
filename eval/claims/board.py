"""The claims board and its pages: a table of all claims, and a page per claim."""

import collections
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import PARTS, Claim
from eval.claims.decide import (
    COMPUTATION,
    IN_PART,
    INFEASIBLE,
    KINDS,
    LANGUAGE_MODELS,
    NOT_CHECKED,
    NOT_REPRODUCED,
    NOT_TESTED,
    NOT_VALID,
    OTHER_MODELS,
    REPRODUCED,
    STANDING,
    VERDICTS,
    WITHDRAWN,
    ConditionResult,
    Decision,
    probability_if_equal,
)
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED
from eval.claims.evidence import MEASURE, OUT_OF_REACH, STALE, Evidence, MeasureEvidence
from eval.claims.left_out import NOT_YET_TESTED, OUT_OF_SCOPE
from eval.claims.measures.rows import MEASURES
from eval.claims.record import FILE, RecordedEvidence, board_record
from eval.claims.register import Entries, entry_note
from lm.storage.files import format_json, write_text
from lm.study.statistics import POWER
from lm.study.tables.text import format_count, format_markdown

RESULTS = Path('configs/studies/results')
RESULT_PAGE = re.compile(r'configs/studies/results/\w+\.md')
ARXIV = re.compile(r'arXiv:(\d{4}\.\d{4,5})')
GUIDE, TUNING_GUIDE = Path('docs/guide/claims.md'), Path('docs/guide/tuning.md')
OPENING = (
    'Each row is a claim from a paper, tested on small models with commands that you can repeat',
    '([how it works]({guide})). In training sweeps every variant has its own tuned learning rate.',
    'A claim that is not reproduced here is not refuted: the models are far smaller than those of',
    'the papers, and each page describes the differences before it gives the verdict. Intervals',
    'are 95% confidence intervals, so about one verdict in twenty may be wrong.',
)
VERDICT_MEANINGS: Mapping[str, str] = {
    REPRODUCED: 'Every condition of the claim holds: its whole 95% interval is in the required '
    'range.',
    IN_PART: 'Some conditions hold and some fail.',
    NOT_REPRODUCED: 'Every condition fails in the setting tested here: its whole 95% interval is '
    'outside the required range.',
    UNDECIDED: 'An interval extends across the end of its range, so the runs do not decide. '
    f'"About n seeds" is the number that would decide with a probability of {POWER:.0%}.',
    NOT_VALID: 'The test cannot tell: it does not find an effect that it must find, or does not '
    'reject a broken version of the method. The page gives the numbers.',
    NOT_CHECKED: 'The conditions are decided, but the test lacks an effect that it must find, or a '
    'broken version of the method that it must reject, so that it may not be able to tell.',
    INFEASIBLE: 'The test needs more hardware than this machine has; the note gives the estimated '
    'cost.',
    STALE: 'The config or the code of the test has changed since it ran.',
    NOT_TESTED: 'The runs have not been trained, or have not finished.',
    WITHDRAWN: 'The verdict was taken back, because the test was not that of the method, or was '
    'faulty; the page gives the reason.',
}
CONDITION_MEANINGS = {
    HOLDS: 'The condition holds: the whole 95% interval is in the required range.',
    FAILS: 'The condition fails: the whole 95% interval is outside the required range.',
    UNDECIDED: 'The condition is undecided: the 95% interval extends across the end of the '
    'required range.',
}
KIND_INTROS = {
    LANGUAGE_MODELS: (
        'These tests train language models on text, with the project as it is used. Where the unit',
        'is nats per token, a negative difference means a lower loss. A study that several claims',
        'share was trained only once, so its cost appears in several rows.',
    ),
    OTHER_MODELS: (
        'These tests train classifiers, or tiny models on random chains of tokens. They show what',
        'a method does in a simple case, and say nothing about language models.',
    ),
    COMPUTATION: (
        'These tests train nothing: they evaluate closed forms, random matrices or untrained',
        'models.',
    ),
}
WITHDRAWN_INTRO = (
    'These tests were not those of the methods, or were faulty, so the claims have no verdict',
    'until they are tested again. Their pages show what was measured.',
)


def table_rows(decisions: Sequence[Decision], entries: Entries) -> list[dict[str, Any]]:
    """Returns a row for each claim, in the order of VERDICTS."""
    return [
        {
            'claim': decision.claim.name,
            'part': decision.claim.part,
            'by': decision.kind,
            'verdict': decision.verdict,
            'effect': _format_effect(decision.conditions[0]),
            'runs': sum(evidence.runs for evidence in decision.evidence.values()),
            'core_hours': round(core_hours(decision), 3),
            'note': decision.why
            or decision.claim.caution
            or entry_note(decision.claim, entries)
            or _power_summary(decision),
        }
        for decision in sorted(decisions, key=lambda decision: VERDICTS.index(decision.verdict))
    ]


def core_hours(decision: Decision) -> float:
    """Returns the core-hours of a claim's studies: wall time times cores of each run.

    A run that serves several claims counts for each claim.
    """
    return sum(study.core_seconds for study in decision.evidence.values()) / 3600


def summary_lines(decisions: Sequence[Decision]) -> list[str]:
    """Returns the lines below the board: claims by verdict, then the total cost.

    Claims of each of KINDS are counted separately, withdrawn claims only in the total. Each study
    counts once.
    """
    standing = [decision for decision in decisions if decision.verdict != WITHDRAWN]
    counts = [
        f'{len(group)} tested {_by(kind)}: {_count_verdicts(group)}'
        for kind in KINDS
        if (group := [decision for decision in standing if decision.kind == kind])
    ]
    studies = {
        evidence.name: evidence for decision in decisions for evidence in decision.evidence.values()
    }.values()
    runs, hours = sum(s.runs for s in studies), sum(s.core_seconds for s in studies) / 3600
    measures = sum(study.name.startswith(MEASURE) for study in studies)
    withdrawn = len(decisions) - len(standing)
    claims = format_count(len(decisions), 'claim')
    return [
        f'{claims}, {withdrawn} of them withdrawn' if withdrawn else claims,
        *counts,
        f'Total cost: {runs:,} training runs, {format_count(measures, "measure")}, '
        f'{hours:.3g} core-hours',
    ]


def _by(kind: str) -> str:
    return f'{"by" if kind == COMPUTATION else "on"} {kind}'


def _count_verdicts(decisions: Sequence[Decision]) -> str:
    count = collections.Counter(decision.verdict for decision in decisions)
    return ', '.join(f'{count[verdict]} {verdict}' for verdict in STANDING if count[verdict])


def _describe_quantity(condition: ConditionResult) -> str:
    """Returns the label of a condition; without a label, its text without the range."""
    if condition.condition.label:
        return condition.condition.label
    quantity, _, unit = condition.text.partition(f' {condition.condition.range_text}')
    return f'{quantity} ({unit.strip()})' if unit.strip() else quantity


def _format_effect(condition: ConditionResult) -> str:
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


def _list_undecided(decision: Decision) -> list[ConditionResult]:
    return [
        condition
        for condition in decision.conditions
        if condition.outcome == UNDECIDED and condition.estimate is not None
    ]


def _power_summary(decision: Decision) -> str:
    """Returns how many seeds would decide an undecided claim; '' for other claims."""
    if decision.verdict != UNDECIDED or not (undecided := _list_undecided(decision)):
        return ''
    seeds = [condition.seeds for condition in undecided if condition.seeds]
    if len(seeds) < len(undecided):
        return 'more seeds would not decide it'
    return f'about {max(seeds)} seeds would decide it'


def power_notes(decision: Decision) -> Iterator[str]:
    """Yields a note for each undecided condition: what would decide it."""
    for condition in _list_undecided(decision):
        text = f'{_describe_quantity(condition)}, {condition.condition.range_text}'
        if condition.seeds:
            yield (
                f'{text}: about {condition.seeds} seeds would decide this with a probability of '
                f'{POWER:.0%}'
            )
        else:
            yield (
                f'{text}: more seeds would not decide this. A finer or wider search of the '
                'learning rate, or longer runs, might'
            )


def write_pages(folder: Path, decisions: Sequence[Decision], entries: Entries) -> list[Path]:
    """Writes the pages of a board and its record.

    Args:
      folder: where to write index.md (the board), NAME.md for each claim, and board.json.
      decisions: the claims with their verdicts.
      entries: register entries by claim name.

    Returns:
      The paths written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {folder / 'index.md': _render_index(decisions, folder, entries)}
    texts |= {
        folder / f'{decision.claim.name}.md': _render_page(decision, folder, entries)
        for decision in decisions
    }
    texts[folder / FILE] = format_json(board_record(decisions, entries))
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _render_index(decisions: Sequence[Decision], folder: Path, entries: Entries) -> str:
    rows = table_rows(decisions, entries)
    by_name = {decision.claim.name: decision for decision in decisions}
    guide = os.path.relpath(GUIDE, folder)
    lines = [
        '# Claims from papers, tested on small models',
        '',
        *(line.format(guide=guide) for line in OPENING),
        '',
        *(f'- {line}.' for line in summary_lines(decisions)),
        '',
        '| verdict | meaning |',
        '| --- | --- |',
        *(f'| {verdict} | {VERDICT_MEANINGS[verdict]} |' for verdict in VERDICTS),
        '',
    ]
    standing = [row for row in rows if row['verdict'] != WITHDRAWN]
    for kind in KINDS:
        if group := [row for row in standing if row['by'] == kind]:
            lines += [f'## Tested {_by(kind)}', '', *KIND_INTROS[kind], '']
            lines += [_render_table(group, by_name), '']
    if withdrawn := [row for row in rows if row['verdict'] == WITHDRAWN]:
        body = [[_link_claim(by_name[row['claim']]), row['note']] for row in withdrawn]
        table = format_markdown([['claim', 'reason'], *body])
        lines += ['## Withdrawn', '', *WITHDRAWN_INTRO, '', table, '']
    lines += ['## By part']
    for part in PARTS:
        if group := [row for row in standing if row['part'] == part]:
            body = [[_link_claim(by_name[row['claim']]), row['verdict']] for row in group]
            lines += ['', f'### {part.capitalize()}', '']
            lines += [format_markdown([['claim', 'verdict'], *body])]
    for heading, reasons in (
        ('Papers out of scope', OUT_OF_SCOPE),
        ('Papers not yet tested', NOT_YET_TESTED),
    ):
        table = format_markdown([['paper', 'reason'], *map(list, reasons.items())])
        lines += ['', f'## {heading}', '', table]
    return '\n'.join(lines) + '\n'


def _render_table(rows: Sequence[dict[str, Any]], by_name: dict[str, Decision]) -> str:
    head = ['claim', 'verdict', 'measured, 95% interval', 'first condition', 'core-minutes', 'note']
    body = []
    for row in rows:
        decision = by_name[row['claim']]
        first = decision.conditions[0]
        # A whole caution would widen the column to several times the others.
        note = row['note'].partition('. ')[0] if decision.claim.caution else row['note']
        body.append(
            [
                _link_claim(decision),
                row['verdict'],
                row['effect'],
                f'{_describe_quantity(first)}: {first.condition.range_text}',
                '' if decision.is_unfinished else f'{60 * core_hours(decision):.1f}',
                note,
            ]
        )
    return format_markdown([head, *body])


def _link_claim(decision: Decision) -> str:
    return f'[{decision.claim.title.rstrip(".")}]({decision.claim.name}.md)'


def _render_page(decision: Decision, folder: Path, entries: Entries) -> str:
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
            _describe_quantity(condition),
            _format_effect(condition),
            condition.condition.range_text,
            condition.outcome if condition.estimate else 'not measured',
            _format_seeds(condition),
        ]
        for condition in decision.conditions
    ]
    lines += ['## Results', '', format_markdown([head, *body]), '']
    lines += _describe_guards(decision)
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


def _describe_guards(decision: Decision) -> list[str]:
    """Returns a section on whether the test can tell: its control and a broken method."""
    if not decision.control and not decision.twin:
        return []
    chances = [probability_if_equal(condition) for condition in decision.conditions]
    power = [
        f'If the difference were 0, a test with this spread would show "{c.condition.range_text}" '
        f'with a probability of {chance:.0%}.'
        for c, chance in zip(decision.conditions, chances, strict=True)
        if chance is not None
    ]
    head = ['role', 'quantity', 'measured, 95% interval', 'range', 'outcome']
    must_fail = 'must fail' if len(decision.twin) == 1 else 'one must fail'
    rows = [('control, must hold', guard) for guard in decision.control]
    rows += [(f'broken method, {must_fail}', guard) for guard in decision.twin]
    body = [
        [
            kind,
            guard.condition.label,
            _format_effect(guard),
            guard.condition.range_text,
            guard.outcome if guard.estimate else 'not measured',
        ]
        for kind, guard in rows
    ]
    return ['## Can the test tell?', '', format_markdown([head, *body]), '', *power, '']


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
