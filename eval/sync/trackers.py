"""The trackers, and what one has to offer."""

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
    """A run that is open at a tracker. All methods may raise any error; a session that has raised
    one is closed, and another opened.
    """

    def last_step(self) -> int | None:
        """The last step that the tracker has, NOTHING for none; None if only the mark knows."""

    def send(self, steps: Sequence[StepValues]) -> None:
        """Sends all numbers of these steps, which rise; returns once the tracker has taken them.

        Steps of which it has a part already, as of a process that was killed, are completed:
        nothing is there twice.
        """

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Sends the summary of a run that has ended, perhaps for now: then it is called again."""

    def close(self) -> None: ...


class Tracker(Protocol):
    """A place that runs are sent to. Raises ValueError where it cannot be used, before any run."""

    most_open: ClassVar[int]  # sessions at once
    reopen_sec: ClassVar[float]  # between two sessions of a run that goes on, where more are wanted
    certain_after: ClassVar[str]  # 'send' or 'close' of a session: when it has kept the rows
    destination: str  # the place, as it is printed and stored

    def __init__(self, uri: str | None, project: str | None): ...

    def open(self, source: TrackedRun, name: str, began: float) -> Session:
        """Opens the run that is called `name` there, which may be new."""


TRACKERS: dict[str, type[Tracker]] = {'mlflow': Mlflow, 'wandb': Wandb}


def make_tracker(name: str, uri: str | None = None, project: str | None = None) -> Tracker:
    """Returns a tracker. Raises ValueError for an unknown name, and where its package lacks."""
    kind = choose(TRACKERS, name, '--to')
    if lacking := [one for one in PACKAGES[name] if importlib.util.find_spec(one) is None]:
        raise ValueError(format_missing(name, lacking))
    try:
        return kind(uri, project)
    except Exception as error:  # of any kind
        place = '' if uri is None else f' at {without_password(uri)}'
        said = first_line(error) or type(error).__name__
        raise ValueError(f'{name}{place} cannot be used: {said}') from error


def format_missing(name: str, packages: Sequence[str]) -> str:
    return (
        f'{name} needs {" and ".join(packages)}: pip install "evenkeel[{name}]", or uv sync '
        f'--extra {name}'
    )
