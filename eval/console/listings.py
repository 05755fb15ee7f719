"""Listings that train.py prints in place of training: parts, a config, a schedule.

    python train.py --choices               every field that selects parts, one line per part
    python train.py --choices=model.norm    one field: its parts, their options and sources
    python train.py --choices=model.norm=rmsnorm    one part, with its whole docstring

A row is described by its `summary`, or else by the first sentence of its docstring. Its sources are
the papers and the code named there.
"""

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags

from eval.console.docstrings import format_docstring, strip_marks
from lm.config.choice import AUTO, Choice
from lm.config.fields import CHOICES, FIELDS
from lm.config.recipe import Recipe, sown_losses
from lm.config.resolve import to_json
from lm.launch.before_jax import docstring
from lm.model.check import check
from lm.run.describe import describe_unfitted
from lm.run.program import list_parameters
from lm.run.start import check_run
from lm.run.tables import format_schedule, format_table
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import check_sources, describe_ignored, expand_sweep
from lm.study.plan.protocols import resolve_protocol
from modules.choices import choose
from modules.numerics import REMAT_SUMMARIES
from modules.options import Option, OptionDeclaration, declared_options, describe_bounds

flags.disclaim_key_flags()  # those that are defined here are of the program that asks for them

WIDTH, MIN_WIDTH = 100, 80  # columns
NO_BREAK = '\N{NO-BREAK SPACE}'
SUMMARIES = {'model.remat': REMAT_SUMMARIES}  # of tables whose rows are not ours to describe
# The symbols that the equations of a table share, by the first field of the table.
SYMBOLS = {
    'model.norm': (
        '`x` [D] are the features of a token, and `y` is the output. Products of vectors are '
        'elementwise. `g` is a learned gain that starts at 1, `b` a learned bias that starts at 0, '
        'and `eps` the option of that name.'
    ),
    'model.placement': (
        '`x` is the residual stream, `N` a norm, and `F` a sublayer: attention `A` or the MLP `M`.'
    ),
    'model.stream': (
        '`x` is the residual stream, `N` a norm, and `F` a sublayer. The equations are those of '
        'pre-norm; other placements that add `F` to the stream have their own place of `N`.'
    ),
    'model.attention': (
        '`q`, `k` and `v` are the queries, keys and values of a head, with a row for each token; '
        '`q_t` is that of token `t`. `H` is the width of a head.'
    ),
    'model.activation': (
        '`x` is the up projection. A gated activation has two projections, with the elementwise '
        'product `gate * up`. `Phi` is the distribution function of a standard normal.'
    ),
    'model.position': (
        '`t` and `s` are the positions of a query and of a key, and `s_ts` is their score.'
    ),
    'model.reparam': (
        '`W_used` [I, O] is the matrix that a layer multiplies by, from `I` inputs to `O` outputs. '
        '`||W||_F` is its Frobenius norm.'
    ),
    'model.mlp': '`x` are the features of a token, and `y` is the output.',
    'model.readout': (
        '`x` is the last activation of a token, and `z_v` the logit of token `v` of the vocabulary.'
    ),
    'loss.name': (
        '`z_v` are the logits of a token for the `V` entries of the vocabulary, `p` is the '
        'probability of its label, and `ce = -log p`. Training minimises the objective. All terms '
        'are in nats per token.'
    ),
    'optim.name': (
        '`g` is the gradient of a parameter (`G` of a matrix), `w` the parameter, and `t` the '
        'number of the update, from 1. `u` is the direction: the update before learning rate and '
        'weight decay. `b1`, `b2` and `eps` are options. Squares, roots and quotients are '
        'elementwise.'
    ),
    'optim.schedule': (
        'The learning rate rises linearly during the warm-up. `f` is the learning rate after that, '
        'as a fraction of its peak `optim.lr`. `p` is the progress of the decay, which is 1 in the '
        'last step, and `r` is `optim.final_lr_fraction`.'
    ),
    'optim.decay_rule': (
        '`s` is the share of a weight that a step removes, `eta` the peak learning rate of the '
        'parameter, `f` the present learning rate as a fraction of the peak, and `lambda` is '
        '`optim.weight_decay`.'
    ),
    'optim.average': (
        '`w_t` are the trained weights after update `t`, and `x_t` the weights for evaluation.'
    ),
    'scaling.name': (
        '`m` is the growth of fan_in from the base model to the model, and `n` the growth of '
        'fan_out. There are three kinds of parameters:\n\n'
        '- input: only fan_out grows. Embeddings, gains, biases, the second of two low-rank '
        'matrices.\n'
        '- hidden: both grow.\n'
        '- output: only fan_in grows. The readout, routers, the first of two low-rank matrices.\n\n'
        'A parametrisation multiplies the used weights (forward), their initial standard deviation '
        'and their learning rate by factors. The factor of weight decay is 1 over the factor of '
        'the learning rate, unless stated otherwise.'
    ),
    'scaling.init': (
        '`s` is the standard deviation of the initial entries. `D` is the width of the model, and '
        '`L` the number of blocks.'
    ),
}
LEGEND = (
    'Set an option with --config.PATH=VALUE. Each line shows the default, which is the published '
    'value; None selects it too.'
)
INLINE_LEGEND = 'Written as NAME:OPTION=VALUE, an option applies only to this field.'
TRACED_LEGEND = 'Runs that differ only in traced options share one compiled program.'
HINT = (
    '--choices=model.norm lists the parts of one field with their options and sources; '
    '--choices=model.norm=dyt describes one part.'
)


def define_flags() -> None:
    """Defines the flags that request a listing."""
    text = 'List all parts, or the parts of one field with their options: --choices=model.norm.'
    # A boolean may stand alone: it is 'true' then.
    flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, 'choices', None, text, boolean=True))
    flags.DEFINE_bool('print_config', False, 'Print the resolved config and stop.')
    flags.DEFINE_bool('print_parameters', False, 'Print the settings of all parameters and stop.')
    flags.DEFINE_bool('print_schedule', False, 'Print the learning rate over the run and stop.')


def print_parts() -> bool:
    """Prints the listing that --choices requests; returns whether the flag was given."""
    selection = flags.FLAGS.choices
    if selection is not None:
        columns = shutil.get_terminal_size((WIDTH, 0)).columns
        width = min(WIDTH, max(MIN_WIDTH, columns))
        print(format_listing(None if selection == 'true' else selection, width), end='')
    return selection is not None


def print_config(recipe: Recipe, base: dict[str, Any], sweep: Any, tune: Any = None) -> bool:
    """Prints the config, the schedule or the parameters, as the flags request.

    The config and its cells are checked first.

    Args:
      recipe: the resolved config.
      base: the config of the cells before their changes, without its sweep.
      sweep: config.sweep, or None.
      tune: config.tune, or None.

    Returns:
      Whether a flag was given.
    """
    shows_config, shows_schedule = flags.FLAGS.print_config, flags.FLAGS.print_schedule
    shows_parameters = flags.FLAGS.print_parameters
    if not (shows_config or shows_schedule or shows_parameters):
        return False
    (check_run if shows_config else check)(recipe)
    cells = [] if sweep is None else expand_sweep(base, sweep)
    if (sweep, tune) != (None, None):
        resolve_protocol(base, sweep)
    description = f'{len(cells)} cells start from this config' if cells else ''
    if tune is not None:
        arms = ArmPlan(base, sweep, tune)
        cells, description = arms.first_cells, f'{arms.description}, starting from this config'
    if shows_config:
        check_sources(cells)
        print(to_json(recipe), end='')
        from eval.convert.exportable import describe_export  # its imports are slow

        print(f'export: {describe_export(recipe)}', file=sys.stderr)
    if shows_schedule:
        print(format_schedule(recipe), end='')
    if shows_parameters:
        print(format_table(list_parameters(recipe)), end='')
    if description:
        print(description, file=sys.stderr)
    for line in describe_unfitted(recipe):
        print(line, file=sys.stderr)
    for note in describe_ignored(cells):
        print(f'NOTE: {note}', file=sys.stderr)
    return True


@dataclasses.dataclass(frozen=True)
class PartRow:
    """A part that a field may name.

    summary: one line. source: such as 'arXiv:1910.07467' or 'code', several with commas; '' if none
    is named. options: by config path, such as 'norm.eps'. text: the whole description. base: the
    row of the table that has the same options, perhaps with other defaults; '' if there is none.
    """

    name: str
    summary: str
    text: str
    source: str
    options: Mapping[str, OptionDeclaration]
    base: str = ''


def part_rows(field: str) -> list[PartRow]:
    """Returns the rows of a field's table. Raises ValueError, with the nearest, if unknown."""
    choice = choose(CHOICES, field, '--choices')
    rows = []
    names = {part: name for name, part in choice.table.items() if isinstance(part, type)}
    for name, part in choice.table.items():
        bases = part.__mro__[1:] if isinstance(part, type) else ()
        text = SUMMARIES[field][name] if field in SUMMARIES else describe_part(part)
        summary, source = summarize_text(text), find_sources(text)
        options = {
            f'{choice.section}.{option}': declaration
            for option, declaration in declared_options(part).items()
        }
        for term in sown_losses(choice, part).values():
            options |= {
                f'loss.{option}': declaration
                for option, declaration in declared_options(term).items()
            }
        base = next((names[c] for c in bases if c in names), '')
        rows.append(PartRow(name, summary, text, source, options, base))
    return rows


def format_listing(selection: str | None = None, width: int = WIDTH) -> str:
    """Formats the parts of all fields, of one field, or one part.

    Args:
      selection: FIELD or FIELD=NAME; None: all fields.
      width: the largest length of a line.
    """
    if selection is None:
        lines = _overview(width)
    else:
        field, _, name = selection.partition('=')
        lines = _details(field, name, width)
    return '\n'.join(lines).rstrip() + '\n'


def _heading(field: str, width: int, addition: str = '') -> list[str]:
    """Returns 'model.norm=NAME or ...: norm in the blocks', wrapped."""
    form = value_form(CHOICES[field])
    return _wrap_hanging('', f'{field}={form}: {FIELDS[field].description}{addition}', 4, width, 0)


def _overview(width: int) -> Iterator[str]:
    listed: dict[int, str] = {}  # the first field of each table
    for field, choice in CHOICES.items():
        first = listed.setdefault(id(choice.table), field)
        if first != field:
            yield from _heading(field, width, f' (the names of {first})')
            yield ''
            continue
        rows = part_rows(field)
        column = max(len(row.name) for row in rows) + 4
        yield from _heading(field, width)
        for row in rows:
            yield from _wrap_hanging(f'  {row.name}', row.summary, column, width)
        yield ''
    yield from textwrap.wrap(HINT, width, break_on_hyphens=False)


def _details(field: str, name: str, width: int) -> Iterator[str]:
    rows = part_rows(field)
    if name:
        rows = [choose({row.name: row for row in rows}, name, field)]
    yield from _heading(field, width)
    yield ''
    options = [declaration.option for row in rows for declaration in row.options.values()]
    if options:
        legend = [LEGEND]
        legend += [INLINE_LEGEND] * CHOICES[field].inline
        legend += [TRACED_LEGEND] * any(option.traced for option in options)
        yield from textwrap.wrap(' '.join(legend), width, break_on_hyphens=False)
        yield ''
    for first, symbols in SYMBOLS.items():
        if CHOICES[first].table is CHOICES[field].table:
            yield from (format_docstring(symbols, width), '')
    for row in rows:
        source = f'({row.source})' if row.source else ''
        yield from _wrap_hanging(f'{row.name} ', source, len(row.name) + 1, width)
        if name:
            yield from ('', textwrap.indent(format_docstring(row.text, width - 2), '  '), '')
        else:
            yield from _wrap_hanging('', row.summary, 2, width)
        if row.base and not name:
            base_options = next(r.options for r in rows if r.name == row.base)
            changed = _drop_same(row.options, base_options)
            yield from _option_lines(changed, width)
            yield f'  and the other options of {row.base}' if changed else f'  as {row.base}'
        else:
            yield from _option_lines(row.options, width)
        yield ''


def _drop_same(
    options: Mapping[str, OptionDeclaration], base_options: Mapping[str, OptionDeclaration]
) -> dict[str, OptionDeclaration]:
    """Returns the options that another row does not have with the same default."""
    return {path: o for path, o in options.items() if o != base_options.get(path)}


def _option_lines(options: Mapping[str, OptionDeclaration], width: int) -> Iterator[str]:
    """Yields the lines of each option: '  PATH=DEFAULT  description [type]'."""
    settings = {path: f'  {path}={declared.default}  ' for path, declared in options.items()}
    column = min(max(map(len, settings.values()), default=0), width * 2 // 5)
    for path, declared in options.items():
        type_text = f'[{option_type(declared)}]'
        if len(type_text) <= width - column:
            type_text = type_text.replace(' ', NO_BREAK)
        start = settings[path]
        if len(start) > column:
            yield start.rstrip()
            start = ''
        for line in _wrap_hanging(
            start, f'{declared.option.description} {type_text}', column, width
        ):
            yield line.replace(NO_BREAK, ' ')


def _wrap_hanging(
    start: str, text: str, column: int, width: int, first_column: int | None = None
) -> list[str]:
    """Wraps `start` and a text.

    Args:
      start: begins the first line.
      text: the text.
      column: of the text.
      width: the largest length of a line.
      first_column: of the text in the first line; None: `column`.

    Returns:
      The lines.
    """
    first_column = column if first_column is None else first_column
    wrapper = textwrap.TextWrapper(width, f'{start:{first_column}}', ' ' * column)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text) or [start.rstrip()]


def value_form(choice: Choice) -> str:
    """Returns the form of a field's value: NAME, NAME+NAME, ..."""
    forms = ['NAME']
    if choice.inline:
        forms.append('NAME:OPTION=VALUE,...')
    if choice.several:
        forms.append('NAME:SHARE+NAME:SHARE' if choice.shares else 'NAME+NAME')
    if choice.auto:
        forms.append(AUTO)
    return ' or '.join(forms)


def option_type(declaration: OptionDeclaration) -> str:
    """Returns 'float, 0 to 1, traced': the type of an option, its bounds, whether it is traced."""
    names = ['None' if t is type(None) else t.__name__ for t in declaration.types]
    traced = 'traced' if declaration.option.traced else ''
    return ', '.join(filter(None, (' or '.join(names), format_bounds(declaration.option), traced)))


def format_bounds(option: Option) -> str:
    """Returns '0 to 1', 'at least 1', 'finite', 'a|b'; '' for no bounds."""
    return '|'.join(option.choices) or describe_bounds(option.minimum, option.maximum)


def describe_part(part: Any) -> str:
    """Returns the description of a row.

    This is its summary, its docstring, the docstring of its first function, or its members as
    'name=value, others=value'.
    """
    if isinstance(part, Mapping):
        members = part
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        if getattr(part, 'summary', ''):
            return part.summary
        members = vars(part)
        functions = [value for value in members.values() if inspect.isfunction(value)]
        if functions:
            return describe_part(functions[0])
    else:
        return docstring(part)
    names: dict[str, list[str]] = {}
    for name, value in members.items():
        names.setdefault(getattr(value, '__name__', value), []).append(name)
    commonest = max(names, key=lambda value: len(names[value]), default=None)
    shared = [commonest] if commonest is not None and len(names[commonest]) > 1 else []
    single = [f'{"+".join(names[value])}: {value}' for value in names if value not in shared]
    return ', '.join([*single, *(f'others: {value}' for value in shared)])


def first_sentence(text: str) -> str:
    """Returns the first sentence on one line, without the full stop.

    A full stop within parentheses, as in '(arXiv:2309.14322, app. E.2)', ends no sentence.
    """
    paragraph = ' '.join(text.split('\n\n')[0].split())
    for end in re.finditer(r'\.\s+(?=[A-Z])', paragraph):
        sentence = paragraph[: end.start()]
        if sentence.count('(') <= sentence.count(')'):
            return sentence
    return paragraph.removesuffix('.')


def summarize_text(text: str) -> str:
    """Returns the first sentence of a description, without the paper if it names only one.

    The paper is printed as the source of the row. Equations have no backticks.
    """
    summary = strip_marks(first_sentence(text))
    return summary.replace(f' ({find_sources(summary)})', '')


def find_sources(text: str) -> str:
    """Returns 'arXiv:1910.07467, code': the papers in the text, in order, and 'code' if it follows
    code.
    """
    papers = dict.fromkeys(re.findall(r'arXiv:\d{4}\.\d{4,5}', text))
    code = ['code'] if re.search(r'\bcode\s+(of|beside)\b|\b(its|authors.)\s+code\b', text) else []
    return ', '.join([*papers, *code])
