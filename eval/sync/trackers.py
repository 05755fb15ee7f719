"""The trackers, and the protocols that they implement."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from eval.sync.marks import without_password
from eval.sync.records import StepValues, TrackedRun
from eval.sync.to_mlflow import Mlflow
from eval.sync.to_wandb import Wandb
from lm.launch.tracking import PACKAGES
from lm.storage.files import first_line
from modules.choices import choose


class Session(Protocol):
    """An open run of a tracker. All methods may raise any error; the session is then replaced."""

    def last_step(self) -> int | None:
        """Returns the tracker's last step, NOTHING if it has none; None if only the mark knows."""

    def send(self, steps: Sequence[StepValues]) -> None:
        """Sends all numbers of these steps, in ascending order; returns once the tracker has them.

        Steps that it has in part, for instance from a killed process, are completed; no value is
        stored twice.
        """

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Sends the summary of a run that has ended.

        It is called again if the run resumes and ends later.
        """

    def close(self) -> None: ...


class Tracker(Protocol):
    """A service that stores runs. Raises ValueError at once if it cannot be used."""

    most_open: ClassVar[int]  # sessions at once
    reopen_sec: ClassVar[float]  # between two sessions of a run, if other runs need sessions
    certain_after: ClassVar[str]  # 'send' or 'close': the call after which rows are stored
    destination: str  # printed, and stored in marks

    def __init__(self, uri: str | None, project: str | None): ...

    def open(self, source: TrackedRun, name: str, began: float) -> Session:
        """Opens the run called `name` at the tracker, which may be new.

        Args:
          source: the run.
          name: its name in the mark.
          began: start of its time axis, in seconds since 1970.
        """


TRACKERS: dict[str, type[Tracker]] = {'mlflow': Mlflow, 'wandb': Wandb}


def make_tracker(name: str, uri: str | None = None, project: str | None = None) -> Tracker:
    """Returns a tracker. Raises ValueError for an unknown name, and if its package is missing.

    Args:
      name: a key of TRACKERS.
      uri: server or database; the tracker's default if None.
      project: project or experiment; the tracker's default if None.
    """
    tracker_class = choose(TRACKERS, name, '--to')
    if missing_packages := [
        package for package in PACKAGES[name] if importlib.util.find_spec(package) is None
    ]:
        raise ValueError(format_missing(name, missing_packages))
    try:
        return tracker_class(uri, project)
    except Exception as error:  # of any kind
        at_uri = '' if uri is None else f' at {without_password(uri)}'
        reason = first_line(error) or type(error).__name__
        raise ValueError(f'{name}{at_uri} cannot be used: {reason}') from error


def format_missing(name: str, packages: Sequence[str]) -> str:
    return (
        f'{name} needs {" and ".join(packages)}. Install with pip install "evenkeel[{name}]" or '
        f'uv sync --extra {name}.'
    )
