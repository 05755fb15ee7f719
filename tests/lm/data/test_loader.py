import itertools

import numpy as np
import pytest

from lm.data import (
    batch_at,
    batches,
    check_epochs,
    evaluation_batches,
    open_dataset,
    steps_in_epoch,
)
from tests.lm.data.conftest import quiet


class Numbered:
    """Rows that hold nothing but their number."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert 0 <= i < self.n
        return {'tokens': np.full(3, i, np.int32), 'segments': np.ones(3, np.int32)}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
        assert a[name].dtype == b[name].dtype == np.int32


def numbers(batch):
    return batch['tokens'][:, 0].tolist()


def test_property_every_epoch_is_another_permutation():
    rows, B = Numbered(24), 4
    drawn = [numbers(batch_at(rows, s, batch_size=B, seed=0)) for s in range(18)]
    epochs = np.array(drawn).reshape(3, 24)
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
        assert epoch.tolist() != list(range(24))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_property_batches_continue_over_the_end_of_an_epoch():
    rows = Numbered(10)
    drawn = np.ravel([numbers(batch_at(rows, s, batch_size=4, seed=0)) for s in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))


def test_property_neighbouring_seeds_share_no_epoch():
    """Grain alone would make epoch 1 of seed 0 the epoch 0 of seed 1."""
    rows = Numbered(50)
    orders = [
        tuple(numbers(batch_at(rows, epoch, batch_size=50, seed=seed)))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == 16


def test_property_a_batch_is_a_function_of_seed_and_step():
    rows = Numbered(100)
    first = batch_at(rows, 7, batch_size=8, seed=3)
    batch_at(rows, 2, batch_size=8, seed=4)
    same(batch_at(rows, 7, batch_size=8, seed=3), first)
    assert numbers(batch_at(rows, 7, batch_size=8, seed=4)) != numbers(first)
    assert numbers(batch_at(rows, 8, batch_size=8, seed=3)) != numbers(first)


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_equivalence_hosts_together_hold_the_batch(count):
    rows = Numbered(100)
    whole = numbers(batch_at(rows, 5, batch_size=8, seed=0))
    parts = [
        numbers(batch_at(rows, 5, batch_size=8, seed=0, process_index=i, process_count=count))
        for i in range(count)
    ]
    assert all(len(part) == 8 // count for part in parts)
    assert list(itertools.chain(*parts)) == whole


@pytest.mark.parametrize('prefetch', [0, 1, 8])
def test_equivalence_grain_makes_batch_at(prefetch, cfg):
    rows = open_dataset(cfg(), say=quiet).train
    how = {'batch_size': 4, 'seed': 1}
    made = list(batches(rows, start=3, stop=20, prefetch=prefetch, **how))
    assert len(made) == 17
    for step, batch in enumerate(made, 3):
        same(batch, batch_at(rows, step, **how))
    tail = batches(rows, start=15, stop=20, prefetch=prefetch, **how)
    for resumed, batch in itertools.zip_longest(tail, made[12:]):
        same(resumed, batch)
    part = next(batches(rows, start=3, stop=4, prefetch=2, process_index=1, process_count=2, **how))
    np.testing.assert_array_equal(part['tokens'], made[0]['tokens'][2:])
    assert list(batches(rows, start=5, stop=5, prefetch=prefetch, **how)) == []


def test_property_evaluation_covers_the_split_in_order():
    rows = Numbered(10)
    made = list(evaluation_batches(rows, batch_size=4, limit=0))
    assert [batch['tokens'].shape for batch in made] == [(4, 3)] * 3
    assert list(itertools.chain(*map(numbers, made)))[:10] == list(range(10))
    np.testing.assert_array_equal(made[2]['segments'][:, 0], [1, 1, 0, 0])
    assert len(list(evaluation_batches(rows, batch_size=4, limit=2))) == 2
    assert len(list(evaluation_batches(rows, batch_size=4, limit=9))) == 3
    halves = [
        list(evaluation_batches(rows, batch_size=4, limit=0, process_index=i, process_count=2))
        for i in range(2)
    ]
    for batch, first, second in zip(made, *halves, strict=True):
        assert numbers(first) + numbers(second) == numbers(batch)


@pytest.mark.parametrize('packing', ['concat', 'best_fit'])
def test_property_evaluation_counts_the_split_exactly(packing, cfg):
    """What bits per byte divides by: targets and bytes of whole documents, padding aside."""
    ds = open_dataset(cfg(packing=packing), say=quiet)
    rows, tokenizer = ds.validation, ds.tokenizer
    targets, ends = 0, 0
    for batch in evaluation_batches(rows, batch_size=4, limit=0):
        wanted = (batch['segments'][:, 1:] > 0) & (batch['tokens'][:, 1:] != tokenizer.bos_id)
        targets += wanted.sum()
        ends += (batch['tokens'][:, 1:][wanted] == tokenizer.eos_id).sum()
    assert targets == rows.n_tokens
    assert ends == ds.report['validation']['documents']
    assert rows.n_bytes == targets - ends  # a byte is a token here


def test_errors_of_hosts():
    for rows_of in (batch_at, lambda rows, step, **how: next(evaluation_batches(rows, **how))):
        extra = {'seed': 0} if rows_of is batch_at else {'limit': 0}
        with pytest.raises(ValueError, match='multiple of the number of processes'):
            rows_of(Numbered(9), 0, batch_size=4, process_count=3, **extra)
    with pytest.raises(ValueError, match='multiple of the number of processes'):
        batches(Numbered(9), batch_size=4, seed=0, start=0, stop=1, prefetch=1, process_count=3)


def test_reference_epoch_rule(cfg):
    rows = Numbered(10)
    assert steps_in_epoch(rows, 4) == 2
    one, three = cfg(batch_size=4, epochs=1), cfg(batch_size=4, epochs=3)
    assert check_epochs(one, 2, rows) == 1
    assert check_epochs(three, 5, rows) == 2
    assert check_epochs(three, 7, rows) == 3
    says = r'needs 2 epochs.*is 2 steps.*data\.epochs=2, or train\.steps to 2 at most'
    with pytest.raises(ValueError, match=says):
        check_epochs(one, 3, rows)
    with pytest.raises(ValueError, match=r'needs 4 epochs.*train\.steps to 7 at most'):
        check_epochs(three, 8, rows)
