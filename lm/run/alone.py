"""A run that trains by itself: what it is asked before, and what it says first and last."""

import signal
from pathlib import Path

import jax

from lm.config.recipe import Recipe
from lm.devices.check_mesh import check_single
from lm.launch.agreement import is_first
from lm.launch.exit_status import DIVERGED, DONE, SIGNALLED
from lm.launch.terminal import Terminal
from lm.record.machine import device_name
from lm.run.slot import Slot, Status
from lm.run.start import check_run


def check(recipe: Recipe) -> None:
    """ValueError where the config cannot be trained with the text and the devices at hand."""
    check_run(recipe)
    check_single(recipe)


def open_terminal() -> Terminal:
    """What process 0 says is shown; of the others nothing is."""
    return Terminal(silent=not is_first())


def where(workdir: Path) -> str:
    """The first line of a run."""
    return f'{workdir} on {device_name()}, jax {jax.__version__}'


def exit_status(slot: Slot, caught: list[int]) -> int:
    """Says how the run ended. caught: the signals that came."""
    journal, say = slot.journal, slot.journal.terminal.say
    if slot.status == Status.DIVERGED:
        say(f'last good checkpoint: {journal.last_good()}')
        return DIVERGED
    if slot.status == Status.STOPPED:
        name = signal.Signals(caught[0]).name
        what = f'saved step {journal.step}' if journal.step else 'nothing trained yet'
        say(f'{name}: {what} in {journal.workdir}; the same command goes on')
        return SIGNALLED + caught[0]
    say(f'done: {journal.workdir}, {journal.wall_sec() / 60:.1f} min')
    return DONE
