"""A workdir in a bucket is written to by one process at a time."""

import json
import threading

import pytest

from lm.storage.buckets import PreconditionFailed, open_bucket
from lm.storage.files import InUseError, UnreadableFile, discard_line
from lm.storage.lease import LEASE, Lease, LeaseLost

pytestmark = pytest.mark.xdist_group('buckets')


@pytest.fixture
def lease_of(bucket_url):
    """lease_of(folder): of another process each time."""

    def made(folder: str, seconds: float = 0.6) -> Lease:
        return Lease(open_bucket(bucket_url), folder, seconds)

    return made


def test_one_that_is_renewed_is_refused_to_others(lease_of):
    said, first = [], lease_of('a')
    first.acquire(discard_line, 0.0)
    with (
        first.keep_renewed(),
        pytest.raises(
            InUseError, match=r'another process trains in s3://.*wait for it, or give anoth'
        ),
    ):
        lease_of('b').acquire(said.append, 1.5)
    assert len(said) == 1 and 'waiting for it to end' in said[0]


def test_one_that_was_given_back_is_taken_at_once(lease_of):
    said, first = [], lease_of('a', seconds=1000.0)
    first.acquire(discard_line, 0.0)
    with first.keep_renewed():
        first.claim()
    second = lease_of('b')
    second.acquire(said.append, 0.0)
    assert not said and second.written_by == 'a'


def test_one_that_ran_out_is_taken_over_and_its_process_sees_so(lease_of):
    said, first, second = [], lease_of('a'), lease_of('b')
    first.acquire(discard_line, 0.0)
    first.claim()
    second.acquire(said.append, 0.0)
    assert len(said) == 1 and second.written_by == 'a'
    second.claim()
    with pytest.raises(
        LeaseLost, match=r'is written to by process .* not renewed its lease for 0\.6'
    ):
        first.claim()
    with pytest.raises(LeaseLost):
        first.check()
    second.check()


def test_one_that_is_lost_is_not_given_back(lease_of, bucket_url):
    first, second = lease_of('a'), lease_of('b')
    first.acquire(discard_line, 0.0)
    second.acquire(discard_line, 0.0)
    before = open_bucket(bucket_url).read(LEASE)
    with first.keep_renewed():
        pass
    assert open_bucket(bucket_url).read(LEASE) == before
    with pytest.raises(LeaseLost):
        first.check()


def test_a_process_that_was_killed_is_followed_at_once_in_the_same_folder(lease_of):
    """The lock of the local folder says that it has ended."""
    said, first = [], lease_of('a', seconds=1000.0)
    first.acquire(discard_line, 0.0)
    lease_of('a').acquire(said.append, 0.0, is_only=True)
    assert not said


def test_one_that_expired_long_ago_is_not_waited_for(lease_of, bucket_url):
    said, first = [], lease_of('a', seconds=1000.0)
    first.acquire(discard_line, 0.0)
    bucket = open_bucket(bucket_url)
    record = json.loads(bucket.read(LEASE)[0])
    bucket.write(LEASE, json.dumps(record | {'expires': '2020-01-01T00:00:00+00:00'}).encode())
    lease_of('b').acquire(said.append, 0.0)
    assert not said


def test_of_two_that_wait_one_gets_it(lease_of):
    lease_of('a').acquire(discard_line, 0.0)
    got, ended = [], threading.Event()

    def wait(folder):
        own = lease_of(folder)
        try:
            own.acquire(discard_line, 0.0)
        except InUseError:
            return
        with own.keep_renewed():
            got.append(folder)
            ended.wait(2.5)

    threads = [threading.Thread(target=wait, args=(folder,)) for folder in 'bc']
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_write_whose_answer_was_lost_is_its_own(lease_of, monkeypatch):
    """The library repeats it, and is told that the object has changed."""
    own = lease_of('a')
    own.acquire(discard_line, 0.0)
    replace = own.bucket.replace

    def twice(name, content, before):
        replace(name, content, before)
        monkeypatch.setattr(own.bucket, 'replace', replace)
        raise PreconditionFailed('as if by another')

    monkeypatch.setattr(own.bucket, 'replace', twice)
    own.claim()
    own.claim()


def test_so_is_the_one_that_took_it(lease_of, monkeypatch):
    said, own = [], lease_of('a', seconds=1000.0)
    create = own.bucket.create

    def twice(name, content):
        create(name, content)
        return create(name, content)

    monkeypatch.setattr(own.bucket, 'create', twice)
    own.acquire(said.append, 0.0)
    own.claim()
    assert not said


def test_a_store_without_conditions_is_refused(lease_of, monkeypatch):
    own = lease_of('a')
    monkeypatch.setattr(own.bucket, 'create', own.bucket.write)
    with pytest.raises(OSError, match='If-None-Match'):
        own.acquire(discard_line, 0.0)


def test_a_lease_that_was_deleted_is_lost(lease_of, bucket_url):
    own = lease_of('a')
    own.acquire(discard_line, 0.0)
    open_bucket(bucket_url).delete([LEASE])
    with pytest.raises(LeaseLost, match='has been deleted'):
        own.claim()


WHOLE = {
    'owner': 'a',
    'host': 'h',
    'pid': 1,
    'folder': 'f',
    'written_by': None,
    'seconds': 3.0,
    'expires': '2026-01-01T00:00:00+00:00',
}


@pytest.mark.parametrize(
    'text',
    [
        *(b'', b'text', b'\xff\xfe', b'[]', b'{}', b'[' * 100_000),
        *(
            json.dumps(WHOLE | {name: value}).encode()
            for name, value in [
                ('expires', '2026-01-01T00:00:00'),
                ('expires', 'tomorrow'),
                ('expires', 5),
                ('seconds', 1e9),
                ('seconds', 'x'),
                ('seconds', -1.0),
                ('seconds', None),
                ('owner', None),
                ('pid', 'x'),
                ('written_by', []),
            ]
        ),
    ],
)
def test_a_damaged_one_is_one_line(lease_of, bucket_url, text):
    """It is not taken over, as a process may train there."""
    open_bucket(bucket_url).write('.lease', text)
    with pytest.raises(UnreadableFile, match=r'/\.lease cannot be read .* Delete it, if no'):
        lease_of('other').acquire(discard_line, patience=0.0)
    assert open_bucket(bucket_url).read('.lease')[0] == text
