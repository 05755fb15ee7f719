"""What may stand in each config field that names a part, read from the parts themselves.

    python train.py --choices               every field, its names, a line each
    python train.py --choices=model.norm    one field, with the options and sources of its rows

A row is described by its `summary`, or else by the first sentence of its docstring; its sources are
the papers and the code that these name.
"""

import dataclasses
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from lm.choice import AUTO, Choice
from lm.recipe import sown_by
from lm.sections import CHOICES
from modules.choices import choose
from modules.numerics import REMAT_SUMMARIES
from modules.options import Declared, Option, options

WIDTH = 100
SUMMARIES = {'model.remat': REMAT_SUMMARIES}  # of tables whose rows are not ours to describe
LEGEND = """\
An option is set by --config.PATH=VALUE; left out, or None, it has the value shown here, which is
the published one. Behind a NAME it is of this field alone, where that may stand there. Runs that
differ in traced options alone share one compiled program.
"""
HINT = '--choices=model.norm lists the options and sources of one field.'


@dataclasses.dataclass(frozen=True)
class Row:
    """A name that a field may have. words: one line of what it is. source: such as
    'arXiv:1910.07467' or 'code', several with commas; '' where none is named. options: by config
    path, such as 'norm.eps'.
    """

    name: str
    words: str
    source: str
    options: Mapping[str, Declared]


def rows_of(field: str) -> list[Row]:
    """The rows of the table that `field` names one of; ValueError with the nearest field."""
    choice = choose(CHOICES, field, '--choices')
    rows = []
    for name, part in choice.table.items():
        text = SUMMARIES[field][name] if field in SUMMARIES else description(part)
        words, source = first_sentence(text), sources(text)
        if sources(words) and words.endswith(f' ({sources(words)})'):  # it is in `source` too
            words = words.removesuffix(f' ({sources(words)})')
        found = {f'{choice.section}.{n}': declared for n, declared in options(part).items()}
        for term in sown_by(choice, part).values():
            found |= {f'loss.{n}': d for n, d in options(term).items()}
        rows.append(Row(name, words, source, found))
    return rows


def listing(field: str | None = None) -> str:
    """The rows of `field` with their options, or of every field without, in lines of WIDTH."""
    lines = _overview() if field is None else _details(field)
    return '\n'.join(lines).rstrip() + '\n'


def _overview() -> Iterator[str]:
    listed: dict[int, str] = {}  # the first field of each table
    for field, choice in CHOICES.items():
        first = listed.setdefault(id(choice.table), field)
        if first != field:
            yield from (f'{field}={form(choice)}: the names of {first}', '')
            continue
        rows = rows_of(field)
        column = max(len(row.name) for row in rows) + 4
        yield f'{field}={form(choice)}'
        for row in rows:
            yield from _hanging(f'  {row.name}', row.words, column)
        yield ''
    yield HINT


def _details(field: str) -> Iterator[str]:
    rows = rows_of(field)
    yield from (f'{field}={form(CHOICES[field])}', '')
    if any(row.options for row in rows):
        yield LEGEND
    for row in rows:
        source = f'({row.source})' if row.source else ''
        yield from _hanging(f'{row.name} ', source, len(row.name) + 1)
        yield from _hanging('', row.words, 2)
        given = [f'  {path}={declared.default}' for path, declared in row.options.items()]
        kinds = [kind(declared) for declared in row.options.values()]
        first, second = (max(map(len, cells), default=0) + 2 for cells in (given, kinds))
        for text, of_kind, declared in zip(given, kinds, row.options.values(), strict=True):
            words = declared.option.words
            yield from _hanging(f'{text:{first}}{of_kind}', words, first + second)
        yield ''


def _hanging(start: str, words: str, column: int) -> list[str]:
    """`start`, then `words` from `column` on, over as many lines as they need."""
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=f'{start:{column}}',
        subsequent_indent=' ' * column,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]


def form(choice: Choice) -> str:
    """What the value of such a field looks like."""
    forms = ['NAME']
    if choice.inline:
        forms.append('NAME:OPTION=VALUE,...')
    if choice.several:
        forms.append('NAME:SHARE+NAME:SHARE' if choice.shares else 'NAME+NAME')
    if choice.auto:
        forms.append(AUTO)
    return ' or '.join(forms)


def kind(declared: Declared) -> str:
    """'float, 0 to 1, traced': the type of an option, its bounds, whether it is traced."""
    names = ['None' if t is type(None) else t.__name__ for t in declared.types]
    traced = 'traced' if declared.option.traced else ''
    return ', '.join(filter(None, (' or '.join(names), bounds(declared.option), traced)))


def bounds(option: Option) -> str:
    """'0 to 1', '1 to any', 'any finite', 'a|b'; '' where there are none."""
    if option.choices:
        return '|'.join(option.choices)
    largest = sys.float_info.max
    if (option.least, option.most) == (-math.inf, math.inf):
        return ''
    if (option.least, option.most) == (-largest, largest):
        return 'any finite'
    least = 'any' if option.least == -math.inf else option.least
    most = {math.inf: 'any', largest: 'any finite'}.get(option.most, option.most)
    return f'{least} to {most}'


def description(part: Any) -> str:
    """The text that says what a row is: its summary, its docstring, that of the first function it
    holds, or the names of what it holds.
    """
    if isinstance(part, Mapping):
        held = part
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        if hasattr(part, 'summary'):
            return part.summary
        held = vars(part)
        functions = [value for value in held.values() if inspect.isfunction(value)]
        if functions:
            return description(functions[0])
    else:
        own = part.__dict__.get('__doc__') if isinstance(part, type) else part.__doc__
        return inspect.cleandoc(own or '')
    names: dict[str, list[str]] = {}
    for name, value in held.items():
        names.setdefault(getattr(value, '__name__', value), []).append(name)
    usual = max(names, key=lambda value: len(names[value]), default=None)
    others = [usual] if usual is not None and len(names[usual]) > 1 else []
    alone = [f'{name} {value}' for value in names if value not in others for name in names[value]]
    return ', '.join([*alone, *(f'others {value}' for value in others)])


def first_sentence(text: str) -> str:
    """On one line, without the full stop."""
    paragraph = ' '.join(text.split('\n\n')[0].split())
    return re.split(r'\.\s+(?=[A-Z])', paragraph)[0].removesuffix('.')


def sources(text: str) -> str:
    """'arXiv:1910.07467, code': the papers in the text, in order, and whether it follows code."""
    papers = dict.fromkeys(re.findall(r'arXiv:\d{4}\.\d{4,5}', text))
    code = ['code'] if re.search(r'\bcode\s+(of|beside)\b', text) else []
    return ', '.join([*papers, *code])
