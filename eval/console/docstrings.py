"""Reads the docstrings of parts: paragraphs, lists, equations, and code in backticks.

Text in backticks is mathematics if it

- has an operator between spaces (`y = x + 1`), `^` or `|`,
- is a symbol or a product of symbols (`x`, `eps`, `g x`), where an index has one or two characters,
  or is a word behind a capital letter (`x_ti`, `W_up`), or
- begins with a symbol or function and its argument (`sigma(W)`, `2 log Z`).

All other text in backticks is code, and text in double backticks always is. A terminal shows the
equations as they are; docs/equations.py draws them on the site.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

GREEK = {
    **{'alpha': 'α', 'beta': 'β', 'gamma': 'γ', 'delta': 'δ', 'epsilon': 'ε', 'eps': 'ε'},
    **{'zeta': 'ζ', 'eta': 'η', 'theta': 'θ', 'kappa': 'κ', 'lambda': 'λ', 'mu': 'μ', 'nu': 'ν'},
    **{'xi': 'ξ', 'pi': 'π', 'rho': 'ρ', 'sigma': 'σ', 'tau': 'τ', 'phi': 'φ', 'chi': 'χ'},
    **{'psi': 'ψ', 'omega': 'ω', 'Gamma': 'Γ', 'Delta': 'Δ', 'Theta': 'Θ', 'Lambda': 'Λ'},
    **{'Sigma': 'Σ', 'Phi': 'Φ', 'Psi': 'Ψ', 'Omega': 'Ω'},
}
# Functions whose limits stand below them.
LIMITS = frozenset(('sum', 'prod', 'mean', 'max', 'min', 'sup', 'argmin', 'argmax'))
FUNCTIONS = LIMITS | {
    *('sqrt', 'exp', 'log', 'tanh', 'sin', 'cos', 'arctan', 'sign', 'floor', 'ceil'),
    *('relu', 'gelu', 'silu', 'swish', 'elu', 'sigmoid', 'softplus', 'softmax'),
    *('rms', 'var', 'std'),
}
_LETTER = rf'(?:[A-Za-z]|{"|".join(GREEK)})'
_SYMBOL = rf"(?: {_LETTER} (?: _[a-z0-9]{{1,2}} )? | [A-Z] (?: _ (?: [a-z]+ | [A-Z] ) )? ) '?"
_FUNCTION = f'(?:{"|".join(FUNCTIONS)})'
_MATHEMATICS = re.compile(
    rf"""
      .*(?: \^ | \| | \s (?: [=<>+*/~.-] | [<>!~]= | <- ) \s ).*   # an operator
    | -? {_SYMBOL} (?: \s {_SYMBOL} )*   # x, or g x
    | -? (?: [\d.]+ \s )? (?: {_LETTER} | {_FUNCTION} ) (?: _\w+ )? \( .*   # f(x)
    | -? (?: [\d.]+ \s )? {_FUNCTION} (?: _\w+ )? \s .*   # log x
    """,
    re.VERBOSE | re.DOTALL,
)
_MARKED = re.compile(r'``([^`]+)``|`([^`]+)`')
_SECTIONS = ('Args:', 'Returns:', 'Yields:', 'Raises:')
_UNBROKEN = 40  # characters of an equation that a line of prose does not break
_HANG = 4  # columns that displayed equations are indented by


class DocBlock(NamedTuple):
    """A block of a docstring.

    `lines` has one element for a paragraph of prose, and one for each equation, item of a list,
    row of a table, line of verbatim text, or line of a section such as `Args:`.
    """

    kind: Literal['prose', 'equations', 'list', 'table', 'verbatim', 'section']
    lines: tuple[str, ...]


def is_equation(text: str) -> bool:
    """Returns whether text in single backticks is mathematics. The rule is that of this module."""
    return bool(_MATHEMATICS.fullmatch(text))


def map_marked(text: str, code: Callable[[str], str], equation: Callable[[str], str]) -> str:
    """Replaces the text in backticks.

    Args:
      text: prose.
      code: is called with the text of each piece of code.
      equation: is called with the text of each equation.

    Returns:
      The prose, with the return values in place of the backticks and their text.
    """

    def replace(match: re.Match) -> str:
        marked = ' '.join((match[1] or match[2]).split())
        return equation(marked) if match[2] and is_equation(marked) else code(marked)

    return _MARKED.sub(replace, text)


def split_docstring(text: str) -> Iterator[DocBlock]:
    """Yields the blocks of a docstring that `inspect.cleandoc` has dedented."""
    return map(parse_block, split_paragraphs(text))


def split_paragraphs(text: str) -> list[str]:
    return re.split(r'\n\s*\n', text.strip('\n'))


def parse_block(paragraph: str) -> DocBlock:
    """Returns a paragraph of a docstring as a block."""
    lines = paragraph.splitlines()
    equations = [' '.join(match[2].split()) for match in _MARKED.finditer(paragraph) if match[2]]
    if lines[0] in _SECTIONS:
        return DocBlock('section', tuple(lines))
    if all(line.startswith('    ') for line in lines):
        lines = textwrap.dedent(paragraph).splitlines()
        columns = {len(split_row(line)) for line in lines}
        is_table = len(lines) > 1 and len(columns) == 1 and columns != {1}
        return DocBlock('table' if is_table else 'verbatim', tuple(lines))
    if not _MARKED.sub('', paragraph).strip(' \n.,;') and all(map(is_equation, equations)):
        return DocBlock('equations', tuple(equations))
    if lines[0].startswith('- '):
        entries = re.split(r'^- ', paragraph, flags=re.MULTILINE)[1:]
        return DocBlock('list', tuple(' '.join(entry.split()) for entry in entries))
    return DocBlock('prose', (' '.join(paragraph.split()),))


def split_row(line: str) -> list[str]:
    """Returns the cells of a row of a table, which two spaces or more separate."""
    return re.split(r'\s{2,}', line.rstrip())


def split_last_equation(prose: str) -> tuple[str, str]:
    """Returns prose up to its colon and the equation that ends it, as in 'Cubes: `y = x^3`.'

    The equation is '' if the prose does not end with one.
    """
    match = re.fullmatch(r'(.*:) `([^`]+)`\.?', prose)
    is_split = match is not None and is_equation(match[2])
    return (match[1], match[2]) if match is not None and is_split else (prose, '')


def strip_marks(text: str) -> str:
    """Returns prose without the backticks around equations; code keeps one on each side."""
    return map_marked(text, '`{}`'.format, str)


def format_docstring(text: str, width: int) -> str:
    """Returns a docstring for a terminal, its prose in lines of at most `width` characters."""
    return '\n\n'.join('\n'.join(_format_block(block, width)) for block in split_docstring(text))


def _format_block(block: DocBlock, width: int) -> Iterator[str]:
    if block.kind == 'table':
        rows = [[strip_marks(cell) for cell in split_row(line)] for line in block.lines]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield (' ' * _HANG + '   '.join(padded)).rstrip()
        return
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    for line in block.lines:
        if block.kind == 'equations':
            yield ' ' * _HANG + line
        elif block.kind in ('verbatim', 'section'):
            yield strip_marks(line)
        else:
            is_item = block.kind == 'list'
            wrap.initial_indent, wrap.subsequent_indent = ('- ', '  ') if is_item else ('', '')
            text = map_marked(line, '`{}`'.format, _join_short)
            yield from (wrapped.replace('\N{NO-BREAK SPACE}', ' ') for wrapped in wrap.wrap(text))


def _join_short(equation: str) -> str:
    """Returns an equation with spaces at which a line does not break, if it is short."""
    is_short = len(equation) <= _UNBROKEN
    return equation.replace(' ', '\N{NO-BREAK SPACE}') if is_short else equation
