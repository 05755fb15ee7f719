"""Prepared data of a data.cache_dir in object storage: whoever prepares it first puts it there, and
others fetch it. All work is done in a folder of this machine that stands for the URL.
"""

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

from lm.data import cache
from lm.storage import complete_folders
from lm.storage.buckets import BucketError, below, is_url, open_bucket


def shared(
    cache_dir: str,
    name: str,
    *,
    make: Callable[[], Path],
    damage: Callable[[Path], str],
    say: Callable[[str], None],
    wait: bool = True,
) -> Path:
    """The folder `name` of the cache, which `make` makes where it is neither here nor there.

    It has its name from its content, and never changes: one that is marked as whole is fetched, and
    any other is put there with its mark last. Where it cannot be put there, that is said, and the
    run goes on with what it has. Raises OSError where the bucket cannot be reached or read, InUse
    where another process fetches it and `wait` is False.
    """
    if not is_url(cache_dir):
        return make()
    path, bucket = cache.root(cache_dir) / name, open_bucket(cache_dir)
    mark, is_damaged = complete_folders.read_mark(bucket, name), False
    if mark is not None and (not path.is_dir() or damage(path)):
        with cache.alone(path, cache.SAME, say, wait) as is_locked, cache.disk_full_explained(path):
            say(f'data: fetching {below(cache_dir, name)}, {sum(mark.files.values()) / 1e6:.1f} MB')
            with contextlib.suppress(FileNotFoundError):  # somebody deletes it: it is made here

                def fetch(partial: Path) -> None:
                    complete_folders.fetch(bucket, name, mark, partial)

                cache.filled(path, fetch, damage, say, is_locked)
        if path.is_dir() and damage(path):
            say(f'NOTE: {below(cache_dir, name)} is damaged: it is prepared again')
            is_damaged = True
    made = make()
    if is_damaged or (mark is None and complete_folders.read_mark(bucket, name) is None):
        try:
            if is_damaged:
                complete_folders.delete(bucket, name, bucket.list(name))
            # Where another host does the same now, it writes the same bytes.
            complete_folders.upload(bucket, made, name, secrets.token_hex(8))
        except BucketError as error:
            say(f'NOTE: {error}; the prepared data stay in {made}, on this machine alone')
    return made
