"""Pages of the reference, written from the tables and signatures that they describe.

Sphinx calls `write` before it reads the pages: what is listed is what there is. A part without a
description, or an option without words, is an error.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from configs import default
from eval.console.listings import bounds, form, kind, rows_of
from eval.tables.columns import IDENTITY, RESULTS, columns
from lm.config.fields import CHOICES, FIELDS
from lm.config.resolve import flatten
from modules.options import Declared
from tests.mistakes import ANSWERED, NOT_HERE

ROOT = Path(__file__).parents[1]
COMMANDS = {
    'train.py': 'train.py',
    'python -m eval': 'eval/__main__.py',
    'python -m eval.generate': 'eval/generate.py',
    'python -m eval.runs': 'eval/runs.py',
    'python -m eval.report': 'eval/report/__main__.py',
    'python -m eval.fit': 'eval/fit/__main__.py',
    'python -m eval.coordinates': 'eval/coordinates.py',
    'python -m eval.rules': 'eval/rules.py',
    'python -m eval.convert': 'eval/convert/__main__.py',
    'python -m tpu.plan': 'tpu/plan.py',
    'python -m tpu.launch': 'tpu/launch.py',
}
PAPER = re.compile(r'arXiv:(\d{4}\.\d{4,5})')


def write(folder: Path) -> None:
    """Writes the pages into the folder, and removes what else is there."""
    pages = {
        'fields.md': fields(),
        'commands.md': commands(),
        'columns.md': columns_of_runs(),
        'other_programs.md': coming_from(),
        **{f'parts/{field}.md': '\n'.join(cards(field)) for field in tables()},
    }
    names = [name.removesuffix('.md') for name in pages if name.startswith('parts/')]
    pages['parts/index.md'] = (
        '# Parts\n\nA page for each table of parts, a card for each part: what its docstring says, '
        'its options with types, bounds and published defaults, its papers, and the tests that '
        f'name it.\n\n{toctree(name.removeprefix("parts/") for name in names)}'
    )
    for old in {*folder.rglob('*.md')} - {folder / name for name in pages}:
        old.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # Sphinx reads what has changed
            path.write_text(text)


def toctree(names: Iterator[str]) -> str:
    return '\n'.join(['```{toctree}', ':maxdepth: 1', '', *names, '```', ''])


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(
        '| ' + ' | '.join(' '.join(cell.replace('|', r'\|').split()) for cell in line) + ' |'
        for line in lines
    )


def tables() -> list[str]:
    """Returns the first field of each table of parts."""
    first: dict[int, str] = {}
    for field, choice in CHOICES.items():
        first.setdefault(id(choice.table), field)
    return list(first.values())


def cards(field: str) -> Iterator[str]:
    """Yields the page of the table that a field names a row of."""
    others = [f for f in CHOICES if CHOICES[f].table is CHOICES[field].table and f != field]
    yield f'# {field}\n'
    yield f'`{field}={form(CHOICES[field])}`' + (
        f', and so for {", ".join(f"`{name}`" for name in others)}.\n' if others else '\n'
    )
    for row in rows_of(field):
        if not row.text or not all(one.option.words for one in row.options.values()):
            raise ValueError(f'{field}={row.name} has no description, or an option without words')
        yield f'## {row.name}\n'
        papers = dict.fromkeys(PAPER.findall(row.text))
        if papers:
            yield ', '.join(f'[arXiv:{one}](https://arxiv.org/abs/{one})' for one in papers) + '\n'
        yield f'```text\n{row.text}\n```\n'
        if row.options:
            yield table(['option', 'default', 'type and bounds', 'what'], options(row.options))
            yield ''
        if found := tests_of(CHOICES[field].table[row.name]):
            yield f'Tests that name it: {", ".join(f"`{path}`" for path in found)}.\n'


def options(declared: dict[str, Declared]) -> list[list[str]]:
    return [
        [f'`{path}`', f'`{one.default}`', kind(one), one.option.words]
        for path, one in declared.items()
    ]


def tests_of(part: object) -> list[str]:
    """Returns the files of reference and property tests that name a part's class or function; none
    for a part that is a record or a mapping, which has no name of its own.
    """
    if not (inspect.isclass(part) or inspect.isfunction(part)):
        return []
    named = re.compile(rf'\b{part.__name__}\b')
    return [path for path, text in TESTS.items() if named.search(text)]


TESTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for room in ('modules', 'lm')
    for path in sorted((ROOT / 'tests' / room).rglob('test_*.py'))
    if re.match(r'"""(?:Reference|Property)', path.read_text())
}


def fields() -> str:
    """Returns the page of all fields of a config."""
    given = flatten(default.get_config().to_dict())
    parts = [
        '# Fields\n',
        'A field is set by `--config.SECTION.FIELD=VALUE`. The default is that of ',
    ]
    parts.append('`configs/default.py`; None of an option means as published.\n')
    pages = {id(CHOICES[field].table): field for field in reversed(tables())}
    section = ''
    rows: list[list[str]] = []

    def flush() -> None:
        if rows:
            parts.append(f'## {section}\n')
            parts.append(table(['field', 'default', 'values', 'what'], rows) + '\n')
            rows.clear()

    for path, field in FIELDS.items():
        if path.split('.')[0] != section:
            flush()
            section = path.split('.')[0]
        if field.choice:
            page = pages[id(field.choice.table)]
            values = f'[{form(field.choice)}](parts/{page}.md)'
        else:
            values = ' or '.join(t.__name__.replace('NoneType', 'None') for t in field.types)
            values += f', {bounds(field.option)}' if field.option and bounds(field.option) else ''
        words = field.option.words if field.option else ''
        rows.append([f'`{path}`', f'`{given.get(path)}`', values, words])
    flush()
    return '\n'.join(parts)


def commands() -> str:
    """Returns the page of commands: what each says of itself."""
    found = ['# Commands\n', '`--help` of each has its flags.\n']
    for command, path in COMMANDS.items():
        text = ast.get_docstring(ast.parse((ROOT / path).read_text()))
        found.append(f'## {command}\n\n```text\n{text}\n```\n')
    return '\n'.join(found)


def columns_of_runs() -> str:
    """Returns the page of the columns of a table of runs."""
    rows = [[f'`{name}`', kind.__name__, ''] for name, kind in IDENTITY.items()]
    rows += [
        [f'`{name}`', kind.__name__, f'`{path}` of summary.json']
        for name, (path, kind) in RESULTS.items()
    ]
    rows += [[f'`{name}`', '', f'`{path}` of the config'] for path, name in columns().items()]
    return (
        '# Columns\n\nThe table `runs` of `eval.runs`, `cells.parquet` of a sweep and '
        '`eval.runs.frame` have a row for each run.\n\n' + table(['column', 'type', 'from'], rows)
    )


def coming_from() -> str:
    """Returns the tables of what other programs call things, as tests hold them."""
    found = []
    for program in dict.fromkeys([*ANSWERED, *NOT_HERE]):
        rows = [[f'`{given}`', f'`{here}`'] for given, here in ANSWERED.get(program, {}).items()]
        rows += [
            [f'`{given}`', f'{words[0].upper()}{words[1:]}' + (f': `{here}`' if here else '')]
            for given, (words, here) in NOT_HERE.get(program, {}).items()
        ]
        found.append(f'## {program}\n\n{table(["there", "here"], rows)}\n')
    return '\n'.join(found)
