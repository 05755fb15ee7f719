"""Listings that train.py prints in place of training: parts, a config, a schedule.

    python train.py --choices               every field, its names, a line each
    python train.py --choices=model.norm    one field, with the options and sources of its rows
    python train.py --choices=model.norm=rmsnorm    one row, with all that its docstring says

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

from absl import flags

from lm.config.choice import AUTO, Choice
from lm.config.fields import CHOICES
from lm.config.recipe import Recipe, sown_losses
from lm.config.resolve import to_json
from lm.launch.before_jax import docstring
from lm.model.check import check
from lm.run.start import check_run
from lm.run.tables import format_schedule
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import check_sources, describe_ignored, expand_sweep
from lm.study.plan.protocols import resolve_protocol
from modules.choices import choose
from modules.numerics import REMAT_SUMMARIES
from modules.options import Option, OptionDeclaration, declared_options

flags.disclaim_key_flags()  # those that are defined here are of the program that asks for them

WIDTH = 100
SUMMARIES = {'model.remat': REMAT_SUMMARIES}  # of tables whose rows are not ours to describe
LEGEND = """\
An option is set by --config.PATH=VALUE; left out, or None, it has the value shown here, which is
the published one. Behind a NAME it is of this field alone, where that may stand there. Runs that
differ in traced options alone share one compiled program.
"""
HINT = '--choices=model.norm lists the options and sources of one field, model.norm=dyt of a row.'


def define_flags() -> None:
    """Defines the flags that ask for a listing."""
    text = 'List all parts, or the options of some: --choices=model.norm.'
    # A boolean may stand alone: it is 'true' then.
    flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, 'choices', None, text, boolean=True))
    flags.DEFINE_bool('print_config', False, 'Print the resolved config and stop.')
    flags.DEFINE_bool('print_schedule', False, 'Print the learning rate over the run and stop.')


def print_parts() -> bool:
    """Prints the listing that --choices asks for; returns whether it was given."""
    asked = flags.FLAGS.choices
    if asked is not None:
        print(format_listing(None if asked == 'true' else asked), end='')
    return asked is not None


def print_config(recipe: Recipe, base: dict[str, Any], sweep: Any, tune: Any = None) -> bool:
    """Prints the config or the schedule, as the flags ask; returns whether either was given.

    The config is checked first, and so is every cell of its sweep, which start from `base`.
    """
    of_config, of_schedule = flags.FLAGS.print_config, flags.FLAGS.print_schedule
    if not of_config and not of_schedule:
        return False
    (check_run if of_config else check)(recipe)
    found = [] if sweep is None else expand_sweep(base, sweep)
    resolve_protocol(base, sweep)
    words = f'{len(found)} cells start from this' if found else ''
    if tune is not None:
        arms = ArmPlan(base, sweep, tune)
        found, words = arms.first_cells, f'{arms.description}, from this start'
    if of_config:
        check_sources(found)
        print(to_json(recipe), end='')
    if of_schedule:
        print(format_schedule(recipe), end='')
    if words:
        print(words, file=sys.stderr)
    for note in describe_ignored(found):
        print(f'NOTE: {note}', file=sys.stderr)
    return True


@dataclasses.dataclass(frozen=True)
class PartRow:
    """A name that a field may have. words: one line of what it is. source: such as
    'arXiv:1910.07467' or 'code', several with commas; '' where none is named. options: by config
    path, such as 'norm.eps'. text: all that is said of it.
    """

    name: str
    summary: str
    text: str
    source: str
    options: Mapping[str, OptionDeclaration]


def part_rows(field: str) -> list[PartRow]:
    """The rows of the table that `field` names one of; ValueError with the nearest field."""
    choice = choose(CHOICES, field, '--choices')
    rows = []
    for name, part in choice.table.items():
        text = SUMMARIES[field][name] if field in SUMMARIES else describe_part(part)
        words, source = first_sentence(text), find_sources(text)
        words = words.removesuffix(f' ({find_sources(words)})')  # it is in `source` too
        found = {
            f'{choice.section}.{n}': declared for n, declared in declared_options(part).items()
        }
        for term in sown_losses(choice, part).values():
            found |= {f'loss.{n}': d for n, d in declared_options(term).items()}
        rows.append(PartRow(name, words, text, source, found))
    return rows


def format_listing(selection: str | None = None) -> str:
    """The rows of a field, or one of them, FIELD=NAME, with their options; the rows of every field
    without. Lines have WIDTH.
    """
    lines = _overview() if selection is None else _details(*selection.split('=', 1))
    return '\n'.join(lines).rstrip() + '\n'


def _overview() -> Iterator[str]:
    listed: dict[int, str] = {}  # the first field of each table
    for field, choice in CHOICES.items():
        first = listed.setdefault(id(choice.table), field)
        if first != field:
            yield from (f'{field}={value_form(choice)}: the names of {first}', '')
            continue
        rows = part_rows(field)
        column = max(len(row.name) for row in rows) + 4
        yield f'{field}={value_form(choice)}'
        for row in rows:
            yield from _wrap_hanging(f'  {row.name}', row.summary, column)
        yield ''
    yield HINT


def _details(field: str, name: str = '') -> Iterator[str]:
    rows = part_rows(field)
    if name:
        rows = [choose({row.name: row for row in rows}, name, field)]
    yield from (f'{field}={value_form(CHOICES[field])}', '')
    if any(row.options for row in rows):
        yield LEGEND
    for row in rows:
        source = f'({row.source})' if row.source else ''
        yield from _wrap_hanging(f'{row.name} ', source, len(row.name) + 1)
        if name:
            yield from ('', textwrap.indent(row.text, '  '), '')
        else:
            yield from _wrap_hanging('', row.summary, 2)
        lines = [(f'  {path}={d.default}', option_type(d), d) for path, d in row.options.items()]
        first, second = (max((len(line[i]) for line in lines), default=0) + 2 for i in (0, 1))
        for given, of_kind, declared in lines:
            start = f'{given:{first}}{of_kind}'
            yield from _wrap_hanging(start, declared.option.description, first + second)
        yield ''


def _wrap_hanging(start: str, text: str, column: int) -> list[str]:
    """`start`, then `words` from `column` on, over as many lines as they need."""
    wrapper = textwrap.TextWrapper(WIDTH, f'{start:{column}}', ' ' * column)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text) or [start.rstrip()]


def value_form(choice: Choice) -> str:
    """The form of the field's value: NAME, NAME+NAME, ..."""
    forms = ['NAME']
    if choice.inline:
        forms.append('NAME:OPTION=VALUE,...')
    if choice.several:
        forms.append('NAME:SHARE+NAME:SHARE' if choice.shares else 'NAME+NAME')
    if choice.auto:
        forms.append(AUTO)
    return ' or '.join(forms)


def option_type(declared: OptionDeclaration) -> str:
    """'float, 0 to 1, traced': the type of an option, its bounds, whether it is traced."""
    names = ['None' if t is type(None) else t.__name__ for t in declared.types]
    traced = 'traced' if declared.option.traced else ''
    return ', '.join(filter(None, (' or '.join(names), format_bounds(declared.option), traced)))


def format_bounds(option: Option) -> str:
    """'0 to 1', '1 to any', 'any finite', 'a|b'; '' where there are none."""
    if option.choices:
        return '|'.join(option.choices)
    largest = sys.float_info.max
    if (option.minimum, option.maximum) == (-math.inf, math.inf):
        return ''
    if (option.minimum, option.maximum) == (-largest, largest):
        return 'any finite'
    least = 'any' if option.minimum == -math.inf else option.minimum
    most = {math.inf: 'any', largest: 'any finite'}.get(option.maximum, option.maximum)
    return f'{least} to {most}'


def describe_part(part: Any) -> str:
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
            return describe_part(functions[0])
    else:
        return docstring(part)
    names: dict[str, list[str]] = {}
    for name, value in held.items():
        names.setdefault(getattr(value, '__name__', value), []).append(name)
    usual = max(names, key=lambda value: len(names[value]), default=None)
    others = [usual] if usual is not None and len(names[usual]) > 1 else []
    alone = [f'{name} {value}' for value in names if value not in others for name in names[value]]
    return ', '.join([*alone, *(f'others {value}' for value in others)])


def first_sentence(text: str) -> str:
    """The first sentence on one line, without the full stop."""
    paragraph = ' '.join(text.split('\n\n')[0].split())
    return re.split(r'\.\s+(?=[A-Z])', paragraph)[0].removesuffix('.')


def find_sources(text: str) -> str:
    """'arXiv:1910.07467, code': the papers in the text, in order, and whether it follows code."""
    papers = dict.fromkeys(re.findall(r'arXiv:\d{4}\.\d{4,5}', text))
    code = ['code'] if re.search(r'\bcode\s+(of|beside)\b', text) else []
    return ', '.join([*papers, *code])
