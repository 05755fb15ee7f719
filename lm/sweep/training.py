"""A sweep from its cells to its report: dealt to hosts, in groups, by an engine, shown live."""

import contextlib
import functools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from lm.config.fields import AUTO
from lm.config.resolve import resolve
from lm.devices.check_mesh import check_devices, check_single
from lm.devices.mesh import make_mesh
from lm.launch.agreement import from_first, is_first, several
from lm.launch.exit_status import BAD_INPUT, DONE, SIGNALLED
from lm.launch.signals import caught_signals
from lm.launch.terminal import Terminal
from lm.record.machine import device_name
from lm.record.workdir import LOCK, SWEEP, check_shared, is_final
from lm.storage.files import locked
from lm.sweep.cells import Cell, cells, groups
from lm.sweep.engines import ENGINES, Work
from lm.sweep.hosts import dealt, first_then_others, join_sweep
from lm.sweep.ledger import open_sweep
from modules.choices import choose


class View(Protocol):
    """What is made of the records of a sweep, which eval reads (`eval.progress.SweepView`)."""

    def live(
        self, groups: Sequence[Sequence[Cell]], console: Console
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Shows where the runs stand; what it gives is to be called now and then."""

    def table(self) -> str:
        """Writes the table of all cells; how they ended, and its path."""

    def report(self) -> str:
        """Writes the report; its path."""


def train_sweep(
    base: dict[str, Any],
    sweep: Any,
    workdir: Path,
    view: View,
    *,
    continue_changed: bool,
    engine: str,
    runs_at_once: int,
    resources: dict[str, float] | None,
    start_over: bool,
) -> int:
    """Trains the cells that have not ended yet; the exit status.

    Args:
        base: the config that all cells start from, as nested dicts.
        sweep: config.sweep.
        workdir: the folder of the sweep.
        view: of its records.
        continue_changed: go on where the folder holds a sweep from another base.
        engine: a name of `lm.sweep.engines.ENGINES`.
        runs_at_once: at most so many in one program; 0: as many as fit.
        resources: of a task of the engine; None: its default.
        start_over: cells whose checkpoints are all lost begin anew.
    """
    train_groups = choose(ENGINES, engine, '--engine')
    grouped = groups(cells(base, sweep))
    host, hosts = join_sweep(grouped, engine)
    for group in grouped:
        check_group(group)
    tells = is_first() and host == 0  # of the whole sweep
    terminal, own = Terminal(silent=not tells), Terminal(silent=not is_first())
    say = own.say if host == 0 else lambda text: own.say(f'host {host}: {text}')
    open_folder = functools.partial(
        open_sweep, workdir, resolve(base), grouped, continue_changed, terminal.say
    )
    grouped = first_then_others(workdir, host, hosts, open_folder)
    check_shared(workdir / SWEEP)
    mine = dealt(grouped, host, hosts)
    n = sum(map(len, grouped))
    terminal.say(f'{workdir}: {n} cells, {len(grouped)} programs, on {device_name()}')
    if hosts > 1:
        say(f'{sum(map(len, mine))} of the {n} cells train on this host')
    with caught_signals() as caught, view.live(grouped, terminal.console) as tick:
        train_groups(Work(mine, workdir, caught, say, tick, runs_at_once, resources, start_over))
    return from_first(_end(workdir, mine, caught, view, terminal) if is_first() else None)


def check_group(group: Sequence[Cell]) -> None:
    """ValueError where runs of one program cannot be laid over the devices at hand."""
    recipe = group[0].recipe
    if several():
        check_single(recipe)
    elif recipe.mesh.axes != AUTO:
        check_devices(recipe, make_mesh(recipe.mesh, runs=len(group)))


def _end(
    workdir: Path,
    groups: Sequence[Sequence[Cell]],
    caught: list[int],
    view: View,
    terminal: Terminal,
) -> int:
    """Writes what is known of all cells; the exit status, which is of these alone."""
    with locked(workdir / LOCK, waiting='', say=lambda _: None):  # another host may end too
        terminal.say(view.table())
        if caught:
            terminal.say(f'{signal.Signals(caught[0]).name}: the same command goes on')
            return SIGNALLED + caught[0]
        terminal.say(view.report())
    folders = [workdir / cell.name for group in groups for cell in group]
    return DONE if all(map(is_final, folders)) else BAD_INPUT
