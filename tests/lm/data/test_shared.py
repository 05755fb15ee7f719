"""Prepared data in object storage: made once, fetched by others, never half of it."""

import dataclasses
import shutil

import numpy as np
import pytest

from lm.data import cache, check, open_dataset
from lm.storage import complete_folders
from lm.storage.buckets import BucketError, open_bucket
from tests.lm.data.conftest import contents
from tests.object_store import free_port

pytestmark = pytest.mark.xdist_group('buckets')


@pytest.fixture
def remote(cfg, bucket_url):
    return cfg(cache_dir=f'{bucket_url}/data')


@pytest.fixture
def opened(remote, monkeypatch, tmp_path):
    """opened(machine) -> (dataset, what was said)."""

    def of(machine, config=remote):
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / machine))
        said = []
        return open_dataset(config, say=said.append), said

    return of


def test_the_second_machine_fetches_what_the_first_prepared(opened, remote, monkeypatch):
    first, said = opened('a')
    assert any('preparing' in line for line in said)
    made = contents(cache.root(remote.cache_dir) / first.digest)
    monkeypatch.setattr('lm.data.scan.scan_source', None)  # it would prepare
    second, said = opened('b')
    assert [line.split()[1] for line in said] == ['fetching']
    assert contents(cache.root(remote.cache_dir) / second.digest) == made
    np.testing.assert_array_equal(first.train[0]['tokens'], second.train[0]['tokens'])
    assert opened('b')[1] == []  # it is here


def test_half_of_it_is_prepared_again_and_put_there_whole(opened, remote):
    first, _ = opened('a')
    bucket = open_bucket(remote.cache_dir)
    bucket.delete([f'{first.digest}/{complete_folders.MARK}'])
    second, said = opened('b')
    assert second.digest == first.digest and any('preparing' in line for line in said)
    assert complete_folders.read_mark(bucket, first.digest) is not None


def test_what_was_damaged_there_is_put_right(opened, remote, monkeypatch):
    first, _ = opened('a')
    bucket = open_bucket(remote.cache_dir)
    name = f'{first.digest}/report.json'
    good = bucket.read(name)[0]
    bucket.write(name, b'x' * len(good))
    _, said = opened('b')
    assert any('is damaged: it is prepared again' in line for line in said)
    assert bucket.read(name)[0] == good
    _, said = opened('c')
    assert [line.split()[1] for line in said] == ['fetching']


def test_what_is_here_and_was_never_put_there_is(opened, remote):
    """The process was killed before."""
    first, _ = opened('a')
    bucket = open_bucket(remote.cache_dir)
    bucket.delete(bucket.list())
    _, said = opened('a')
    assert said == [] and complete_folders.read_mark(bucket, first.digest) is not None


def test_a_bucket_that_may_not_be_written_costs_a_note(opened, remote, monkeypatch):
    def refuse(*_, **__):
        raise BucketError('it may not be')

    monkeypatch.setattr('lm.storage.complete_folders.upload', refuse)
    dataset, said = opened('a')
    assert len(dataset.train) > 0
    assert said[-1].startswith('NOTE: it may not be; the prepared data stay in ')


def test_a_mixture_with_its_tokenizer(opened, cfg, remote, tmp_path):
    shutil.copytree(tmp_path / 'corpus', tmp_path / 'other')
    (tmp_path / 'other' / '00.txt').write_text('another one')
    sources = [f'text:{tmp_path}/{name}/*.txt' for name in ('corpus', 'other')]
    mixture = f"{{'a': (0.5, '{sources[0]}'), 'b': (0.5, '{sources[1]}')}}"
    both = dataclasses.replace(remote, source=None, mixture=mixture, tokenizer='bpe:300')
    first, said = opened('a', both)
    assert any('training bpe:300' in line for line in said)
    second, said = opened('b', both)
    assert [line.split()[1] for line in said] == ['fetching'] * 3
    assert second.digest == first.digest


def test_a_url_of_another_kind_and_a_store_that_is_not_there(cfg, remote, monkeypatch):
    with pytest.raises(ValueError, match='gs://BUCKET/PATH or s3://BUCKET/PATH'):
        check(cfg(cache_dir='az://a/b'))
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{free_port()}')
    with pytest.raises(OSError, match='cannot be reached'):
        open_dataset(remote, say=print)
