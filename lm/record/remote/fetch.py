"""Reads what a bucket holds of runs: a local folder gets their records, and the checkpoints that
are asked for. Nothing is written there and no lease is taken: a run may train there meanwhile.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from lm.record.checkpoint import FOLDER
from lm.record.metrics import FILE
from lm.record.remote.local_copy import CHECKPOINT, Copy, split, step_of
from lm.record.workdir import CONFIG, SUMMARY, SWEEP
from lm.storage import complete_folders
from lm.storage.buckets import Stored, is_url, open_bucket
from lm.storage.files import locked

KIND = 'reads'
RECORDS = (CONFIG, SUMMARY, SWEEP, FILE, 'cells.parquet')
OWN, WORDS = f'{FOLDER}/', 'tokenizer/'  # begin the names of what a model is made of
TRIES = 5  # of a workdir in which a run deletes a checkpoint while it is read


def at_hand(path: str | Path) -> Path:
    """`path` itself, or for a URL a folder of this machine with the records of the run, the sweep
    or the runs below it, as they are now.

    Raises ValueError for a URL of another kind and where obstore is missing; OSError where the
    bucket cannot be reached or read.
    """
    if not is_url(path):
        return Path(path)
    with _copy(path) as copy:
        _fetch_files(copy, copy.bucket.list(), _is_record)
        return copy.folder


def checkpoints_at(url: str) -> Iterator[tuple[Path, int]]:
    """(folder of checkpoints, step) of those of a workdir, the newest first, or of the one that the
    URL names. Each is fetched when it is asked for. There may be none.
    """
    workdir, asked = of_workdir(url)
    given: set[int] = set()
    n_failed = 0
    while True:
        with _copy(workdir) as copy:
            listing = copy.bucket.list()
            own = {name: stored for name, stored in listing.items() if name.startswith(OWN)}
            marks = complete_folders.whole_folders(copy.bucket, own)
            left = {step_of(name) for name in marks if asked in (None, step_of(name))} - given
            if not left:
                return
            name = f'{OWN}{max(left)}'
            try:
                _fetch_files(copy, listing, lambda name: _is_record(name) or name.startswith(WORDS))
                copy.drop([name for name in copy.folders if name not in marks])
                copy.fetch_folder(name, marks[name])
            except FileNotFoundError:  # a run has deleted it meanwhile
                n_failed += 1
                if n_failed == TRIES:
                    raise
                continue
        given.add(max(left))
        yield copy.folder / FOLDER, max(left)


def of_workdir(url: str) -> tuple[str, int | None]:
    """(the URL of a workdir, the step) for WORKDIR/checkpoints/STEP; None for a workdir alone."""
    match = CHECKPOINT.fullmatch(f'{PurePosixPath(url.partition("://")[2])}/-')
    if match is None or f'/{FOLDER}/' not in match[1]:
        return url, None
    return url.rstrip('/').rsplit('/', 2)[0], step_of(match[1])


@contextlib.contextmanager
def _copy(url: str) -> Iterator[Copy]:
    """The folder for it, with no other process in it."""
    copy = Copy(open_bucket(url), KIND)
    copy.place.mkdir(parents=True, exist_ok=True)
    with locked(copy.place / 'lock', waiting='', say=lambda _: None):
        copy.open()
        yield copy


def _fetch_files(
    copy: Copy, listing: Mapping[str, Stored], is_wanted: Callable[[str], bool]
) -> None:
    """And drops what is not there any more."""
    files, _ = split(listing)
    copy.drop([name for name in copy.files if name not in files])
    copy.fetch_files({name: stored for name, stored in files.items() if is_wanted(name)})
    copy.save()


def _is_record(name: str) -> bool:
    """Of the run or sweep, of a cell, or of one of the runs or sweeps that lie below."""
    parts = PurePosixPath(name).parts
    return len(parts) <= 3 and parts[-1] in RECORDS
