"""Property: every row of every table declares the facts that its readers use; unknown facts are
rejected.
"""

import inspect

import pytest

from lm.config.fields import CHOICES
from modules.facts import accept_any, longest_horizon, row_decorator
from modules.options import declared_options

ROWS = [
    pytest.param(row, id=f'{field}={name}')
    for field, choice in CHOICES.items()
    if choice.section
    for name, row in choice.table.items()
]


@pytest.mark.parametrize('row', ROWS)
def test_rows_declare_check_and_horizon(row):
    """Without its decorator a row would fail in the first run that chooses it."""
    assert list(inspect.signature(row.check).parameters) == ['recipe', 'part']
    if counted := {n: d.default for n, d in declared_options(row).items() if d.option.time_unit}:
        assert row.lasts(2, **counted) >= max(counted.values())


def test_decorator_sets_every_fact():
    mark = row_decorator(is_fast=False, check=accept_any)

    @mark(is_fast=True)
    def fast(): ...

    @mark()
    def usual(): ...

    assert (fast.is_fast, usual.is_fast, usual.check) == (True, False, accept_any)
    with pytest.raises(TypeError, match=r"declare \['check', 'is_fast'\]; got \['is_slow'\]"):
        mark(is_slow=True)


def test_longest_horizon_counts():
    assert longest_horizon(3, warmup=5, decay=40) == 40
