"""Mixtures from text to batches: what is prepared, in which order rows come, how long they last."""

import collections
import itertools
import shutil
import threading
import time

import numpy as np
import pytest

from lm.config.mixture import MixedRows, Shares
from lm.data import (
    Cursor,
    Feed,
    batch_at,
    cache,
    check,
    check_epochs,
    dataset,
    open_dataset,
    prepare,
    steps_in_epoch,
    tokenizers,
)
from lm.storage.files import hold_lock
from tests.lm.data.conftest import Killed, discard_line, document, killed
from tests.lm.data.test_loader import Numbered


class Tagged(Numbered):
    """Rows that hold a tag and their number."""

    def __init__(self, n, tag):
        super().__init__(n)
        self.tag = tag

    def __getitem__(self, i):
        return {'tokens': np.array([self.tag, super().__getitem__(i)['tokens'][0]], np.int32)}


def three(sizes=(50, 20, 30), weights=(0.5, 0.3, 0.2)):
    parts = tuple(Tagged(n, tag) for tag, n in enumerate(sizes))
    return MixedRows(('a', 'b', 'c'), Shares(weights), parts)


def drawn(rows, n, seed=0, batch_size=10):
    """The first n rows of the order, as (tag, number)."""
    batches = [
        batch_at(rows, s, batch_size=batch_size, seed=seed)['tokens']
        for s in range(-(-n // batch_size))
    ]
    return [tuple(row) for row in np.concatenate(batches)[:n].tolist()]


def test_reference_shares_and_epochs_of_the_order():
    """Each source's rows are its own epochs, one after the other, at the places of its share."""
    rows, order = three(), drawn(three(), 400)
    assert [tag for tag, _ in order] == [rows.shares.locate_row(i)[0] for i in range(400)]
    for tag, size in enumerate((50, 20, 30)):
        own = [number for other, number in order if other == tag]
        assert len(own) == 400 * (0.5, 0.3, 0.2)[tag]
        epochs = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs) > 1


def test_property_the_order_is_of_the_seed_and_sources_have_orders_of_their_own():
    rows = three(sizes=(40, 40, 40), weights=(1.0, 1.0, 1.0))
    assert drawn(rows, 90) == drawn(rows, 90) != drawn(rows, 90, seed=1)
    assert drawn(rows, 90, batch_size=6) == drawn(rows, 90)
    order = drawn(rows, 120)
    own = {tuple(number for t, number in order if t == tag) for tag in range(3)}
    assert len(own) == 3


def test_property_weights_need_not_sum_to_one():
    assert [tag for tag, _ in drawn(three(weights=(5.0, 3.0, 2.0)), 100)] == [
        tag for tag, _ in drawn(three(), 100)
    ]


@pytest.mark.parametrize('count', [1, 2, 4])
def test_equivalence_processes_together_hold_the_batch(count):
    rows = three()
    for step in (0, 7):
        whole = batch_at(rows, step, batch_size=8, seed=3)['tokens']
        parts = []
        for i in range(count):
            feed = Feed(rows, batch_size=8, prefetch=2, process_index=i, process_count=count)
            parts += feed.take([Cursor(3, step, 9)])
            feed.close()
        np.testing.assert_array_equal(np.concatenate([p['tokens'] for p in parts]), whole)


@pytest.mark.default_rows('1-sizes0')
@pytest.mark.parametrize('sizes', [(50, 20, 30), (7, 100, 1), (3, 3, 3)])
@pytest.mark.parametrize('epochs', [1, 3])
def test_reference_steps_until_a_source_repeats(sizes, epochs, cfg):
    """By drawing rows until one of them has been seen `epochs` times already."""
    rows, own = three(sizes), cfg(batch_size=4, epochs=epochs)
    seen, n = collections.Counter(), 0
    for row in drawn(rows, 2000):
        seen[row] += 1
        if seen[row] > epochs:
            break
        n += 1
    most = n // 4
    if epochs == 1:
        assert steps_in_epoch(rows, 4) == most
    if most:
        assert check_epochs(own, most, rows) <= epochs
    with pytest.raises(ValueError, match=rf'train\.steps to {most} at most'):
        check_epochs(own, most + 1, rows)


def test_the_source_that_would_repeat_is_named(cfg):
    says = (
        r"train\.steps=30 takes 90 sequences of 'b' in data\.mixture, which holds 20: 5 epochs of "
        r'it, and data\.epochs=2\. Set data\.epochs=5, or train\.steps to 13 at most; or give it '
        r'more text, or 0\.133 of the mixture at most instead of 0\.3\.'
    )
    with pytest.raises(ValueError, match=says):
        check_epochs(cfg(batch_size=10, epochs=2), 30, three())
    assert check_epochs(cfg(batch_size=10, epochs=5), 30, three()) == 5


@pytest.fixture
def two(tmp_path, cfg):
    """two(shares, field=value, ...) -> the config of a mixture of two folders of text."""
    for name, numbers in (('odd', range(1, 60, 2)), ('even', range(0, 60, 2))):
        (tmp_path / name).mkdir()
        for i in numbers:
            (tmp_path / name / f'{i:02}.txt').write_text(f'{name} words\n' * 5 + document(i))

    def make(names=('odd', 'even'), shares=(0.75, 0.25), **fields):
        sources = [f'text:{tmp_path}/{name}/*.txt' for name in names]
        found = dict(zip(names, zip(shares, sources, strict=True), strict=True))
        return cfg(**{'mixture': repr(found), 'source': ''} | fields)

    make.alone = lambda name, **fields: cfg(source=f'text:{tmp_path}/{name}/*.txt', **fields)
    return make


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:300'])
def test_equivalence_a_source_of_a_mixture_is_the_source_alone(two, tokenizer):
    """Its documents, splits and counts; to the token where the tokenizer is the same."""
    dataset = open_dataset(two(tokenizer=tokenizer), say=discard_line)
    total = collections.Counter()
    for k, name in enumerate(('odd', 'even')):
        alone = open_dataset(two.alone(name, tokenizer=tokenizer), say=discard_line)
        own, wanted = dataset.report['sources'][name], alone.report
        for split, rows in (('train', dataset.train), ('validation', dataset.validation)):
            assert own[split]['documents'] == wanted[split]['documents']
            theirs = getattr(alone, split)
            texts = [dataset.tokenizer.decode(ids) for ids in rows.sources[k].documents()]
            assert texts == [alone.tokenizer.decode(ids) for ids in theirs.documents()]
            assert rows.sources[k].n_bytes == theirs.n_bytes == own[split]['bytes']
            total[split] += own[split]['tokens']
        assert (own['digest'] == alone.digest) == (tokenizer == 'byte')
        assert own['share'] == (0.75, 0.25)[k]
    assert {split: dataset.report[split]['tokens'] for split in total} == total
    assert dataset.report['invalid_utf8'] == {'documents': 0, 'bytes': 0}


def test_property_bpe_is_trained_on_all_training_splits_once(two, monkeypatch):
    """And on nothing else: not again for other shares, another order or other names."""
    trained = []
    build = prepare.training_texts

    def counted(found, fraction):
        trained.append(list(build(found, fraction)))
        return iter(trained[-1])

    monkeypatch.setattr(prepare, 'training_texts', counted)
    first = open_dataset(two(tokenizer='bpe:300'), say=discard_line)
    fed, n_training = [text for texts in trained[:2] for text in texts], len(trained)
    kept = [first.tokenizer.decode(ids) for ids in first.train.documents()]
    assert sorted(fed) == sorted(kept)
    for other in (
        two(shares=(0.5, 0.5), tokenizer='bpe:300'),
        two(names=('even', 'odd'), tokenizer='bpe:300'),
    ):
        again = open_dataset(other, say=discard_line)
        assert again.tokenizer.library.to_str() == first.tokenizer.library.to_str()
        assert again.digest != first.digest
    assert len(trained) == n_training
    own = open_dataset(two(tokenizer='bpe:300', validation_fraction=0.5), say=discard_line)
    assert own.tokenizer.library.to_str() != first.tokenizer.library.to_str()


def test_property_what_is_prepared_is_found_again(two, tmp_path):
    said = []
    cfg = two(tokenizer='bpe:300')
    first = open_dataset(cfg, say=said.append)
    assert [line.split(' with')[0] for line in said if 'preparing' in line] == [
        f'data: preparing text:{tmp_path}/{name}/*.txt' for name in ('odd', 'even')
    ]
    assert sum('training bpe:300 on the training splits of 2 sources' in s for s in said) == 1
    again = open_dataset(cfg, say=pytest.fail)
    assert again.digest == first.digest and again.report == first.report
    (tmp_path / 'odd' / '01.txt').write_text('zqzx ' * 3000)
    changed = open_dataset(cfg, say=discard_line)
    assert changed.digest != first.digest
    assert len(changed.tokenizer.encode('zqzx')) < len(first.tokenizer.encode('zqzx'))
    shutil.rmtree(tmp_path / 'cache')
    fresh = open_dataset(cfg, say=discard_line)
    assert fresh.digest == changed.digest
    np.testing.assert_array_equal(fresh.validation[0]['tokens'], changed.validation[0]['tokens'])


def test_a_killed_training_of_a_shared_tokenizer_goes_on_from_its_scans(two, monkeypatch):
    read, scan, cfg = [], dataset.scan_source, two(tokenizer='bpe:300')

    def counted(source, *given):
        read.append(source)
        scan(source, *given)

    monkeypatch.setattr(dataset, 'scan_source', counted)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenizers.SubwordTokenizer, 'save', killed)
        open_dataset(cfg, say=discard_line)
    assert len(read) == 2
    open_dataset(cfg, say=discard_line)
    assert len(read) == 2 and not list(cache.root(cfg.cache_dir).glob('*.pieces'))


def test_a_damaged_tokenizer_of_a_mixture_is_trained_again(two, tmp_path):
    said, cfg = [], two(tokenizer='bpe:300')
    first = open_dataset(cfg, say=discard_line)
    folders = [p for p in (tmp_path / 'cache').iterdir() if p.is_dir()]
    (tokenizer,) = [p for p in folders if not (p / 'records').exists()]
    (tokenizer / 'tokenizer' / 'tokenizer.json').write_text('{}')
    again = open_dataset(cfg, say=said.append)
    assert again.digest == first.digest and 'is damaged' in said[0]


def test_property_processes_prepare_different_sources(two, tmp_path):
    """One whose lock another process has is left for last: catches hosts that wait in a row."""
    wanted = open_dataset(two(), say=discard_line)
    other = {'cache_dir': str(tmp_path / 'other')}
    (tmp_path / 'other').mkdir()
    said, done = [], []
    held = tmp_path / 'other' / f'{wanted.report["sources"]["odd"]["digest"]}.lock'
    thread = threading.Thread(
        target=lambda: done.append(open_dataset(two(**other), say=said.append))
    )
    with hold_lock(held, waiting_message=''):
        thread.start()
        deadline = time.monotonic() + 60
        while not any('waiting for it' in line for line in said):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (line,) = [line for line in said if 'preparing' in line]
        assert 'even/*.txt' in line and not done
    thread.join()
    assert done[0].digest == wanted.digest and done[0].report == wanted.report
    assert done[0].train.names == ('odd', 'even')


BAD = [
    ({'names': ('odd', 'none')}, "'none' of data.mixture: no file matches data.source=text:"),
    ({'tokenizer': 'bpe:300', 'seq_len': 10**6}, "'odd' of data.mixture: the training split of"),
]


@pytest.mark.parametrize(('fields', 'says'), BAD)
def test_what_is_wrong_with_a_source_names_it(two, fields, says):
    with pytest.raises(ValueError, match=says):
        open_dataset(two(**fields), say=discard_line)
    if 'names' in fields:
        with pytest.raises(ValueError, match=says):
            check(two(**fields))


def test_kinds_of_sources_are_checked_as_data_source_is(cfg):
    mixture = "{'a': (1, 'pyton'), 'b': (1, 'synthetic:markov')}"
    with pytest.raises(ValueError, match=r"'a' of data.mixture: .*Did you mean 'python'"):
        check(cfg(source='', mixture=mixture))
    check(cfg(source='', mixture=mixture.replace('pyton', 'synthetic:copy')))


def test_property_batches_of_a_mixture_read_both_sources(two):
    dataset = open_dataset(two(), say=discard_line)
    seen = itertools.chain.from_iterable(
        batch_at(dataset.train, step, batch_size=4, seed=0)['tokens'] for step in range(5)
    )
    texts = [dataset.tokenizer.decode(row) for row in seen]
    assert any('odd' in text for text in texts) and any('even' in text for text in texts)
