"""Contract: the pages list every part, and nothing else."""

import importlib
import re
import subprocess
import sys

import pytest

from docs import report_picture
from eval.console.listings import part_rows
from lm.config.fields import CHOICES, FIELDS
from tests import ROOT
from tests.pages import FRONT_PAGE, TEXT

# Options that no table repeats, with the sentence above the table that says who has them.
LEFT_OUT = {
    'model.norm': ('eps', 'Every norm but `dyt` and `none` also has `eps`'),
    'model.reparam': (
        'roles',
        'Every reparametrisation but `none` and `shared` also has `roles`',
    ),
}


def cells(line):
    return [cell.strip() for cell in line.strip().strip('|').split('|')]


def parse_names(cell):
    return re.findall(r'`([\w.]+)`', cell)


def tables():
    """Returns {field: (header cells, rows of cells)} of the tables with a choice as first header
    cell.
    """
    by_field = {}
    for block in TEXT.split('\n\n'):
        lines = block.splitlines()
        header = cells(lines[0]) if lines and lines[0].startswith('| `') else []
        field = next(iter(parse_names(header[0])), '') if header else ''
        if field in CHOICES:
            assert field not in by_field, field
            by_field[field] = header, [cells(line) for line in lines[2:]]
    return by_field


TABLES = tables()


def find_page(field: str) -> str:
    """Returns the page with the table of a field, for an error."""
    pages = sorted((ROOT / 'docs' / 'guide').glob('*.md'))
    return next(
        (f'docs/guide/{path.name}' for path in pages if f'\n| `{field}`' in path.read_text()),
        'README.md',
    )


def test_readme_is_short():
    assert len(FRONT_PAGE.splitlines()) <= 200


def test_tables_are_found():
    assert {'model.norm', 'model.placement'} <= TABLES.keys()


@pytest.mark.parametrize('field', TABLES)
def test_tables_have_unique_names(field):
    _, rows = TABLES[field]
    names = [name for row in rows for name in parse_names(row[0])]
    declared = [row.name for row in part_rows(field)]
    missing, unknown = sorted({*declared} - {*names}), sorted({*names} - {*declared})
    assert sorted(names) == sorted(declared), (
        f'{find_page(field)}: the table that begins with | `{field}` | lacks a line for {missing}, '
        f'and has lines for no row: {unknown}'
    )


@pytest.mark.parametrize('field', TABLES)
def test_tables_match_declared_options(field):
    """Options are in the column `options`; without it, in config paths of any column."""
    header, rows = TABLES[field]
    declared = {row.name: {path.split('.')[1] for path in row.options} for row in part_rows(field)}
    left_out, _ = LEFT_OUT.get(field, ('', ''))
    for row in rows:
        if 'options' in header:
            listed = parse_names(row[header.index('options')])
        else:
            paths = [path for path in parse_names(' '.join(row)) if path in FIELDS]
            listed = [path.split('.')[1] for path in paths if FIELDS[path].is_part_option]
        assert len(set(listed)) == len(listed), row
        for name in parse_names(row[0]):
            options = declared[name] - {left_out}
            assert set(listed) == options, (
                f'{find_page(field)}: the line of `{name}` in the table | `{field}` | must name '
                f'the options {sorted(options)}; it lacks {sorted(options - {*listed})} and has '
                f'{sorted({*listed} - options)}, which the part does not have'
            )


@pytest.mark.parametrize('field', LEFT_OUT)
def test_omitted_options_are_named_above_the_table(field):
    """Omitted options are named with the rows that lack them."""
    option, sentence = LEFT_OUT[field]
    above = TEXT.split(f'\n| `{field}` |')[0].split('\n## ')[-1]
    assert sentence in ' '.join(above.split())
    without = [
        row.name
        for row in part_rows(field)
        if option not in {path.split('.')[1] for path in row.options}
    ]
    assert without and sorted([*without, option]) == sorted(parse_names(sentence))


def test_every_kind_has_an_existing_table_and_test():
    """Catches a table, row or test that has moved since the page on adding a part was written."""
    page = (ROOT / 'docs' / 'guide' / 'parts.md').read_text()
    file = r'`([A-Z_]+)` in \[[^]]+\]\(\.\./\.\./(\S+?)(?:/__init__)?\.py\)'
    rows = re.findall(rf'^\| [^|]+ \| {file} \| `(\S+)` \| `(\S+)` ', page, re.MULTILINE)
    assert len(rows) == 31
    for table, path, name, test in rows:
        module = importlib.import_module(path.replace('/', '.'))
        assert name in getattr(module, table) and (ROOT / test).exists(), (table, name, test)


@pytest.mark.full  # prepares the text and compiles the default step
def test_first_screen_is_as_shown(tmp_path):
    """The output on the front page is as its command prints it, but for numbers of the machine and
    of the standard library. Catches a line that was changed in the program alone.
    """
    command = [sys.executable, 'train.py', '--config=configs/default.py']
    command += ['--config.train.steps=3', '--config.train.log_every=1']
    command += ['--config.train.eval_batches=1', f'--workdir={tmp_path / "run"}']
    done = subprocess.run(
        [*command, f'--config.data.cache_dir={tmp_path / "cache"}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    printed = {mask_numbers(line) for line in done.stdout.splitlines()}
    block = re.search(r'^```\nruns/default.*?^```$', FRONT_PAGE, re.DOTALL | re.MULTILINE)[0]
    lines = [mask_numbers(line) for line in block.splitlines()[2:-2] if line != '...']
    assert len(lines) > 10 and not [line for line in lines if line not in printed]


@pytest.mark.full  # trains 90 tiny runs
def test_study_ends_as_shown(tmp_path):
    """The last lines of the study on the front page, and the page that they promise. Losses depend
    on the machine's order of summation: Muon's verdict must not, the others' words may.
    """
    page, printed = report_picture.train(tmp_path)
    block = re.search(r'^```\n(Muon is .*?)^```$', FRONT_PAGE, re.DOTALL | re.MULTILINE)[1]
    muon, lion, lowest = (mask_numbers(line) for line in block.splitlines())
    lines = [mask_numbers(line) for line in printed.splitlines()]
    assert muon in lines and lowest in lines
    assert lion in lines or any(line.startswith('Inconclusive: ') for line in lines)
    text = page.read_text()
    assert 'adamw' in text and 'tuned_losses' in text


def mask_numbers(line):
    """Returns a line with # for each number, and `min` for each unit of time."""
    masked = re.sub(r'\d[\d,.]*', '#', re.sub(r'\s+', ' ', line)).strip()
    return re.sub(r'# (s|h) left', '# min left', masked)
