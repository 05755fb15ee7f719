"""A folder of this machine that stands for a workdir in a bucket, and what it was when the two were
the same: of each file its size, its time of change and the tag that the store gave it.

Beside the folder lie manifest.json, which says that, and what is on its way. Checkpoints are taken
as wholes (`lm.storage.complete_folders`); all else is small, and goes file by file.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lm.record.checkpoint import FOLDER
from lm.record.checkpoints import DAMAGED
from lm.storage import complete_folders
from lm.storage.buckets import Bucket, Stored, each, local_name, place
from lm.storage.files import Unreadable, read_json, sync, write_json
from lm.storage.lease import LEASE

MANIFEST = 'manifest.json'
STAGING = 'staging'
STAYS = ('.lock', '.job', '.tmp')  # end the names of what is of this machine alone
CHECKPOINT = re.compile(rf'((?:.+/)?(?:{FOLDER}|{DAMAGED})/(?:\d+))/(.+)')
WITHIN = re.compile(rf'(?:.+/)?(?:{FOLDER}|{DAMAGED})/.*')

Stat = list[int]  # [bytes, time of change in ns]


class Copy:
    """`id` is of this folder, and of no other; `files` are {name: [*stat, e_tag]} and `folders`
    {name: {'token': of the mark, 'files': {name: stat}, 'is_up': whether the mark was written}},
    as they were when they were fetched or written.
    """

    def __init__(self, bucket: Bucket, kind: str):
        self.bucket, self.place = bucket, place(bucket.url, kind)
        self.folder = self.place / local_name(bucket.url)
        self.staging = self.place / STAGING
        self.id, self.files, self.folders = secrets.token_hex(8), {}, {}

    def open(self) -> None:
        """To be called once no other process is in it. What is there without a manifest that can
        be read is set aside, as nothing is known of it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError, Unreadable, KeyError):
            record = read_json(self.place / MANIFEST)
            self.id, self.files, self.folders = record['id'], record['files'], record['folders']
            return
        if any(self.folder.iterdir()):
            self.set_aside()
        self.save()

    def save(self) -> None:
        record = {'url': self.bucket.url, 'id': self.id}
        write_json(self.place / MANIFEST, record | {'files': self.files, 'folders': self.folders})

    def set_aside(self) -> Path:
        """Moves what is there to a name of its own, and begins with an empty folder."""
        n = 1
        while (aside := self.place / f'{self.folder.name}.aside-{n}').exists():
            n += 1
        self.folder.rename(aside)
        self.folder.mkdir()
        self.files, self.folders = {}, {}
        self.save()
        return aside

    def is_same(self, name: str, stored: Stored) -> bool:
        """Whether the file is here as the store has it, by what was noted of both."""
        return self.files.get(name) == [*(stat(self.folder / name) or ()), stored.e_tag]

    def has(self, folder: str, token: str) -> bool:
        """The same of a checkpoint."""
        noted = self.folders.get(folder)
        here = noted is not None and noted['token'] == token
        return here and noted['files'] == stats_in(self.folder / folder)

    def is_damaged(self, folder: str, token: str) -> bool:
        """Whether a checkpoint has lost or changed some of its files here since it was noted. One
        of the same step that was made anew has none of them.
        """
        noted = self.folders.get(folder, {'token': None})
        if noted['token'] != token or self.has(folder, token):
            return False
        here = stats_in(self.folder / folder)
        return not here or any(noted['files'].get(name) == one for name, one in here.items())

    def fetch_files(self, found: Mapping[str, Stored]) -> None:
        """Those that are not the same here; all of each or nothing."""

        def one(name: str) -> None:
            path, partial = self.folder / name, self.staging / f'{secrets.token_hex(8)}.tmp'
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            try:
                stored = self.bucket.fetch(name, partial)
                sync(partial)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            self.files[name] = [*stat(path), stored.e_tag]

        each(one, [name for name, stored in found.items() if not self.is_same(name, stored)])

    def fetch_folder(self, folder: str, mark: complete_folders.Mark) -> None:
        """A checkpoint, unless it is the same here: all of it or nothing. It is noted before it
        gets its name, so that no later process takes it for one that was made here.
        """
        if self.has(folder, mark.token):
            return
        path, partial = self.folder / folder, self.staging / f'{secrets.token_hex(8)}.tmp'
        try:
            complete_folders.fetch(self.bucket, folder, mark, partial)
            self.note_folder(folder, mark.token, stats_in(partial), is_up=True)
            self.save()
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def note_folder(self, folder: str, token: str, files: dict[str, Stat], is_up: bool) -> None:
        self.folders[folder] = {'token': token, 'files': files, 'is_up': is_up}

    def forget(self, names: Iterable[str]) -> None:
        """Files and checkpoints that are in neither place any more."""
        for name in names:
            self.files.pop(name, None)
            self.folders.pop(name, None)

    def drop(self, names: Iterable[str]) -> None:
        """Removes files and checkpoints that the workdir does not hold, and folders that are empty
        then. Not while a run has the folder: it may have made one that it is about to fill.
        """
        names = list(names)
        for name in names:
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.forget(names)
        for path in sorted(self.folder.rglob('*/'), reverse=True):  # the deepest first
            with contextlib.suppress(OSError):
                path.rmdir()  # where it is empty


def split(listing: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, list[str]]]:
    """(files, names of the objects of each checkpoint, whole or not) of a workdir in a bucket."""
    files, folders = {}, {}
    for name, stored in listing.items():
        if match := CHECKPOINT.fullmatch(name):
            folders.setdefault(match[1], []).append(name)
        elif not WITHIN.fullmatch(name) and name != LEASE:
            files[name] = stored
    return files, folders


def files_here(folder: Path) -> dict[str, Stat]:
    """Those that go one by one."""
    return {
        name: found
        for name, path in _walk(folder, lambda name: not WITHIN.fullmatch(f'{name}/'))
        if not name.endswith(STAYS) and (found := stat(path)) is not None
    }


def checkpoints_here(folder: Path) -> dict[str, dict[str, Stat]]:
    """The complete checkpoints: Orbax gives one its name when all of it is there."""
    found = [
        path.relative_to(folder).as_posix()
        for kind in (FOLDER, DAMAGED)
        for pattern in (f'{kind}/*', f'*/{kind}/*')
        for path in folder.glob(pattern)
        if path.name.isdigit() and path.is_dir()
    ]
    return {name: stats_in(folder / name) for name in sorted(found, key=step_of)}


def step_of(checkpoint: str) -> int:
    return int(checkpoint.split('/')[-1])


def stats_in(folder: Path) -> dict[str, Stat]:
    """Of all files below; one that is removed meanwhile is left out."""
    walked = _walk(folder, lambda name: True)
    return {name: found for name, path in walked if (found := stat(path)) is not None}


def stat(path: Path) -> Stat | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return None


def _walk(folder: Path, enters: Callable[[str], bool], prefix: str = '') -> Any:
    """(name relative to the first folder, path) of every file; links are not followed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if enters(name):
                    yield from _walk(Path(entry.path), enters, f'{name}/')
            elif entry.is_file(follow_symlinks=False):
                yield name, Path(entry.path)
