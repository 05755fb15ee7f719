"""The runs of a wave (RunSpec requests a run, Slot holds it), and the messages of a single run."""

import dataclasses
import enum
import signal
from collections.abc import Callable
from pathlib import Path

import jax

from lm.config.recipe import Recipe
from lm.config.resolve import to_dict
from lm.devices.check_mesh import check_single_run
from lm.launch.distributed import broadcast_from_first, is_first
from lm.launch.exit_status import DIVERGED, DONE, SIGNALLED
from lm.launch.terminal import Terminal, format_duration
from lm.record.code import running_code
from lm.record.machine import device_name, versions
from lm.record.run import Run
from lm.record.time_use import DATA_WAIT, STEPS, Preparation
from lm.record.trial import try_checkpoint
from lm.run.branch import check_branch
from lm.run.journal import Journal
from lm.run.program import build_without_text, locate_data
from lm.run.start import check_run

BUDGET_TOLERANCE = 0.05  # a larger difference from train.seconds is worth a line


class Status(enum.StrEnum):
    """Status of a run of a wave."""

    TRAINING = enum.auto()
    DONE = enum.auto()
    STOPPED = enum.auto()
    DIVERGED = enum.auto()
    FAILED = enum.auto()


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run to train, with its folder and terminal."""

    recipe: Recipe
    folder: Path
    terminal: Terminal
    continue_changed: bool = False  # resume from a checkpoint that was trained on other data
    start_over: bool = False  # begin anew if all checkpoints are damaged or lost
    preparation: Preparation = dataclasses.field(default_factory=Preparation)


@dataclasses.dataclass
class Slot:
    """The place of a run in a wave."""

    journal: Journal
    status: Status = Status.TRAINING
    is_rolled_back: bool = False  # since the last dispatch
    is_waiting: bool = False  # for runs in an earlier stage, which the last dispatch trained

    @property
    def recipe(self) -> Recipe:
        return self.journal.recipe

    @property
    def is_active(self) -> bool:
        return self.status == Status.TRAINING


def check(recipe: Recipe, workdir: Path) -> None:
    """Raises ValueError if the config does not suit the text and the available devices.

    Called before the run's folder is opened and its text prepared, which can take minutes.
    """
    check_run(recipe, workdir)
    check_single_run(recipe)
    tokenizer, platform = locate_data(recipe, workdir).tokenizer, jax.devices()[0].platform
    check_branch(recipe, build_without_text(recipe, tokenizer, platform), workdir)


def try_storage(recipe: Recipe, workdir: Path) -> None:
    """Raises OSError if the folder cannot hold the run's checkpoints; all processes call it.

    A run that is done is skipped, as it may have no checkpoint to write.
    """
    if not broadcast_from_first(Run(workdir).status == Status.DONE if is_first() else None):
        record = {'config': to_dict(recipe), 'versions': versions(), 'code': running_code()}
        try_checkpoint(workdir, record)


def open_terminal() -> Terminal:
    """Returns the terminal of a single run; only process 0 prints."""
    return Terminal(silent=not is_first())


def format_header(workdir: Path) -> str:
    """Returns the first line of a run."""
    return f'{workdir} on {device_name()}, jax {jax.__version__}'


def report_finished(slot: Slot, say: Callable[[str], object]) -> int:
    """Says that a single run has ended before, and returns its exit status."""
    journal, steps = slot.journal, slot.recipe.train.steps
    say(f'{journal.workdir} is finished: step {journal.step} of {steps}, nothing left to do')
    return DONE


def report_exit(slot: Slot, signals: list[int], say: Callable[[str], object]) -> int:
    """Says how a single run ended, and returns its exit status.

    Args:
      slot: the run.
      signals: the received signals.
      say: receives the line.
    """
    journal = slot.journal
    if slot.status == Status.DIVERGED:
        say(f'last good checkpoint: {journal.find_last_good()}')
        return DIVERGED
    if slot.status == Status.STOPPED:
        name = signal.Signals(signals[0]).name
        outcome = f'saved step {journal.step}' if journal.step else 'nothing trained yet'
        say(f'{name}: {outcome} in {journal.workdir}. Run the same command to resume.')
        return SIGNALLED + signals[0]
    seconds = journal.seconds()
    for line in describe_budget(slot.recipe, seconds[STEPS] + seconds[DATA_WAIT]):
        journal.terminal.say(line)
    say(f'done: {journal.workdir}, {format_duration(journal.wall_sec())}')
    return DONE


def describe_budget(recipe: Recipe, train_sec: float) -> list[str]:
    """Returns a line if the steps took longer or shorter than train.seconds; else [].

    train_sec: seconds of all steps, with waiting for data.
    """
    seconds = recipe.train.seconds
    if seconds is None or abs(train_sec - seconds) <= BUDGET_TOLERANCE * seconds:
        return []
    return [
        f'NOTE: train.seconds={seconds:g}, but the {recipe.train.steps:,} steps took '
        f'{train_sec:.3g} s: their time has changed since it was measured'
    ]
