"""Trains in a workdir of object storage as in any other: by a local folder that is kept the same.

Whoever trains gets the folder, and nothing else is different for it (`lm.record.remote.mirror`). Where the
bucket cannot be written for longer than it is tried again, or another process has taken the
workdir, the run is stopped as by SIGTERM: it saves a checkpoint in the folder. Then it ends with an
error that says where everything is.
"""

import _thread
import contextlib
import functools
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from lm.launch.agreement import disk_of_first, from_first, is_first
from lm.launch.this_host import child_host
from lm.record.remote.local_copy import Copy, checkpoints_here, step_of
from lm.record.remote.mirror import KIND, Mirror, check_is_ours
from lm.record.workdir import PATIENCE_SEC
from lm.storage.buckets import is_url, open_bucket, times
from lm.storage.files import locked
from lm.storage.lease import Lease, Lost

FIRST_WAIT_SEC = 1.0  # after an error; then twice as long each time, up to the pace
POLL_SEC = 0.2
say_at_once = functools.partial(print, flush=True)


@contextlib.contextmanager
def mirrored(workdir: str | Path, say: Callable[[str], None] = say_at_once) -> Iterator[Path]:
    """The folder to train in: `workdir` itself, or that which stands for a URL. When the block ends
    the bucket holds all of it. Of several processes the first has that folder; the others have an
    empty one, and process 0 reads and writes checkpoints for them (`lm.launch.agreement.disk_of_first`).

    Raises ValueError for a URL of another kind, where obstore is missing, for a path that holds
    other things, and of several processes that have not joined (`lm.launch.distributed`); InUse where
    another process trains there; OSError where the bucket cannot be reached, read or written.
    """
    if not is_url(str(workdir)):
        yield Path(workdir)
        return
    if child_host() is None:
        with _mirrored(str(workdir), say) as folder:
            yield folder
        return
    if not jax.distributed.is_initialized():
        raise ValueError(
            f'{workdir}: hosts that share the cells of a sweep need a --workdir on a disk that all '
            'of them see, or that a bucket is mounted on. A single run takes a bucket.'
        )
    with disk_of_first(), contextlib.ExitStack() as held:
        if is_first():
            yield held.enter_context(_mirrored(str(workdir), say))
            held.close()
        else:
            yield Path(held.enter_context(tempfile.TemporaryDirectory()))
        from_first(None)  # what process 0 has still to write is written


@contextlib.contextmanager
def _mirrored(url: str, say: Callable[[str], None]) -> Iterator[Path]:
    bucket, every = open_bucket(url), times()
    check_is_ours(bucket)
    copy = Copy(bucket, KIND)
    copy.place.mkdir(parents=True, exist_ok=True)
    in_use = f'another process trains in {bucket.url}; wait for it, or give another --workdir'
    waiting = f'{bucket.url} is in use by another process: waiting for it to end'
    until = time.monotonic() + PATIENCE_SEC
    lock = copy.place / 'lock'
    with locked(lock, waiting=waiting, in_use=in_use, say=say, wait_until=until) as is_only:
        copy.open()
        lease = Lease(bucket, copy.id, every.lease)
        lease.take(say, PATIENCE_SEC, is_only)
        with lease.renewed():
            mirror = Mirror(copy, lease, every, say)
            mirror.bring()
            with Pushes(mirror).running():
                yield copy.folder
            say(f'{bucket.url} holds all of it')


class Pushes:
    """`Mirror.push` every so often, in a thread; `failure` is what it has ended with."""

    def __init__(self, mirror: Mirror):
        self.mirror, self.times, self.say = mirror, mirror.times, mirror.say
        self.failure: Exception | None = None
        self._ended = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Raises OSError where the block ends, and the bucket does not hold what it should. After
        an error of the block itself that is only said.
        """
        thread = threading.Thread(target=self._run, name='mirror', daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            is_stopped = self.failure is not None
            if not is_stopped:
                self._push_last()
            if self.failure is not None:
                if sys.exception() is None or is_stopped:
                    raise OSError(self._words()) from self.failure
                self.say(f'NOTE: {self._words()}')

    def _run(self) -> None:
        while not self._ended.wait(self.times.pace):
            if not self._push_until_done():
                self._stop_run()
                return

    def _push_until_done(self, is_last: bool = False) -> bool:
        """Whether it was done at last, or need not be as the block has ended."""
        began, wait = time.monotonic(), FIRST_WAIT_SEC
        while True:
            try:
                self.mirror.push(is_last)
                return True
            except Lost as error:
                self.failure = error
                return False
            except Exception as error:  # of the bucket, or of the disk
                if time.monotonic() - began >= self.times.retry:
                    self.failure = error
                    return False
                if wait == FIRST_WAIT_SEC:
                    self.say(f'NOTE: {error}; tried again for {self.times.retry:g} s')
            if is_last:
                time.sleep(wait)
            elif self._ended.wait(wait):
                return True  # the last one is to be done
            wait = min(2 * wait, max(FIRST_WAIT_SEC, self.times.pace))

    def _push_last(self) -> None:
        try:
            self._push_until_done(is_last=True)
        except KeyboardInterrupt as error:
            self.failure = InterruptedError('interrupted')
            raise OSError(self._words()) from error

    def _stop_run(self) -> None:
        """As SIGTERM does; where nothing catches it yet, once something does."""
        self.say(f'NOTE: {self.failure}: the run is stopped')
        while not self._ended.wait(POLL_SEC):
            if callable(signal.getsignal(signal.SIGTERM)):
                _thread.interrupt_main(signal.SIGTERM)
                return

    def _words(self) -> str:
        url, folder = self.mirror.bucket.url, self.mirror.copy.folder
        steps = [step_of(name) for name in checkpoints_here(folder)]
        held = f'up to the checkpoint of step {max(steps)} ' if steps else ''
        if isinstance(self.failure, Lost):
            return (
                f'{self.failure}. Nothing more has been written there; what this process has '
                f'trained is in {folder}. The same command goes on from what the other one leaves.'
            )
        return (
            f'{url} could not be written ({self.failure}). All that was trained {held}is in '
            f'{folder}: when the bucket can be written, the same command on this machine writes '
            'it there and goes on.'
        )
