"""Who may write to a workdir in a bucket: the object .lease, in place of the lock of a folder.

A lock goes with its process, and a bucket has none. A lease is taken, and renewed every so often,
by writes on the condition that nobody has written it since; it runs out where it is not renewed.
Then another process may take it, and the first one sees so at its next renewal.

{'owner': of the process, 'host', 'pid', 'folder': the local folder it trains in, 'written_by': the
local folder that what the workdir holds is from, 'seconds': without renewal until it runs out,
'renewed': how often, 'expires': a time of day, or null where it has been given back}

It is given back by one more such write. To delete it would have no condition: a process that has
lost its lease could delete that of another. And the next process learns from it whether its own
local folder is what the workdir is from.
"""

import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lm.storage.buckets import Bucket, BucketError, Changed, Stored, below
from lm.storage.files import InUse, Unreadable

LEASE = '.lease'
POLL_SEC = 1.0
# How far apart the clocks of two hosts may be: S3 refuses whose clock is off by 15 minutes.
CLOCKS_SEC = 1800.0
RENEWALS = 3  # within the time in which a lease runs out


class Lost(OSError):
    """Another process has the lease now."""


class Lease:
    """Of this process. `written_by`: see above, None for a workdir that nobody has written to."""

    def __init__(self, bucket: Bucket, folder: str, seconds: float):
        self.bucket, self.folder, self.seconds = bucket, folder, seconds
        self.owner = secrets.token_hex(8)
        self.written_by: str | None = None
        self._lost: Lost | None = None
        self._renewed, self._until = 0, 0.0
        self._stored: Stored | None = None
        self._alone = threading.Lock()  # one write at a time of the two threads that renew

    def take(self, say: Callable[[str], None], patience: float, is_only: bool = False) -> None:
        """Waits until it is free. Raises InUse where another process renews it, and still has it
        after `patience` seconds, and OSError where the store does not keep to conditions.

        is_only: no other process is in the local folder, so that one that had it there has ended.
        """
        self._wait(say, patience, is_only)
        try:
            self.bucket.create(LEASE, self._text())
        except Changed:
            return
        raise OSError(
            f'the store of {self.bucket.url} writes an object that is there, where it was asked to '
            'only if it is not (If-None-Match): two processes could train in one workdir. Give a '
            '--workdir on a disk, or in a store with conditional writes.'
        )

    def _wait(self, say: Callable[[str], None], patience: float, is_only: bool) -> None:
        began = time.monotonic()
        seen, since, is_alive, is_said = None, began, False, False
        while True:
            found = self._read()
            if found is None:
                if self._try(None):
                    return
                continue
            record, stored = found
            if record['owner'] == self.owner:  # the library repeated the write that took it
                self._stored = stored
                return
            if stored.e_tag != seen:
                is_alive = seen is not None
                seen, since = stored.e_tag, time.monotonic()
            if self._is_free(record, is_only, time.monotonic() - since) and self._try(found):
                return
            if is_alive and time.monotonic() - began >= patience:
                raise InUse(
                    f'another process trains in {self.bucket.url} ({_who(record)}); wait for it, '
                    'or give another --workdir'
                )
            if not is_said:
                say(f'{self.bucket.url} is in use by {_who(record)}: waiting for it to end')
            is_said = True
            time.sleep(min(POLL_SEC, record['seconds'] / 10))

    def _is_free(self, record: dict[str, Any], is_only: bool, unchanged: float) -> bool:
        """unchanged: for how many seconds this process has seen it the same, by its own clock."""
        if record['expires'] is None or (is_only and record['folder'] == self.folder):
            return True
        expires = datetime.datetime.fromisoformat(record['expires'])
        long_ago = (_now() - expires).total_seconds() > CLOCKS_SEC
        return long_ago or unchanged > record['seconds']

    def _try(self, found: tuple[dict[str, Any], Stored] | None) -> bool:
        """Whether it could be taken, before another did."""
        began = time.monotonic()
        try:
            if found is None:
                self._stored = self.bucket.create(LEASE, self._text())
            else:
                record, stored = found
                self.written_by = record['written_by']
                self._stored = self.bucket.replace(LEASE, self._text(), stored)
        except (Changed, FileNotFoundError):
            return False
        self._until = began + self.seconds
        return True

    def _read(self) -> tuple[dict[str, Any], Stored] | None:
        try:
            text, stored = self.bucket.read(LEASE)
        except FileNotFoundError:
            return None
        try:
            record = json.loads(text)
            known = ('owner', 'host', 'pid', 'folder', 'written_by', 'seconds', 'expires')
            return {name: record[name] for name in known}, stored
        except (ValueError, KeyError, TypeError) as error:
            raise Unreadable(
                f'{below(self.bucket.url, LEASE)} cannot be read ({error!r}). Delete it, if no '
                'process trains there.'
            ) from error

    def _text(self, is_held: bool = True) -> bytes:
        expires = _now() + datetime.timedelta(seconds=self.seconds)
        record = {
            'owner': self.owner,
            'host': socket.gethostname(),
            'pid': os.getpid(),
            'folder': self.folder,
            'written_by': self.written_by,
            'seconds': self.seconds,
            'renewed': self._renewed,
            'expires': expires.isoformat() if is_held else None,
        }
        return json.dumps(record, indent=2).encode()

    def claim(self) -> None:
        """From now on what the workdir holds is from the local folder of this process."""
        self.written_by = self.folder
        with self._alone:
            self._write()

    def check(self) -> None:
        """To be called before each write to the workdir. Raises Lost where another process has the
        lease, and BucketError where it has run out and cannot be renewed now.
        """
        if self._lost is not None:
            raise self._lost
        if time.monotonic() >= self._until:
            with self._alone:
                self._write()

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renews it in the background until the block ends, and then gives it back."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self.seconds / RENEWALS):
                with contextlib.suppress(BucketError, Lost), self._alone:  # `check` says so
                    self._write()

        thread = threading.Thread(target=renew, name='lease', daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(BucketError, Lost), self._alone:  # it runs out by itself
                self._write(is_held=False)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def _write(self, is_held: bool = True) -> None:
        """Renews the lease, or gives it back."""
        if self._lost is not None:
            raise self._lost
        began = time.monotonic()
        self._renewed += 1  # so that no two are the same object
        text = self._text(is_held)
        try:
            self._stored = self.bucket.replace(LEASE, text, self._stored)
        except (Changed, FileNotFoundError):
            # The library repeats a write whose answer was lost, and may meet its own.
            found = self._read()
            if found is None or found[0]['owner'] != self.owner:
                self._lost = Lost(self._words(found))
                raise self._lost from None
            self._stored = self.bucket.replace(LEASE, text, found[1])
        self._until = began + self.seconds

    def _words(self, found: tuple[dict[str, Any], Stored] | None) -> str:
        if found is None:
            return f'{below(self.bucket.url, LEASE)} has been deleted'
        return (
            f'{self.bucket.url} is written to by {_who(found[0])} now, which took it when this '
            f'process had not renewed its lease for {self.seconds:g} s'
        )


def _who(record: dict[str, Any]) -> str:
    return f'process {record["pid"]} of {record["host"]}'


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
