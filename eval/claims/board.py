"""The board and its pages: rows of what is known of each claim, in words that a reader needs."""

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
from eval.claims.evidence import MEASURE, OUT_OF_REACH, Evidence
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
TRAINING, COMPUTING = 'training', 'computing alone'  # what a claim's evidence is made by
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
    """Returns a row a claim, in the order of VERDICTS."""
    return [
        {
            'claim': one.claim.name,
            'part': one.claim.part,
            'by': TRAINING if one.trains else COMPUTING,
            'verdict': one.verdict,
            'effect': _format_effect(one.conditions[0]),
            'runs': sum(own.runs for own in one.evidence.values()),
            'core_hours': round(core_hours(one), 3),
            'note': one.why
            or one.claim.caution
            or entry_note(one.claim, entries)
            or '; '.join(power_notes(one)),
        }
        for one in sorted(decisions, key=lambda one: VERDICTS.index(one.verdict))
    ]


def core_hours(decision: Decision) -> float:
    """Returns the hours that the runs of a claim's studies took, times the cores they had; runs
    that several claims speak of count for each.
    """
    return sum(study.core_seconds for study in decision.evidence.values()) / 3600


def summary_lines(decisions: Sequence[Decision]) -> list[str]:
    """Returns how many claims have which verdict, by whether anything was trained for them and
    without those that are withdrawn, and what all runs took: each once.
    """
    standing = [one for one in decisions if one.verdict != WITHDRAWN]
    counts = [
        f'{len(own)} by {by}: {_count_verdicts(own)}'
        for by, trains in ((TRAINING, True), (COMPUTING, False))
        if (own := [one for one in standing if one.trains == trains])
    ]
    studies = {s.name: s for one in decisions for s in one.evidence.values()}.values()
    runs, hours = sum(s.runs for s in studies), sum(s.core_seconds for s in studies) / 3600
    measures = sum(one.name.startswith(MEASURE) for one in studies)
    many = 'claim' if len(decisions) == 1 else 'claims'
    withdrawn = len(decisions) - len(standing)
    return [
        f'{len(decisions)} {many}' + f', of which {withdrawn} withdrawn' * bool(withdrawn),
        *counts,
        f'{runs} runs of studies and {measures} measures, {hours:.3g} core-hours',
    ]


def _count_verdicts(decisions: Sequence[Decision]) -> str:
    count = collections.Counter(one.verdict for one in decisions)
    return ', '.join(f'{count[verdict]} {verdict}' for verdict in STANDING if count[verdict])


def _format_effect(condition: ConditionResult) -> str:
    found = condition.estimate
    if found is None:
        return ''
    if math.isinf(found.value):
        return f'{"it" if found.value > 0 else "the other"} diverges at every rate'
    return f'{found.value:+.3f} [{_format_bound(found.low)}, {_format_bound(found.high)}]'


def _format_bound(value: float) -> str:
    return 'unknown' if math.isinf(value) else f'{value:+.3f}'


def power_notes(decision: Decision) -> Iterator[str]:
    """Returns what would decide each undecided condition."""
    for own in decision.conditions:
        if own.outcome != UNDECIDED or own.estimate is None:
            continue
        if own.seeds:
            yield f'{own.text}: about {own.seeds} seeds would tell in {POWER:.0%} of cases'
        else:
            yield f'{own.text}: a finer or wider search of the rate, or longer runs would tell'


def write_pages(folder: Path, decisions: Sequence[Decision], entries: Entries) -> list[Path]:
    """Writes index.md, the board, NAME.md of each claim, and the record of all; returns their
    paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {folder / 'index.md': _render_index(decisions, entries)}
    texts |= {
        folder / f'{one.claim.name}.md': _render_page(one, folder, entries) for one in decisions
    }
    texts[folder / FILE] = format_json(board_record(decisions, entries))
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _render_index(decisions: Sequence[Decision], entries: Entries) -> str:
    told = table_rows(decisions, entries)
    by_name = {one.claim.name: one for one in decisions}
    lines = [
        '# Claims',
        '',
        *OPENING,
        '',
        *(f'- {line}.' for line in summary_lines(decisions)),
        '',
    ]
    standing = [row for row in told if row['verdict'] != WITHDRAWN]
    for by in (TRAINING, COMPUTING):
        if own := [row for row in standing if row['by'] == by]:
            lines += [f'## By {by}', '', _render_table(own, by_name), '']
    if withdrawn := [row for row in told if row['verdict'] == WITHDRAWN]:
        lines += ['## Withdrawn', '', *WITHDRAWN_INTRO, '', _render_table(withdrawn, by_name), '']
    lines += ['## By part']
    for part in PARTS:
        if own := [row for row in standing if row['part'] == part]:
            lines += ['', f'### {part.capitalize()}', '', _render_table(own, by_name)]
    for head, left in (
        ('has no place here', OUT_OF_SCOPE),
        ('waits for work, or for hours of training', NOT_YET_TESTED),
    ):
        lines += ['', f'## What {head}', '', format_markdown([['paper', 'why'], *left.items()])]
    return '\n'.join(lines) + '\n'


def _render_table(told: Sequence[dict[str, Any]], by_name: dict[str, Decision]) -> str:
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
        for row in told
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
    if told := entry_note(claim, entries):
        lines += [f'Of the record: {told}.', '']
    if decision.verdict == WITHDRAWN:
        lines += ['**Measured**, and no verdict:', '']
    else:
        lines += [
            f'**Found: {decision.verdict}.** {_format_sentence(decision.why) if decision.why else ""}'.rstrip(),
            '',
        ]
    head = ['condition', 'found, 95%', 'seeds', 'it']
    body = [
        [own.text, _format_effect(own), str(own.estimate.n) if own.estimate else '', own.outcome]
        for own in decision.conditions
    ]
    lines += [format_markdown([head, *body]), '']
    if decision.verdict not in (*UNFINISHED, WITHDRAWN):
        lines += [f'- {_format_sentence(text)}' for text in power_notes(decision)]
        lines += [''] * bool(list(power_notes(decision)))
    lines += ['**Runs.** Each study once, for all claims that speak of it:', '']
    for own in decision.evidence.values():
        commands = [own.plan_command] if own.state == OUT_OF_REACH else []
        lines += [f'    uv run python {shlex.join(each)}' for each in [*commands, own.command]]
    lines += [f'    uv run python -m eval.claims --only={claim.name}', '']
    lines += [
        f'{_format_cost(study)}{_study_link(study, folder)}' for study in decision.evidence.values()
    ]
    return '\n'.join(lines).rstrip() + '\n'


def _link_study_pages(text: str, folder: Path) -> str:
    """Returns a text in which pages of studies are links."""
    return RESULT_PAGE.sub(lambda m: f'[{m[0]}]({os.path.relpath(m[0], folder)})', text)


def _format_sentence(text: str) -> str:
    is_name = text.startswith('arXiv')
    return f'{text if is_name else text[0].upper() + text[1:]}'.rstrip('.') + '.'


def _format_cost(study: Evidence | RecordedEvidence) -> str:
    runs = f'{study.runs} runs, ' if study.runs else ''
    return f'- {study.name}: {runs}{study.core_seconds / 3600:.2f} core-hours'


def _study_link(study: Evidence | RecordedEvidence, folder: Path) -> str:
    """A link to the page of a study, where it has one."""
    page = RESULTS / f'{Path(study.name).name.partition(".")[0]}.md'
    return f'; [its table]({os.path.relpath(page, folder)})' if page.exists() else ''
