"""Many runs in one program: the groups of a sweep, each compiled once.

Cells that differ only in what a program takes as data (`lm.config.fields.RUN_PATHS`) form a group;
one that does not fit in memory trains in waves (`lm.run.wave`). Where several processes train
together, each run has the devices of all, and a wave is of one run. What they do follows from
process 0's disk then, and an error of a run ends the job.
"""

import contextlib
import functools
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.config.fields import RUN_PATHS
from lm.config.recipe import Recipe
from lm.devices.run_axis import SINGLE, run_axis
from lm.launch.agreement import from_first, is_first, several
from lm.launch.signals import nothing_to_lose
from lm.launch.stopping import asked_to_stop
from lm.launch.terminal import CellTerminal
from lm.record.machine import device_memory_bytes
from lm.record.workdir import (
    PATIENCE_SEC,
    InUse,
    held_workdir,
    is_final,
    read_config,
    record_failure,
    write_config,
)
from lm.run.describe import notes_of_all
from lm.run.experiment import Experiment, open_text
from lm.run.parameter_table import parameter_count
from lm.run.program import Program, runs_that_fit
from lm.run.slot import RunSpec
from lm.run.wave import Wave, closing
from lm.storage.files import Unreadable
from lm.sweep.cells import Cell

MOST_RUNS = 256  # in one wave: each holds a descriptor, the lock of its folder
OTHER_FILES = 128  # descriptors of a process that trains, besides: libraries, text, checkpoints


def train_group(
    group: list[Cell],
    workdir: Path,
    *,
    caught: list[int],
    say: Callable[[str], None] = print,
    tick: Callable[[], None] = lambda: None,
    runs_at_once: int = 0,
    start_over: bool = False,
) -> None:
    """Trains the cells of a group that have not ended, each in workdir/NAME.

    runs_at_once: at most so many in one wave; 0: as many as fit in memory, MOST_RUNS at most and
    fewer where the process may open few files. `caught` is a list that signals are put in: runs are
    then saved, and this returns. `tick` is called after every step. start_over: a cell whose
    checkpoints are all damaged begins anew. An error ends the cells it concerns, as failed, and is
    recorded with them.
    """
    waiting = _seen_by_first(lambda: _waiting(group, workdir, say), group)
    if waiting:
        for note in notes_of_all([cell.recipe for cell in waiting]):
            say(f'NOTE: {note}')

    @functools.cache
    def compiled() -> tuple[Program, int]:
        with nothing_to_lose(caught):
            return _compiled(waiting, runs_at_once, say)

    for part in _even_parts(waiting, from_first(most_files())):
        if asked_to_stop(caught):
            return
        wait_until = time.monotonic() + PATIENCE_SEC  # for all together
        with contextlib.ExitStack() as held:
            opened = _seen_by_first(
                lambda part=part, held=held, wait_until=wait_until: [
                    c for c in part if _open(held, workdir / c.name, c, wait_until, say)
                ],
                part,
            )
            runs = [_run_of(cell, workdir, say, start_over) for cell in opened]
            try:
                if runs:
                    _train(*compiled(), runs, caught, say, tick)
            except Exception as error:  # of any kind: the other groups can still be trained
                if several():  # the others wait for this process
                    raise
                for run in runs:
                    if not is_final(run.folder):
                        record_failure(run.folder, error, say)


def _seen_by_first(look: Callable[[], list[Cell]], cells: list[Cell]) -> list[Cell]:
    """Those of the cells that process 0 finds with `look`, on all."""
    names = from_first([cell.name for cell in look()] if is_first() else None)
    return [cell for cell in cells if cell.name in names]


def _waiting(group: list[Cell], workdir: Path, say: Callable) -> list[Cell]:
    waiting = []
    for cell in group:
        if is_final(workdir / cell.name):
            _repair_config(workdir / cell.name, cell, say)
        else:
            waiting.append(cell)
    return waiting


def _repair_config(folder: Path, cell: Cell, say: Callable) -> None:
    """Writes a damaged config.json of a cell that has ended: it is known from the sweep."""
    try:
        read_config(folder)
    except Unreadable as error:
        say(f'NOTE: {error}. It is written anew.')
        write_config(folder, cell.recipe)


def _run_of(cell: Cell, workdir: Path, say: Callable, start_over: bool) -> RunSpec:
    terminal = CellTerminal(cell.name, say)
    return RunSpec(cell.recipe, workdir / cell.name, terminal, start_over=start_over)


def _even_parts(cells: list[Cell], most: int) -> Iterator[list[Cell]]:
    parts = -(-len(cells) // most)
    size = -(-len(cells) // max(parts, 1))
    return (cells[start : start + size] for start in range(0, len(cells), size or 1))


def _open(
    held: contextlib.ExitStack, folder: Path, cell: Cell, wait_until: float, say: Callable
) -> bool:
    """Whether the run can be trained; its folder is held until `held` ends."""
    try:
        held.enter_context(held_workdir(folder, cell.recipe, False, say, wait_until))
        return not is_final(folder)  # which another process may have trained meanwhile
    except InUse as error:  # nothing is wrong with that run, and its folder is not ours
        say(f'{folder.name} left out: {error}')
    except (OSError, ValueError) as error:
        record_failure(folder, error, say)
    return False


def _compiled(cells: list[Cell], runs_at_once: int, say: Callable) -> tuple[Program, int]:
    """(the program of the cells, how many of them a wave has room for)."""
    recipe = longest(cells)
    experiment = Experiment(recipe, open_text(recipe, say), say, side_by_side(len(cells)))
    how = run_axis(experiment.recipe.config.kernels.run_axis, experiment.platform)
    program = Program(experiment, SINGLE if several() else how)
    alike = [f'{p}={v}' for p, v in cells[0].changes.items() if p not in RUN_PATHS]
    say(
        f'compiling one program for {len(cells)} runs of {parameter_count(experiment.learner):,} '
        f'parameters{" with " * bool(alike)}{", ".join(alike)}'
    )
    return program, 1 if several() else slots_for(program, len(cells), runs_at_once, say)


def side_by_side(runs: int) -> int:
    """How many of `runs` runs may train at once."""
    return 1 if several() else runs


def _train(
    program: Program,
    slots: int,
    runs: list[RunSpec],
    caught: list[int],
    say: Callable[[str], None],
    tick: Callable[[], None],
) -> None:
    """In waves of `slots` runs. An error of one run leaves the others."""

    def on_failure(folder: Path, error: Exception) -> None:
        if several():
            raise error
        record_failure(folder, error, say)

    for start in range(0, len(runs), slots):
        if asked_to_stop(caught):
            return
        part = runs[start : start + slots]
        if not several():
            sec = program.compile_sec
            say(f'{len(part)} runs side by side ({program.how}), compiled in {sec:.1f} s')
        with closing(Wave(program, part, slots, on_failure)) as wave:
            wave.compile()
            for is_due in wave.steps(caught):
                if is_due:
                    wave.evaluate()
                    wave.diagnose()
                    wave.save()
                    wave.end_finished()
                    wave.compact()
                tick()


def longest(cells: list[Cell]) -> Recipe:
    """The config of the run with the most steps, which the text has to suffice for."""
    return max((cell.recipe for cell in cells), key=lambda recipe: recipe.train.steps)


def slots_for(
    program: Program, runs: int, runs_at_once: int, say: Callable[[str], None] = print
) -> int:
    """How many runs a wave has room for: a multiple of the mesh axis `run`."""
    multiple = program.experiment.mesh.shape['run']
    wanted = min(runs, runs_at_once or runs, max(multiple, most_files() // multiple * multiple))
    limit = device_memory_bytes() // (program.experiment.mesh.size if program.shares_memory else 1)
    most = runs_that_fit(wanted, multiple, limit, program.memory_bytes)
    waves = -(-runs // most)
    slots = -(-runs // waves)  # waves of equal size
    slots = -(-slots // multiple) * multiple
    if waves > 1:
        say(
            f'{waves} waves of {slots} runs, {MOST_RUNS} at most: one needs '
            f'{program.memory_bytes(slots) / 1e9:.2f} GB of {limit / 1e9:.2f} GB a device'
        )
    return slots


def most_files() -> int:
    """The runs whose folders a process may hold open: MOST_RUNS, or what the system's limit of open
    files leaves.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_RUNS
    return max(1, min(MOST_RUNS, allowed - OTHER_FILES))
