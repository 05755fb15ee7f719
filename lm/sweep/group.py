"""Many runs in one program: the groups of a sweep, each compiled once.

Cells that differ only in what a program takes as data (`lm.config.RUN_PATHS`) form a group;
one that does not fit in memory trains in waves (`lm.run.wave`).
"""

import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path

import jax

from lm.config import Config
from lm.many import run_axis
from lm.record.host import device_memory_bytes
from lm.record.workdir import PATIENCE_SEC, InUse, is_final, open_workdir, record_failure
from lm.run.experiment import Experiment
from lm.run.program import Program, runs_that_fit
from lm.run.slot import RunSpec
from lm.run.table import parameter_count
from lm.run.terminal import CellTerminal
from lm.run.wave import Wave
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
    waiting = [cell for cell in group if not is_final(workdir / cell.name)]
    if not waiting:
        return
    try:
        program, slots = _compiled(waiting, runs_at_once, say)
    except Exception as error:  # of any kind: the other groups can still be trained
        for cell in waiting:
            with contextlib.ExitStack() as held:
                if _open(held, workdir / cell.name, cell, time.monotonic(), say):
                    record_failure(workdir / cell.name, error, say)
        return
    for start in range(0, len(waiting), slots):
        if caught:
            return
        part = waiting[start : start + slots]
        wait_until = time.monotonic() + PATIENCE_SEC  # for all together
        with contextlib.ExitStack() as held:
            opened = [c for c in part if _open(held, workdir / c.name, c, wait_until, say)]
            runs = [
                RunSpec(
                    cell.config,
                    workdir / cell.name,
                    CellTerminal(cell.name, say),
                    start_over=start_over,
                )
                for cell in opened
            ]
            try:
                _train(program, runs, slots, caught, say, tick)
            except Exception as error:
                for run in runs:
                    if not is_final(run.folder):
                        record_failure(run.folder, error, say)


def _open(
    held: contextlib.ExitStack, folder: Path, cell: Cell, wait_until: float, say: Callable
) -> bool:
    """Whether the run can be trained; its folder is held until `held` ends."""
    try:
        held.enter_context(open_workdir(folder, cell.config, False, say, wait_until))
        return not is_final(folder)  # which another process may have trained meanwhile
    except InUse as error:  # nothing is wrong with that run, and its folder is not ours
        say(f'{folder.name} left out: {error}')
    except (OSError, ValueError) as error:
        record_failure(folder, error, say)
    return False


def _compiled(cells: list[Cell], runs_at_once: int, say: Callable) -> tuple[Program, int]:
    """(the program of the cells, how many of them a wave has room for)."""
    experiment = Experiment(longest(cells), say, len(cells))
    if jax.process_count() > 1:
        raise ValueError('a sweep trains in one process; --engine=ray goes beyond one host')
    how = run_axis(experiment.config.kernels.run_axis, experiment.platform)
    program = Program(experiment, how)
    say(
        f'compiling one program for {len(cells)} runs of {parameter_count(experiment.learner):,} '
        f'parameters ({cells[0].changes}{", ..." if len(cells) > 1 else ""})'
    )
    return program, slots_for(program, len(cells), runs_at_once, say)


def _train(
    program: Program,
    runs: list[RunSpec],
    slots: int,
    caught: list[int],
    say: Callable[[str], None],
    tick: Callable[[], None],
) -> None:
    """One wave. An error of one run leaves the others."""
    if not runs:
        return

    def on_failure(folder: Path, error: Exception) -> None:
        record_failure(folder, error, say)

    say(f'{len(runs)} runs side by side ({program.how}), compiled in {program.compile_sec:.1f} s')
    with contextlib.closing(Wave(program, runs, slots, on_failure)) as wave:
        wave.compile()
        wave.train(caught, tick)


def longest(cells: list[Cell]) -> Config:
    """The config of the run with the most steps, which the text has to suffice for."""
    return max((cell.config for cell in cells), key=lambda config: config.train.steps)


def slots_for(
    program: Program, runs: int, runs_at_once: int, say: Callable[[str], None] = print
) -> int:
    """How many runs a wave has room for: a multiple of the mesh axis `run`."""
    multiple = program.experiment.mesh.shape['run']
    wanted = min(runs, runs_at_once or runs, most_files(multiple))
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


def most_files(multiple: int) -> int:
    """The runs whose files a wave may hold open: MOST_RUNS, or what the system's limit leaves, and
    a multiple of `multiple`.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_RUNS if allowed == resource.RLIM_INFINITY else min(MOST_RUNS, allowed - OTHER_FILES)
    return max(multiple, most // multiple * multiple)
