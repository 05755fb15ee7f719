"""Docstrings as text of the site: prose, lists, and equations that are drawn.

The role `equation` draws one in a line, and the directive `equation` one on each line below it.
"""

import re
import sys
from collections.abc import Iterator, Sequence

from eval.console.docstrings import (
    DocBlock,
    format_docstring,
    map_marked,
    parse_block,
    split_docstring,
    split_last_equation,
    split_paragraphs,
    split_row,
)

PAPER = re.compile(r'arXiv:(\d{4}\.\d{4,5})')
URL = re.compile(r'(?<![(<\[])https?://[^\s)>,]+[^\s)>,.;]')
SECTIONS = {'Args:': 'Arguments', 'Returns:': 'Returns', 'Yields:': 'Yields', 'Raises:': 'Raises'}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(
        '| ' + ' | '.join(' '.join(cell.replace('|', r'\|').split()) for cell in line) + ' |'
        for line in lines
    )


def list_equations(text: str) -> list[str]:
    """Returns the equations of a docstring, those of lines of their own included."""
    equations: list[str] = []

    def keep(equation: str) -> str:
        equations.append(equation)
        return ''

    for block in split_docstring(text):
        if block.kind == 'equations':
            equations += block.lines
        elif block.kind != 'verbatim':  # cells of tables are prose, too
            for line in block.lines:
                map_marked(line, str, keep)
    return equations


def to_markdown(text: str) -> str:
    """Returns a docstring in Markdown, with links to its papers."""
    return '\n\n'.join(line for block in split_docstring(text) for line in format_block(block))


def format_block(block: DocBlock) -> Iterator[str]:
    """Yields the paragraphs in Markdown of a block."""
    if block.kind == 'equations':
        yield fence('{equation}', block.lines)
    elif block.kind == 'verbatim':
        yield fence('text', block.lines)
    elif block.kind == 'table':
        head, *rows = ([format_prose(cell) for cell in split_row(line)] for line in block.lines)
        yield table(head, rows)
    elif block.kind == 'list':
        yield '\n'.join(f'- {format_prose(item)}' for item in block.lines)
    elif block.kind == 'section':
        yield f'**{SECTIONS[block.lines[0]]}**'
        yield '\n'.join(format_entries(block.lines[1:]))
    else:
        prose, equation = split_last_equation(block.lines[0])
        yield format_prose(prose)
        if equation:
            yield fence('{equation}', (equation,))


def fence(language: str, lines: tuple[str, ...]) -> str:
    return '\n'.join([f'```{language}', *lines, '```'])


def format_entries(lines: tuple[str, ...]) -> Iterator[str]:
    """Yields a list in Markdown of arguments or errors, or the only paragraph of the section."""
    entries: list[str] = []
    for line in lines:
        if line.startswith('    ') and entries:
            entries[-1] += ' ' + line.strip()
        else:
            entries.append(line.strip())
    if len(entries) == 1 and not re.match(r'\**\w+: ', entries[0]):
        yield format_prose(entries[0])
        return
    for entry in entries:
        name, colon, words = entry.partition(': ')
        is_named = bool(colon) and re.fullmatch(r'\**\w+', name)
        yield f'- `{name}`: {format_prose(words)}' if is_named else f'- {format_prose(entry)}'


def format_prose(text: str) -> str:
    """Returns prose in Markdown: papers and addresses linked, code and equations marked."""
    marked: list[str] = []

    def keep(text: str) -> str:
        marked.append(text)
        return f'\0{len(marked) - 1}\0'

    text = map_marked(text, lambda code: keep(f'`{code}`'), lambda text: keep(inline(text)))
    text = URL.sub(lambda match: keep(f'<{match[0]}>'), text)
    text = PAPER.sub(lambda m: keep(f'[{m[0]}](https://arxiv.org/abs/{m[1]})'), text)
    text = re.sub(r'([*_<>|\[\]\\])', r'\\\1', text)
    return re.sub('\0(\\d+)\0', lambda match: marked[int(match[1])], text)


def inline(equation: str) -> str:
    return f'{{equation}}`{equation}`'


def to_rest(text: str) -> str:
    """Returns a docstring in reStructuredText, as autodoc reads it.

    Equations on lines of their own and verbatim text become directives. All else stays: the default
    role of the site tells equations in backticks from code.
    """
    paragraphs = []
    for paragraph in split_paragraphs(text):
        block = parse_block(paragraph)
        prose, equation = split_last_equation(block.lines[0]) if block.kind == 'prose' else ('', '')
        if equation:
            paragraphs += [prose, directive('equation', (equation,))]
        elif block.kind == 'equations':
            paragraphs.append(directive('equation', block.lines))
        elif block.kind in ('table', 'verbatim'):
            lines = format_docstring(paragraph, sys.maxsize).splitlines()
            paragraphs.append(directive('code-block:: text', lines))
        else:
            paragraphs.append(paragraph)
    return '\n\n'.join(paragraphs)


def directive(name: str, lines: Sequence[str]) -> str:
    head = f'.. {name}' if '::' in name else f'.. {name}::'
    return '\n'.join([head, '', *(f'   {line}' for line in lines)])
