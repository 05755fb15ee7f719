"""Many runs in one program: the groups of a sweep, each compiled once.

Cells that differ only in what a program takes as data (`lm.cells.RUN_PATHS`) form a group; one that
does not fit in memory trains in waves (`lm.wave`).
"""

from collections.abc import Callable
from pathlib import Path

import jax

from lm.cells import Cell
from lm.config import Config
from lm.host import device_memory_bytes
from lm.many import run_axis
from lm.setting import Setting
from lm.sweep_program import Program, runs_that_fit
from lm.wave import Wave
from lm.workdir import is_final, open_workdir, record_failure


def train_group(
    group: list[Cell],
    workdir: Path,
    *,
    caught: list[int],
    say: Callable[[str], None] = print,
    tick: Callable[[], None] = lambda: None,
    runs_at_once: int = 0,
) -> None:
    """Trains the cells of a group that have not ended, each in workdir/NAME.

    runs_at_once: at most so many in one wave; 0: as many as fit in memory. `caught` is a list that
    signals are put in: runs are then saved, and this returns. `tick` is called after every step.
    An error ends the cells it concerns, as failed, and is recorded with them.
    """
    waiting = [cell for cell in group if not is_final(workdir / cell.name)]
    openable = [cell for cell in waiting if _open(workdir / cell.name, cell, say)]
    if not openable:
        return
    try:
        setting = Setting(longest(openable), say, len(openable))
        if jax.process_count() > 1:
            raise ValueError('a sweep trains in one process; --engine=ray goes beyond one host')
        how = run_axis(setting.config.kernels.run_axis, setting.platform)
        program = Program(setting, how)
        slots = slots_for(program, len(openable), runs_at_once, say)
        for start in range(0, len(openable), slots):
            if caught:
                return
            cells = openable[start : start + slots]
            say(f'{len(cells)} runs side by side ({how}), compiled in {program.compile_sec:.1f} s')
            Wave(program, cells, workdir, slots, say).train(caught, tick)
    except Exception as error:  # of any kind: the other groups can still be trained
        for cell in openable:
            if not is_final(workdir / cell.name):
                record_failure(workdir / cell.name, error, say)


def _open(folder: Path, cell: Cell, say: Callable[[str], None]) -> bool:
    try:
        open_workdir(folder, cell.config, continue_changed=False)
        return True
    except (OSError, ValueError) as error:
        record_failure(folder, error, say)
        return False


def longest(cells: list[Cell]) -> Config:
    """The config of the run with the most steps, which the text has to suffice for."""
    return max((cell.config for cell in cells), key=lambda config: config.train.steps)


def slots_for(
    program: Program, runs: int, runs_at_once: int, say: Callable[[str], None] = print
) -> int:
    """How many runs a wave has room for: a multiple of the mesh axis `run`."""
    multiple = program.setting.mesh.shape['run']
    wanted = min(runs, runs_at_once) if runs_at_once else runs
    limit = device_memory_bytes() // (program.setting.mesh.size if program.shares_memory else 1)
    most = runs_that_fit(wanted, multiple, limit, program.memory_bytes)
    waves = -(-runs // most)
    slots = -(-runs // waves)  # waves of equal size
    slots = -(-slots // multiple) * multiple
    if waves > 1:
        say(
            f'{waves} waves of {slots} runs: one needs {program.memory_bytes(slots) / 1e9:.2f} GB '
            f'of {limit / 1e9:.2f} GB a device'
        )
    return slots
