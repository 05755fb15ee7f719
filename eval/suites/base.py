"""Suites: rows of a table, and the result that each returns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Sequence[Any]]  # of equal length


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a result's page, drawn as a chart where `x` and `y` name two of its columns."""

    columns: Columns
    x: str = ''
    y: str = ''
    by: str = ''  # a column that tells the lines or bars of the chart apart

    @classmethod
    def from_rows(
        cls, heads: Sequence[str], rows: Sequence[Sequence[Any]], **chart: str
    ) -> 'Table':
        """Returns the table of rows, with a column for each head; without rows it has none.

        chart: x, y and by.
        """
        columns = zip(heads, map(list, zip(*rows, strict=True)), strict=True) if rows else ()
        return cls(dict(columns), **chart)


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """Numbers of one checkpoint, with what they are made of.

    `numbers` are recorded, printed, and traced over checkpoints. `items` has an entry for each
    document, pair or question in each of its columns; the column `item` names it, equally for all
    checkpoints that are asked the same, so that two of them compare pair by pair. `tables` are of
    the page, by their titles. All of it can be written as JSON.
    """

    numbers: Mapping[str, float]
    items: Columns = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Suite:
    """A row of SUITES: `function(checkpoint, **options) -> SuiteResult`.

    The options are keywords of the function, each with its default and an `Option`
    (`modules.options`), and a flag --NAME.OPTION each.
    """

    function: Callable[..., SuiteResult]
    #: The option that --suite=NAME:VALUE gives.
    argument: str = ''
    #: Columns of `items` whose ratio of sums is compared: a score, and what it is counted in, ''
    #: for items that count alike; '' where there is nothing to compare.
    score: str = ''
    weight: str = ''
    lower_is_better: bool = True
    #: That ratio times `scale` is in this unit; '': `score` per `weight`.
    unit: str = ''
    scale: float = 1.0
    #: Entries of `items` in words, in the plural.
    item_noun: str = 'items'
