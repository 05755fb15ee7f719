import contextlib
import itertools
import threading
import time

import numpy as np
import pytest

from lm.data import (
    Cursor,
    Feed,
    batch_at,
    check_epochs,
    evaluation_batches,
    open_dataset,
    steps_in_epoch,
)
from lm.data.loader import READERS, THREAD_PREFIX
from tests.lm.data.conftest import discard_line


class IndexRows:
    """Rows that hold only their number."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert 0 <= i < self.n
        return {'tokens': np.full(3, i, np.int32), 'segments': np.ones(3, np.int32)}


def check_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
        assert a[name].dtype == b[name].dtype == np.int32


def numbers(batch):
    return batch['tokens'][:, 0].tolist()


def test_property_every_epoch_is_another_permutation():
    rows, B = IndexRows(24), 4
    row_numbers = [numbers(batch_at(rows, s, batch_size=B, seed=0)) for s in range(18)]
    epochs = np.array(row_numbers).reshape(3, 24)
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
        assert epoch.tolist() != list(range(24))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_property_batches_continue_across_epochs():
    rows = IndexRows(10)
    row_numbers = np.ravel([numbers(batch_at(rows, s, batch_size=4, seed=0)) for s in range(5)])
    assert sorted(row_numbers[:10]) == sorted(row_numbers[10:]) == list(range(10))


def test_property_neighbouring_seeds_share_no_epoch():
    """Grain alone would make epoch 1 of seed 0 the epoch 0 of seed 1."""
    rows = IndexRows(50)
    orders = [
        tuple(numbers(batch_at(rows, epoch, batch_size=50, seed=seed)))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == 16


def test_property_batch_depends_on_seed_and_step():
    rows = IndexRows(100)
    first = batch_at(rows, 7, batch_size=8, seed=3)
    batch_at(rows, 2, batch_size=8, seed=4)
    check_same(batch_at(rows, 7, batch_size=8, seed=3), first)
    assert numbers(batch_at(rows, 7, batch_size=8, seed=4)) != numbers(first)
    assert numbers(batch_at(rows, 8, batch_size=8, seed=3)) != numbers(first)


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_equivalence_hosts_share_the_batch(count):
    rows = IndexRows(100)
    whole = numbers(batch_at(rows, 5, batch_size=8, seed=0))
    parts = [
        numbers(batch_at(rows, 5, batch_size=8, seed=0, process_index=i, process_count=count))
        for i in range(count)
    ]
    assert all(len(part) == 8 // count for part in parts)
    assert list(itertools.chain(*parts)) == whole


@contextlib.contextmanager
def record_batches(rows, prefetch, batch_size=4, **process):
    """Yields a feed, and the list of the (seed, step) of its batches, in order."""
    feed, keys = Feed(rows, batch_size=batch_size, prefetch=prefetch, **process), []
    make = feed._make_batch

    def record(step, *, seed):
        keys.append((seed, step))
        return make(step, seed=seed)

    feed._make_batch = record
    with contextlib.closing(feed):
        yield feed, keys


def idle(feed):
    """Waits until all started batches are made."""
    for future in feed._futures.values():
        future.result()


@pytest.mark.parametrize('prefetch', [0, 1, 8])
def test_equivalence_feed_returns_batch_at(prefetch, cfg):
    rows = open_dataset(cfg(), say=discard_line).train
    with record_batches(rows, prefetch) as (feed, keys):
        for step in range(3, 20):
            (batch,) = feed.take([Cursor(1, step, 20)])
            check_same(batch, batch_at(rows, step, batch_size=4, seed=1))
    assert sorted(keys) == [(1, step) for step in range(3, 20)]  # each once, and none beyond
    with record_batches(rows, prefetch, process_index=1, process_count=2) as (feed, _):
        (half,) = feed.take([Cursor(1, 19, 20)])
    np.testing.assert_array_equal(half['tokens'], batch['tokens'][2:])


@pytest.mark.parametrize('prefetch', [0, 1, 8])
def test_property_feed_prefetches(prefetch):
    with record_batches(IndexRows(100), prefetch) as (feed, keys):
        feed.take([Cursor(0, 5, 99)])
        idle(feed)
        assert sorted(keys) == [(0, step) for step in range(5, 6 + prefetch)]


def test_property_runs_at_one_cursor_share_batches():
    """One of the runs may stop earlier, or arrive later."""
    rows = IndexRows(100)
    with record_batches(rows, 8) as (feed, keys):
        for step in range(6):
            cursors = [
                Cursor(0, step, 3 if step < 3 else 9),
                Cursor(0, step, 6),
                Cursor(0, step + 2, 8),
            ]
            for cursor, batch in zip(cursors, feed.take(cursors), strict=True):
                check_same(batch, batch_at(rows, cursor.index, batch_size=4, seed=cursor.seed))
        idle(feed)
    assert sorted(keys) == [(0, step) for step in range(9)]


def test_property_unused_batches_are_dropped():
    """One run went back and left batches out, another has ended."""
    with record_batches(IndexRows(100), 4) as (feed, _):
        feed.take([Cursor(0, 0, 50), Cursor(1, 0, 50)])
        assert set(feed._futures) == {(seed, step) for seed in (0, 1) for step in range(3)}
        feed.take([Cursor(0, 30, 50)])
        assert set(feed._futures) == {(0, step) for step in range(30, 35)}


@pytest.mark.full
def test_property_many_orders_share_threads():
    """Three hundred runs with separate orders: one batch of each is prefetched."""
    with record_batches(IndexRows(100), 8) as (feed, keys):
        for step in range(3):
            feed.take([Cursor(seed, step, 50) for seed in range(300)])
            assert len(feed._futures) == 600
        assert len(reader_threads()) == READERS
    assert reader_threads() == [] and len(keys) <= 300 * 4


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


def test_property_close_ends_threads():
    class Slow(IndexRows):
        def __getitem__(self, i):
            time.sleep(0.02)
            return super().__getitem__(i)

    with record_batches(Slow(100), 50, batch_size=1) as (feed, keys):
        feed.take([Cursor(0, 0, 99)])
    assert reader_threads() == [] and len(keys) < 20


def test_take_raises_reader_errors():
    class Torn(IndexRows):
        def __getitem__(self, i):
            raise OSError('no such chunk')

    with record_batches(Torn(10), 2) as (feed, _), pytest.raises(OSError, match='no such chunk'):
        feed.take([Cursor(0, 0, 9)])


def test_property_evaluation_covers_the_split_in_order():
    rows = IndexRows(10)
    batches = list(evaluation_batches(rows, batch_size=4, limit=0))
    assert [batch['tokens'].shape for batch in batches] == [(4, 3)] * 3
    assert list(itertools.chain(*map(numbers, batches)))[:10] == list(range(10))
    np.testing.assert_array_equal(batches[2]['segments'][:, 0], [1, 1, 0, 0])
    assert len(list(evaluation_batches(rows, batch_size=4, limit=2))) == 2
    assert len(list(evaluation_batches(rows, batch_size=4, limit=9))) == 3
    halves = [
        list(evaluation_batches(rows, batch_size=4, limit=0, process_index=i, process_count=2))
        for i in range(2)
    ]
    for batch, first, second in zip(batches, *halves, strict=True):
        assert numbers(first) + numbers(second) == numbers(batch)


@pytest.mark.parametrize('packing', ['concat', 'best_fit'])
def test_property_evaluation_counts_the_split_exactly(packing, cfg):
    """Bits per byte divides by these: targets and bytes of whole documents, without padding."""
    ds = open_dataset(cfg(packing=packing), say=discard_line)
    rows, tokenizer = ds.validation, ds.tokenizer
    targets, ends = 0, 0
    for batch in evaluation_batches(rows, batch_size=4, limit=0):
        is_target = (batch['segments'][:, 1:] > 0) & (batch['tokens'][:, 1:] != tokenizer.bos_id)
        targets += is_target.sum()
        ends += (batch['tokens'][:, 1:][is_target] == tokenizer.eos_id).sum()
    assert targets == rows.n_tokens
    assert ends == ds.report['validation']['documents']
    assert rows.n_bytes == targets - ends  # a byte is a token here


def test_errors_batch_not_divisible_by_hosts():
    for make_batch in (
        batch_at,
        lambda rows, step, **options: next(evaluation_batches(rows, **options)),
    ):
        extra = {'seed': 0} if make_batch is batch_at else {'limit': 0}
        with pytest.raises(ValueError, match='multiple of the number of processes'):
            make_batch(IndexRows(9), 0, batch_size=4, process_count=3, **extra)
    with pytest.raises(ValueError, match='multiple of the number of processes'):
        Feed(IndexRows(9), batch_size=4, prefetch=1, process_count=3)


def test_reference_epoch_rule(cfg):
    rows = IndexRows(10)
    assert steps_in_epoch(rows, 4) == 2
    one_epoch, three_epochs = cfg(batch_size=4, epochs=1), cfg(batch_size=4, epochs=3)
    assert check_epochs(one_epoch, 2, rows) == 1
    assert check_epochs(three_epochs, 5, rows) == 2
    assert check_epochs(three_epochs, 7, rows) == 3
    message = r'needs 2 epochs.*is 2 steps.*data\.epochs=2, or train\.steps to at most 2\.'
    with pytest.raises(ValueError, match=message):
        check_epochs(one_epoch, 3, rows)
    with pytest.raises(ValueError, match=r'needs 4 epochs.*train\.steps to at most 7\.'):
        check_epochs(three_epochs, 8, rows)
