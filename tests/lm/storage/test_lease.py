"""A workdir in a bucket is written by one process at a time."""

import json
import threading

import pytest

from lm.storage.buckets import PreconditionFailed, open_bucket
from lm.storage.files import InUseError, UnreadableFile, discard_line
from lm.storage.lease import LEASE, Lease, LeaseLost

pytestmark = pytest.mark.xdist_group('buckets')


@pytest.fixture
def make_lease(bucket_url):
    """Returns make_lease(folder): each call is another process."""

    def make(folder: str, seconds: float = 0.6) -> Lease:
        return Lease(open_bucket(bucket_url), folder, seconds)

    return make


def test_renewed_lease_is_refused_to_others(make_lease):
    messages, first = [], make_lease('a')
    first.acquire(discard_line, 0.0)
    with (
        first.keep_renewed(),
        pytest.raises(
            InUseError, match=r'another process is training in s3://.*wait until it ends, or use'
        ),
    ):
        make_lease('b').acquire(messages.append, 1.5)
    assert len(messages) == 1 and 'waiting for it to end' in messages[0]


def test_returned_lease_is_taken_at_once(make_lease):
    messages, first = [], make_lease('a', seconds=1000.0)
    first.acquire(discard_line, 0.0)
    with first.keep_renewed():
        first.claim()
    second = make_lease('b')
    second.acquire(messages.append, 0.0)
    assert not messages and second.written_by == 'a'


def test_expired_lease_is_taken_over(make_lease):
    messages, first, second = [], make_lease('a'), make_lease('b')
    first.acquire(discard_line, 0.0)
    first.claim()
    second.acquire(messages.append, 0.0)
    assert len(messages) == 1 and second.written_by == 'a'
    second.claim()
    with pytest.raises(
        LeaseLost, match=r'now belongs to process .* not renewed its lease for 0\.6'
    ):
        first.claim()
    with pytest.raises(LeaseLost):
        first.check()
    second.check()


def test_lost_lease_is_not_given_back(make_lease, bucket_url):
    first, second = make_lease('a'), make_lease('b')
    first.acquire(discard_line, 0.0)
    second.acquire(discard_line, 0.0)
    before = open_bucket(bucket_url).read(LEASE)
    with first.keep_renewed():
        pass
    assert open_bucket(bucket_url).read(LEASE) == before
    with pytest.raises(LeaseLost):
        first.check()


def test_killed_process_frees_lease_for_its_folder(make_lease):
    """The lock of the local folder shows that the killed process has ended."""
    messages, first = [], make_lease('a', seconds=1000.0)
    first.acquire(discard_line, 0.0)
    make_lease('a').acquire(messages.append, 0.0, is_only=True)
    assert not messages


def test_long_expired_lease_is_not_waited_for(make_lease, bucket_url):
    messages, first = [], make_lease('a', seconds=1000.0)
    first.acquire(discard_line, 0.0)
    bucket = open_bucket(bucket_url)
    record = json.loads(bucket.read(LEASE)[0])
    bucket.write(LEASE, json.dumps(record | {'expires': '2020-01-01T00:00:00+00:00'}).encode())
    make_lease('b').acquire(messages.append, 0.0)
    assert not messages


def test_only_one_waiting_process_gets_lease(make_lease):
    make_lease('a').acquire(discard_line, 0.0)
    holders, is_ended = [], threading.Event()

    def wait(folder):
        lease = make_lease(folder)
        try:
            lease.acquire(discard_line, 0.0)
        except InUseError:
            return
        with lease.keep_renewed():
            holders.append(folder)
            is_ended.wait(2.5)

    threads = [threading.Thread(target=wait, args=(folder,)) for folder in 'bc']
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(holders) == 1


def test_repeated_renewal_is_recognised(make_lease, monkeypatch):
    """The library repeats the write, and the store answers that the object has changed."""
    lease = make_lease('a')
    lease.acquire(discard_line, 0.0)
    replace = lease.bucket.replace

    def replace_twice(name, content, before):
        replace(name, content, before)
        monkeypatch.setattr(lease.bucket, 'replace', replace)
        raise PreconditionFailed('as if by another')

    monkeypatch.setattr(lease.bucket, 'replace', replace_twice)
    lease.claim()
    lease.claim()


def test_repeated_creation_is_recognised(make_lease, monkeypatch):
    messages, lease = [], make_lease('a', seconds=1000.0)
    create = lease.bucket.create

    def create_twice(name, content):
        create(name, content)
        return create(name, content)

    monkeypatch.setattr(lease.bucket, 'create', create_twice)
    lease.acquire(messages.append, 0.0)
    lease.claim()
    assert not messages


def test_store_without_conditional_writes_is_refused(make_lease, monkeypatch):
    lease = make_lease('a')
    monkeypatch.setattr(lease.bucket, 'create', lease.bucket.write)
    with pytest.raises(OSError, match='If-None-Match'):
        lease.acquire(discard_line, 0.0)


def test_deleted_lease_is_lost(make_lease, bucket_url):
    lease = make_lease('a')
    lease.acquire(discard_line, 0.0)
    open_bucket(bucket_url).delete([LEASE])
    with pytest.raises(LeaseLost, match='has been deleted'):
        lease.claim()


RECORD = {
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
            json.dumps(RECORD | {name: value}).encode()
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
def test_damaged_lease_raises_one_line(make_lease, bucket_url, text):
    """The lease is not taken over, as a process may train there."""
    open_bucket(bucket_url).write('.lease', text)
    with pytest.raises(UnreadableFile, match=r'/\.lease cannot be read .* Delete it if no'):
        make_lease('other').acquire(discard_line, patience=0.0)
    assert open_bucket(bucket_url).read('.lease')[0] == text
