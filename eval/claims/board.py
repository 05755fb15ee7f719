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
from eval.claims.decide import STANDING, UNFINISHED, VERDICTS, WITHDRAWN, Decided, Judged
from eval.claims.estimates import UNDECIDED
from eval.claims.evidence import MEASURE, OUT_OF_REACH, Evidence
from eval.claims.left_out import NO_PLACE, WAITS
from eval.claims.record import FILE, Recorded, board_record
from eval.claims.register import Entries, note
from lm.storage.files import json_text, write_text
from lm.study.statistics import POWER
from lm.study.tables.text import markdown

RESULTS = Path('configs/studies/results')
RESULT_PAGE = re.compile(r'configs/studies/results/\w+\.md')
OPENING = (
    'What papers say, asked of small models by commands that anyone can repeat, with a learning',
    'rate tuned for every arm ([how](../guide/claims.md)). A claim that is not reproduced here is',
    'not refuted: its page says first what differs. Intervals are of 95%: of twenty verdicts one',
    'may be wrong.',
)
TRAINING, COMPUTING = 'training', 'computing alone'  # what a claim's evidence is made by
WITHDRAWN_WORDS = (
    'These verdicts do not stand, and the board does not count them until the claims are tried',
    'again. What was measured is on each page.',
)
HEADS = {'Paper': 'Paper', 'Says': 'It says', 'Here': 'What differs here', 'Counts': 'What counts'}


def rows(found: Sequence[Decided], entries: Entries) -> list[dict[str, Any]]:
    """Returns a row a claim, in the order of VERDICTS."""
    return [
        {
            'claim': one.claim.name,
            'part': one.claim.part,
            'by': TRAINING if one.trains else COMPUTING,
            'verdict': one.verdict,
            'effect': _effect(one.conditions[0]),
            'runs': sum(own.runs for own in one.evidence.values()),
            'core_hours': round(core_hours(one), 3),
            'note': one.why
            or one.claim.caution
            or note(one.claim, entries)
            or '; '.join(power(one)),
        }
        for one in sorted(found, key=lambda one: VERDICTS.index(one.verdict))
    ]


def core_hours(one: Decided) -> float:
    """Returns the hours that the runs of a claim's studies took, times the cores they had; runs
    that several claims speak of count for each.
    """
    return sum(study.core_seconds for study in one.evidence.values()) / 3600


def summary(found: Sequence[Decided]) -> list[str]:
    """Returns how many claims have which verdict, by whether anything was trained for them and
    without those that are withdrawn, and what all runs took: each once.
    """
    standing = [one for one in found if one.verdict != WITHDRAWN]
    counts = [
        f'{len(own)} by {by}: {_verdicts(own)}'
        for by, trains in ((TRAINING, True), (COMPUTING, False))
        if (own := [one for one in standing if one.trains == trains])
    ]
    studies = {s.name: s for one in found for s in one.evidence.values()}.values()
    runs, hours = sum(s.runs for s in studies), sum(s.core_seconds for s in studies) / 3600
    measures = sum(one.name.startswith(MEASURE) for one in studies)
    many = 'claim' if len(found) == 1 else 'claims'
    withdrawn = len(found) - len(standing)
    return [
        f'{len(found)} {many}' + f', of which {withdrawn} withdrawn' * bool(withdrawn),
        *counts,
        f'{runs} runs of studies and {measures} measures, {hours:.3g} core-hours',
    ]


def _verdicts(decided: Sequence[Decided]) -> str:
    count = collections.Counter(one.verdict for one in decided)
    return ', '.join(f'{count[verdict]} {verdict}' for verdict in STANDING if count[verdict])


def _effect(one: Judged) -> str:
    found = one.estimate
    if found is None:
        return ''
    if math.isinf(found.value):
        return f'{"it" if found.value > 0 else "the other"} diverges at every rate'
    return f'{found.value:+.3f} [{_end(found.low)}, {_end(found.high)}]'


def _end(value: float) -> str:
    return 'unknown' if math.isinf(value) else f'{value:+.3f}'


def power(one: Decided) -> Iterator[str]:
    """Returns what would decide each undecided condition."""
    for own in one.conditions:
        if own.said != UNDECIDED or own.estimate is None:
            continue
        if own.seeds:
            yield f'{own.words}: about {own.seeds} seeds would tell in {POWER:.0%} of cases'
        else:
            yield f'{own.words}: a finer or wider search of the rate, or longer runs would tell'


def write_pages(folder: Path, found: Sequence[Decided], entries: Entries) -> list[Path]:
    """Writes index.md, the board, NAME.md of each claim, and the record of all; returns their
    paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {folder / 'index.md': _index(found, entries)}
    texts |= {folder / f'{one.claim.name}.md': _page(one, folder, entries) for one in found}
    texts[folder / FILE] = json_text(board_record(found, entries))
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _index(found: Sequence[Decided], entries: Entries) -> str:
    told = rows(found, entries)
    by_name = {one.claim.name: one for one in found}
    lines = [
        '# Claims',
        '',
        *OPENING,
        '',
        *(f'- {line}.' for line in summary(found)),
        '',
    ]
    standing = [row for row in told if row['verdict'] != WITHDRAWN]
    for by in (TRAINING, COMPUTING):
        if own := [row for row in standing if row['by'] == by]:
            lines += [f'## By {by}', '', _table(own, by_name), '']
    if withdrawn := [row for row in told if row['verdict'] == WITHDRAWN]:
        lines += ['## Withdrawn', '', *WITHDRAWN_WORDS, '', _table(withdrawn, by_name), '']
    lines += ['## By part']
    for part in PARTS:
        if own := [row for row in standing if row['part'] == part]:
            lines += ['', f'### {part.capitalize()}', '', _table(own, by_name)]
    for head, left in (
        ('has no place here', NO_PLACE),
        ('waits for work, or for hours of training', WAITS),
    ):
        lines += ['', f'## What {head}', '', markdown([['paper', 'why'], *left.items()])]
    return '\n'.join(lines) + '\n'


def _table(told: Sequence[dict[str, Any]], by_name: dict[str, Decided]) -> str:
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
    return markdown([head, *body])


def _page(one: Decided, folder: Path, entries: Entries) -> str:
    claim = one.claim
    lines = [f'# {claim.title.rstrip(".")}', '']
    if one.verdict == WITHDRAWN:
        lines += [f'**Withdrawn.** {_sentence(one.why)} Below is what was measured.', '']
    if claim.caution:
        lines += [f'**Caution.** {_linked(_sentence(claim.caution), folder)}', '']
    for heading in HEADINGS:
        lines += [f'**{HEADS[heading]}.** {_sentence(claim.texts[heading])}', '']
    if told := note(claim, entries):
        lines += [f'Of the record: {told}.', '']
    if one.verdict == WITHDRAWN:
        lines += ['**Measured**, and no verdict:', '']
    else:
        lines += [f'**Found: {one.verdict}.** {_sentence(one.why) if one.why else ""}'.rstrip(), '']
    head = ['condition', 'found, 95%', 'seeds', 'it']
    body = [
        [own.words, _effect(own), str(own.estimate.n) if own.estimate else '', own.said]
        for own in one.conditions
    ]
    lines += [markdown([head, *body]), '']
    if one.verdict not in (*UNFINISHED, WITHDRAWN):
        lines += [f'- {_sentence(text)}' for text in power(one)]
        lines += [''] * bool(list(power(one)))
    lines += ['**Runs.** Each study once, for all claims that speak of it:', '']
    for own in one.evidence.values():
        commands = [own.plan_command] if own.state == OUT_OF_REACH else []
        lines += [f'    uv run python {shlex.join(each)}' for each in [*commands, own.command]]
    lines += [f'    uv run python -m eval.claims --only={claim.name}', '']
    lines += [f'{_cost(study)}{_link(study, folder)}' for study in one.evidence.values()]
    return '\n'.join(lines).rstrip() + '\n'


def _linked(text: str, folder: Path) -> str:
    """Returns a text in which pages of studies are links."""
    return RESULT_PAGE.sub(lambda m: f'[{m[0]}]({os.path.relpath(m[0], folder)})', text)


def _sentence(text: str) -> str:
    is_name = text.startswith('arXiv')
    return f'{text if is_name else text[0].upper() + text[1:]}'.rstrip('.') + '.'


def _cost(study: Evidence | Recorded) -> str:
    runs = f'{study.runs} runs, ' if study.runs else ''
    return f'- {study.name}: {runs}{study.core_seconds / 3600:.2f} core-hours'


def _link(study: Evidence | Recorded, folder: Path) -> str:
    """A link to the page of a study, where it has one."""
    page = RESULTS / f'{Path(study.name).name.partition(".")[0]}.md'
    return f'; [its table]({os.path.relpath(page, folder)})' if page.exists() else ''
