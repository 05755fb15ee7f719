"""Mixtures from text to batches: preparation, order of rows, and number of epochs."""

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
from tests.lm.data.conftest import PreparationKilled, discard_line, document, raise_killed
from tests.lm.data.test_loader import IndexRows


class Tagged(IndexRows):
    """Rows that hold a tag and their number."""

    def __init__(self, n, tag):
        super().__init__(n)
        self.tag = tag

    def __getitem__(self, i):
        return {'tokens': np.array([self.tag, super().__getitem__(i)['tokens'][0]], np.int32)}


def make_mixture(sizes=(50, 20, 30), weights=(0.5, 0.3, 0.2)):
    sources = tuple(Tagged(n, tag) for tag, n in enumerate(sizes))
    return MixedRows(('a', 'b', 'c'), Shares(weights), sources)


def draw_rows(rows, n, seed=0, batch_size=10):
    """Returns the first n rows of the order, as (tag, number)."""
    batches = [
        batch_at(rows, s, batch_size=batch_size, seed=seed)['tokens']
        for s in range(-(-n // batch_size))
    ]
    return [tuple(row) for row in np.concatenate(batches)[:n].tolist()]


def test_reference_order_has_shares_and_epochs():
    """The rows of each source are its epochs in sequence, at the positions of its share."""
    rows, order = make_mixture(), draw_rows(make_mixture(), 400)
    assert [tag for tag, _ in order] == [rows.shares.locate_row(i)[0] for i in range(400)]
    for tag, size in enumerate((50, 20, 30)):
        numbers = [number for row_tag, number in order if row_tag == tag]
        assert len(numbers) == 400 * (0.5, 0.3, 0.2)[tag]
        epochs = [numbers[i : i + size] for i in range(0, len(numbers) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs) > 1


def test_property_each_source_has_its_own_order():
    rows = make_mixture(sizes=(40, 40, 40), weights=(1.0, 1.0, 1.0))
    assert draw_rows(rows, 90) == draw_rows(rows, 90) != draw_rows(rows, 90, seed=1)
    assert draw_rows(rows, 90, batch_size=6) == draw_rows(rows, 90)
    order = draw_rows(rows, 120)
    orders = {tuple(number for t, number in order if t == tag) for tag in range(3)}
    assert len(orders) == 3


def test_property_weights_need_not_sum_to_one():
    assert [tag for tag, _ in draw_rows(make_mixture(weights=(5.0, 3.0, 2.0)), 100)] == [
        tag for tag, _ in draw_rows(make_mixture(), 100)
    ]


@pytest.mark.parametrize('count', [1, 2, 4])
def test_equivalence_processes_share_the_batch(count):
    rows = make_mixture()
    for step in (0, 7):
        whole = batch_at(rows, step, batch_size=8, seed=3)['tokens']
        batches = []
        for i in range(count):
            feed = Feed(rows, batch_size=8, prefetch=2, process_index=i, process_count=count)
            batches += feed.take([Cursor(3, step, 9)])
            feed.close()
        np.testing.assert_array_equal(np.concatenate([batch['tokens'] for batch in batches]), whole)


@pytest.mark.default_rows('1-sizes0')
@pytest.mark.parametrize('sizes', [(50, 20, 30), (7, 100, 1), (3, 3, 3)])
@pytest.mark.parametrize('epochs', [1, 3])
def test_reference_steps_until_a_source_repeats(sizes, epochs, cfg):
    """Draws rows until one of them occurs more than `epochs` times."""
    rows, data_cfg = make_mixture(sizes), cfg(batch_size=4, epochs=epochs)
    n_drawn, n = collections.Counter(), 0
    for row in draw_rows(rows, 2000):
        n_drawn[row] += 1
        if n_drawn[row] > epochs:
            break
        n += 1
    last_step = n // 4
    if epochs == 1:
        assert steps_in_epoch(rows, 4) == last_step
    if last_step:
        assert check_epochs(data_cfg, last_step, rows) <= epochs
    with pytest.raises(ValueError, match=rf'train\.steps to at most {last_step}\b'):
        check_epochs(data_cfg, last_step + 1, rows)


def test_error_names_the_source_that_would_repeat(cfg):
    message = (
        r"train\.steps=30 needs 90 sequences of 'b' in data\.mixture, which has 20\. This is 5 "
        r'epochs, but data\.epochs=2\. Set data\.epochs=5, or train\.steps to at most 13; or add '
        r'text to this source, or lower its share from 0\.3 to at most 0\.133\.'
    )
    with pytest.raises(ValueError, match=message):
        check_epochs(cfg(batch_size=10, epochs=2), 30, make_mixture())
    assert check_epochs(cfg(batch_size=10, epochs=5), 30, make_mixture()) == 5


@pytest.fixture
def mixture_cfg(tmp_path, cfg):
    """mixture_cfg(shares, field=value, ...) -> the config of a mixture of two folders of text."""
    for name, numbers in (('odd', range(1, 60, 2)), ('even', range(0, 60, 2))):
        (tmp_path / name).mkdir()
        for i in numbers:
            (tmp_path / name / f'{i:02}.txt').write_text(f'{name} words\n' * 5 + document(i))

    def make(names=('odd', 'even'), shares=(0.75, 0.25), **fields):
        sources = [f'text:{tmp_path}/{name}/*.txt' for name in names]
        mixture = dict(zip(names, zip(shares, sources, strict=True), strict=True))
        return cfg(**{'mixture': repr(mixture), 'source': ''} | fields)

    make.alone = lambda name, **fields: cfg(source=f'text:{tmp_path}/{name}/*.txt', **fields)
    return make


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:300'])
def test_equivalence_mixed_source_and_source_alone(mixture_cfg, tokenizer):
    """Documents, splits and counts are equal; tokens too, if the tokenizer is the same."""
    dataset = open_dataset(mixture_cfg(tokenizer=tokenizer), say=discard_line)
    total = collections.Counter()
    for k, name in enumerate(('odd', 'even')):
        single = open_dataset(mixture_cfg.alone(name, tokenizer=tokenizer), say=discard_line)
        report, alone_report = dataset.report['sources'][name], single.report
        for split, rows in (('train', dataset.train), ('validation', dataset.validation)):
            assert report[split]['documents'] == alone_report[split]['documents']
            alone_rows = getattr(single, split)
            texts = [dataset.tokenizer.decode(ids) for ids in rows.sources[k].documents()]
            assert texts == [single.tokenizer.decode(ids) for ids in alone_rows.documents()]
            assert rows.sources[k].n_bytes == alone_rows.n_bytes == report[split]['bytes']
            total[split] += report[split]['tokens']
        assert (report['digest'] == single.digest) == (tokenizer == 'byte')
        assert report['share'] == (0.75, 0.25)[k]
    assert {split: dataset.report[split]['tokens'] for split in total} == total
    assert dataset.report['invalid_utf8'] == {'documents': 0, 'bytes': 0}


def test_property_bpe_trains_once_on_all_training_splits(mixture_cfg, monkeypatch):
    """Other shares, another order or other names do not train it again."""
    trained = []
    build = prepare.training_texts

    def record(*args):
        trained.append(list(build(*args)))
        return iter(trained[-1])

    monkeypatch.setattr(prepare, 'training_texts', record)
    first = open_dataset(mixture_cfg(tokenizer='bpe:300'), say=discard_line)
    training_texts, n_training = [text for texts in trained[:2] for text in texts], len(trained)
    documents = [first.tokenizer.decode(ids) for ids in first.train.documents()]
    assert sorted(training_texts) == sorted(documents)
    for other_cfg in (
        mixture_cfg(shares=(0.5, 0.5), tokenizer='bpe:300'),
        mixture_cfg(names=('even', 'odd'), tokenizer='bpe:300'),
    ):
        again = open_dataset(other_cfg, say=discard_line)
        assert again.tokenizer.library.to_str() == first.tokenizer.library.to_str()
        assert again.digest != first.digest
    assert len(trained) == n_training
    larger_validation = open_dataset(
        mixture_cfg(tokenizer='bpe:300', validation_fraction=0.5), say=discard_line
    )
    assert larger_validation.tokenizer.library.to_str() != first.tokenizer.library.to_str()


def test_property_prepared_data_is_reused(mixture_cfg, tmp_path):
    messages = []
    cfg = mixture_cfg(tokenizer='bpe:300')
    first = open_dataset(cfg, say=messages.append)
    assert [line.split(' with')[0] for line in messages if 'preparing' in line] == [
        f'data: preparing text:{tmp_path}/{name}/*.txt' for name in ('odd', 'even')
    ]
    assert sum('training bpe:300 on the training splits of 2 sources' in s for s in messages) == 1
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


def test_killed_tokenizer_training_resumes_from_scans(mixture_cfg, monkeypatch):
    scanned, scan, cfg = [], dataset.scan_source, mixture_cfg(tokenizer='bpe:300')

    def record(source, *args):
        scanned.append(source)
        scan(source, *args)

    monkeypatch.setattr(dataset, 'scan_source', record)
    with monkeypatch.context() as patch, pytest.raises(PreparationKilled):
        patch.setattr(tokenizers.SubwordTokenizer, 'save', raise_killed)
        open_dataset(cfg, say=discard_line)
    assert len(scanned) == 2
    open_dataset(cfg, say=discard_line)
    assert len(scanned) == 2 and not list(cache.root(cfg.cache_dir).glob('*.pieces'))


def test_damaged_mixture_tokenizer_is_trained_again(mixture_cfg, tmp_path):
    messages, cfg = [], mixture_cfg(tokenizer='bpe:300')
    first = open_dataset(cfg, say=discard_line)
    folders = [p for p in (tmp_path / 'cache').iterdir() if p.is_dir()]
    (tokenizer,) = [p for p in folders if not (p / 'records').exists()]
    (tokenizer / 'tokenizer' / 'tokenizer.json').write_text('{}')
    again = open_dataset(cfg, say=messages.append)
    assert again.digest == first.digest and 'is damaged' in messages[0]


def test_property_processes_prepare_different_sources(mixture_cfg, tmp_path):
    """A source that another process has locked comes last: catches hosts that wait in a row."""
    expected = open_dataset(mixture_cfg(), say=discard_line)
    other_cache = {'cache_dir': str(tmp_path / 'other')}
    (tmp_path / 'other').mkdir()
    messages, datasets = [], []
    lock_path = tmp_path / 'other' / f'{expected.report["sources"]["odd"]["digest"]}.lock'
    thread = threading.Thread(
        target=lambda: datasets.append(
            open_dataset(mixture_cfg(**other_cache), say=messages.append)
        )
    )
    with hold_lock(lock_path, waiting_message=''):
        thread.start()
        deadline = time.monotonic() + 60
        while not any('waiting for it' in line for line in messages):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (line,) = [line for line in messages if line.startswith('data: preparing')]
        assert 'even/*.txt' in line and not datasets
    thread.join()
    assert datasets[0].digest == expected.digest and datasets[0].report == expected.report
    assert datasets[0].train.names == ('odd', 'even')


BAD = [
    ({'names': ('odd', 'none')}, "'none' of data.mixture: no file matches data.source=text:"),
    ({'tokenizer': 'bpe:300', 'seq_len': 10**6}, "'odd' of data.mixture: the training split of"),
]


@pytest.mark.parametrize(('fields', 'says'), BAD)
def test_errors_name_the_source(mixture_cfg, fields, says):
    with pytest.raises(ValueError, match=says):
        open_dataset(mixture_cfg(**fields), say=discard_line)
    if 'names' in fields:
        with pytest.raises(ValueError, match=says):
            check(mixture_cfg(**fields))


def test_check_validates_mixture_sources(cfg):
    mixture = "{'a': (1, 'pyton'), 'b': (1, 'synthetic:markov')}"
    with pytest.raises(ValueError, match=r"'a' of data.mixture: .*Did you mean 'python'"):
        check(cfg(source='', mixture=mixture))
    check(cfg(source='', mixture=mixture.replace('pyton', 'synthetic:copy')))


def test_property_mixture_batches_read_both_sources(mixture_cfg):
    dataset = open_dataset(mixture_cfg(), say=discard_line)
    rows = itertools.chain.from_iterable(
        batch_at(dataset.train, step, batch_size=4, seed=0)['tokens'] for step in range(5)
    )
    texts = [dataset.tokenizer.decode(row) for row in rows]
    assert any('odd' in text for text in texts) and any('even' in text for text in texts)
