"""A local folder that mirrors a workdir in a bucket, and reading runs through it.

Beside the folder lie manifest.json, with size, time of change and the store's tag of each file when
folder and bucket agreed, and files in transit. Checkpoints are fetched as complete folders
(`lm.storage.complete_folders`); all other files are small and are fetched one by one. Reading
writes nothing to the bucket and takes no lease, so a run may train there meanwhile.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from lm.record.metrics import FILE
from lm.record.names import (
    BRANCH,
    CHECKPOINTS,
    CONFIG,
    DAMAGED_FOLDER,
    PARAMETER_ROWS,
    STARTS,
    SUMMARY,
    SWEEP,
)
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
CHECKPOINT = re.compile(rf'((?:.+/)?(?:{CHECKPOINTS}|{DAMAGED_FOLDER})/(?:\d+))/(.+)')
IN_CHECKPOINTS = re.compile(rf'(?:.+/)?(?:{CHECKPOINTS}|{DAMAGED_FOLDER})/.*')
READS = 'reads'
RECORDS = (CONFIG, SUMMARY, SWEEP, BRANCH, PARAMETER_ROWS, FILE, STARTS, 'cells.parquet')
CHECKPOINT_PREFIX = f'{CHECKPOINTS}/'
TOKENIZER_PREFIX = 'tokenizer/'
TRIES = 5  # attempts while a run deletes the checkpoint that is read

Stat = list[int]  # [bytes, time of change in ns]


class LocalCopy:
    """A local folder with its manifest.

    `id` identifies this folder. The copy of a cell lies in the local folder of its `sweep`.

    `files` are {name: [*stat, e_tag]} and `folders` {name: {'token': of the mark, 'files': {name:
    stat}, 'is_up': whether the mark was written}}, at the time when they were fetched or written.

    Args:
      bucket: the workdir in the bucket.
      kind: subfolder of the cache.
      sweep: local folder of the sweep, for a cell.
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
        """Reads the manifest; a folder without a manifest is set aside. Needs the folder's lock."""
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
        """Renames the folder, and starts with an empty one."""
        n = 1
        while (aside := self.root / f'{self.folder.name}.aside-{n}').exists():
            n += 1
        self.folder.rename(aside)
        self.folder.mkdir()
        self.files, self.folders = {}, {}
        self.save()
        return aside

    def has_checkpoint(self, folder: str, token: str) -> bool:
        """Returns whether the folder holds the checkpoint that a mark with this token lists."""
        entry = self.folders.get(folder)
        is_current = entry is not None and entry['token'] == token
        return is_current and entry['files'] == read_stats(self.folder / folder)

    def is_damaged(self, folder: str, token: str) -> bool:
        """Returns whether a checkpoint has lost or changed local files since it was noted."""
        entry = self.folders.get(folder, {'token': None})
        if entry['token'] != token or self.has_checkpoint(folder, token):
            return False
        stats = read_stats(self.folder / folder)
        # A checkpoint that was written anew shares no file with the manifest, and is not damaged.
        return not stats or any(
            entry['files'].get(name) == file_stat for name, file_stat in stats.items()
        )

    def fetch_files(self, listing: Mapping[str, ObjectMeta]) -> None:
        """Fetches the files that differ from the local files, each of them atomically."""

        def fetch_file(name: str) -> None:
            path, partial = self.folder / name, self._make_partial_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stored = self.bucket.fetch(name, partial)
                sync(partial)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            file_stat = read_stat(path)
            assert file_stat is not None  # written above, and the folder is locked
            self.files[name] = [*file_stat, stored.e_tag]

        def differs(name: str) -> bool:
            current = [*(read_stat(self.folder / name) or ()), listing[name].e_tag]
            return self.files.get(name) != current

        for_each(fetch_file, filter(differs, listing))

    def fetch_folder(self, folder: str, mark: complete_folders.FolderMark) -> None:
        """Fetches a checkpoint atomically, unless the local copy equals it."""
        if self.has_checkpoint(folder, mark.token):
            return
        path, partial = self.folder / folder, self._make_partial_path()
        try:
            complete_folders.fetch(self.bucket, folder, mark, partial)
            # Noted before the renaming: if the process were killed in between, the next one would
            # otherwise take it for a checkpoint that was made here.
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
        """Adds a checkpoint to the manifest.

        Args:
          folder: name of the checkpoint.
          token: token of its mark.
          files: stats of its files.
          is_up: whether its mark is in the bucket.
        """
        self.folders[folder] = {'token': token, 'files': files, 'is_up': is_up}

    def forget(self, names: Iterable[str]) -> None:
        """Drops files and checkpoints from the manifest that exist neither here nor there."""
        for name in names:
            self.files.pop(name, None)
            self.folders.pop(name, None)

    def drop(self, names: Iterable[str]) -> None:
        """Removes local files and checkpoints, and empty folders.

        No run may use the folder meanwhile.
        """
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
    """Returns (files, checkpoints) of a listed workdir; the checkpoints may be incomplete."""
    files, folders = {}, set()
    for name, stored in listing.items():
        if match := CHECKPOINT.fullmatch(name):
            folders.add(match[1])
        elif not IN_CHECKPOINTS.fullmatch(name) and PurePosixPath(name).name != LEASE:
            files[name] = stored
    return files, folders


def list_local_files(folder: Path) -> dict[str, Stat]:
    """Returns the files that are synchronised one by one, with their stats."""
    stats = read_stats(folder, lambda name: not IN_CHECKPOINTS.fullmatch(f'{name}/'))
    return {
        name: file_stat for name, file_stat in stats.items() if not name.endswith(LOCAL_ENDINGS)
    }


def list_local_checkpoints(folder: Path) -> dict[str, dict[str, Stat]]:
    """Returns the complete checkpoints with the stats of their files.

    Orbax renames a checkpoint to its final name once it is complete.
    """
    names = [
        path.relative_to(folder).as_posix()
        for kind in (CHECKPOINTS, DAMAGED_FOLDER)
        for pattern in (f'{kind}/*', f'*/{kind}/*')
        for path in folder.glob(pattern)
        if path.name.isdigit() and path.is_dir()
    ]
    return {name: read_stats(folder / name) for name in sorted(names, key=parse_step)}


def parse_step(checkpoint: str) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(checkpoint.split('/')[-1])


def read_stats(folder: Path, enters: Callable[[str], bool] = lambda name: True) -> dict[str, Stat]:
    """Returns the stats of all files in a folder, by name.

    Links, and files that are removed meanwhile, are left out. enters: whether to descend into a
    subfolder.
    """
    stats = {}
    for path, folders, names in folder.walk(on_error=_raise_unless_removed):
        relative = path.relative_to(folder)
        folders[:] = sorted(name for name in folders if enters((relative / name).as_posix()))
        for name in sorted(names):
            if (file_stat := read_stat(path / name)) is not None:
                stats[(relative / name).as_posix()] = file_stat
    return stats


def _raise_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def read_stat(path: Path) -> Stat | None:
    """Returns the stat of a file; None if it is not a regular file or has been removed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        return [status.st_size, status.st_mtime_ns] if S_ISREG(status.st_mode) else None
    return None


def fetch_records(path: str | Path) -> Path:
    """Returns `path` itself, or a local folder with the current records of all runs under a URL.

    Raises ValueError for another kind of URL, OSError if the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    with _open_local_copy(path) as copy:
        _fetch_files(copy, copy.bucket.list(), is_record)
        return copy.folder


def fetch_checkpoints(url: str) -> Iterator[tuple[Path, int]]:
    """Yields (folder, step) for the checkpoints of a workdir, the newest first.

    The URL of a checkpoint yields only this checkpoint. Each one is fetched when the caller asks
    for the next.
    """
    workdir, wanted_step = split_checkpoint_url(url)
    fetched: set[int] = set()
    tries_left = TRIES
    while True:
        with _open_local_copy(workdir) as copy:
            listing = copy.bucket.list()
            checkpoint_files = {
                name: stored
                for name, stored in listing.items()
                if name.startswith(CHECKPOINT_PREFIX)
            }
            marks = complete_folders.list_complete_folders(copy.bucket, checkpoint_files)
            remaining = {
                parse_step(name) for name in marks if wanted_step in (None, parse_step(name))
            } - fetched
            if not remaining:
                return
            name = f'{CHECKPOINT_PREFIX}{max(remaining)}'
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
        fetched.add(max(remaining))
        yield copy.folder / CHECKPOINTS, max(remaining)


def split_checkpoint_url(url: str) -> tuple[str, int | None]:
    """Splits WORKDIR/checkpoints/STEP into (WORKDIR, STEP); the step is None for a workdir."""
    match = CHECKPOINT.fullmatch(f'{PurePosixPath(url.partition("://")[2])}/-')
    if match is None or f'/{CHECKPOINTS}/' not in match[1]:
        return url, None
    return url.rstrip('/').rsplit('/', 2)[0], parse_step(match[1])


@contextlib.contextmanager
def _open_local_copy(url: str) -> Generator[LocalCopy]:
    copy = LocalCopy(open_bucket(url), READS)
    with hold_lock(copy.root / 'lock'):
        copy.open()
        yield copy


def _fetch_files(copy: LocalCopy, listing: Mapping, is_wanted: Callable[[str], bool]) -> None:
    """Fetches the wanted files, and drops local files that are no longer in the bucket."""
    files, _ = sort_listing(listing)
    copy.drop([name for name in copy.files if name not in files])
    copy.fetch_files({name: stored for name, stored in files.items() if is_wanted(name)})
    copy.save()


def is_record(name: str) -> bool:
    """Returns whether a file is a record of the run or sweep, or of a cell or run below."""
    parts = PurePosixPath(name).parts
    return len(parts) <= 3 and parts[-1] in RECORDS
