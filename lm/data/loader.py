"""Batches: the rows of a step are a pure function of (seed, step).

In a mixture, the source of a row depends only on the row's number (`Shares`). Every prefix of the
order therefore has the shares, and each source has its own order. The number of hosts and of
reading threads does not matter, and resuming at a step needs no state but its number.
"""

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.config.mixture import MixedRows, split_by_source
from lm.config.stages import TrainingStage, find_stage
from lm.data.rows import Rows
from lm.data.stage_rows import StageOrder, StageRows, order_stages

Batch = dict[str, np.ndarray]
RowTransform = Callable[[Batch, np.random.Generator], Batch]
READERS = 2  # threads; a batch of 16 rows of 257 tokens takes one of them about a millisecond
CACHED_ORDERS = 256  # that are kept, a kilobyte each: one a seed and source
THREAD_PREFIX = 'batches'  # the beginning of their names


def batch_at(
    rows: Rows | MixedRows | StageRows,
    step: int,
    *,
    batch_size: int,
    seed: int,
    transform: RowTransform | None = None,
    process_index: int = 0,
    process_count: int = 1,
    first: int | None = None,
) -> Batch:
    """Returns this process's slice of the batch of `step`, [batch_size / process_count, T+1].

    Rows are shuffled anew for each epoch. Batch s is rows s * B to (s + 1) * B of that order.

    Args:
      rows: the rows of a split, or of a stage of a run.
      step: s, from 0.
      batch_size: B, over all processes.
      seed: determines the order.
      transform: transform(row, rng) turns each row into the examples of the objective; (seed, step,
        i) determine the rng.
      process_index: the index of this process.
      process_count: number of processes.
      first: the number of the batch's first row; None: s * B.

    Returns:
      {name: array}.
    """
    local_rows = _local_rows(batch_size, process_index, process_count)
    first = step * batch_size if first is None else first
    batch_rows = [_read_row(rows, seed, first + i) for i in local_rows]
    if transform is not None:
        rngs = [np.random.default_rng((seed, step, i)) for i in local_rows]
        batch_rows = [transform(row, rng) for row, rng in zip(batch_rows, rngs, strict=True)]
    return _stack(batch_rows)


def _read_row(rows: Rows | MixedRows | StageRows, seed: int, number: int) -> Batch:
    """Returns row `number` of the endless order."""
    if isinstance(rows, StageRows):
        return rows.read(number, lambda n_rows, key: _row_order(n_rows, seed, key))
    if not isinstance(rows, MixedRows):
        return rows[_row_order(len(rows), seed)[number]]
    source, number = rows.shares.locate_row(number)
    source_rows = rows.sources[source]
    return source_rows[_row_order(len(source_rows), seed, (source,))[number]]


@functools.lru_cache(CACHED_ORDERS)
def _row_order(n_rows: int, seed: int, key: tuple[int, ...] = ()) -> Any:
    """Returns row numbers without end: one permutation of all rows after another, random access."""
    import grain

    # Grain shuffles epoch e by seed + e: unhashed, neighbouring seeds would share epochs.
    hashed = int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])
    return grain.MapDataset.range(n_rows).shuffle(seed=hashed).repeat()


def _local_rows(batch_size: int, process_index: int, process_count: int) -> range:
    """Returns the positions in a batch that belong to this process."""
    if batch_size % process_count or not 0 <= process_index < process_count:
        raise ValueError(
            'data.batch_size must be a multiple of the number of processes, because each takes an '
            f'equal share; got {batch_size=}, {process_index=} and {process_count=}.'
        )
    share = batch_size // process_count
    return range(process_index * share, (process_index + 1) * share)


def _stack(rows: Sequence[Mapping[str, Any]]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def stage_batch_at(
    order: StageOrder, index: int, skipped: int = 0, *, seed: int, **options: Any
) -> Batch:
    """Returns this process's slice of batch `index` of a run in stages.

    Args:
      order: the rows of the stages.
      index: from 0.
      skipped: batches that rollbacks have left out before this one.
      seed: determines the order.
      **options: further arguments of `batch_at`.
    """
    number = find_stage(order.stages, index - skipped)
    stage, size = order.stages[number], order.stages[number].shape.batch_size
    first = order.first[number] + (index - stage.start) * size
    rows = order.rows[number]
    return batch_at(rows, index, batch_size=size, seed=seed, first=first, **options)


class Cursor(NamedTuple):
    """A run's position in its order: the index of the next batch, and one past its last.

    skipped: batches that rollbacks have left out. The stage of a batch is that of its step, index -
    skipped.
    """

    seed: int
    index: int
    stop: int
    skipped: int = 0


class Feed:
    """Batches for any number of runs, prefetched by READERS threads in total.

    Runs at the same position of the same order share a batch. `prefetch` batches are made ahead,
    divided evenly among the orders: none if it is 0, otherwise at least one per order. `stages` are
    those of the runs; without them, all batches have `batch_size` rows.
    """

    def __init__(
        self,
        rows: Rows | MixedRows,
        *,
        batch_size: int,
        prefetch: int,
        transform: RowTransform | None = None,
        process_index: int = 0,
        process_count: int = 1,
        stages: Sequence[TrainingStage] = (),
    ):
        for size in (batch_size, *(stage.shape.batch_size for stage in stages)):
            _local_rows(size, process_index, process_count)  # raises here, not in a thread
        process = {'process_index': process_index, 'process_count': process_count}
        options = {'transform': transform} | process
        self._make_batch = functools.partial(batch_at, rows, batch_size=batch_size, **options)
        if stages:
            order = order_stages(rows, stages)
            self._make_batch = functools.partial(stage_batch_at, order, **options)
        self._has_stages = bool(stages)
        self._prefetch = prefetch
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix=THREAD_PREFIX)
        self._futures: dict[tuple[int, ...], Future[Batch]] = {}

    def take(self, cursors: Sequence[Cursor]) -> list[Batch]:
        """Returns the batch at each cursor, starts the following ones, and drops all others."""
        stops: dict[tuple[int, ...], int] = {}
        for cursor in cursors:
            place = self._locate(cursor)
            stops[place] = max(cursor.stop, stops.get(place, cursor.stop))
        futures, self._futures = self._futures, {}
        n_ahead = -(-self._prefetch // len(stops))
        for offset in range(n_ahead + 1):  # in the order in which the runs need them
            for (seed, start, *skipped), stop in stops.items():
                index = start + offset
                place = seed, index, *skipped
                if place not in self._futures and (offset == 0 or index < stop):
                    future = futures.pop(place, None)
                    future = future or self._pool.submit(
                        self._make_batch, index, *skipped, seed=seed
                    )
                    self._futures[place] = future
        for stale in futures.values():
            stale.cancel()
        return [self._futures[self._locate(cursor)].result() for cursor in cursors]

    def _locate(self, cursor: Cursor) -> tuple[int, ...]:
        """Returns what determines the batch at a cursor: with stages, the skipped batches too."""
        place = cursor.seed, cursor.index
        return (*place, cursor.skipped) if self._has_stages else place

    def close(self) -> None:
        """Stops the threads."""
        self._pool.shutdown(cancel_futures=True)
        self._futures.clear()


def evaluation_batches(
    rows: Rows | MixedRows,
    *,
    batch_size: int,
    limit: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Yields every row once, in order; the last batch is padded with zeros.

    Args:
      rows: the rows of a split.
      batch_size: rows per batch, over all processes.
      limit: maximum number of batches; 0: all.
      process_index: the index of this process.
      process_count: number of processes.
    """
    local_rows = _local_rows(batch_size, process_index, process_count)
    blank = {name: np.zeros_like(value) for name, value in rows[0].items()}
    for batch in range(count_evaluation_batches(rows, batch_size, limit)):
        row_numbers = [batch * batch_size + i for i in local_rows]
        yield _stack([rows[i] if i < len(rows) else blank for i in row_numbers])


def count_evaluation_batches(rows: Rows | MixedRows, batch_size: int, limit: int) -> int:
    """Returns the number of batches that `evaluation_batches` yields.

    Args:
      rows: the rows of a split.
      batch_size: rows per batch, over all processes.
      limit: maximum number of batches; 0: all.
    """
    n_batches = -(-len(rows) // batch_size)
    return min(n_batches, limit or n_batches)


def steps_in_epoch(rows: Rows | MixedRows, batch_size: int, epochs: int = 1) -> int:
    """Returns the last step at which no source has begun epoch `epochs` + 1.

    Args:
      rows: the training split.
      batch_size: rows per step.
      epochs: passes over each source.
    """
    n_steps = epochs * len(rows) // batch_size + 1  # more rows than all sources have

    def exceeds_epochs(steps: int) -> bool:
        return max(_count_epochs(rows, steps * batch_size)) > epochs

    # The number of begun epochs grows with the steps, so that bisection finds the last valid step.
    return bisect.bisect_left(range(n_steps), True, key=exceeds_epochs) - 1


def _count_epochs(rows: Rows | MixedRows, n: int) -> list[int]:
    """Returns the number of epochs of each source that the first n rows begin."""
    if not isinstance(rows, MixedRows):
        return [-(-n // len(rows))]
    counts = rows.shares.count_rows(n)
    return [
        -(-count // len(source_rows))
        for count, source_rows in zip(counts, rows.sources, strict=True)
    ]


def count_stage_rows(rows: Rows | MixedRows, stages: Sequence[TrainingStage]) -> tuple[int, ...]:
    """Returns the number of rows of data.seq_len that a run in stages reads of each source."""
    return order_stages(rows, stages).rows[-1].stops


def check_stage_epochs(
    cfg: DataConfig, rows: Rows | MixedRows, stages: Sequence[TrainingStage]
) -> int:
    """Returns the number of epochs that a run in stages begins.

    Args:
      cfg: the data section.
      rows: the training split.
      stages: the stages of the run.

    Raises:
      ValueError: if it exceeds cfg.epochs.
    """
    counts, needed = count_stage_rows(rows, stages), 0
    for (name, part), count in zip(split_by_source(rows).items(), counts, strict=True):
        needed = max(needed, n_epochs := -(-count // len(part)))
        if n_epochs > cfg.epochs:
            text = f'{name!r} in data.mixture' if name else 'the text'
            raise ValueError(
                f'the stages of the run (train.stages, train.steps={stages[-1].stop}) read '
                f'{count:,} rows of {cfg.seq_len} tokens of {text}, which has {len(part):,}. This '
                f'is {n_epochs} epochs, but data.epochs={cfg.epochs}. Set data.epochs={n_epochs}, '
                'or reduce train.steps.'
            )
    return max(1, needed)


def check_epochs(cfg: DataConfig, steps: int, rows: Rows | MixedRows) -> int:
    """Returns the number of epochs that a run begins.

    Args:
      cfg: the data section.
      steps: the number of steps.
      rows: the training split.

    Raises:
      ValueError: if it exceeds cfg.epochs.
    """
    n = steps * cfg.batch_size
    needed = max(1, *_count_epochs(rows, n))
    if needed <= cfg.epochs:
        return needed
    last_step = steps_in_epoch(rows, cfg.batch_size, cfg.epochs)
    remedy = f'Set data.epochs={needed}, or train.steps to at most {last_step}'
    if not isinstance(rows, MixedRows):
        raise ValueError(
            f'train.steps={steps} needs {needed} epochs, but data.epochs={cfg.epochs}. One epoch '
            f'is {steps_in_epoch(rows, cfg.batch_size)} steps of {cfg.batch_size} sequences '
            f'({len(rows)} in all). {remedy}.'
        )
    worst = _count_epochs(rows, n).index(needed)
    n_rows, count = len(rows.sources[worst]), rows.shares.count_rows(n)[worst]
    raise ValueError(
        f'train.steps={steps} needs {count} sequences of {rows.names[worst]!r} in data.mixture, '
        f'which has {n_rows}. This is {needed} epochs, but data.epochs={cfg.epochs}. {remedy}; or '
        f'add text to this source, or lower its share from {rows.shares.fractions[worst]:.3g} to '
        f'at most {cfg.epochs * n_rows / n:.3g}.'
    )
