"""Which rows make the batch of a step: a pure function of (seed, step).

Of a mixture, which source a row is from is a function of its number alone (`lm.config.mixture.Shares`), so
that every beginning of the order has the shares, and each source has an order of its own. Neither
the number of hosts nor of reading threads matters, and resuming at a step needs no state but its
number.
"""

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.config.mixture import Mixed
from lm.data.rows import Rows

Batch = dict[str, np.ndarray]
Mixture = Callable[[Batch, np.random.Generator], Batch]  # of one row
READERS = 2  # threads; a batch of 16 rows of 257 tokens takes one of them about a millisecond
ORDERS = 256  # that are kept, a kilobyte each: one a seed and source
THREADS = 'batches'  # the beginning of their names


def batch_at(
    rows: Rows | Mixed,
    step: int,
    *,
    batch_size: int,
    seed: int,
    mixture: Mixture | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Batch:
    """The batch of `step`, [batch_size / process_count, T+1]: this process's slice of it.

    Rows are shuffled anew for each epoch; batch s is rows s * B to (s + 1) * B of that order, which
    has no end. mixture(row,
    rng) makes of each what its objective has, of numbers that (seed, step, i) alone decide; None:
    rows stay as they are.
    """
    mine = _slice(batch_size, process_index, process_count)
    found = [_row(rows, seed, step * batch_size + i) for i in mine]
    if mixture is not None:
        rngs = [np.random.default_rng((seed, step, i)) for i in mine]
        found = [mixture(row, rng) for row, rng in zip(found, rngs, strict=True)]
    return _stack(found)


def _row(rows: Rows | Mixed, seed: int, number: int) -> Batch:
    """That of the endless order."""
    if not isinstance(rows, Mixed):
        return rows[_order(len(rows), seed)[number]]
    source, number = rows.shares.place(number)
    own = rows.parts[source]
    return own[_order(len(own), seed, (source,))[number]]


@functools.lru_cache(ORDERS)
def _order(n_rows: int, seed: int, key: tuple[int, ...] = ()) -> Any:
    """Row numbers without end: a permutation of all rows, then another, ..., random access."""
    import grain

    # Grain shuffles epoch e by seed + e: unhashed, neighbouring seeds would share epochs.
    mixed = int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])
    return grain.MapDataset.range(n_rows).shuffle(seed=mixed).repeat()


def _slice(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size % process_count or not 0 <= process_index < process_count:
        raise ValueError(
            f'data.batch_size must be a multiple of the number of processes, each taking its '
            f'share; got {batch_size=}, {process_index=} and {process_count=}.'
        )
    share = batch_size // process_count
    return range(process_index * share, (process_index + 1) * share)


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class Place(NamedTuple):
    """Where a run is in its order of the text: the batch it needs next, and one past its last."""

    seed: int
    index: int
    stop: int


class Feed:
    """Batches for any number of runs, made ahead by READERS threads in all.

    A batch is made once for all the runs that are at the same place of the same order. `prefetch`
    batches are made ahead, shared evenly between the orders, and one of each order at least; with 0
    none is.
    """

    def __init__(
        self,
        rows: Rows | Mixed,
        *,
        batch_size: int,
        prefetch: int,
        mixture: Mixture | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        _slice(batch_size, process_index, process_count)  # refused here, not in a thread
        self._make = functools.partial(
            batch_at,
            rows,
            batch_size=batch_size,
            mixture=mixture,
            process_index=process_index,
            process_count=process_count,
        )
        self._prefetch = prefetch
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix=THREADS)
        self._begun: dict[tuple[int, int], Future[Batch]] = {}

    def take(self, places: Sequence[Place]) -> list[Batch]:
        """The batch of each place. Begins those that follow, and drops what no place leads to."""
        stops: dict[tuple[int, int], int] = {}
        for seed, index, stop in places:
            stops[seed, index] = max(stop, stops.get((seed, index), stop))
        before, self._begun = self._begun, {}
        ahead = -(-self._prefetch // len(stops))
        for offset in range(ahead + 1):  # what is needed first is begun first
            for (seed, index), stop in stops.items():
                key = seed, index + offset
                if key not in self._begun and (offset == 0 or key[1] < stop):
                    self._begun[key] = before.pop(key, None) or self._begin(*key)
        for unwanted in before.values():
            unwanted.cancel()
        return [self._begun[place[:2]].result() for place in places]

    def _begin(self, seed: int, index: int) -> Future[Batch]:
        return self._pool.submit(self._make, index, seed=seed)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)
        self._begun.clear()


def evaluation_batches(
    rows: Rows | Mixed,
    *,
    batch_size: int,
    limit: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Every row once, in order, the last batch filled with padding; `limit` batches, or 0: all."""
    mine = _slice(batch_size, process_index, process_count)
    n_batches = -(-len(rows) // batch_size)
    blank = {name: np.zeros_like(value) for name, value in rows[0].items()}
    for batch in range(min(n_batches, limit or n_batches)):
        at = [batch * batch_size + i for i in mine]
        yield _stack([rows[i] if i < len(rows) else blank for i in at])


def steps_in_epoch(rows: Rows | Mixed, batch_size: int) -> int:
    """Of a mixture, as many steps as repeat no row of any source."""
    return _most_steps(rows, batch_size, epochs=1)


def _most_steps(rows: Rows | Mixed, batch_size: int, epochs: int) -> int:
    """The last step at which no source has begun epoch `epochs` + 1."""
    if not isinstance(rows, Mixed):
        return epochs * len(rows) // batch_size
    beyond = epochs * len(rows) // batch_size + 1  # with more rows than all sources have

    def repeats(steps: int) -> bool:
        return max(_epochs(rows, steps * batch_size)) > epochs

    return bisect.bisect_left(range(beyond), True, key=repeats) - 1


def _epochs(rows: Mixed, n: int) -> list[int]:
    """How many epochs of each source the first n rows begin."""
    counts = rows.shares.counts(n)
    return [-(-count // len(own)) for count, own in zip(counts, rows.parts, strict=True)]


def check_epochs(cfg: DataConfig, steps: int, rows: Rows | Mixed) -> int:
    """How many epochs `steps` begin, of a mixture those of the source that repeats most; more than
    one must have been asked for.

    Raises ValueError where they are more than cfg.epochs.
    """
    n = steps * cfg.batch_size
    needed = max(1, *_epochs(rows, n)) if isinstance(rows, Mixed) else max(1, -(-n // len(rows)))
    if needed <= cfg.epochs:
        return needed
    if isinstance(rows, Mixed):
        raise ValueError(_repeats(cfg, steps, rows))
    most = _most_steps(rows, cfg.batch_size, cfg.epochs)
    raise ValueError(
        f'train.steps={steps} needs {needed} epochs, and data.epochs={cfg.epochs}: one epoch '
        f'is {steps_in_epoch(rows, cfg.batch_size)} steps of {cfg.batch_size} sequences '
        f'({len(rows)} in all). Set data.epochs={needed}, or train.steps to {most} at most.'
    )


def _repeats(cfg: DataConfig, steps: int, rows: Mixed) -> str:
    """Which source of a mixture repeats most, how often, and what to do."""
    n = steps * cfg.batch_size
    epochs = _epochs(rows, n)
    worst = epochs.index(max(epochs))
    held, count = len(rows.parts[worst]), rows.shares.counts(n)[worst]
    most = _most_steps(rows, cfg.batch_size, cfg.epochs)
    return (
        f'train.steps={steps} takes {count} sequences of {rows.names[worst]!r} in data.mixture, '
        f'which holds {held}: {epochs[worst]} epochs of it, and data.epochs={cfg.epochs}. Set '
        f'data.epochs={epochs[worst]}, or train.steps to {most} at most; or give it more text, or '
        f'{cfg.epochs * held / n:.3g} of the mixture at most instead of '
        f'{rows.shares.of_each[worst]:.3g}.'
    )
