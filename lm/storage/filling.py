"""Folders of this machine that one command fills: complete, or marked as incomplete.

The mark is the file FOLDER/.incomplete. It is there before anything else and goes after all else is
written; whoever is killed in between leaves it. Readers refuse a folder with a mark, and the same
command removes what is there and fills it anew.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from lm.storage.files import sync

MARK = '.incomplete'
# By which others know a folder of theirs, so that they take one without it for none.
EXTERNAL_MARKERS = ('config.json', 'adapter_config.json')


def check_empty(folder: Path) -> None:
    """Raises ValueError where a folder to be filled holds something, unless it has the mark."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise ValueError(f'--out={folder} is not empty; give a new folder')


def check_complete(folder: Path) -> None:
    """Raises ValueError for a folder with the mark."""
    if (folder / MARK).exists():
        raise ValueError(
            f'{folder} is incomplete: the command that wrote it was interrupted. Give that command '
            'again, which writes it anew.'
        )


@contextlib.contextmanager
def fill_folder(folder: Path) -> Iterator[None]:
    """Marks a folder as incomplete until the block that fills it has ended without an error.

    What an interrupted command left there is removed first. What outsiders know the folder by, such
    as config.json, should come last. Raises ValueError for a folder that `check_empty` refuses.
    """
    check_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    sync(folder)
    left = (path for path in folder.iterdir() if path.name != MARK)
    for path in sorted(left, key=lambda path: path.name not in EXTERNAL_MARKERS):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    yield
    (folder / MARK).unlink()
    sync(folder)
