"""The rows of the table of suites, and the results that suites return."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Sequence[Any]]  # of equal length


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a result's page, drawn as a chart if `x` and `y` name two of its columns."""

    columns: Columns
    x: str = ''
    y: str = ''
    by: str = ''  # a column with a line or bar of the chart for each value

    @classmethod
    def from_rows(
        cls, heads: Sequence[str], rows: Sequence[Sequence[Any]], **chart: str
    ) -> 'Table':
        """Returns a table from rows, with a column for each head. Without rows it has no columns.

        chart: x, y and by.
        """
        columns = zip(heads, map(list, zip(*rows, strict=True)), strict=True) if rows else ()
        return cls(dict(columns), **chart)


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """The numbers of a checkpoint, with details.

    `numbers` are recorded, printed, and traced over checkpoints. `items` has columns with an entry
    for each document, pair or question. The column `item` names the entry, equally for all
    checkpoints with the same request, so that two of them are compared pair by pair. `tables` are
    for the page, by title. Everything can be written as JSON.
    """

    numbers: Mapping[str, float]
    items: Columns = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Suite:
    """A row of SUITES: `function(checkpoint, **options) -> SuiteResult`.

    The options are keyword arguments of the function, each with a default, an `Option`
    (`modules.options`), and a flag --NAME.OPTION.
    """

    function: Callable[..., SuiteResult]
    #: The option that --suite=NAME:VALUE gives.
    argument: str = ''
    #: Columns of `items`: models are compared by sum(score) / sum(weight). An empty `weight` is 1
    #: for each item; without a `score` there is no comparison.
    score: str = ''
    weight: str = ''
    lower_is_better: bool = True
    #: The ratio times `scale` is in this unit; '': `score` per `weight`.
    unit: str = ''
    scale: float = 1.0
    #: The word for entries of `items`, in the plural.
    item_noun: str = 'items'
    #: reader(tokenizer, seq_len, **options) -> evaluate(checkpoint): reads the data of the suite
    #: before a training that evaluates it (eval.suites). None: it reads the run's text, or none.
    reader: Callable[..., Callable[..., SuiteResult]] | None = None
    #: The reason for which it does not run during training; '': it does.
    refusal: str = ''
