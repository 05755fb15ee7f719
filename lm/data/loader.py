"""The batch of a step: rows are picked by a pure function of (seed, step).

In a mixture the source of a row follows from the row's number alone (`Shares`), so every beginning
of the order has the shares, and each source has an order of its own. Neither the number of hosts
nor of reading threads matters, and resuming at a step needs no state but its number.
"""

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.config.mixture import MixedRows
from lm.data.rows import Rows

Batch = dict[str, np.ndarray]
RowTransform = Callable[[Batch, np.random.Generator], Batch]
READERS = 2  # threads; a batch of 16 rows of 257 tokens takes one of them about a millisecond
CACHED_ORDERS = 256  # that are kept, a kilobyte each: one a seed and source
THREAD_PREFIX = 'batches'  # the beginning of their names


def batch_at(
    rows: Rows | MixedRows,
    step: int,
    *,
    batch_size: int,
    seed: int,
    transform: RowTransform | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Batch:
    """Returns this process's slice of the batch of `step`, [batch_size / process_count, T+1].

    Rows are shuffled anew for each epoch; batch s is rows s * B to (s + 1) * B of that order.
    transform(row, rng) makes of each what the objective needs; (seed, step, i) decide the rng.
    """
    mine = _local_rows(batch_size, process_index, process_count)
    found = [_read_row(rows, seed, step * batch_size + i) for i in mine]
    if transform is not None:
        rngs = [np.random.default_rng((seed, step, i)) for i in mine]
        found = [transform(row, rng) for row, rng in zip(found, rngs, strict=True)]
    return _stack(found)


def _read_row(rows: Rows | MixedRows, seed: int, number: int) -> Batch:
    """Returns row `number` of the endless order."""
    if not isinstance(rows, MixedRows):
        return rows[_row_order(len(rows), seed)[number]]
    source, number = rows.shares.locate_row(number)
    own = rows.sources[source]
    return own[_row_order(len(own), seed, (source,))[number]]


@functools.lru_cache(CACHED_ORDERS)
def _row_order(n_rows: int, seed: int, key: tuple[int, ...] = ()) -> Any:
    """Row numbers without end: a permutation of all rows, then another, ..., random access."""
    import grain

    # Grain shuffles epoch e by seed + e: unhashed, neighbouring seeds would share epochs.
    hashed = int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])
    return grain.MapDataset.range(n_rows).shuffle(seed=hashed).repeat()


def _local_rows(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size % process_count or not 0 <= process_index < process_count:
        raise ValueError(
            f'data.batch_size must be a multiple of the number of processes, each taking its '
            f'share; got {batch_size=}, {process_index=} and {process_count=}.'
        )
    share = batch_size // process_count
    return range(process_index * share, (process_index + 1) * share)


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class Cursor(NamedTuple):
    """A run's place in its order of the text: the batch it needs next, and one past its last."""

    seed: int
    index: int
    stop: int


class Feed:
    """Batches for any number of runs, made ahead by READERS threads in all.

    A batch is made once for all the runs at the same place of the same order. `prefetch` batches
    are made ahead, shared evenly between the orders, with 0 none, else at least one of each order.
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
    ):
        _local_rows(batch_size, process_index, process_count)  # refused here, not in a thread
        process = {'process_index': process_index, 'process_count': process_count}
        how = {'batch_size': batch_size, 'transform': transform} | process
        self._make_batch = functools.partial(batch_at, rows, **how)
        self._prefetch = prefetch
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix=THREAD_PREFIX)
        self._futures: dict[tuple[int, int], Future[Batch]] = {}

    def take(self, cursors: Sequence[Cursor]) -> list[Batch]:
        """Returns the batch of each place, begins the following ones, and drops all others."""
        stops: dict[tuple[int, int], int] = {}
        for seed, index, stop in cursors:
            stops[seed, index] = max(stop, stops.get((seed, index), stop))
        before, self._futures = self._futures, {}
        ahead = -(-self._prefetch // len(stops))
        for offset in range(ahead + 1):  # what is needed first is begun first
            for (seed, start), stop in stops.items():
                index = start + offset
                if (seed, index) not in self._futures and (offset == 0 or index < stop):
                    future = before.pop((seed, index), None)
                    future = future or self._pool.submit(self._make_batch, index, seed=seed)
                    self._futures[seed, index] = future
        for unwanted in before.values():
            unwanted.cancel()
        return [self._futures[place[:2]].result() for place in cursors]

    def close(self) -> None:
        """Ends the threads."""
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
    """Yields every row once, in order, the last batch padded; at most `limit` batches, 0: all."""
    mine = _local_rows(batch_size, process_index, process_count)
    n_batches = -(-len(rows) // batch_size)
    blank = {name: np.zeros_like(value) for name, value in rows[0].items()}
    for batch in range(min(n_batches, limit or n_batches)):
        at = [batch * batch_size + i for i in mine]
        yield _stack([rows[i] if i < len(rows) else blank for i in at])


def steps_in_epoch(rows: Rows | MixedRows, batch_size: int, epochs: int = 1) -> int:
    """Returns the last step at which no source has begun epoch `epochs` + 1."""
    beyond = epochs * len(rows) // batch_size + 1  # with more rows than all sources have

    def exceeds_epochs(steps: int) -> bool:
        return max(_count_epochs(rows, steps * batch_size)) > epochs

    return bisect.bisect_left(range(beyond), True, key=exceeds_epochs) - 1


def _count_epochs(rows: Rows | MixedRows, n: int) -> list[int]:
    """Returns how many epochs of each source the first n rows begin."""
    if not isinstance(rows, MixedRows):
        return [-(-n // len(rows))]
    counts = rows.shares.count_rows(n)
    return [-(-count // len(own)) for count, own in zip(counts, rows.sources, strict=True)]


def check_epochs(cfg: DataConfig, steps: int, rows: Rows | MixedRows) -> int:
    """Returns how many epochs `steps` begin. Raises ValueError if they exceed cfg.epochs."""
    n = steps * cfg.batch_size
    needed = max(1, *_count_epochs(rows, n))
    if needed <= cfg.epochs:
        return needed
    most = steps_in_epoch(rows, cfg.batch_size, cfg.epochs)
    remedy = f'Set data.epochs={needed}, or train.steps to {most} at most'
    if not isinstance(rows, MixedRows):
        raise ValueError(
            f'train.steps={steps} needs {needed} epochs, and data.epochs={cfg.epochs}: one epoch '
            f'is {steps_in_epoch(rows, cfg.batch_size)} steps of {cfg.batch_size} sequences '
            f'({len(rows)} in all). {remedy}.'
        )
    worst = _count_epochs(rows, n).index(needed)
    held, count = len(rows.sources[worst]), rows.shares.count_rows(n)[worst]
    raise ValueError(
        f'train.steps={steps} takes {count} sequences of {rows.names[worst]!r} in data.mixture, '
        f'which holds {held}: {needed} epochs of it, and data.epochs={cfg.epochs}. {remedy}; or '
        f'give it more text, or {cfg.epochs * held / n:.3g} of the mixture at most instead of '
        f'{rows.shares.fractions[worst]:.3g}.'
    )
