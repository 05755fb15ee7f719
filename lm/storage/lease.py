"""The right to write to a workdir in a bucket: the object .lease, in place of a folder's lock.

A lease is taken, and renewed at intervals, by writes on the condition that nobody has written it
since. Without renewal it expires. Then another process may take it, and the first process notices
at its next renewal. It is given back by another conditional write: a deletion has no condition, so
a process that has lost its lease could delete another's.

{'owner': of the process, 'host', 'pid', 'folder': the local folder it trains in, 'written_by': the
local folder that the content of the workdir comes from, 'seconds': without renewal until it
expires, 'renewed': how often, 'expires': a time of day, or null once it has been given back}
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from typing import Any

from lm.storage.buckets import Bucket, BucketError, ObjectMeta, PreconditionFailed, join_url
from lm.storage.files import InUseError, UnreadableFile, parse_json

LEASE = '.lease'
POLL_SEC = 1.0
# Two hosts' clocks may differ by so much: S3 refuses a clock that is off by 15 minutes.
MAX_CLOCK_SKEW_SEC = 1800.0
MAX_LEASE_SEC = 1e6  # until a lease expires
RENEWALS = 3  # per lifetime of a lease


class LeaseLost(OSError):
    """Another process has the lease now."""


class Lease:
    """A process's lease of a workdir in a bucket.

    `written_by` is the local folder that last wrote to the workdir, None if nobody has.

    Args:
      bucket: the workdir.
      folder: id of the local folder.
      seconds: time without renewal after which the lease expires.
    """

    def __init__(self, bucket: Bucket, folder: str, seconds: float):
        self.bucket, self.folder, self.seconds = bucket, folder, seconds
        self.owner = secrets.token_hex(8)
        self.written_by: str | None = None
        self._lost: LeaseLost | None = None
        self._n_renewals, self._expires_at = 0, 0.0
        self._stored: ObjectMeta | None = None
        self._write_lock = threading.Lock()  # the background thread and `check` both renew

    def read_writer(self) -> None:
        """Reads who wrote to the workdir last. Raises UnreadableFile for a damaged lease."""
        if (current := self._read()) is not None:
            self.written_by = current[0]['written_by']

    def acquire(self, say: Callable[[str], None], patience: float, is_only: bool = False) -> None:
        """Waits until the lease is free, and takes it.

        Args:
          say: prints a line.
          patience: seconds to wait for a process that keeps renewing the lease.
          is_only: no other process uses the local folder.

        Raises:
          InUseError: if another process still renews the lease after `patience` seconds.
          OSError: if the store ignores conditions of writes.
        """
        self._wait_and_acquire(say, patience, is_only)
        # The object exists now. A store that ignores conditions would overwrite it here.
        try:
            self.bucket.create(LEASE, self._encode())
        except PreconditionFailed:
            return
        raise OSError(
            f'the store of {self.bucket.url} overwrites objects despite the condition '
            'If-None-Match, so two processes could train in one workdir. Use a --workdir on a '
            'disk, or in a store with conditional writes.'
        )

    def _wait_and_acquire(self, say: Callable[[str], None], patience: float, is_only: bool) -> None:
        start = time.monotonic()
        e_tag, unchanged_since, is_alive, is_reported = None, start, False, False
        while True:
            if (current := self._read()) is None:
                if self._try_acquire(None):
                    return
                continue
            record, stored = current
            if record['owner'] == self.owner:  # the library repeated our write after a lost answer
                self._stored = stored
                return
            if stored.e_tag != e_tag:
                is_alive = e_tag is not None
                e_tag, unchanged_since = stored.e_tag, time.monotonic()
            if self._is_free(
                record, is_only, time.monotonic() - unchanged_since
            ) and self._try_acquire(current):
                return
            owner = _describe_process(record)
            if is_alive and time.monotonic() - start >= patience:
                raise InUseError(
                    f'another process is training in {self.bucket.url} ({owner}); wait until it '
                    'ends, or use another --workdir'
                )
            if not is_reported:
                say(f'{self.bucket.url} is in use by {owner}: waiting for it to end')
            is_reported = True
            time.sleep(min(POLL_SEC, record['seconds'] / 10))

    def _is_free(self, record: dict[str, Any], is_only: bool, unchanged_sec: float) -> bool:
        """Returns whether the lease may be taken.

        unchanged_sec: seconds for which this process has seen the same object, by its own clock.
        """
        if record['expires'] is None or (is_only and record['folder'] == self.folder):
            return True
        # The other host's clock counts only beyond any skew; otherwise our own clock does, from the
        # time since which the object has not changed.
        expires = datetime.fromisoformat(record['expires'])
        is_long_expired = (datetime.now(UTC) - expires).total_seconds() > MAX_CLOCK_SKEW_SEC
        return is_long_expired or unchanged_sec > record['seconds']

    def _try_acquire(self, current: tuple[dict[str, Any], ObjectMeta] | None) -> bool:
        """Returns whether the lease could be taken before another process took it."""
        start = time.monotonic()
        try:
            if current is None:
                self._stored = self.bucket.create(LEASE, self._encode())
            else:
                record, stored = current
                self.written_by = record['written_by']
                self._stored = self.bucket.replace(LEASE, self._encode(), stored)
        except (PreconditionFailed, FileNotFoundError):
            return False
        self._expires_at = start + self.seconds
        return True

    def _read(self) -> tuple[dict[str, Any], ObjectMeta] | None:
        try:
            text, stored = self.bucket.read(LEASE)
        except FileNotFoundError:
            return None
        try:
            return parse_record(parse_json(text)), stored
        except ValueError as error:
            raise UnreadableFile(
                f'{join_url(self.bucket.url, LEASE)} cannot be read ({error}). Delete it if no '
                'process is training there.'
            ) from error

    def _encode(self, is_held: bool = True) -> bytes:
        expires = (datetime.now(UTC) + timedelta(seconds=self.seconds)).isoformat()
        process = {'owner': self.owner, 'host': socket.gethostname(), 'pid': os.getpid()}
        folders = {'folder': self.folder, 'written_by': self.written_by, 'seconds': self.seconds}
        state = {'renewed': self._n_renewals, 'expires': expires if is_held else None}
        return json.dumps(process | folders | state, indent=2).encode()

    def claim(self) -> None:
        """Records that this process's folder is the source of the workdir's content from now on."""
        self.written_by = self.folder
        self._write()

    def check(self) -> None:
        """Raises LeaseLost, or BucketError if the lease has expired; called before each write."""
        if self._lost is not None or time.monotonic() >= self._expires_at:
            self._write()

    @contextlib.contextmanager
    def keep_renewed(self) -> Generator[None]:
        """Renews the lease in the background until the block ends, and then gives it back."""
        is_ended = threading.Event()

        def renew() -> None:
            while not is_ended.wait(self.seconds / RENEWALS):
                with contextlib.suppress(
                    BucketError, LeaseLost
                ):  # `check` raises it in the main thread
                    self._write()

        thread = threading.Thread(target=renew, name='lease', daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_ended.set()
            thread.join()
            with contextlib.suppress(BucketError, LeaseLost):  # then it expires
                self._write(is_held=False)

    def _write(self, is_held: bool = True) -> None:
        """Renews the lease, or gives it back."""
        with self._write_lock:
            if self._lost is not None:
                raise self._lost
            assert self._stored is not None  # set by `acquire`
            start = time.monotonic()
            self._n_renewals += 1  # so that every renewal changes the e_tag
            text = self._encode(is_held)
            try:
                self._stored = self.bucket.replace(LEASE, text, self._stored)
            except (PreconditionFailed, FileNotFoundError):
                # After a lost answer the library repeats the write, and may find its own object.
                current = self._read()
                if current is None or current[0]['owner'] != self.owner:
                    self._lost = LeaseLost(self._describe_loss(current))
                    raise self._lost from None
                self._stored = self.bucket.replace(LEASE, text, current[1])
            self._expires_at = start + self.seconds

    def _describe_loss(self, current: tuple[dict[str, Any], ObjectMeta] | None) -> str:
        if current is None:
            return f'{join_url(self.bucket.url, LEASE)} has been deleted'
        return (
            f'{self.bucket.url} now belongs to {_describe_process(current[0])}, which took it '
            f'after this process had not renewed its lease for {self.seconds:g} s'
        )


def parse_record(value: Any) -> dict[str, Any]:
    """Returns the record of a lease. Raises ValueError if the value is not one."""
    match value:
        case {
            'owner': str(),
            'host': str(),
            'pid': int(),
            'folder': str(),
            'written_by': str() | None,
            'seconds': int() | float() as seconds,
            'expires': str() | None as expires,
        } if 0 < seconds <= MAX_LEASE_SEC:
            if expires is not None and datetime.fromisoformat(expires).utcoffset() is None:
                raise ValueError(f'it expires at {expires}, without a time zone')
            return value
    raise ValueError('a field is missing, or has a wrong type or size')


def _describe_process(record: dict[str, Any]) -> str:
    return f'process {record["pid"]} of {record["host"]}'
