"""Pages of the reference, written from the tables and signatures that they describe.

Sphinx calls `write` before it reads the pages: what is listed is what there is. A part without a
description, or an option without words, is an error.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from cards import cards, table, tables

from configs import default
from eval.console.listings import bounds, form
from eval.tables.columns import IDENTITY, RESULTS, columns
from lm.config.fields import CHOICES, FIELDS
from lm.config.resolve import flatten
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
        'its options with types, bounds and published defaults, its papers, what it does not go '
        'with, the studies that tried it, and the tests that hold it.\n\n'
        + toctree(name.removeprefix('parts/') for name in names)
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
