"""Contract: the README lists what there is, and nothing else."""

import re
from pathlib import Path

import pytest

from modules.norms import NORMS
from modules.placements import PLACEMENTS

README = (Path(__file__).parent.parent / 'README.md').read_text()


@pytest.mark.parametrize(
    ('header', 'table'), [('`model.norm`', NORMS), ('`model.placement`', PLACEMENTS)]
)
def test_tables_have_a_row_for_every_choice(header, table):
    rows = README.split(f'\n| {header} |', 1)[1].split('\n\n', 1)[0].splitlines()[2:]
    names = [name for row in rows for name in re.findall(r'`(\w+)`', row.split('|')[1])]
    assert sorted(names) == sorted(table)


def test_norm_options_are_those_of_the_layer():
    """In the third column, of rows that name their options in full."""
    rows = README.split('\n| `model.norm` |', 1)[1].split('\n\n', 1)[0].splitlines()[2:]
    for row in rows:
        _, names, _, options, _ = row.split('|')
        layers = [NORMS[name] for name in re.findall(r'`(\w+)`', names)]
        for option in re.findall(r'`(\w+)`', options):
            known = any(option in layer.__dataclass_fields__ for layer in layers)
            assert known or option in NORMS, (names, option)
