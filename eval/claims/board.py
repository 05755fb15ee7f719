"""The board and its pages: rows of what is known of each claim, in words that a reader needs."""

import collections
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import HEADINGS, PARTS
from eval.claims.decide import UNFINISHED, VERDICTS, Decided, Judged
from eval.claims.estimates import UNDECIDED
from eval.claims.evidence import OUT_OF_REACH, Evidence, Measure
from eval.claims.left_out import NO_PLACE, WAITS
from eval.claims.register import Entries, note
from eval.tables.text import markdown
from lm.storage.files import write_text

RESULTS = Path('configs/studies/results')
OPENING = (
    'What papers say, asked of small models by commands that anyone can repeat, with a learning',
    'rate tuned for every arm ([how](../guide/claims.md)). A claim that is not reproduced here is',
    'not refuted: its page says first what differs. Intervals are of 95%: of twenty verdicts one',
    'may be wrong.',
)
HEADS = {'Paper': 'Paper', 'Says': 'It says', 'Here': 'What differs here', 'Counts': 'What counts'}


def rows(found: Sequence[Decided], entries: Entries) -> list[dict[str, Any]]:
    """Returns a row a claim, in the order of VERDICTS."""
    return [
        {
            'claim': one.claim.name,
            'part': one.claim.part,
            'verdict': one.verdict,
            'effect': _effect(one.conditions[0]),
            'runs': sum(own.runs for own in one.evidence.values()),
            'core_hours': round(core_hours(one), 3),
            'note': one.why or note(one.claim, entries) or '; '.join(power(one)),
        }
        for one in sorted(found, key=lambda one: VERDICTS.index(one.verdict))
    ]


def core_hours(one: Decided) -> float:
    """Returns the hours that the runs of a claim's studies took, times the cores they had; runs
    that several claims speak of count for each.
    """
    return sum(study.core_seconds for study in one.evidence.values()) / 3600


def summary(found: Sequence[Decided]) -> list[str]:
    """Returns how many claims have which verdict, and what all runs took: each once."""
    count = collections.Counter(one.verdict for one in found)
    told = ', '.join(f'{count[verdict]} {verdict}' for verdict in VERDICTS if count[verdict])
    studies = {s.name: s for one in found for s in one.evidence.values()}.values()
    runs, hours = sum(s.runs for s in studies), sum(s.core_seconds for s in studies) / 3600
    measures = sum(isinstance(one, Measure) for one in studies)
    many = 'claim' if len(found) == 1 else 'claims'
    return [
        f'{len(found)} {many}: {told}',
        f'{runs} runs of studies and {measures} measures, {hours:.2f} core-hours',
    ]


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
            yield f'{own.words}: about {own.seeds} seeds would tell'
        else:
            yield f'{own.words}: a finer or wider search of the rate, or longer runs would tell'


def write_pages(folder: Path, found: Sequence[Decided], entries: Entries) -> list[Path]:
    """Writes index.md, the board, and NAME.md of each claim; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {folder / 'index.md': _index(found, entries)}
    texts |= {folder / f'{one.claim.name}.md': _page(one, folder, entries) for one in found}
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
        *(f'{line}.' for line in summary(found)),
        '',
        '## By verdict',
        '',
        _table(told, by_name),
        '',
        '## By part',
    ]
    for part in PARTS:
        own = [row for row in told if row['part'] == part]
        if own:
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
    for heading in HEADINGS:
        lines += [f'**{HEADS[heading]}.** {_sentence(claim.texts[heading])}', '']
    if told := note(claim, entries):
        lines += [f'Of the record: {told}.', '']
    lines += [f'**Found: {one.verdict}.** {_sentence(one.why) if one.why else ""}'.rstrip(), '']
    head = ['condition', 'found, 95%', 'seeds', 'it']
    body = [
        [own.words, _effect(own), str(own.estimate.n) if own.estimate else '', own.said]
        for own in one.conditions
    ]
    lines += [markdown([head, *body]), '']
    if one.verdict not in UNFINISHED:
        lines += [f'- {_sentence(text)}' for text in power(one)]
        lines += [''] * bool(list(power(one)))
    lines += ['**Runs.** Each study once, for all claims that speak of it:', '']
    for own in one.evidence.values():
        commands = [own.plan_command] if own.state == OUT_OF_REACH else []
        lines += [f'    uv run python {shlex.join(each)}' for each in [*commands, own.command]]
    lines += [f'    uv run python -m eval.claims --only={claim.name}', '']
    lines += [f'{_cost(study)}{_link(study, folder)}' for study in one.evidence.values()]
    return '\n'.join(lines).rstrip() + '\n'


def _sentence(text: str) -> str:
    is_name = text.startswith('arXiv')
    return f'{text if is_name else text[0].upper() + text[1:]}'.rstrip('.') + '.'


def _cost(study: Evidence) -> str:
    runs = f'{study.runs} runs, ' if study.runs else ''
    return f'- {study.name}: {runs}{study.core_seconds / 3600:.2f} core-hours'


def _link(study: Evidence, folder: Path) -> str:
    """A link to the page of a study, where it has one."""
    page = RESULTS / f'{Path(study.name).name.partition(".")[0]}.md'
    return f'; [its table]({os.path.relpath(page, folder)})' if page.exists() else ''
