"""Marks: a tracker's progress with a run, as a file in the run's folder.

Before the tracker hears of a run, the mark records the run's name there, so that the successor of a
killed process finds the same run again. When the tracker has stored rows, the mark records their
last step. Rows that were stored but not yet noted, because a process was killed in between, are
known to the tracker itself (`eval.sync.trackers.Session`).
"""

import dataclasses
import hashlib
import re
import secrets
from pathlib import Path
from typing import cast

from eval.sync.records import MAX_SECONDS, MAX_STEPS, TrackedRun
from lm.storage.files import UnreadableFile, read_json, seal_record, write_json

NOTHING = -1  # the step of a run without sent rows


@dataclasses.dataclass
class TrackerMark:
    """A tracker's progress with a run. run: its name there; began: the start of its time axis."""

    tracker: str
    where: str
    run: str
    config: str  # the digest of its config
    began: float
    step: int = NOTHING
    summary: str = ''  # the digest of the sent summary.json

    @classmethod
    def new(cls, tracker: str, destination: str, source: TrackedRun) -> 'TrackerMark':
        """Returns the mark of a run that the tracker does not have.

        Two runs of one config, in two folders, get different names.

        Args:
          tracker: the tracker's name in TRACKERS.
          destination: the tracker's destination.
          source: the run.
        """
        name = f'{source.digest}-{secrets.token_hex(4)}'
        return cls(tracker, destination, name, source.digest, source.began)

    def write(self, path: Path) -> None:
        write_json(path, seal_record(dataclasses.asdict(self)))


def read_mark(path: Path) -> TrackerMark | None:
    """Returns the mark in a file, or None. Raises UnreadableFile if the file is damaged."""
    try:
        mark = TrackerMark(**read_json(path))
        check(mark)
        return mark
    except FileNotFoundError:
        return None
    except (UnreadableFile, TypeError, OverflowError, OSError) as error:
        raise UnreadableFile(
            f'{error}. Delete {path} to send all rows to a new run in the tracker.'
        ) from error


def check(mark: TrackerMark) -> None:
    """Raises TypeError for a mark that was not written by us: of other types, or out of bounds."""
    for field in dataclasses.fields(TrackerMark):
        value = getattr(mark, field.name)
        if type(value) is not field.type and (type(value), field.type) != (int, float):
            kind = cast(type, field.type)  # no string: this file evaluates its annotations
            raise TypeError(f'{field.name} is not of type {kind.__name__}')
    if not re.fullmatch(r'[\w-]{1,64}', mark.run, re.ASCII):  # it is part of queries and paths
        raise TypeError('run is not a name')
    if not NOTHING <= mark.step < MAX_STEPS or not 0 <= mark.began < MAX_SECONDS:
        raise TypeError('step or began is out of bounds')


def file_name(tracker: str, destination: str, ending: str = 'json') -> str:
    """Returns a name such as sync-mlflow-1a2b3c4d.json: a file for each destination.

    Args:
      tracker: the tracker's name in TRACKERS.
      destination: the tracker's destination.
      ending: 'json' for the mark, 'lock' for its lock.
    """
    digest = hashlib.sha256(destination.encode()).hexdigest()[:8]
    return f'sync-{tracker}-{digest}.{ending}'


def without_password(uri: str) -> str:
    """Returns a URI without its password, to be printed and stored where others read it."""
    return re.sub(r'//[^/@]*@', '//', uri)
