"""Folders of a bucket that readers see complete or not at all.

A store has no folders and renames nothing, so a folder gets a mark: the object FOLDER/.whole, which
is written after all others and deleted before any of them. It is JSON: {'files': {name: bytes},
'token': text}; the token is unique to an upload. A folder is incomplete, and nobody reads it, if it
has no mark, or if its mark lists an object that does not exist.
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
    """Returns the mark of a folder, or None if the listing shows that the folder is incomplete.

    Args:
      bucket: the bucket.
      folder: name of the folder.
      listing: the objects of the bucket; listed anew if None.
    """
    try:
        record = parse_json(bucket.read(f'{folder}/{MARK}')[0])
        mark = FolderMark(
            str(record['token']), {str(k): int(v) for k, v in record['files'].items()}
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    listing = bucket.list(folder) if listing is None else listing
    objects = {name: listing.get(f'{folder}/{name}') for name in mark.files}
    sizes = {name: stored.size for name, stored in objects.items() if stored is not None}
    return mark if sizes == mark.files else None


def upload(
    bucket: Bucket,
    path: Path,
    folder: str,
    token: str,
    check: Callable[[], None] = lambda: None,
    sent: set[str] | None = None,
) -> None:
    """Writes the files of a local folder, and then the mark.

    Args:
      bucket: the bucket.
      path: the local folder.
      folder: name of the folder in the bucket.
      token: a token that no other upload has.
      check: called before each write; it may raise.
      sent: names that an earlier upload with this token has written, which are skipped; updated in
        place.
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
    """Returns the names of all files in a folder, relative to it."""
    return sorted(file.relative_to(path).as_posix() for file in path.rglob('*') if file.is_file())


def fetch(bucket: Bucket, folder: str, mark: FolderMark, path: Path) -> None:
    """Writes a complete folder of a bucket to a local path.

    Args:
      bucket: the bucket.
      folder: name of the folder.
      mark: its mark.
      path: the local folder.

    Raises:
      FileNotFoundError: if the folder changes meanwhile.
    """
    for parent in {(path / name).parent for name in mark.files} | {path}:
        parent.mkdir(parents=True, exist_ok=True)

    def fetch_file(name: str) -> None:
        stored = bucket.fetch(f'{folder}/{name}', path / name)
        if stored.size != mark.files[name]:
            raise FileNotFoundError(f'{folder} was changed while it was read')
        sync(path / name)

    for_each(fetch_file, mark.files)


def delete(
    bucket: Bucket, folder: str, names: Iterable[str], check: Callable[[], None] = lambda: None
) -> None:
    """Deletes the mark, then the objects, so that an interrupted call leaves an incomplete folder.

    Args:
      bucket: the bucket.
      folder: name of the folder.
      names: names of its objects.
      check: called before each deletion; it may raise.
    """
    check()
    bucket.delete([f'{folder}/{MARK}'])
    check()
    bucket.delete(name for name in names if name != f'{folder}/{MARK}')
