"""Prepared data in object storage: made once, fetched by others, and never partial."""

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
def open_on(remote, monkeypatch, tmp_path):
    """open_on(machine) -> (dataset, messages)."""

    def open_dataset_on(machine, config=remote):
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / machine))
        messages = []
        return open_dataset(config, say=messages.append), messages

    return open_dataset_on


def test_second_machine_fetches_prepared_data(open_on, remote, monkeypatch):
    first, messages = open_on('a')
    assert any('preparing' in line for line in messages)
    files = contents(cache.root(remote.cache_dir) / first.digest)
    monkeypatch.setattr('lm.data.scan.scan_source', None)  # it would prepare
    second, messages = open_on('b')
    assert [line.split()[1] for line in messages] == ['fetching']
    assert contents(cache.root(remote.cache_dir) / second.digest) == files
    np.testing.assert_array_equal(first.train[0]['tokens'], second.train[0]['tokens'])
    assert open_on('b')[1] == []  # it is here


def test_incomplete_upload_is_replaced(open_on, remote):
    first, _ = open_on('a')
    bucket = open_bucket(remote.cache_dir)
    bucket.delete([f'{first.digest}/{complete_folders.MARK}'])
    second, messages = open_on('b')
    assert second.digest == first.digest and any('preparing' in line for line in messages)
    assert complete_folders.read_mark(bucket, first.digest) is not None


def test_damaged_upload_is_replaced(open_on, remote, monkeypatch):
    first, _ = open_on('a')
    bucket = open_bucket(remote.cache_dir)
    name = f'{first.digest}/report.json'
    content = bucket.read(name)[0]
    bucket.write(name, b'x' * len(content))
    _, messages = open_on('b')
    assert any('is damaged and will be prepared again' in line for line in messages)
    assert bucket.read(name)[0] == content
    _, messages = open_on('c')
    assert [line.split()[1] for line in messages] == ['fetching']


def test_local_data_is_uploaded(open_on, remote):
    """The process was killed before the upload."""
    first, _ = open_on('a')
    bucket = open_bucket(remote.cache_dir)
    bucket.delete(bucket.list())
    _, messages = open_on('a')
    assert messages == [] and complete_folders.read_mark(bucket, first.digest) is not None


def test_unwritable_bucket_prints_a_note(open_on, remote, monkeypatch):
    def refuse(*_, **__):
        raise BucketError('it may not be')

    monkeypatch.setattr('lm.storage.complete_folders.upload', refuse)
    dataset, messages = open_on('a')
    assert len(dataset.train) > 0
    assert messages[-1].startswith('NOTE: it may not be; the prepared data stay on this machine')


def test_mixture_shares_its_tokenizer(open_on, cfg, remote, tmp_path):
    shutil.copytree(tmp_path / 'corpus', tmp_path / 'other')
    (tmp_path / 'other' / '00.txt').write_text('another one')
    sources = [f'text:{tmp_path}/{name}/*.txt' for name in ('corpus', 'other')]
    mixture = f"{{'a': (0.5, '{sources[0]}'), 'b': (0.5, '{sources[1]}')}}"
    mixture_cfg = dataclasses.replace(remote, source=None, mixture=mixture, tokenizer='bpe:300')
    first, messages = open_on('a', mixture_cfg)
    assert any('training bpe:300' in line for line in messages)
    second, messages = open_on('b', mixture_cfg)
    assert [line.split()[1] for line in messages] == ['fetching'] * 3
    assert second.digest == first.digest


def test_errors_invalid_url_and_missing_store(cfg, remote, monkeypatch):
    with pytest.raises(ValueError, match='gs://BUCKET/PATH or s3://BUCKET/PATH'):
        check(cfg(cache_dir='az://a/b'))
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{free_port()}')
    with pytest.raises(OSError, match='cannot be reached'):
        open_dataset(remote, say=print)
