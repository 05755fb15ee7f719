"""The rows of each stage of a run (`lm.config.stages`), as functions of a row's number.

Stages read a source on from where the stages before them ended, in its one order of rows of
data.seq_len, so that every row is read before any is repeated. Successive stages of the same
mixture and row length share one numbering: they read the rows that a run without stages would read.

A stage with shorter rows reads parts of rows: part `j` of rows of `T` tokens has the targets
`j T + 1` to `j T + T`, so that each target of a row is in one of its parts. Its range of rows is
cut, and all parts of the range are shuffled. The rest of the last row of a range is not read.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lm.config.mixture import MixedRows, Shares, split_by_source
from lm.config.stages import TrainingStage
from lm.data.rows import Rows

PARTS = 1  # ends the key of an order of parts, which no order of rows has


@dataclasses.dataclass(frozen=True)
class StageRows:
    """The rows of one or more successive stages of the same mixture and row length.

    Attributes:
      sources: the rows of all sources of the run.
      is_mixed: whether they are those of a mixture.
      shares: deals rows to `chosen`.
      chosen: the indices of the sources that are read.
      parts: parts into which a row is cut.
      starts: for each source, rows of its order that earlier stages read.
      stops: the same at the end of these stages.
    """

    sources: tuple[Rows, ...]
    is_mixed: bool
    shares: Shares
    chosen: tuple[int, ...]
    parts: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def read(self, number: int, order: Callable[..., Any]) -> dict[str, np.ndarray]:
        """Returns row `number` of these stages.

        Args:
          number: counts from 0.
          order: order(n, key) returns an endless order of n rows.
        """
        source, place, part = self.locate(number, order)
        row = self.sources[source][place]
        return row if self.parts == 1 else cut_row(row, part, self.parts)

    def locate(self, number: int, order: Callable[..., Any]) -> tuple[int, int, int]:
        """Returns (source, row of the source, part of the row) of row `number`.

        Args: as in `read`.
        """
        index, number = self.shares.locate_row(number)
        source = self.chosen[index]
        n_rows, key = len(self.sources[source]), (source,) if self.is_mixed else ()
        # Parts are numbered in the order of the rows: parts k to k + parts - 1 are a row.
        number += self.starts[source] * self.parts
        if self.parts > 1:
            number = self._shuffle(source, number, order)
        place, part = divmod(number, self.parts)
        return source, order(n_rows, key)[place], part

    def _shuffle(self, source: int, number: int, order: Callable[..., Any]) -> int:
        """Returns the part that is read in place of part `number`, of the same pass."""
        stop, n_parts = self.stops[source] * self.parts, len(self.sources[source]) * self.parts
        if number >= stop:  # only after a rollback, which leaves batches out
            return number
        epoch = number // n_parts
        first = max(self.starts[source] * self.parts, epoch * n_parts)
        last = min(stop, (epoch + 1) * n_parts)
        return first + order(last - first, (source, first, PARTS))[number - first]


def cut_row(row: Mapping[str, np.ndarray], part: int, parts: int) -> dict[str, np.ndarray]:
    """Returns a part of a row. Its documents are numbered from 1.

    Args:
      row: arrays [T + 1].
      part: index of the part.
      parts: number of parts, which divides T.
    """
    seq_len = (len(row['tokens']) - 1) // parts
    cut = {name: array[part * seq_len : (part + 1) * seq_len + 1] for name, array in row.items()}
    segments = cut['segments']
    # Padding, segment 0, ends a row: a part that begins with it is empty.
    return cut | {'segments': np.where(segments > 0, segments - segments[0] + 1, 0)}


@dataclasses.dataclass(frozen=True)
class StageOrder:
    """The batches of a run in stages.

    Attributes:
      stages: the stages of the run.
      rows: the rows of each stage.
      first: the number of the first row of each stage, in its rows.
    """

    stages: tuple[TrainingStage, ...]
    rows: tuple[StageRows, ...]
    first: tuple[int, ...]


def order_stages(rows: Rows | MixedRows, stages: Sequence[TrainingStage]) -> StageOrder:
    """Returns the rows of each stage of a run.

    Args:
      rows: the training split, with rows of data.seq_len.
      stages: the stages of the run.
    """
    sources = tuple(split_by_source(rows).values())
    positions, ordered, first = [0] * len(sources), [], []
    kinds = [(_list_weights(rows, stage), stage.shape.seq_len) for stage in stages]
    for kind, group in itertools.groupby(zip(kinds, stages, strict=True), key=lambda pair: pair[0]):
        members, (weights, seq_len) = [stage for _, stage in group], kind
        counts = [(stage.stop - stage.start) * stage.shape.batch_size for stage in members]
        parts, starts = stages[-1].shape.seq_len // seq_len, tuple(positions)
        chosen, shares = tuple(range(len(sources))), Shares([1.0])
        if weights is not None:
            chosen = tuple(i for i, weight in enumerate(weights) if weight)
            shares = Shares([weights[i] for i in chosen])
        elif isinstance(rows, MixedRows):
            shares = rows.shares
        for i, count in zip(chosen, shares.count_rows(sum(counts)), strict=True):
            positions[i] += -(-count // parts)
        is_mixed, stops = isinstance(rows, MixedRows), tuple(positions)
        stage_rows = StageRows(sources, is_mixed, shares, chosen, parts, starts, stops)
        ordered += [stage_rows] * len(members)
        first += itertools.accumulate(counts[:-1], initial=0)
    return StageOrder(tuple(stages), tuple(ordered), tuple(first))


def _list_weights(rows: Rows | MixedRows, stage: TrainingStage) -> tuple[float, ...] | None:
    """Returns the weights of all sources in a stage; None for those of the whole run."""
    if stage.weights is None or not isinstance(rows, MixedRows):
        return None
    weights = tuple(stage.weights.get(name, 0.0) for name in rows.names)
    is_same = all(weights) and Shares(weights).fractions == rows.shares.fractions
    return None if is_same else weights
