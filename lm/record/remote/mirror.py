"""A workdir in a bucket, trained in a folder of this machine that is kept the same as it.

Nothing that trains knows of it: at the start the folder is made to hold what the bucket holds, and
from then on what is new in the folder is written to the bucket, in this order (`Mirror.push`):

1. The complete checkpoints are listed, and get second names (hard links), so that they stay until
   they are written, whatever the run removes. The summaries are read before.
2. All files but summaries. Rows are on disk before a checkpoint that covers them, so what is
   written now covers every checkpoint of the list.
3. The new checkpoints, the newest first: their files, then their marks.
4. Checkpoints that were not on the list are deleted, their marks first.
5. The summaries: one that says a run is done comes when its last checkpoint is there.

Wherever this is cut off, the bucket holds checkpoints with rows that cover them, and nothing of
which only half is there has a mark.

At the start (`Mirror.bring`) the bucket is right, and what differs here is replaced by what is
there. With one exception: where nobody else has written to the bucket since this very folder was
written to it, which its lease says, the folder is the same run further on. Then it stays as it is,
what it lacks is fetched, and the rest is written by the first `push`. A folder with checkpoints
that never were in the bucket, which another process has written to since, is set aside with a word.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

from lm.record.remote.local_copy import (
    Copy,
    Stat,
    checkpoints_here,
    files_here,
    split,
    stat,
    stats_in,
    step_of,
)
from lm.record.workdir import CONFIG, SUMMARY, SWEEP
from lm.storage import complete_folders
from lm.storage.buckets import Bucket, Times, each
from lm.storage.lease import LEASE, Lease

KIND = 'runs'
FIRST = (CONFIG, SWEEP)  # they say what the others are of
LARGE = 8 << 20  # bytes of a file that is not written again at every look
LARGE_PACES = 10  # but at every so many, and before each checkpoint


class Mirror:
    """`bring`, then `push` as often as wanted; both may be repeated after an error."""

    def __init__(self, copy: Copy, lease: Lease, times: Times, say: Callable[[str], None]):
        self.copy, self.lease, self.times, self.say = copy, lease, times, say
        self.bucket: Bucket = copy.bucket
        self._marks: dict[str, str] = {}  # token of each checkpoint that is whole in the bucket
        self._halves: dict[str, list[str]] = {}  # objects of those that are not
        self._sent: dict[str, set[str]] = {}  # by token: what an upload has written so far
        self._written: dict[str, float] = {}  # when a file was

    def bring(self) -> None:
        """The local folder as the bucket has it; see above. To be called with the lease."""
        copy, mine = self.copy, self.lease.written_by == self.copy.id
        listing = self.bucket.list()
        files, folders = split(listing)
        marks = complete_folders.whole_folders(self.bucket, listing)
        self._marks = {name: mark.token for name, mark in marks.items() if name in folders}
        self._halves = {name: folders[name] for name in folders.keys() - self._marks.keys()}
        if mine:
            files = {name: one for name, one in files.items() if stat(copy.folder / name) is None}
            wanted = [
                name
                for name, token in self._marks.items()
                if not (copy.folder / name).is_dir() or copy.is_damaged(name, token)
            ]
        else:
            self._drop_what_differs(files.keys(), marks)
            wanted = list(self._marks)
        copy.fetch_files(files)
        for name in wanted:
            copy.fetch_folder(name, marks[name])
        copy.save()
        self.lease.claim()
        newest = max(map(step_of, self._marks), default=None)
        held = 'no checkpoint yet' if newest is None else f'checkpoints up to step {newest}'
        self.say(f'{self.bucket.url} holds {held}; trained in {copy.folder}')

    def _drop_what_differs(
        self, files: Collection[str], marks: dict[str, complete_folders.Mark]
    ) -> None:
        """What the bucket does not hold, or holds another one of."""
        copy = self.copy
        here = checkpoints_here(copy.folder)
        known = copy.folders
        unsent = [
            name
            for name, found in here.items()
            if name not in known or known[name]['files'] != found or not known[name]['is_up']
        ]
        if unsent:
            aside = copy.set_aside()
            self.say(
                f'NOTE: {copy.folder} held checkpoints that are not in {self.bucket.url} '
                f'({", ".join(unsent)}), which another process has written to since: moved to '
                f'{aside}, and not gone on from'
            )
            return
        copy.drop(n for n in here if n not in marks or not copy.has(n, marks[n].token))
        copy.drop(name for name in files_here(copy.folder) if name not in files)

    def push(self, is_last: bool = False) -> None:
        """Writes what is new here, and deletes what is gone; see above. Raises lease.Lost, or
        BucketError: then it is to be called again.
        """
        self.lease.check()  # one that has lost its lease ends, also where it has nothing to write
        folder = self.copy.folder
        summaries = {
            name: (found, content)
            for name, found in files_here(folder).items()
            if is_summary(name) and (content := read(folder / name)) is not None
        }
        listed = checkpoints_here(folder)
        new = {name: found for name, found in listed.items() if not self._is_written(name, found)}
        staged = {name: self._second_name(name) for name in new}
        self._push_files(is_all=is_last or bool(new))
        self._note(new)
        try:
            for name in sorted(new, key=step_of, reverse=True):
                if stats_in(staged[name]) == new[name]:  # or it was removed while it was listed
                    self._push_checkpoint(name, staged[name])
        finally:
            if new:
                self.copy.save()
        for name in [*(self._marks.keys() - listed.keys()), *self._halves]:
            self._delete(name)
        for name, (found, content) in summaries.items():
            self._push_file(name, found, content)
        shutil.rmtree(self.copy.staging, ignore_errors=True)

    def _is_written(self, name: str, found: dict[str, Stat]) -> bool:
        noted = self.copy.folders.get(name)
        return (
            noted is not None
            and noted['files'] == found
            and self._marks.get(name) == noted['token']
        )

    def _second_name(self, name: str) -> Path:
        """The checkpoint under a name of its own, which the run does not remove."""
        path = self.copy.staging / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            shutil.copytree(self.copy.folder / name, path, copy_function=_link)
        return path

    def _push_files(self, is_all: bool) -> None:
        """All that changed, but summaries; of large files not each change, unless `is_all`."""
        found = files_here(self.copy.folder)
        gone = [name for name in self.copy.files if name not in found]
        if gone:
            self.lease.check()
            self.bucket.delete(gone)
            self.copy.forget(gone)
        due = [
            name
            for name, one in found.items()
            if not is_summary(name) and (is_all or self._is_due(name, one))
        ]
        due.sort(key=lambda name: PurePosixPath(name).name not in FIRST)
        n_first = sum(PurePosixPath(name).name in FIRST for name in due)
        before = dict(self.copy.files)
        for names in (due[:n_first], due[n_first:]):
            each(lambda name: self._push_file(name, found[name]), names)
        if gone or self.copy.files != before:
            self.copy.save()

    def _is_due(self, name: str, found: Stat) -> bool:
        waited = time.monotonic() - self._written.get(name, -1e9)
        return found[0] < LARGE or waited >= LARGE_PACES * self.times.pace

    def _push_file(self, name: str, found: Stat, content: bytes | None = None) -> None:
        """One file, unless it is there. found: its state, no newer than `content`."""
        if self.copy.files.get(name, [])[:2] == found:
            return
        if content is None:
            content = read(self.copy.folder / name)
        if content is not None:
            self.lease.check()
            stored = self.bucket.write(name, content)
            self.copy.files[name] = [*found, stored.e_tag]
            self._written[name] = time.monotonic()

    def _note(self, new: dict[str, dict[str, Stat]]) -> None:
        """Gives tokens to checkpoints. The manifest knows them before there is a mark: if this
        process is killed in between, the next one sees that the checkpoint is this one.
        """
        for name, found in new.items():
            noted = self.copy.folders.get(name)
            if noted is None or noted['files'] != found:
                self.copy.note_folder(name, secrets.token_hex(8), found, is_up=False)
        if new:
            self.copy.save()

    def _push_checkpoint(self, name: str, path: Path) -> None:
        noted = self.copy.folders[name]
        token = noted['token']
        if name in self._marks or (name in self._halves and token not in self._sent):
            self._delete(name)  # another one of this step
        self._halves[name] = []
        sent = self._sent.setdefault(token, set())
        complete_folders.upload(self.bucket, path, name, token, self.lease.check, sent)
        self._marks[name], noted['is_up'] = token, True
        del self._halves[name], self._sent[token]

    def _delete(self, name: str) -> None:
        complete_folders.delete(self.bucket, name, self.bucket.list(name), self.lease.check)
        self._marks.pop(name, None)
        self._halves.pop(name, None)
        self._sent.pop(self.copy.folders.get(name, {}).get('token'), None)
        if name in self.copy.folders and not (self.copy.folder / name).is_dir():
            self.copy.forget([name])


def check_is_ours(bucket: Bucket) -> None:
    """ValueError where the path holds what no run has put there, before anything is written."""
    found = bucket.list()
    if found and LEASE not in found:
        raise ValueError(
            f'{bucket.url} holds {len(found)} objects, such as {min(found)}, and is no workdir: '
            f'there is no {LEASE} in it. Give a --workdir that is new. A run that was copied there '
            'by other means goes on from a copy on a disk alone.'
        )


def read(path: Path) -> bytes | None:
    """None for a file that has been removed."""
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
