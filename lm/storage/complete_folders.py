"""Folders of a bucket that readers see complete or not at all.

A store has no folders and renames nothing, so a folder gets a mark: the object FOLDER/.whole, which
is written after all others and deleted before any of them. It is JSON: {'files': {name: bytes},
'token': text}, where no two uploads have the same token. A folder without a mark, or with a mark
that lists an object that is not there, is incomplete, and nobody reads it.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lm.storage.buckets import Bucket, ObjectMeta, for_each
from lm.storage.files import parse_json, sync

MARK = '.whole'


@dataclasses.dataclass(frozen=True)
class FolderMark:
    """`files` maps each name, relative to the folder, to its size in bytes."""

    token: str
    files: Mapping[str, int]


def list_complete_folders(
    bucket: Bucket, listing: Mapping[str, ObjectMeta]
) -> dict[str, FolderMark]:
    """Returns the fully uploaded folders of a listing (`Bucket.list`), with their marks."""
    folders = [name.removesuffix(f'/{MARK}') for name in listing if name.endswith(f'/{MARK}')]
    marks = for_each(lambda folder: read_mark(bucket, folder, listing), folders)
    return {folder: mark for folder, mark in zip(folders, marks, strict=True) if mark is not None}


def read_mark(bucket: Bucket, folder: str, listing: Mapping | None = None) -> FolderMark | None:
    """Returns the mark of a folder, or None if it is not complete by the listing of the bucket."""
    try:
        record = parse_json(bucket.read(f'{folder}/{MARK}')[0])
        mark = FolderMark(
            str(record['token']), {str(k): int(v) for k, v in record['files'].items()}
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    listing = bucket.list(folder) if listing is None else listing
    found = {name: listing.get(f'{folder}/{name}') for name in mark.files}
    sizes = {name: one.size for name, one in found.items() if one is not None}
    return mark if sizes == mark.files else None


def upload(
    bucket: Bucket,
    path: Path,
    folder: str,
    token: str,
    check: Callable[[], None] = lambda: None,
    sent: set[str] | None = None,
) -> None:
    """Writes the files of the local folder `path`, and then the mark.

    check: called before each write; it may raise. sent: names that an earlier upload with this
    token has written, and that are not written again; kept up to date.
    """
    sent = set() if sent is None else sent
    sizes = {name: (path / name).stat().st_size for name in list_files(path)}

    def upload_file(name: str) -> None:
        if name not in sent:
            check()
            bucket.write(f'{folder}/{name}', path / name)
            sent.add(name)

    for_each(upload_file, sizes)
    check()
    mark = {'files': sizes, 'token': token}
    bucket.write(f'{folder}/{MARK}', json.dumps(mark, indent=1).encode())


def list_files(path: Path) -> list[str]:
    return sorted(one.relative_to(path).as_posix() for one in path.rglob('*') if one.is_file())


def fetch(bucket: Bucket, folder: str, mark: FolderMark, path: Path) -> None:
    """Writes a complete folder to `path`. Raises FileNotFoundError if it changes meanwhile."""
    for parent in {(path / name).parent for name in mark.files} | {path}:
        parent.mkdir(parents=True, exist_ok=True)

    def fetch_file(name: str) -> None:
        stored = bucket.fetch(f'{folder}/{name}', path / name)
        if stored.size != mark.files[name]:
            raise FileNotFoundError(f'{folder} has been changed while it was read')
        sync(path / name)

    for_each(fetch_file, mark.files)


def delete(
    bucket: Bucket, folder: str, names: Iterable[str], check: Callable[[], None] = lambda: None
) -> None:
    """Deletes the mark, then the objects: what an interrupted call leaves counts as incomplete."""
    check()
    bucket.delete([f'{folder}/{MARK}'])
    check()
    bucket.delete(name for name in names if name != f'{folder}/{MARK}')
