"""Which rows of a table the tests run by default, and which with `-m full`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_tiers(rows: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """The rows for `parametrize`: those in `default` as they are, the others marked `full`.

    Raises:
        ValueError: A default row is not among the rows, as after a change of name.
    """
    rows = list(rows)
    if unknown := [row for row in default if row not in rows]:
        raise ValueError(f'not among the rows: {unknown}')
    return [row if row in default else pytest.param(row, marks=pytest.mark.full) for row in rows]
