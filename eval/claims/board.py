"""The claims board: a table of all claims by verdict and by part, and the files of its pages."""

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import PARTS
from eval.claims.decide import (
    COMPUTATION,
    DECIDED,
    DEPENDS,
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
)
from eval.claims.estimates import UNDECIDED
from eval.claims.evidence import MEASURE, STALE
from eval.claims.left_out import NOT_YET_TESTED, OUT_OF_SCOPE
from eval.claims.page import describe_quantity, format_effect, list_undecided, render_page
from eval.claims.record import FILE, board_record
from eval.claims.register import Entries, entry_note
from lm.storage.files import format_json, write_text
from lm.study.statistics import POWER, format_seeds
from lm.study.tables.text import format_count, format_markdown

GUIDE = Path('docs/guide/claims.md')
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
    DEPENDS: 'The outcome differs at another value of a factor that the claim does not '
    'mention, such as the initial scale of the embeddings. The note gives both.',
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
KIND_INTROS = {
    LANGUAGE_MODELS: (
        'These tests train language models on text, with the project as it is used. Where the unit',
        'is nats per token, a negative difference means a lower loss. A study that several claims',
        'share was trained only once, so its cost appears in several rows.',
    ),
    OTHER_MODELS: (
        'These tests train classifiers, calibrators, single layers or tiny models on random',
        'tokens; one measures gradients on text. They show what a method does in a simple case,',
        'and say nothing about the loss of language models.',
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
            'effect': format_effect(_telling_condition(decision)),
            'runs': sum(evidence.runs for evidence in decision.evidence.values()),
            'core_hours': round(core_hours(decision), 3),
            'note': decision.why
            or decision.claim.caution
            or entry_note(decision.claim, entries)
            or _power_summary(decision)
            or _settings_summary(decision),
        }
        for decision in sorted(decisions, key=lambda decision: VERDICTS.index(decision.verdict))
    ]


def _telling_condition(decision: Decision) -> ConditionResult:
    """Returns the condition of a claim's row: the first, or the first that is undecided if the
    claim is.
    """
    undecided = list_undecided(decision) if decision.verdict == UNDECIDED else []
    return (undecided or decision.conditions)[0]


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
        *_count_settings(standing),
        f'Total cost: {runs:,} training runs, {format_count(measures, "measure")}, '
        f'{hours:.3g} core-hours',
    ]


def _count_settings(decisions: Sequence[Decision]) -> list[str]:
    """Returns a line on the decided claims that were tested in other settings too, if any were."""
    verdicts = [
        (decision.verdict, {repeated.verdict for repeated in decision.settings} - {NOT_TESTED})
        for decision in decisions
        if decision.verdict in (*DECIDED, DEPENDS)
    ]
    tested = [(verdict, elsewhere) for verdict, elsewhere in verdicts if elsewhere]
    if not tested:
        return []
    same = sum(elsewhere == {verdict} for verdict, elsewhere in tested)
    depends = sum(verdict == DEPENDS for verdict, _ in tested)
    return [
        f'{len(tested)} claims with a verdict were tested in other settings too: {same} have '
        f'the same outcome in each, {depends} depend on the setting, and for '
        f'{len(tested) - same - depends} another setting is undecided or cannot tell'
    ]


def _by(kind: str) -> str:
    return f'{"by" if kind == COMPUTATION else "on"} {kind}'


def _count_verdicts(decisions: Sequence[Decision]) -> str:
    count = collections.Counter(decision.verdict for decision in decisions)
    return ', '.join(f'{count[verdict]} {verdict}' for verdict in STANDING if count[verdict])


def _power_summary(decision: Decision) -> str:
    """Returns how many seeds would decide an undecided claim; '' for other claims."""
    if decision.verdict != UNDECIDED or not (undecided := list_undecided(decision)):
        return ''
    seeds = [condition.seeds for condition in undecided if condition.seeds]
    if len(seeds) < len(undecided):
        return 'more seeds would not decide it'
    return f'{format_seeds(max(seeds))} would decide it'


def _settings_summary(decision: Decision) -> str:
    """Returns the settings with the outcomes of the claim's own test; '' if there are none."""
    same = [
        f'another {repeated.setting.factor} ({repeated.setting.value})'
        for repeated in decision.settings
        if repeated.verdict == decision.verdict
    ]
    return f'the same with {" and ".join(same)}' if same else ''


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
        folder / f'{decision.claim.name}.md': render_page(decision, folder, entries)
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
    head = ['claim', 'verdict', 'measured, 95% interval', 'condition', 'core-minutes', 'note']
    body = []
    for row in rows:
        decision = by_name[row['claim']]
        condition = _telling_condition(decision)
        # A whole caution would widen the column to several times the others.
        note = row['note'].partition('. ')[0] if decision.claim.caution else row['note']
        body.append(
            [
                _link_claim(decision),
                row['verdict'],
                row['effect'],
                f'{describe_quantity(condition)}: {condition.condition.range_text}',
                '' if decision.is_unfinished else f'{60 * core_hours(decision):.1f}',
                note,
            ]
        )
    return format_markdown([head, *body])


def _link_claim(decision: Decision) -> str:
    return f'[{decision.claim.title.rstrip(".")}]({decision.claim.name}.md)'
