"""The board and its pages: a row and a page for each claim, in text for readers."""

import collections
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import HEADINGS, PARTS
from eval.claims.decide import STANDING, UNFINISHED, VERDICTS, WITHDRAWN, ConditionResult, Decision
from eval.claims.estimates import UNDECIDED
from eval.claims.evidence import MEASURE, OUT_OF_REACH, Evidence, MeasureEvidence
from eval.claims.left_out import NOT_YET_TESTED, OUT_OF_SCOPE
from eval.claims.record import FILE, RecordedEvidence, board_record
from eval.claims.register import Entries, entry_note
from lm.storage.files import format_json, write_text
from lm.study.statistics import POWER
from lm.study.tables.text import format_markdown

RESULTS = Path('configs/studies/results')
RESULT_PAGE = re.compile(r'configs/studies/results/\w+\.md')
OPENING = (
    'What papers say, asked of small models by commands that anyone can repeat, with a learning',
    'rate tuned for every arm ([how](../guide/claims.md)). A claim that is not reproduced here is',
    'not refuted: its page says first what differs. Intervals are of 95%: of twenty verdicts one',
    'may be wrong.',
)
TRAINING, COMPUTING = 'training', 'computing alone'  # kinds of evidence
WITHDRAWN_INTRO = (
    'These verdicts do not stand, and the board does not count them until the claims are tried',
    'again. What was measured is on each page.',
)
HEADING_LABELS = {
    'Paper': 'Paper',
    'Says': 'It says',
    'Here': 'What differs here',
    'Counts': 'What counts',
}


def table_rows(decisions: Sequence[Decision], entries: Entries) -> list[dict[str, Any]]:
    """Returns a row for each claim, in the order of VERDICTS."""
    return [
        {
            'claim': decision.claim.name,
            'part': decision.claim.part,
            'by': TRAINING if decision.trains else COMPUTING,
            'verdict': decision.verdict,
            'effect': _format_effect(decision.conditions[0]),
            'runs': sum(evidence.runs for evidence in decision.evidence.values()),
            'core_hours': round(core_hours(decision), 3),
            'note': decision.why
            or decision.claim.caution
            or entry_note(decision.claim, entries)
            or '; '.join(power_notes(decision)),
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

    Claims that were trained for and claims that were only computed are counted separately,
    withdrawn claims only in the total. Each study counts once.
    """
    standing = [decision for decision in decisions if decision.verdict != WITHDRAWN]
    counts = [
        f'{len(group)} by {by}: {_count_verdicts(group)}'
        for by, trains in ((TRAINING, True), (COMPUTING, False))
        if (group := [decision for decision in standing if decision.trains == trains])
    ]
    studies = {
        evidence.name: evidence for decision in decisions for evidence in decision.evidence.values()
    }.values()
    runs, hours = sum(s.runs for s in studies), sum(s.core_seconds for s in studies) / 3600
    measures = sum(study.name.startswith(MEASURE) for study in studies)
    noun = 'claim' if len(decisions) == 1 else 'claims'
    withdrawn = len(decisions) - len(standing)
    return [
        f'{len(decisions)} {noun}' + f', of which {withdrawn} withdrawn' * bool(withdrawn),
        *counts,
        f'{runs} runs of studies and {measures} measures, {hours:.3g} core-hours',
    ]


def _count_verdicts(decisions: Sequence[Decision]) -> str:
    count = collections.Counter(decision.verdict for decision in decisions)
    return ', '.join(f'{count[verdict]} {verdict}' for verdict in STANDING if count[verdict])


def _format_effect(condition: ConditionResult) -> str:
    estimate = condition.estimate
    if estimate is None:
        return ''
    # An arm that diverges at every rate has no loss to subtract (`evidence.loss_difference`).
    if math.isinf(estimate.value):
        return f'{"it" if estimate.value > 0 else "the other"} diverges at every rate'
    return f'{estimate.value:+.3f} [{_format_bound(estimate.low)}, {_format_bound(estimate.high)}]'


def _format_bound(value: float) -> str:
    return 'unknown' if math.isinf(value) else f'{value:+.3f}'


def power_notes(decision: Decision) -> Iterator[str]:
    """Yields a note for each undecided condition: what would decide it."""
    for condition in decision.conditions:
        if condition.outcome != UNDECIDED or condition.estimate is None:
            continue
        if condition.seeds:
            yield (
                f'{condition.text}: about {condition.seeds} seeds would tell in {POWER:.0%} '
                'of cases'
            )
        else:
            yield (
                f'{condition.text}: a finer or wider search of the rate, or longer runs would tell'
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
    texts = {folder / 'index.md': _render_index(decisions, entries)}
    texts |= {
        folder / f'{decision.claim.name}.md': _render_page(decision, folder, entries)
        for decision in decisions
    }
    texts[folder / FILE] = format_json(board_record(decisions, entries))
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _render_index(decisions: Sequence[Decision], entries: Entries) -> str:
    rows = table_rows(decisions, entries)
    by_name = {decision.claim.name: decision for decision in decisions}
    lines = [
        '# Claims',
        '',
        *OPENING,
        '',
        *(f'- {line}.' for line in summary_lines(decisions)),
        '',
    ]
    standing = [row for row in rows if row['verdict'] != WITHDRAWN]
    for by in (TRAINING, COMPUTING):
        if group := [row for row in standing if row['by'] == by]:
            lines += [f'## By {by}', '', _render_table(group, by_name), '']
    if withdrawn := [row for row in rows if row['verdict'] == WITHDRAWN]:
        lines += ['## Withdrawn', '', *WITHDRAWN_INTRO, '', _render_table(withdrawn, by_name), '']
    lines += ['## By part']
    for part in PARTS:
        if group := [row for row in standing if row['part'] == part]:
            lines += ['', f'### {part.capitalize()}', '', _render_table(group, by_name)]
    for head, reasons in (
        ('has no place here', OUT_OF_SCOPE),
        ('waits for work, or for hours of training', NOT_YET_TESTED),
    ):
        lines += [
            '',
            f'## What {head}',
            '',
            format_markdown([['paper', 'why'], *map(list, reasons.items())]),
        ]
    return '\n'.join(lines) + '\n'


def _render_table(rows: Sequence[dict[str, Any]], by_name: dict[str, Decision]) -> str:
    head = ['claim', 'verdict', 'effect, 95%', 'runs', 'core-hours', 'note']
    body = [
        [
            f'[{by_name[row["claim"]].claim.title.rstrip(".")}]({row["claim"]}.md)',
            row['verdict'],
            row['effect'],
            str(row['runs'] or ''),
            f'{row["core_hours"]:.2f}',
            row['note'],
        ]
        for row in rows
    ]
    return format_markdown([head, *body])


def _render_page(decision: Decision, folder: Path, entries: Entries) -> str:
    claim = decision.claim
    lines = [f'# {claim.title.rstrip(".")}', '']
    if decision.verdict == WITHDRAWN:
        lines += [
            f'**Withdrawn.** {_format_sentence(decision.why)} Below is what was measured.',
            '',
        ]
    if claim.caution:
        lines += [f'**Caution.** {_link_study_pages(_format_sentence(claim.caution), folder)}', '']
    for heading in HEADINGS:
        lines += [f'**{HEADING_LABELS[heading]}.** {_format_sentence(claim.texts[heading])}', '']
    if note := entry_note(claim, entries):
        lines += [f'Of the record: {note}.', '']
    if decision.verdict == WITHDRAWN:
        lines += ['**Measured**, and no verdict:', '']
    else:
        lines += [
            f'**Found: {decision.verdict}.** '
            f'{_format_sentence(decision.why) if decision.why else ""}'.rstrip(),
            '',
        ]
    head = ['condition', 'found, 95%', 'seeds', 'it']
    body = [
        [
            condition.text,
            _format_effect(condition),
            str(condition.estimate.n) if condition.estimate else '',
            condition.outcome,
        ]
        for condition in decision.conditions
    ]
    lines += [format_markdown([head, *body]), '']
    if decision.verdict not in (*UNFINISHED, WITHDRAWN):
        lines += [f'- {_format_sentence(text)}' for text in power_notes(decision)]
        lines += [''] * bool(list(power_notes(decision)))
    lines += ['**Runs.** Each study once, for all claims that speak of it:', '']
    for evidence in decision.evidence.values():
        is_planned = not isinstance(evidence, MeasureEvidence) and evidence.state == OUT_OF_REACH
        commands = [evidence.plan_command] if is_planned else []
        lines += [
            f'    uv run python {shlex.join(command)}' for command in [*commands, evidence.command]
        ]
    lines += [f'    uv run python -m eval.claims --only={claim.name}', '']
    lines += [
        f'{_format_cost(study)}{_study_link(study, folder)}' for study in decision.evidence.values()
    ]
    return '\n'.join(lines).rstrip() + '\n'


def _link_study_pages(text: str, folder: Path) -> str:
    """Returns the text with a link for each result page of a study that it mentions."""
    return RESULT_PAGE.sub(lambda m: f'[{m[0]}]({os.path.relpath(m[0], folder)})', text)


def _format_sentence(text: str) -> str:
    is_name = text.startswith('arXiv')
    return f'{text if is_name else text[0].upper() + text[1:]}'.rstrip('.') + '.'


def _format_cost(study: Evidence | RecordedEvidence) -> str:
    runs = f'{study.runs} runs, ' if study.runs else ''
    return f'- {study.name}: {runs}{study.core_seconds / 3600:.2f} core-hours'


def _study_link(study: Evidence | RecordedEvidence, folder: Path) -> str:
    """Returns a link to the result page of a study; '' if it has none."""
    page = RESULTS / f'{Path(study.name).name.partition(".")[0]}.md'
    return f'; [its table]({os.path.relpath(page, folder)})' if page.exists() else ''
