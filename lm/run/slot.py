"""The runs of a wave: what each is asked to be, and where it stands."""

import dataclasses
import enum
from pathlib import Path

from lm.config.recipe import Recipe
from lm.launch.terminal import Terminal
from lm.run.journal import Journal


class Status(enum.StrEnum):
    """Where a run of a wave stands."""

    TRAINING = enum.auto()
    DONE = enum.auto()
    STOPPED = enum.auto()
    DIVERGED = enum.auto()
    FAILED = enum.auto()


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run to be trained: what it is, the folder that holds it, and the terminal it speaks to.

    continue_changed: go on from a checkpoint that was trained on other data. start_over: begin anew
    where all checkpoints are damaged or gone.
    """

    recipe: Recipe
    folder: Path
    terminal: Terminal
    continue_changed: bool = False
    start_over: bool = False


@dataclasses.dataclass
class Slot:
    """The place of a run in a wave. rolled_back: it has gone back since the last dispatch."""

    journal: Journal
    status: Status = Status.TRAINING
    rolled_back: bool = False

    @property
    def recipe(self) -> Recipe:
        return self.journal.recipe

    @property
    def active(self) -> bool:
        return self.status == Status.TRAINING


def raise_error(folder: Path, error: Exception) -> None:
    """What goes wrong with a run ends the wave."""
    del folder
    raise error
