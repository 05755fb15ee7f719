"""A folder of this machine that stands for a workdir in a bucket, and reading runs through it.

Beside the folder lie manifest.json, with size, time of change and the store's tag of each file when
folder and bucket agreed, and what is on its way. Checkpoints are taken as complete folders
(`lm.storage.list_complete_folders`); all else is small, and goes file by file. Reading writes nothing to
the bucket and takes no lease: a run may train there meanwhile.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from lm.record.checkpoint import FOLDER
from lm.record.checkpoints import DAMAGED_FOLDER
from lm.record.metrics import FILE
from lm.record.workdir import CONFIG, SUMMARY, SWEEP
from lm.storage import complete_folders
from lm.storage.buckets import (
    Bucket,
    ObjectMeta,
    cache_folder,
    for_each,
    is_url,
    local_name,
    open_bucket,
)
from lm.storage.files import UnreadableFile, hold_lock, read_json, sync, write_json
from lm.storage.lease import LEASE

MANIFEST = 'manifest.json'
STAGING = 'staging'
LOCAL_ENDINGS = ('.lock', '.job', '.tmp')  # files that concern this machine alone
CHECKPOINT = re.compile(rf'((?:.+/)?(?:{FOLDER}|{DAMAGED_FOLDER})/(?:\d+))/(.+)')
IN_CHECKPOINTS = re.compile(rf'(?:.+/)?(?:{FOLDER}|{DAMAGED_FOLDER})/.*')
READS = 'reads'
RECORDS = (CONFIG, SUMMARY, SWEEP, FILE, 'cells.parquet')
CHECKPOINT_PREFIX, TOKENIZER_PREFIX = (
    f'{FOLDER}/',
    'tokenizer/',
)  # begin the names of checkpoints, and of the tokenizer
TRIES = 5  # attempts while a run deletes the checkpoint that is read

Stat = list[int]  # [bytes, time of change in ns]


class LocalCopy:
    """A local folder with its manifest. `id` belongs to this folder alone. That of a cell lies in
    the local folder of its `sweep`.

    `files` are {name: [*stat, e_tag]} and `folders` {name: {'token': of the mark, 'files': {name:
    stat}, 'is_up': whether the mark was written}}, as they were when fetched or written.
    """

    def __init__(self, bucket: Bucket, kind: str, sweep: Path | None = None):
        self.bucket, self.root, name = (
            bucket,
            cache_folder(bucket.url, kind),
            local_name(bucket.url),
        )
        if sweep is not None:
            self.root = sweep.with_name(f'{sweep.name}.cells') / name
        self.folder = (sweep or self.root) / name
        self.staging = self.root / STAGING
        self.id, self.files, self.folders = secrets.token_hex(8), {}, {}
        self.root.mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        """Reads the manifest; a folder without one is set aside. Needs the lock of the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError, UnreadableFile, KeyError):
            record = read_json(self.root / MANIFEST)
            self.id, self.files, self.folders = record['id'], record['files'], record['folders']
            return
        # Folders of a sweep's cells have manifests of their own.
        if any(path.is_file() for path in self.folder.iterdir()):
            self.set_aside()
        self.save()

    def save(self) -> None:
        record = {'url': self.bucket.url, 'id': self.id}
        write_json(self.root / MANIFEST, record | {'files': self.files, 'folders': self.folders})

    def set_aside(self) -> Path:
        """Renames the folder, and begins with an empty one."""
        n = 1
        while (aside := self.root / f'{self.folder.name}.aside-{n}').exists():
            n += 1
        self.folder.rename(aside)
        self.folder.mkdir()
        self.files, self.folders = {}, {}
        self.save()
        return aside

    def has_checkpoint(self, folder: str, token: str) -> bool:
        """Whether a checkpoint is here as the mark with this token describes it."""
        noted = self.folders.get(folder)
        here = noted is not None and noted['token'] == token
        return here and noted['files'] == read_stats(self.folder / folder)

    def is_damaged(self, folder: str, token: str) -> bool:
        """Whether a checkpoint has lost or changed some of its files here since it was noted."""
        noted = self.folders.get(folder, {'token': None})
        if noted['token'] != token or self.has_checkpoint(folder, token):
            return False
        here = read_stats(
            self.folder / folder
        )  # one that was made anew has none of the noted files
        return not here or any(noted['files'].get(name) == one for name, one in here.items())

    def fetch_files(self, listing: Mapping[str, ObjectMeta]) -> None:
        """Fetches the files that are not the same here; all of each or nothing."""

        def fetch_file(name: str) -> None:
            path, partial = self.folder / name, self._make_partial_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stored = self.bucket.fetch(name, partial)
                sync(partial)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            self.files[name] = [*read_stat(path), stored.e_tag]

        def differs(name: str) -> bool:
            same = [*(read_stat(self.folder / name) or ()), listing[name].e_tag]
            return self.files.get(name) != same

        for_each(fetch_file, filter(differs, listing))

    def fetch_folder(self, folder: str, mark: complete_folders.FolderMark) -> None:
        """Fetches a checkpoint, unless it is the same here; all of it or nothing."""
        if self.has_checkpoint(folder, mark.token):
            return
        path, partial = self.folder / folder, self._make_partial_path()
        try:
            complete_folders.fetch(self.bucket, folder, mark, partial)
            # Noted before it gets its name, or a later process would think it was made here.
            self.note_folder(folder, mark.token, read_stats(partial), is_up=True)
            self.save()
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_partial_path(self) -> Path:
        self.staging.mkdir(parents=True, exist_ok=True)
        return self.staging / f'{secrets.token_hex(8)}.tmp'

    def note_folder(self, folder: str, token: str, files: dict[str, Stat], is_up: bool) -> None:
        self.folders[folder] = {'token': token, 'files': files, 'is_up': is_up}

    def forget(self, names: Iterable[str]) -> None:
        """Drops files and checkpoints from the manifest that are in neither place any more."""
        for name in names:
            self.files.pop(name, None)
            self.folders.pop(name, None)

    def drop(self, names: Iterable[str]) -> None:
        """Removes files and checkpoints, and empty folders. No run may use the folder meanwhile."""
        names = list(names)
        for name in names:
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.forget(names)
        for path in sorted(self.folder.rglob('*/'), reverse=True):  # the deepest first
            with contextlib.suppress(OSError):
                path.rmdir()  # fails unless it is empty


def sort_listing(listing: Mapping[str, ObjectMeta]) -> tuple[dict[str, ObjectMeta], set[str]]:
    """Returns the files and the checkpoints, complete or not, of a listed workdir."""
    files, folders = {}, set()
    for name, stored in listing.items():
        if match := CHECKPOINT.fullmatch(name):
            folders.add(match[1])
        elif not IN_CHECKPOINTS.fullmatch(name) and PurePosixPath(name).name != LEASE:
            files[name] = stored
    return files, folders


def list_local_files(folder: Path) -> dict[str, Stat]:
    """Returns the files that are kept the same one by one."""
    found = read_stats(folder, lambda name: not IN_CHECKPOINTS.fullmatch(f'{name}/'))
    return {name: one for name, one in found.items() if not name.endswith(LOCAL_ENDINGS)}


def list_local_checkpoints(folder: Path) -> dict[str, dict[str, Stat]]:
    """Returns the complete checkpoints: Orbax gives one its name when all of it is there."""
    found = [
        path.relative_to(folder).as_posix()
        for kind in (FOLDER, DAMAGED_FOLDER)
        for pattern in (f'{kind}/*', f'*/{kind}/*')
        for path in folder.glob(pattern)
        if path.name.isdigit() and path.is_dir()
    ]
    return {name: read_stats(folder / name) for name in sorted(found, key=parse_step)}


def parse_step(checkpoint: str) -> int:
    return int(checkpoint.split('/')[-1])


def read_stats(folder: Path, enters: Callable[[str], bool] = lambda name: True) -> dict[str, Stat]:
    """Returns the stats of all files below, without links and those that are removed meanwhile."""
    found = {}
    for at, folders, names in folder.walk(on_error=_raise_unless_removed):
        below = at.relative_to(folder)
        folders[:] = sorted(name for name in folders if enters((below / name).as_posix()))
        for name in sorted(names):
            if (one := read_stat(at / name)) is not None:
                found[(below / name).as_posix()] = one
    return found


def _raise_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def read_stat(path: Path) -> Stat | None:
    """Returns the stat of a file, None if it is something else or has been removed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        return [found.st_size, found.st_mtime_ns] if S_ISREG(found.st_mode) else None
    return None


def fetch_records(path: str | Path) -> Path:
    """Returns `path` itself, or a local folder with the present records of all runs below a URL.

    Raises ValueError for another kind of URL, OSError if the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    with _open_local_copy(path) as copy:
        _fetch_files(copy, copy.bucket.list(), is_record)
        return copy.folder


def fetch_checkpoints(url: str) -> Iterator[tuple[Path, int]]:
    """Yields (folder, step) for the checkpoints of a workdir, the newest first, or for one's URL.

    Each is fetched when it is asked for.
    """
    workdir, asked = split_checkpoint_url(url)
    given: set[int] = set()
    tries_left = TRIES
    while True:
        with _open_local_copy(workdir) as copy:
            listing = copy.bucket.list()
            own = {
                name: stored
                for name, stored in listing.items()
                if name.startswith(CHECKPOINT_PREFIX)
            }
            marks = complete_folders.list_complete_folders(copy.bucket, own)
            left = {parse_step(name) for name in marks if asked in (None, parse_step(name))} - given
            if not left:
                return
            name = f'{CHECKPOINT_PREFIX}{max(left)}'
            try:
                _fetch_files(
                    copy, listing, lambda name: is_record(name) or name.startswith(TOKENIZER_PREFIX)
                )
                copy.drop([name for name in copy.folders if name not in marks])
                copy.fetch_folder(name, marks[name])
            except FileNotFoundError:  # a run has deleted it meanwhile
                tries_left -= 1
                if not tries_left:
                    raise
                continue
        given.add(max(left))
        yield copy.folder / FOLDER, max(left)


def split_checkpoint_url(url: str) -> tuple[str, int | None]:
    """Returns (WORKDIR, STEP) for WORKDIR/checkpoints/STEP; the step of a workdir is None."""
    match = CHECKPOINT.fullmatch(f'{PurePosixPath(url.partition("://")[2])}/-')
    if match is None or f'/{FOLDER}/' not in match[1]:
        return url, None
    return url.rstrip('/').rsplit('/', 2)[0], parse_step(match[1])


@contextlib.contextmanager
def _open_local_copy(url: str) -> Iterator[LocalCopy]:
    copy = LocalCopy(open_bucket(url), READS)
    with hold_lock(copy.root / 'lock'):
        copy.open()
        yield copy


def _fetch_files(copy: LocalCopy, listing: Mapping, is_wanted: Callable[[str], bool]) -> None:
    """Fetches the wanted files, and drops those that are not in the bucket any more."""
    files, _ = sort_listing(listing)
    copy.drop([name for name in copy.files if name not in files])
    copy.fetch_files({name: stored for name, stored in files.items() if is_wanted(name)})
    copy.save()


def is_record(name: str) -> bool:
    """Whether a file is a record of the run or sweep, of a cell, or of a run or sweep below."""
    parts = PurePosixPath(name).parts
    return len(parts) <= 3 and parts[-1] in RECORDS
