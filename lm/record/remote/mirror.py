"""A workdir in a bucket, trained in a folder of this machine that is kept the same as it.

The code that trains gets the folder (`mirrored`) and knows nothing of the bucket. What is new in
the folder is written to the bucket every so often, in this order (`Mirror.push`):

1. The complete checkpoints are listed, and get second names (hard links), so that they stay until
   they are written, whatever the run removes. The summaries are read before.
2. All files but summaries. Rows are on disk before a checkpoint that covers them, so what is
   written now covers every checkpoint of the list.
3. The new checkpoints, the newest first: their files, then their marks.
4. Checkpoints that were not on the list are deleted, their marks first.
5. The summaries: one that says a run is done comes when its last checkpoint is there.

Wherever this is cut off, the bucket holds checkpoints with rows that cover them, and nothing
incomplete has a mark.

At the start (`Mirror.pull`) the content of the bucket replaces what differs here. One exception:
if its lease says that nobody has written to the bucket since this very folder was written to it,
the folder is the same run further on, and is kept; the first `push` writes the rest. A folder with
checkpoints that never were in the bucket, to which another process has written since, is set aside.

Each cell of a sweep is such a workdir, with a lease of its own, which a process has while it trains
the cell (`mirror_cell`). The lease of the sweep is held for the moments in which sweep.json is
written, and table and report, from the records of all cells (`mirror_sweep_records`).

If the bucket cannot be written for longer than `Times.retry`, or another process has taken the
workdir, the run is stopped as by SIGTERM, and ends with an error that says where everything is.
"""

import _thread
import contextlib
import functools
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from lm.launch.distributed import broadcast_from_first, is_first, is_multiprocess, private_disks
from lm.record.remote.local_copy import (
    LocalCopy,
    Stat,
    is_record,
    list_local_checkpoints,
    list_local_files,
    parse_step,
    read_stat,
    read_stats,
    sort_listing,
)
from lm.record.workdir import CONFIG, PATIENCE_SEC, SUMMARY, SWEEP
from lm.storage import complete_folders
from lm.storage.buckets import (
    Bucket,
    RequestRefused,
    Times,
    for_each,
    is_url,
    join_url,
    open_bucket,
    read_times,
)
from lm.storage.files import InUseError, UnreadableFile, hold_lock
from lm.storage.lease import LEASE, Lease, LeaseLost

KIND = 'runs'
WRITTEN_FIRST = (CONFIG, SWEEP)  # written before the files that they describe
LARGE_BYTES = 8 << 20  # bytes of a file that is not written again at every look
LARGE_PACES = 10  # looks between two writes of such a file, which comes before each checkpoint too
FIRST_WAIT_SEC = 1.0  # after an error; then twice as long each time, up to the pace
POLL_SEC = 0.2
SWEEP_PATIENCE_SEC = 600.0  # until all hosts that end at the same time have written their report
print_flushed = functools.partial(print, flush=True)


@contextlib.contextmanager
def mirror_workdir(
    workdir: str | Path, say: Callable[[str], None] = print_flushed
) -> Iterator[Path]:
    """Yields the folder to train in: `workdir` itself, or the local folder of a URL.

    When the block ends the bucket holds all of it. Of several processes the first has that folder;
    the others have an empty one, and process 0 reads and writes checkpoints for them. Raises
    ValueError for another kind of URL, and for a path that holds other things; InUse if another
    process trains there; OSError if the bucket does not answer.
    """
    if not is_url(str(workdir)):
        yield Path(workdir)
        return
    if not is_multiprocess():
        with _mirror_bucket(str(workdir), say) as folder:
            yield folder
        return
    with private_disks(), contextlib.ExitStack() as held:
        if is_first():
            yield held.enter_context(_mirror_bucket(str(workdir), say))
            held.close()
        else:
            yield Path(held.enter_context(tempfile.TemporaryDirectory()))
        broadcast_from_first(None)  # process 0 has written everything


@contextlib.contextmanager
def _mirror_bucket(url: str, say: Callable[[str], None]) -> Iterator[Path]:
    bucket = open_bucket(url)
    check_is_workdir(bucket)
    with _open_mirror(LocalCopy(bucket, KIND), say, PATIENCE_SEC) as mirror:
        mirror.pull()
        say(mirror.describe())
        with PushLoop(mirror).run_in_background():
            yield mirror.copy.folder
        say(f'{bucket.url} holds all of it')


@contextlib.contextmanager
def _open_mirror(
    copy: LocalCopy, say: Callable[[str], None], patience: float
) -> Iterator['Mirror']:
    """Holds the lock of the folder and the lease of the bucket, once both are free."""
    url, every = copy.bucket.url, read_times()
    how = {
        'in_use_message': f'another process trains in {url}; wait for it, or give another --workdir',
        'waiting_message': f'{url} is in use by another process: waiting for it to end',
        'wait_until': time.monotonic() + patience,
    }
    with hold_lock(copy.root / 'lock', say=say, **how) as is_only:
        copy.open()
        lease = Lease(copy.bucket, copy.id, every.lease)
        lease.acquire(say, patience, is_only)
        with lease.keep_renewed():
            yield Mirror(copy, lease, every, say)


def sweep_folder(workdir: str | Path) -> Path:
    """Returns `workdir` itself, or the local folder of a URL, which may not be there yet."""
    url = str(workdir)
    return LocalCopy(open_bucket(url), KIND).folder if is_url(url) else Path(workdir)


@contextlib.contextmanager
def mirror_cell(url: str | None, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a cell of the sweep at `url`, and keeps `folder`, where it trains, the same as it.
    Nothing is to be done without a URL. Raises InUse if another process trains the cell.
    """
    if url is None:
        yield
        return
    copy = LocalCopy(open_bucket(join_url(url, folder.name)), KIND, folder.parent)
    with _open_mirror(copy, say, PATIENCE_SEC) as mirror:
        mirror.pull()
        with PushLoop(mirror).run_in_background():
            yield


@contextlib.contextmanager
def mirror_sweep_records(url: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Brings the records of all cells to `sweep_folder`, and writes the sweep's own files to the
    bucket at the end, such as sweep.json. No other process does so within the block.
    """
    if url is None:
        yield
        return
    bucket = open_bucket(url)
    check_is_workdir(bucket, is_sweep=True)
    with _open_mirror(LocalCopy(bucket, KIND), say, SWEEP_PATIENCE_SEC) as mirror:
        copy, listing = mirror.copy, bucket.list()
        files = {name: one for name, one in sort_listing(listing)[0].items() if '/' not in name}
        copy.fetch_files(files)
        cells = {name.split('/')[0] for name in listing if name.endswith(f'/{LEASE}')}
        for_each(lambda name: _fetch_cell_records(join_url(url, name), copy.folder, say), cells)
        yield
        for name, found in list_local_files(copy.folder).items():
            if '/' not in name:
                mirror.push_file(name, found)
        copy.save()


def _fetch_cell_records(url: str, sweep: Path, say: Callable[[str], None]) -> None:
    """Fetches those of a cell, unless it trains on this machine. One whose lease is damaged, or of
    which something is deleted meanwhile, stays as it was.
    """
    copy = LocalCopy(open_bucket(url), KIND, sweep)
    with (
        contextlib.suppress(InUseError, UnreadableFile, FileNotFoundError),
        hold_lock(copy.root / 'lock', wait_until=0.0),
    ):
        copy.open()
        lease = Lease(copy.bucket, copy.id, read_times().lease)
        lease.read_writer()
        Mirror(copy, lease, read_times(), say).pull(records_only=True)


def check_is_workdir(bucket: Bucket, is_sweep: bool = False) -> None:
    """Raises ValueError, before anything is written, if the path holds what no run has written, or
    a sweep where a run is wanted, or the other way round.
    """
    found = bucket.list()
    if (CONFIG if is_sweep else SWEEP) in found:
        there, wanted = ('single run', 'sweep') if is_sweep else ('sweep', 'single run')
        raise ValueError(f'{bucket.url} holds a {there}; give another --workdir for a {wanted}')
    if found and LEASE not in found:
        raise ValueError(
            f'{bucket.url} holds {len(found)} objects, such as {min(found)}, and is no workdir: '
            f'there is no {LEASE} in it. Give a --workdir that is new. A run that was copied there '
            'by other means goes on from a copy on a disk alone.'
        )


class Mirror:
    """`pull`, then `push` as often as wanted; both may be repeated after an error."""

    def __init__(self, copy: LocalCopy, lease: Lease, times: Times, say: Callable[[str], None]):
        self.copy, self.lease, self.times, self.say = copy, lease, times, say
        self.bucket: Bucket = copy.bucket
        self._marks: dict[str, str] = {}  # token of each checkpoint that is complete in the bucket
        self._incomplete: set[str] = set()  # the other checkpoints in the bucket
        self._sent: dict[str, set[str]] = {}  # by token: what an upload has written so far
        self._due: dict[str, float] = {}  # when a large file is written again at the earliest

    def pull(self, records_only: bool = False) -> None:
        """Makes the local folder as the bucket has it; see above. To be called with the lease.

        of_reader: fetch the records alone, without the lease; another process may train there.
        """
        copy, mine = self.copy, self.lease.written_by == self.copy.id
        listing = self.bucket.list()
        files, folders = sort_listing(listing)
        marks = complete_folders.list_complete_folders(self.bucket, listing)
        self._marks = {name: mark.token for name, mark in marks.items() if name in folders}
        left = sorted(folders - self._marks.keys())
        if left and not records_only:
            self.say(f'NOTE: {self.bucket.url} lacks parts of {", ".join(left)}: they are not read')
        self._incomplete = set(left)
        wanted = list(self._marks)
        if mine:
            files = {
                name: one for name, one in files.items() if read_stat(copy.folder / name) is None
            }
            is_here = {name: (copy.folder / name).is_dir() for name in wanted}
            wanted = [n for n in wanted if not is_here[n] or copy.is_damaged(n, self._marks[n])]
        else:
            self._drop_stale(files.keys(), marks)
        copy.fetch_files({n: one for n, one in files.items() if not records_only or is_record(n)})
        for name in [] if records_only else wanted:
            copy.fetch_folder(name, marks[name])
        copy.save()
        if not records_only:
            self.lease.claim()

    def describe(self) -> str:
        newest = max(map(parse_step, self._marks), default=None)
        held = 'no checkpoint yet' if newest is None else f'checkpoints up to step {newest}'
        return f'{self.bucket.url} holds {held}; trained in {self.copy.folder}'

    def _drop_stale(self, files: Collection[str], marks: Mapping) -> None:
        copy = self.copy
        here, known = list_local_checkpoints(copy.folder), copy.folders
        sent = {name for name, noted in known.items() if noted['is_up']}
        if unsent := [
            n for n, found in here.items() if n not in sent or known[n]['files'] != found
        ]:
            aside = copy.set_aside()
            self.say(
                f'NOTE: {copy.folder} held checkpoints that are not in {self.bucket.url} '
                f'({", ".join(unsent)}), which another process has written to since: moved to '
                f'{aside}, and not gone on from'
            )
            return
        copy.drop(n for n in here if n not in marks or not copy.has_checkpoint(n, marks[n].token))
        copy.drop(name for name in list_local_files(copy.folder) if name not in files)

    def push(self, is_last: bool = False) -> None:
        """Writes what is new here, and deletes what is gone; to be repeated after a BucketError."""
        self.lease.check()  # one that has lost its lease ends, also if it has nothing to write
        folder = self.copy.folder
        summaries = {
            name: (found, content)
            for name, found in list_local_files(folder).items()
            if is_summary(name) and (content := read_file(folder / name)) is not None
        }
        listed = list_local_checkpoints(folder)
        new = {name: found for name, found in listed.items() if not self._is_written(name, found)}
        staged = {name: self._link_checkpoint(name) for name in new}
        self._push_files(is_all=is_last or bool(new))
        self._assign_tokens(new)
        try:
            for name in sorted(new, key=parse_step, reverse=True):
                if read_stats(staged[name]) == new[name]:  # or it was removed while it was listed
                    self._push_checkpoint(name, staged[name])
        finally:
            if new:
                self.copy.save()
        for name in [*(self._marks.keys() - listed.keys()), *self._incomplete]:
            self._delete(name)
        for name, (found, content) in summaries.items():
            self.push_file(name, found, content)
        shutil.rmtree(self.copy.staging, ignore_errors=True)

    def _is_written(self, name: str, stats: dict[str, Stat]) -> bool:
        noted = self.copy.folders.get(name, {'files': None})
        return noted['files'] == stats and self._marks.get(name) == noted['token']

    def _link_checkpoint(self, name: str) -> Path:
        """Links the checkpoint to a path of its own, which the run does not remove."""
        path = self.copy.staging / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            shutil.copytree(self.copy.folder / name, path, copy_function=_link)
        return path

    def _push_files(self, is_all: bool) -> None:
        """Writes all files that changed, but summaries; large ones if they are due or `is_all`."""
        found = list_local_files(self.copy.folder)
        gone = [name for name in self.copy.files if name not in found]
        if gone:
            self.lease.check()
            self.bucket.delete(gone)
            self.copy.forget(gone)
        before, now = dict(self.copy.files), time.monotonic()
        due = {
            name
            for name, (size, _) in found.items()
            if not is_summary(name)
            and (is_all or size < LARGE_BYTES or now >= self._due.get(name, 0.0))
        }
        first = {name for name in due if PurePosixPath(name).name in WRITTEN_FIRST}
        for names in (first, due - first):
            for_each(lambda name: self.push_file(name, found[name]), names)
        if gone or self.copy.files != before:
            self.copy.save()

    def push_file(self, name: str, file_stat: Stat, content: bytes | None = None) -> None:
        """Writes one file, unless it is there. found: its state, no newer than `content`."""
        if self.copy.files.get(name, [])[:2] == file_stat:
            return
        if content is None:
            content = read_file(self.copy.folder / name)
        if content is not None:
            self.lease.check()
            stored = self.bucket.write(name, content)
            self.copy.files[name] = [*file_stat, stored.e_tag]
            self._due[name] = time.monotonic() + LARGE_PACES * self.times.pace

    def _assign_tokens(self, checkpoints: dict[str, dict[str, Stat]]) -> None:
        """Gives tokens to checkpoints, before there is a mark that a killed process leaves."""
        for name, found in checkpoints.items():
            noted = self.copy.folders.get(name)
            if noted is None or noted['files'] != found:
                self.copy.note_folder(name, secrets.token_hex(8), found, is_up=False)
        if checkpoints:
            self.copy.save()

    def _push_checkpoint(self, name: str, path: Path) -> None:
        noted = self.copy.folders[name]
        token = noted['token']
        if name in self._marks or (name in self._incomplete and token not in self._sent):
            self._delete(name)  # another one of this step
        self._incomplete.add(name)
        sent = self._sent.setdefault(token, set())
        complete_folders.upload(self.bucket, path, name, token, self.lease.check, sent)
        self._marks[name], noted['is_up'] = token, True
        self._incomplete.remove(name)
        del self._sent[token]

    def _delete(self, name: str) -> None:
        complete_folders.delete(self.bucket, name, self.bucket.list(name), self.lease.check)
        self._marks.pop(name, None)
        self._incomplete.discard(name)
        self._sent.pop(self.copy.folders.get(name, {}).get('token'), None)
        if name in self.copy.folders and not (self.copy.folder / name).is_dir():
            self.copy.forget([name])


def read_file(path: Path) -> bytes | None:
    """Returns the content of a file; None if it has been removed."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def is_summary(name: str) -> bool:
    return PurePosixPath(name).name == SUMMARY


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without second names
        shutil.copy2(source, target)


class PushLoop:
    """Calls `Mirror.push` every so often, in a thread; `failure` is the error that ended it."""

    def __init__(self, mirror: Mirror):
        self.mirror, self.times, self.say = mirror, mirror.times, mirror.say
        self.failure: Exception | None = None
        self._failed_since: float | None = None  # no push has succeeded from then on
        self._ended = threading.Event()

    @contextlib.contextmanager
    def run_in_background(self) -> Iterator[None]:
        """Raises OSError at the end if the bucket lacks something; says it after another error."""
        thread = threading.Thread(target=self._run, name='mirror', daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            is_stopped = self.failure is not None
            if not is_stopped:
                try:
                    self._push_until_done(is_last=True)
                except KeyboardInterrupt as error:
                    self.failure = InterruptedError('interrupted')
                    raise OSError(self._describe_failure()) from error
            if self.failure is not None:
                if sys.exception() is None or is_stopped:
                    raise OSError(self._describe_failure()) from self.failure
                self.say(f'NOTE: {self._describe_failure()}')

    def _run(self) -> None:
        while not self._ended.wait(self.times.pace):
            if not self._push_until_done():
                self._stop_run()
                return

    def _push_until_done(self, is_last: bool = False) -> bool:
        """Whether it was done at last, or need not be as the block has ended."""
        wait = FIRST_WAIT_SEC
        while True:
            began = time.monotonic()
            try:
                self.mirror.push(is_last)
                if self._failed_since is not None:
                    self.say(f'{self.mirror.bucket.url} has all that is new again')
                self._failed_since = None
                return True
            except Exception as error:  # of the bucket, or of the disk
                since = began if self._failed_since is None else self._failed_since
                is_late = time.monotonic() - since >= self.times.retry
                if is_late or isinstance(error, LeaseLost | RequestRefused):
                    self.failure = error
                    return False
                if self._failed_since is None:
                    self.say(f'NOTE: {error}; tried again for {self.times.retry:g} s')
                self._failed_since = since
            if is_last:
                time.sleep(wait)
            elif self._ended.wait(wait):
                return True  # the last push is to be done
            wait = min(2 * wait, max(FIRST_WAIT_SEC, self.times.pace))

    def _stop_run(self) -> None:
        """Stops the run as SIGTERM would, once something catches that signal."""
        self.say(f'NOTE: {self.failure}: the run is stopped')
        while not self._ended.wait(POLL_SEC):
            if callable(signal.getsignal(signal.SIGTERM)):
                _thread.interrupt_main(signal.SIGTERM)
                return

    def _describe_failure(self) -> str:
        url, folder = self.mirror.bucket.url, self.mirror.copy.folder
        if isinstance(self.failure, LeaseLost):
            return (
                f'{self.failure}. Nothing more has been written there; what this process has '
                f'trained is in {folder}. The same command goes on from what the other one leaves.'
            )
        steps = [parse_step(name) for name in list_local_checkpoints(folder)]
        held = f'up to the checkpoint of step {max(steps)} ' if steps else ''
        return (
            f'{url} could not be written ({self.failure}). All that was trained {held}is in '
            f'{folder}: when the bucket can be written, the same command on this machine writes '
            'it there and goes on.'
        )
