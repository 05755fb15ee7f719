"""A workdir in a bucket, trained in a local folder that is kept in sync with it.

The training code gets the folder (`mirror_workdir`) and knows nothing of the bucket. New content of
the folder is written to the bucket at intervals, in this order (`Mirror.push`):

1. The complete checkpoints are listed, and get second names (hard links), so that they remain until
   they are written, even if the run removes them. The summaries are read before.
2. All files but summaries. Rows are on disk before a checkpoint that covers them, so the rows
   written now cover every listed checkpoint.
3. The new checkpoints, the newest first: their files, then their marks.
4. Checkpoints that were not listed are deleted, their marks first.
5. The summaries: a summary with status done comes after the last checkpoint of its run.

After an interruption at any point, the bucket holds checkpoints with rows that cover them, and
nothing incomplete has a mark.

At the start (`Mirror.pull`) the content of the bucket replaces local content that differs. There is
one exception: if this folder was the last to write to the bucket, by the lease, it holds the same
run at a later step. It is kept, and the first `push` writes the rest. If another process has
written to the bucket since, a folder with checkpoints that never were in the bucket is set aside.

Each cell of a sweep is such a workdir with its own lease, which a process holds while it trains the
cell (`mirror_cell`). The lease of the sweep is held only while sweep.json, table and report are
written from the records of all cells (`mirror_sweep_records`).

If the bucket cannot be written for longer than `Times.retry`, or another process has taken the
workdir, the run is stopped as by SIGTERM, and ends with an error that names the folder of its
files.
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
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

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
LARGE_BYTES = 8 << 20  # files of this size are not written again at every push
LARGE_PACES = 10  # pushes between two writes of a large file; it also precedes each checkpoint
FIRST_WAIT_SEC = 1.0  # after an error; then twice as long each time, up to the pace
POLL_SEC = 0.2
SWEEP_PATIENCE_SEC = 600.0  # hosts that end at the same time write their reports in turn
print_flushed = functools.partial(print, flush=True)


@contextlib.contextmanager
def mirror_workdir(
    workdir: str | Path, say: Callable[[str], None] = print_flushed
) -> Generator[Path]:
    """Yields the folder to train in: `workdir` itself, or the local folder of a URL.

    When the block ends, the bucket holds all of it. With several processes the first has that
    folder; the others have an empty one, and process 0 reads and writes checkpoints for them.

    Raises:
      ValueError: for another kind of URL, or a path with other content.
      InUseError: if another process trains there.
      OSError: if the bucket does not answer.
    """
    if not is_url(str(workdir)):
        yield Path(workdir)
        return
    if not is_multiprocess():
        with _mirror_bucket(str(workdir), say) as folder:
            yield folder
        return
    with private_disks(), contextlib.ExitStack() as stack:
        if is_first():
            yield stack.enter_context(_mirror_bucket(str(workdir), say))
            stack.close()
        else:
            yield Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broadcast_from_first(None)  # process 0 has written everything


@contextlib.contextmanager
def _mirror_bucket(url: str, say: Callable[[str], None]) -> Generator[Path]:
    bucket = open_bucket(url)
    check_is_workdir(bucket)
    with _open_mirror(LocalCopy(bucket, KIND), say, PATIENCE_SEC) as mirror:
        mirror.pull()
        say(mirror.describe())
        with PushLoop(mirror).run_in_background():
            yield mirror.copy.folder
        say(f'{bucket.url} is complete')


@contextlib.contextmanager
def _open_mirror(
    copy: LocalCopy, say: Callable[[str], None], patience: float
) -> Generator['Mirror']:
    """Holds the lock of the folder and the lease of the bucket, once both are free."""
    url, bucket_times = copy.bucket.url, read_times()
    options: dict[str, Any] = {
        'in_use_message': (
            f'another process is training in {url}; wait until it ends, or use another --workdir'
        ),
        'waiting_message': f'{url} is in use by another process: waiting for it to end',
        'wait_until': time.monotonic() + patience,
    }
    with hold_lock(copy.root / 'lock', say=say, **options) as is_only:
        copy.open()
        lease = Lease(copy.bucket, copy.id, bucket_times.lease)
        lease.acquire(say, patience, is_only)
        with lease.keep_renewed():
            yield Mirror(copy, lease, bucket_times, say)


def sweep_folder(workdir: str | Path) -> Path:
    """Returns `workdir` itself, or the local folder of a URL, which may not exist yet."""
    url = str(workdir)
    return LocalCopy(open_bucket(url), KIND).folder if is_url(url) else Path(workdir)


@contextlib.contextmanager
def mirror_cell(url: str | None, folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """Holds the lease of a cell, and keeps its folder in sync with the bucket.

    Args:
      url: the URL of the sweep; None does nothing.
      folder: the local folder in which the cell trains.
      say: prints a line.

    Raises:
      InUseError: if another process trains the cell.
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
def mirror_sweep_records(url: str | None, say: Callable[[str], None]) -> Generator[None]:
    """Fetches the records of all cells to `sweep_folder`; pushes the sweep's own files at the end.

    No other process does so within the block, which writes files such as sweep.json.
    """
    if url is None:
        yield
        return
    bucket = open_bucket(url)
    check_is_workdir(bucket, is_sweep=True)
    with _open_mirror(LocalCopy(bucket, KIND), say, SWEEP_PATIENCE_SEC) as mirror:
        copy, listing = mirror.copy, bucket.list()
        files = {
            name: stored for name, stored in sort_listing(listing)[0].items() if '/' not in name
        }
        copy.fetch_files(files)
        cells = {name.split('/')[0] for name in listing if name.endswith(f'/{LEASE}')}
        for_each(lambda name: _fetch_cell_records(join_url(url, name), copy.folder, say), cells)
        yield
        for name, file_stat in list_local_files(copy.folder).items():
            if '/' not in name:
                mirror.push_file(name, file_stat)
        copy.save()


def _fetch_cell_records(url: str, sweep: Path, say: Callable[[str], None]) -> None:
    """Fetches the records of a cell, unless it trains on this machine.

    The local records are left unchanged if the lease is damaged, or if objects are deleted
    meanwhile.
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
    """Raises ValueError, before anything is written, if no run has written the content of the path.

    A sweep is refused if a run is expected, and a run if a sweep is (`is_sweep`).
    """
    listing = bucket.list()
    if (CONFIG if is_sweep else SWEEP) in listing:
        present, expected = ('single run', 'sweep') if is_sweep else ('sweep', 'single run')
        raise ValueError(
            f'{bucket.url} contains a {present}; use another --workdir for a {expected}'
        )
    if listing and LEASE not in listing:
        raise ValueError(
            f'{bucket.url} contains {len(listing)} objects, such as {min(listing)}, but is not a '
            f'workdir: there is no {LEASE} in it. Use a new --workdir. A run that was copied there '
            'by other means can only be resumed from a copy on a disk.'
        )


class Mirror:
    """Synchronises a local folder with a bucket: `pull`, then `push` repeatedly.

    Both may be repeated after an error.

    Args:
      copy: the local folder.
      lease: the lease of the workdir.
      times: pace and patience, in seconds.
      say: prints a line.
    """

    def __init__(self, copy: LocalCopy, lease: Lease, times: Times, say: Callable[[str], None]):
        self.copy, self.lease, self.times, self.say = copy, lease, times, say
        self.bucket: Bucket = copy.bucket
        self._marks: dict[str, str] = {}  # token of each checkpoint that is complete in the bucket
        self._incomplete: set[str] = set()  # the other checkpoints in the bucket
        self._sent: dict[str, set[str]] = {}  # by token: what an upload has written so far
        self._due: dict[str, float] = {}  # when a large file is written again at the earliest

    def pull(self, records_only: bool = False) -> None:
        """Makes the local folder equal to the bucket, as described above. Needs the lease.

        records_only: fetch the records alone, without the lease; another process may train there.
        """
        copy, is_ours = self.copy, self.lease.written_by == self.copy.id
        listing = self.bucket.list()
        files, folders = sort_listing(listing)
        marks = complete_folders.list_complete_folders(self.bucket, listing)
        self._marks = {name: mark.token for name, mark in marks.items() if name in folders}
        incomplete = sorted(folders - self._marks.keys())
        if incomplete and not records_only:
            self.say(
                f'NOTE: {self.bucket.url} lacks parts of {", ".join(incomplete)}, which are ignored'
            )
        self._incomplete = set(incomplete)
        to_fetch = list(self._marks)
        if is_ours:
            files = {
                name: stored
                for name, stored in files.items()
                if read_stat(copy.folder / name) is None
            }
            is_here = {name: (copy.folder / name).is_dir() for name in to_fetch}
            to_fetch = [n for n in to_fetch if not is_here[n] or copy.is_damaged(n, self._marks[n])]
        else:
            self._drop_stale(files.keys(), marks)
        copy.fetch_files(
            {n: stored for n, stored in files.items() if not records_only or is_record(n)}
        )
        for name in [] if records_only else to_fetch:
            copy.fetch_folder(name, marks[name])
        copy.save()
        if not records_only:
            self.lease.claim()

    def describe(self) -> str:
        """Returns a line with the newest checkpoint in the bucket and the local folder."""
        newest = max(map(parse_step, self._marks), default=None)
        content = 'no checkpoint yet' if newest is None else f'checkpoints up to step {newest}'
        return f'{self.bucket.url} has {content}; training in {self.copy.folder}'

    def _drop_stale(self, files: Collection[str], marks: Mapping) -> None:
        copy = self.copy
        local, recorded = list_local_checkpoints(copy.folder), copy.folders
        sent = {name for name, entry in recorded.items() if entry['is_up']}
        if unsent := [
            n for n, stats in local.items() if n not in sent or recorded[n]['files'] != stats
        ]:
            aside = copy.set_aside()
            self.say(
                f'NOTE: {copy.folder} had checkpoints that are not in {self.bucket.url} '
                f'({", ".join(unsent)}), and another process has written there since. They were '
                f'moved to {aside} and are not used'
            )
            return
        copy.drop(n for n in local if n not in marks or not copy.has_checkpoint(n, marks[n].token))
        copy.drop(name for name in list_local_files(copy.folder) if name not in files)

    def push(self, is_last: bool = False) -> None:
        """Writes new content to the bucket, and deletes removed content.

        It may be repeated after a BucketError.
        """
        self.lease.check()  # a process without the lease must end, even if it has nothing to write
        folder = self.copy.folder
        summaries = {
            name: (file_stat, content)
            for name, file_stat in list_local_files(folder).items()
            if is_summary(name) and (content := read_file(folder / name)) is not None
        }
        listed = list_local_checkpoints(folder)
        unsent = {
            name: file_stat
            for name, file_stat in listed.items()
            if not self._is_written(name, file_stat)
        }
        staged = {name: self._link_checkpoint(name) for name in unsent}
        self._push_files(is_all=is_last or bool(unsent))
        self._assign_tokens(unsent)
        try:
            # The newest first: if writing is interrupted, it is the one from which the run resumes.
            for name in sorted(unsent, key=parse_step, reverse=True):
                if read_stats(staged[name]) == unsent[name]:  # unless it was removed during listing
                    self._push_checkpoint(name, staged[name])
        finally:
            if unsent:
                self.copy.save()
        for name in [*(self._marks.keys() - listed.keys()), *self._incomplete]:
            self._delete(name)
        for name, (file_stat, content) in summaries.items():
            self.push_file(name, file_stat, content)
        shutil.rmtree(self.copy.staging, ignore_errors=True)

    def _is_written(self, name: str, stats: dict[str, Stat]) -> bool:
        entry = self.copy.folders.get(name, {'files': None})
        return entry['files'] == stats and self._marks.get(name) == entry['token']

    def _link_checkpoint(self, name: str) -> Path:
        """Links the checkpoint to another path, which the run does not remove."""
        path = self.copy.staging / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            shutil.copytree(self.copy.folder / name, path, copy_function=_link)
        return path

    def _push_files(self, is_all: bool) -> None:
        """Writes all changed files except summaries; large files only if due, or if `is_all`."""
        files = list_local_files(self.copy.folder)
        removed = [name for name in self.copy.files if name not in files]
        if removed:
            self.lease.check()
            self.bucket.delete(removed)
            self.copy.forget(removed)
        before, time_now = dict(self.copy.files), time.monotonic()
        due = {
            name
            for name, (size, _) in files.items()
            if not is_summary(name)
            and (is_all or size < LARGE_BYTES or time_now >= self._due.get(name, 0.0))
        }
        # A reader that finds rows must find the config that they belong to.
        first = {name for name in due if PurePosixPath(name).name in WRITTEN_FIRST}
        for names in (first, due - first):
            for_each(lambda name: self.push_file(name, files[name]), names)
        if removed or self.copy.files != before:
            self.copy.save()

    def push_file(self, name: str, file_stat: Stat, content: bytes | None = None) -> None:
        """Writes a file, unless the bucket has it.

        Args:
          name: name of the file.
          file_stat: its stat, not newer than `content`.
          content: its content; read from the folder if None.
        """
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
        """Assigns tokens to checkpoints before their marks are written.

        A process may be killed in between, and leave a mark.
        """
        for name, stats in checkpoints.items():
            entry = self.copy.folders.get(name)
            if entry is None or entry['files'] != stats:
                self.copy.note_folder(name, secrets.token_hex(8), stats, is_up=False)
        if checkpoints:
            self.copy.save()

    def _push_checkpoint(self, name: str, path: Path) -> None:
        entry = self.copy.folders[name]
        token = entry['token']
        if name in self._marks or (name in self._incomplete and token not in self._sent):
            self._delete(name)  # an older checkpoint of the same step
        self._incomplete.add(name)
        sent = self._sent.setdefault(token, set())
        complete_folders.upload(self.bucket, path, name, token, self.lease.check, sent)
        self._marks[name], entry['is_up'] = token, True
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
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


class PushLoop:
    """Calls `Mirror.push` at intervals in a thread; `failure` is the error that ended it."""

    def __init__(self, mirror: Mirror):
        self.mirror, self.times, self.say = mirror, mirror.times, mirror.say
        self.failure: Exception | None = None
        self._failed_since: float | None = None  # no push has succeeded from then on
        self._ended = threading.Event()

    @contextlib.contextmanager
    def run_in_background(self) -> Generator[None]:
        """Runs the loop during the block.

        Raises OSError at the end if the bucket lacks something; after another error this is only
        printed.
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
        """Returns whether a push succeeded, or is left to the end of the block."""
        wait = FIRST_WAIT_SEC
        while True:
            began = time.monotonic()
            try:
                self.mirror.push(is_last)
                if self._failed_since is not None:
                    self.say(f'{self.mirror.bucket.url} is up to date again')
                self._failed_since = None
                return True
            except Exception as error:  # of the bucket, or of the disk
                since = began if self._failed_since is None else self._failed_since
                is_late = time.monotonic() - since >= self.times.retry
                if is_late or isinstance(error, LeaseLost | RequestRefused):
                    self.failure = error
                    return False
                if self._failed_since is None:
                    self.say(f'NOTE: {error}; retrying for up to {self.times.retry:g} s')
                self._failed_since = since
            if is_last:
                time.sleep(wait)
            elif self._ended.wait(wait):
                return True  # the last push will write the rest
            wait = min(2 * wait, max(FIRST_WAIT_SEC, self.times.pace))

    def _stop_run(self) -> None:
        """Stops the run as SIGTERM would, once something catches that signal."""
        self.say(f'NOTE: {self.failure}; stopping the run')
        while not self._ended.wait(POLL_SEC):
            if callable(signal.getsignal(signal.SIGTERM)):
                _thread.interrupt_main(signal.SIGTERM)
                return

    def _describe_failure(self) -> str:
        url, folder = self.mirror.bucket.url, self.mirror.copy.folder
        if isinstance(self.failure, LeaseLost):
            return (
                f'{self.failure}. This process no longer writes there; its steps are in {folder}. '
                'Run the same command to resume from the checkpoint of the other process.'
            )
        steps = [parse_step(name) for name in list_local_checkpoints(folder)]
        progress = f' up to the checkpoint of step {max(steps)}' if steps else ''
        return (
            f'{url} could not be written ({self.failure}). The run{progress} is in {folder}. When '
            'the bucket can be written again, run the same command on this machine to upload it '
            'and resume.'
        )
