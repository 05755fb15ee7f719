"""Folders of a bucket that are there whole or not at all.

A store has no folders and renames nothing, so a folder gets a mark: the object FOLDER/.whole, which
is written when all others are there and deleted before any of them. It is JSON: {'files': {name:
bytes}, 'token': text}, where no two uploads have the same token. A folder without a mark, or whose
mark lists what is not there, is half of one: nobody takes it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lm.storage.buckets import Bucket, Stored, each
from lm.storage.files import sync

MARK = '.whole'


@dataclasses.dataclass(frozen=True)
class Mark:
    """`files`: their sizes by name, relative to the folder."""

    token: str
    files: Mapping[str, int]


def whole_folders(bucket: Bucket, listing: Mapping[str, Stored]) -> dict[str, Mark]:
    """Those of `Bucket.list` that are whole, with their marks."""
    names = [name for name in listing if name.endswith(f'/{MARK}')]
    marks = zip(names, each(lambda name: _read(bucket, name), names), strict=True)
    return {
        name.removesuffix(f'/{MARK}'): mark
        for name, mark in marks
        if mark is not None and _is_there(name.removesuffix(MARK), mark, listing)
    }


def read_mark(bucket: Bucket, folder: str) -> Mark | None:
    """Of a folder whose files are there as the mark lists them; None where it is not whole."""
    mark = _read(bucket, f'{folder}/{MARK}')
    found = mark is not None and _is_there(f'{folder}/', mark, bucket.list(folder))
    return mark if found else None


def _read(bucket: Bucket, name: str) -> Mark | None:
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        record = json.loads(bucket.read(name)[0])
        return Mark(str(record['token']), {str(k): int(v) for k, v in record['files'].items()})
    return None


def _is_there(prefix: str, mark: Mark, listing: Mapping[str, Stored]) -> bool:
    found = {name: listing.get(prefix + name) for name in mark.files}
    return all(one is not None and one.size == mark.files[name] for name, one in found.items())


def upload(
    bucket: Bucket,
    path: Path,
    folder: str,
    token: str,
    check: Callable[[], None] = lambda: None,
    sent: set[str] | None = None,
) -> None:
    """Writes the files of the folder `path`, and when they are there the mark.

    check() is called before each write, and may raise. sent: names that need not be written again,
    as an upload with this token got so far; it is kept up to date.
    """
    sent = set() if sent is None else sent
    sizes = {name: (path / name).stat().st_size for name in files_in(path)}

    def one(name: str) -> None:
        if name not in sent:
            check()
            bucket.write(f'{folder}/{name}', path / name)
            sent.add(name)

    each(one, sizes)
    check()
    mark = {'files': sizes, 'token': token}
    bucket.write(f'{folder}/{MARK}', json.dumps(mark, indent=1).encode())


def files_in(path: Path) -> list[str]:
    return sorted(one.relative_to(path).as_posix() for one in path.rglob('*') if one.is_file())


def fetch(bucket: Bucket, folder: str, mark: Mark, path: Path) -> None:
    """Writes the files of a whole folder below `path`, which is to be renamed by the caller.

    Raises FileNotFoundError where it is deleted or changed meanwhile.
    """
    for parent in {(path / name).parent for name in mark.files} | {path}:
        parent.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> None:
        stored = bucket.fetch(f'{folder}/{name}', path / name)
        if stored.size != mark.files[name]:
            raise FileNotFoundError(f'{folder} has been changed while it was read')
        sync(path / name)

    each(one, mark.files)


def delete(
    bucket: Bucket, folder: str, names: Iterable[str], check: Callable[[], None] = lambda: None
) -> None:
    """The mark goes first: whenever this ends, what is left is not taken for whole."""
    check()
    bucket.delete([f'{folder}/{MARK}'])
    check()
    bucket.delete(name for name in names if name != f'{folder}/{MARK}')
