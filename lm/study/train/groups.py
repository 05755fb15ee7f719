"""Many runs in one program: the groups of a sweep, each compiled once.

Cells that differ only in what a program takes as data (`lm.config.fields.RUN_PATHS`) form a group;
one that does not fit in memory trains in waves (`lm.run.wave`). Where several processes train
together, each run has the devices of all, and a wave is of one run. What they do follows from
process 0's disk then, and an error of a run ends the job.
"""

import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lm.config.fields import RUN_PATHS
from lm.config.recipe import Recipe
from lm.devices.run_axis import SINGLE, select_run_axis
from lm.launch.distributed import broadcast_from_first, is_first, is_multiprocess, is_stop_requested
from lm.launch.signals import interruptible
from lm.launch.terminal import CellTerminal
from lm.record import workdir
from lm.record.code import describe_code, running_code, summarize_codes
from lm.record.machine import device_memory_bytes
from lm.record.remote.mirror import mirror_cell
from lm.record.run import Run
from lm.run.describe import list_sweep_notes
from lm.run.program import Experiment, Program, find_max_runs, open_text
from lm.run.runs import RunSpec, try_storage
from lm.run.tables import parameter_count
from lm.run.wave import Wave, closing
from lm.storage.buckets import for_each
from lm.storage.files import UnreadableFile
from lm.study.plan.cells import Cell, program_key

MAX_RUNS = 256  # in one wave: each holds a descriptor, the lock of its folder
OTHER_FILES = 128  # descriptors of a process that trains, besides: libraries, text, checkpoints


@dataclasses.dataclass
class Work:
    """The cells that a sweep has to train, and how."""

    groups: list[list[Cell]]  # by program
    workdir: Path  # of the sweep; each cell trains in workdir/NAME
    caught: list[int]  # receives signals: runs are then saved, and training returns
    say: Callable[[str], None] = print
    tick: Callable[[], None] = lambda: None  # called after every step
    runs_at_once: int = 0  # in one wave at most; 0: as many as fit in memory
    resources: dict[str, float] | None = None  # of one group on a cluster, such as {'GPU': 1}
    url: str | None = None  # of the sweep, if it is in a bucket
    is_storage_checked: bool = False  # whether a cell's folder has taken a tiny checkpoint
    start_over: bool = False  # cells whose checkpoints are all damaged begin anew
    # Those so far, where further runs of them may follow, and for how many runs they are compiled.
    programs: dict[tuple, Program] = dataclasses.field(default_factory=dict)
    sizes: dict[tuple, set[int]] = dataclasses.field(default_factory=dict)

    def folder(self, cell: Cell) -> Path:
        return self.workdir / cell.name

    def is_final(self, cell: Cell) -> bool:
        return Run(self.folder(cell)).is_final

    def fail(self, cells: Sequence[Cell], error: Exception) -> None:
        """Records the error with each cell that has not ended."""
        for cell in cells:
            if not self.is_final(cell):
                workdir.record_failure(self.folder(cell), error, self.say)


def train_group(group: list[Cell], work: Work) -> None:
    """Trains the cells of a group that have not ended. An error fails the cells it concerns."""
    waiting = _select_on_first(lambda: _list_waiting(group, work), group)
    if waiting:
        for note in list_sweep_notes([cell.recipe for cell in waiting]):
            work.say(f'NOTE: {note}')

    @functools.cache
    def compile_once() -> tuple[Program, int]:
        with interruptible(work.caught):
            return compile_program(waiting, work)

    for part in _split_evenly(waiting, broadcast_from_first(max_open_folders())):
        if is_stop_requested(work.caught):
            return
        with contextlib.ExitStack() as held:
            opened = _select_on_first(functools.partial(_open_cells, held, part, work), part)
            try:
                if opened:
                    _try_storage(opened[0], work)
                    _train_cells(*compile_once(), opened, work)
            except Exception as error:  # of any kind: the other groups can still be trained
                if is_multiprocess():  # the others wait for this process
                    raise
                work.fail(opened, error)


def _try_storage(cell: Cell, work: Work) -> None:
    """Tries, once for all cells of the work, whether their folders can hold checkpoints."""
    if not work.is_storage_checked:
        try_storage(cell.recipe, work.folder(cell))
        work.is_storage_checked = True


def _select_on_first(choose: Callable[[], list[Cell]], cells: list[Cell]) -> list[Cell]:
    """The cells that process 0 chooses, on all processes."""
    names = broadcast_from_first([cell.name for cell in choose()] if is_first() else None)
    return [cell for cell in cells if cell.name in names]


def _list_waiting(group: list[Cell], work: Work) -> list[Cell]:
    """The cells that have not ended; a damaged config.json of one that has is written anew."""
    for cell in filter(work.is_final, group):
        try:
            Run(work.folder(cell)).read_config()
        except (UnreadableFile, FileNotFoundError) as error:
            work.say(f'NOTE: {error}. It is written anew.')
            workdir.write_config(work.folder(cell), cell.recipe)
    return [cell for cell in group if not work.is_final(cell)]


def _split_evenly(cells: list[Cell], max_size: int) -> Iterator[list[Cell]]:
    parts = -(-len(cells) // max_size)
    size = -(-len(cells) // max(parts, 1))
    return (cells[start : start + size] for start in range(0, len(cells), size or 1))


def _open_cells(folders: contextlib.ExitStack, cells: list[Cell], work: Work) -> list[Cell]:
    """The cells that can be trained; their folders are held until `held` ends."""
    wait_until = time.monotonic() + workdir.PATIENCE_SEC  # for all together

    def try_open(cell: Cell) -> bool:
        folder = work.folder(cell)
        try:
            how = cell.recipe, False, work.say, wait_until
            folders.enter_context(mirror_cell(work.url, folder, work.say))
            folders.enter_context(workdir.open_workdir(folder, *how, per_process=True))
            return not work.is_final(cell)  # another process may have trained it meanwhile
        except (
            workdir.InUseError
        ) as error:  # nothing is wrong with that run, and its folder is not ours
            work.say(f'{folder.name} left out: {error}')
        except (OSError, ValueError) as error:
            workdir.record_failure(folder, error, work.say)
        return False

    opened = (map if work.url is None else for_each)(try_open, cells)
    return [cell for cell, is_open in zip(cells, opened, strict=True) if is_open]


def compile_program(cells: list[Cell], work: Work) -> tuple[Program, int]:
    """Returns (the program of the cells, how many of them a wave has room for)."""
    key = program_key(cells[0])
    if key not in work.programs:
        work.programs[key] = _build_program(cells, work)
    program = work.programs[key]
    if is_multiprocess():
        return program, 1
    sizes = work.sizes.setdefault(key, set())
    enough = [n for n in sizes if n >= len(cells)]
    if enough and program.layout.skips_inactive:  # a slot without a run costs nothing there
        return program, min(enough)
    slots = count_slots(program, len(cells), work.runs_at_once, work.say)
    sizes.add(slots)
    return program, slots


def _build_program(cells: list[Cell], work: Work) -> Program:
    recipe, at_once = longest_recipe(cells), 1 if is_multiprocess() else len(cells)
    experiment = Experiment(recipe, open_text(recipe, work.say), work.say, at_once)
    how = select_run_axis(experiment.recipe.config.kernels.run_axis, experiment.platform)
    program = Program(experiment, SINGLE if is_multiprocess() else how)
    alike = [f'{p}={v}' for p, v in cells[0].changes.items() if p not in RUN_PATHS]
    work.say(
        f'compiling one program for {len(cells)} runs of {parameter_count(experiment.learner):,} '
        f'parameters{" with " * bool(alike)}{", ".join(alike)}'
    )
    return program


def _train_cells(program: Program, slots: int, cells: list[Cell], work: Work) -> None:
    """Trains the cells in waves of `slots` runs. An error of one run leaves the others."""

    def on_failure(folder: Path, error: Exception) -> None:
        if is_multiprocess():
            raise error
        workdir.record_failure(folder, error, work.say)

    for start in range(0, len(cells), slots):
        if is_stop_requested(work.caught):
            return
        runs = []
        for cell in cells[start : start + slots]:
            terminal, anew = CellTerminal(cell.name, work.say), work.start_over
            runs.append(RunSpec(cell.recipe, work.folder(cell), terminal, start_over=anew))
        if not is_multiprocess():
            sec = program.compile_sec
            work.say(
                f'{len(runs)} runs side by side ({program.axis_name}), compiled in {sec:.1f} s'
            )
        with closing(Wave(program, runs, slots, on_failure)) as wave:
            if words := summarize_codes(slot.journal.other_code for slot in wave.slots):
                now = describe_code(running_code())
                work.say(f'NOTE: runs go on that other code has begun: {words}; this is {now}')
            wave.compile()
            wave.train(work.caught, work.tick)


def longest_recipe(cells: list[Cell]) -> Recipe:
    """The config of the run with the most steps, which the text has to suffice for."""
    return max((cell.recipe for cell in cells), key=lambda recipe: recipe.train.steps)


def count_slots(
    program: Program, runs: int, runs_at_once: int, say: Callable[[str], None] = print
) -> int:
    """Counts the runs that a wave has room for: a multiple of the mesh axis `run`."""
    multiple = program.experiment.mesh.shape['run']
    wanted = min(
        runs, runs_at_once or runs, max(multiple, max_open_folders() // multiple * multiple)
    )
    limit = device_memory_bytes() // (program.experiment.mesh.size if program.shares_memory else 1)
    most = find_max_runs(wanted, multiple, limit, program.memory_bytes)
    waves = -(-runs // most)
    slots = -(-runs // waves)  # waves of equal size
    slots = -(-slots // multiple) * multiple
    if waves > 1:
        say(
            f'{waves} waves of {slots} runs, {MAX_RUNS} at most: one needs '
            f'{program.memory_bytes(slots) / 1e9:.2f} GB of {limit / 1e9:.2f} GB a device'
        )
    return slots


def max_open_folders() -> int:
    """Counts the folders of runs that a process may hold open, MOST_RUNS at most."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MAX_RUNS
    return max(1, min(MAX_RUNS, allowed - OTHER_FILES))
