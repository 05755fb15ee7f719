"""Local folders that one command fills: complete, or marked as incomplete.

The mark is the file FOLDER/.incomplete. It is created first and removed after everything else is
written, so a killed command leaves it. Readers refuse a folder with a mark, and the same command
removes the content, except FOLDER/.parts, and fills the folder again.
"""

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path

from lm.storage.files import sync

MARK = '.incomplete'
PARTS = '.parts'  # a folder with what an interrupted command had finished
# Other programs recognise their folders by these files, and ignore a folder without them.
EXTERNAL_MARKERS = ('config.json', 'adapter_config.json')


def check_empty(folder: Path) -> None:
    """Raises ValueError if a folder to be filled is not empty, unless it has the mark."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise ValueError(f'--out={folder} is not empty; use a new folder')


def check_complete(folder: Path) -> None:
    """Raises ValueError for a folder with the mark."""
    if (folder / MARK).exists():
        raise ValueError(
            f'{folder} is incomplete: the command that wrote it was interrupted. Run that command '
            'again to rewrite it.'
        )


def _mark(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    sync(folder)


def open_parts(folder: Path) -> Path:
    """Marks a folder as incomplete, and returns its folder for finished work.

    `fill_folder` removes it at its end. Raises ValueError for a folder that `check_empty` refuses.
    """
    check_empty(folder)
    _mark(folder)
    (folder / PARTS).mkdir(exist_ok=True)
    return folder / PARTS


@contextlib.contextmanager
def fill_folder(folder: Path) -> Generator[None]:
    """Marks a folder as incomplete until the block that fills it ends without an error.

    Files of an interrupted command are removed first. Files by which other programs recognise the
    folder, such as config.json, should be written last. Raises ValueError for a folder that
    `check_empty` refuses.
    """
    check_empty(folder)
    _mark(folder)
    # Markers first: if this is interrupted too, no other program recognises the rest.
    leftovers = (path for path in folder.iterdir() if path.name not in (MARK, PARTS))
    for path in sorted(leftovers, key=lambda path: path.name not in EXTERNAL_MARKERS):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    yield
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    (folder / MARK).unlink()
    sync(folder)
