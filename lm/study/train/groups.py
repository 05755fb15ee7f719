"""Trains the groups of a sweep: many runs in one program, compiled once for each group.

Cells that differ only in data of a program (`Recipe.run_paths`) form a group. A group
that does not fit in memory trains in waves (`lm.run.wave`). If several processes train together,
each run uses the devices of all processes, and a wave has one run. Process 0's disk then determines
what they do, and an error of a run ends the job.
"""

import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from lm.record.time_use import COMPILE, DATA, Preparation
from lm.run.describe import list_disk_use, list_sweep_notes
from lm.run.program import Experiment, Program, find_max_runs, open_text
from lm.run.runs import RunSpec, try_storage
from lm.run.suites import SuiteLoader
from lm.run.tables import parameter_count
from lm.run.wave import Wave, closing
from lm.storage.buckets import for_each
from lm.storage.files import UnreadableFile
from lm.study.plan.cells import BRANCH_FROM, Cell, program_key

MAX_RUNS = 256  # runs in one wave: each holds a descriptor, the lock of its folder
OTHER_FILES = 128  # other descriptors of a process that trains: libraries, text, checkpoints


@dataclasses.dataclass
class Work:
    """The cells that a sweep has to train, and options of the training."""

    groups: list[list[Cell]]  # by program
    workdir: Path  # folder of the sweep; each cell trains in workdir/NAME
    caught: list[int]  # receives signals: runs are then saved, and training returns
    say: Callable[[str], None] = print
    tick: Callable[[], None] = lambda: None  # called after every step
    runs_at_once: int = 0  # maximal number of runs in a wave; 0: as many as fit in memory
    resources: dict[str, float] | None = None  # resources of a Ray task, such as {'GPU': 1}
    url: str | None = None  # URL of the sweep, if it is in a bucket
    is_storage_checked: bool = False  # whether a cell's folder has taken a tiny checkpoint
    start_over: bool = False  # cells whose checkpoints are all damaged begin anew
    suite_loader: SuiteLoader | None = None  # opens the suites of eval.suites
    # Programs so far by `program_key`, since a later wave may have further runs of them, and the
    # numbers of slots that each has been compiled for.
    programs: dict[tuple, Program] = dataclasses.field(default_factory=dict)
    sizes: dict[tuple, set[int]] = dataclasses.field(default_factory=dict)
    printed_notes: set[str] = dataclasses.field(default_factory=set)
    # Of the runs of the next wave.
    preparation: Preparation = dataclasses.field(default_factory=Preparation)

    def note(self, text: str) -> None:
        """Prints a note once, as groups and waves give rise to the same notes."""
        if text not in self.printed_notes:
            self.say(f'NOTE: {text}')
        self.printed_notes.add(text)

    def list_compiled(self) -> dict[tuple, float]:
        """Returns the programs so far, with the seconds that compiling a step has taken."""
        times = {key: program.compile_sec for key, program in self.programs.items()}
        return {key: sec for key, sec in times.items() if sec}

    def folder(self, cell: Cell) -> Path:
        """Returns the folder of a cell."""
        return self.workdir / cell.name

    def is_final(self, cell: Cell) -> bool:
        """Whether a cell has ended for good."""
        return Run(self.folder(cell)).is_final

    def fail(self, cells: Sequence[Cell], error: Exception) -> None:
        """Records the error with each cell that has not ended."""
        for cell in cells:
            if not self.is_final(cell):
                workdir.record_failure(self.folder(cell), error, self.say)


def train_group(group: list[Cell], work: Work) -> None:
    """Trains the cells of a group that have not ended. An error fails only the cells it
    concerns.
    """
    waiting = _select_on_first(lambda: _list_waiting(group, work), group)
    if waiting:
        for note in list_sweep_notes([cell.recipe for cell in waiting]):
            work.note(note)

    # Called only after some folder has opened: if other processes hold all of them, there is
    # nothing to train.
    @functools.cache
    def compile_once() -> tuple[Program, int]:
        # Compiling takes long and there is nothing to save, so that a signal may end it at once.
        with interruptible(work.caught):
            return compile_program(waiting, work)

    for part in _split_evenly(waiting, broadcast_from_first(max_open_folders())):
        if is_stop_requested(work.caught):
            return
        work.preparation = Preparation()
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
    """Tests, once for all cells of the work, whether their folders can hold checkpoints."""
    if not work.is_storage_checked:
        try_storage(cell.recipe, work.folder(cell))
        work.is_storage_checked = True


def _select_on_first(choose: Callable[[], list[Cell]], cells: list[Cell]) -> list[Cell]:
    """Returns the cells that process 0 chooses, on all processes."""
    names = broadcast_from_first([cell.name for cell in choose()] if is_first() else None)
    return [cell for cell in cells if cell.name in names]


def _list_waiting(group: list[Cell], work: Work) -> list[Cell]:
    """Returns the cells that have not ended; rewrites a damaged config.json of an ended cell."""
    # Ended cells are not opened again, so this is the only repair of their config.json, which
    # tables and reports read.
    for cell in filter(work.is_final, group):
        try:
            Run(work.folder(cell)).read_config()
        except (UnreadableFile, FileNotFoundError) as error:
            work.say(f'NOTE: {error}. It will be rewritten.')
            workdir.write_config(work.folder(cell), cell.recipe)
    return [cell for cell in group if not work.is_final(cell)]


def _split_evenly(cells: list[Cell], max_size: int) -> Iterator[list[Cell]]:
    """Yields the cells in parts of about equal size, at most `max_size`."""
    parts = -(-len(cells) // max_size)
    size = -(-len(cells) // max(parts, 1))
    return (cells[start : start + size] for start in range(0, len(cells), size or 1))


def _open_cells(folders: contextlib.ExitStack, cells: list[Cell], work: Work) -> list[Cell]:
    """Returns the cells that can be trained; `folders` holds their folders until it is closed."""
    wait_until = time.monotonic() + workdir.PATIENCE_SEC  # for all together

    def try_open(cell: Cell) -> bool:
        folder = work.folder(cell)
        try:
            options = cell.recipe, False, work.say, wait_until
            folders.enter_context(mirror_cell(work.url, folder, work.say))
            folders.enter_context(workdir.open_workdir(folder, *options, per_process=True))
            return not work.is_final(cell)  # another process may have trained it meanwhile
        except (
            workdir.InUseError
        ) as error:  # nothing is wrong with that run, and its folder is not ours
            work.say(f'{folder.name} skipped: {error}')
        except (OSError, ValueError) as error:
            workdir.record_failure(folder, error, work.say)
        return False

    # A cell in a bucket waits for several requests, so that many are opened at a time.
    opened = (map if work.url is None else for_each)(try_open, cells)
    return [cell for cell, has_opened in zip(cells, opened, strict=True) if has_opened]


def compile_program(cells: Sequence[Cell], work: Work) -> tuple[Program, int]:
    """Returns (the program of the cells, number of runs in one wave)."""
    key = program_key(cells[0])
    if key not in work.programs:
        work.programs[key] = _build_program(cells, work)
    program = work.programs[key]
    if is_multiprocess():
        return program, 1
    sizes = work.sizes.setdefault(key, set())
    large_enough = [n for n in sizes if n >= len(cells)]
    if large_enough and program.layout.skips_inactive:  # a slot without a run costs nothing there
        return program, min(large_enough)
    with work.preparation.time_part(COMPILE):
        slots = count_slots(program, len(cells), work.runs_at_once, work.say)
    sizes.add(slots)
    return program, slots


def _build_program(cells: Sequence[Cell], work: Work) -> Program:
    """Returns the program of the cells, without compiling it."""
    # train.steps may differ between the cells. It does not change the program.
    recipe, n_runs = longest_recipe(cells), 1 if is_multiprocess() else len(cells)
    begun = next((work.folder(cell) for cell in cells if Run(work.folder(cell)).branch), None)
    with work.preparation.time_part(DATA):
        dataset = open_text(recipe, work.say, begun)
    experiment = Experiment(recipe, dataset, work.say, n_runs, work.suite_loader)
    axis = select_run_axis(experiment.recipe.config.kernels.run_axis, experiment.platform)
    program = Program(experiment, SINGLE if is_multiprocess() else axis, work.say)
    single = (*recipe.run_paths, BRANCH_FROM)
    shared = [f'{p}={v}' for p, v in cells[0].changes.items() if p not in single]
    work.say(
        f'compiling one program for {len(cells)} runs of {parameter_count(experiment.learner):,} '
        f'parameters{" with " * bool(shared)}{", ".join(shared)}'
    )
    recipes = [cell.recipe for cell in cells]
    for line in list_disk_use(recipes, experiment.state_shapes, work.workdir):
        work.say(line)
    return program


def _train_cells(program: Program, slots: int, cells: list[Cell], work: Work) -> None:
    """Trains the cells in waves of `slots` runs. An error of one run leaves the others running."""

    def on_failure(folder: Path, error: Exception) -> None:
        if is_multiprocess():
            raise error
        workdir.record_failure(folder, error, work.say)

    for start in range(0, len(cells), slots):
        if is_stop_requested(work.caught):
            return
        runs = []
        for cell in cells[start : start + slots]:
            terminal, start_over = CellTerminal(cell.name, work.say), work.start_over
            folder, shared = work.folder(cell), work.preparation
            spec = RunSpec(cell.recipe, folder, terminal, start_over=start_over, preparation=shared)
            runs.append(spec)
        with closing(Wave(program, runs, slots, on_failure)) as wave:
            if other_code := summarize_codes(slot.journal.other_code for slot in wave.slots):
                present_code = describe_code(running_code())
                work.say(
                    f'NOTE: other code started some of these runs: {other_code}; the code is now '
                    f'{present_code}'
                )
            wave.compile()
            wave.train(work.caught, work.tick)
        work.preparation = Preparation()


def longest_recipe(cells: Sequence[Cell]) -> Recipe:
    """Returns the recipe of the run with the most steps, which needs the most text."""
    return max((cell.recipe for cell in cells), key=lambda recipe: recipe.train.steps)


def count_slots(
    program: Program, runs: int, runs_at_once: int, say: Callable[[str], None] = print
) -> int:
    """Returns the number of runs in a wave: a multiple of the mesh axis `run`.

    Args:
      program: program of the runs.
      runs: number of runs to train.
      runs_at_once: maximal number of runs in a wave; 0: as many as fit.
      say: prints a line if several waves are necessary.

    Returns:
      The number of slots.
    """
    multiple = program.experiment.mesh.shape['run']
    requested = min(
        runs, runs_at_once or runs, max(multiple, max_open_folders() // multiple * multiple)
    )
    # The devices of a CPU share the machine's memory.
    limit = device_memory_bytes() // (program.experiment.mesh.size if program.shares_memory else 1)
    fitting = find_max_runs(requested, multiple, limit, program.memory_bytes)
    waves = -(-runs // fitting)
    slots = -(-runs // waves)  # waves of equal size
    slots = -(-slots // multiple) * multiple
    if waves > 1:
        say(
            f'{waves} waves of up to {slots} runs (no wave has over {MAX_RUNS}); a wave needs '
            f'{program.memory_bytes(slots) / 1e9:.2f} GB of {limit / 1e9:.2f} GB per device'
        )
    return slots


def max_open_folders() -> int:
    """Returns the number of run folders that a process may hold open, at most MAX_RUNS."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return MAX_RUNS
    return max(1, min(MAX_RUNS, soft_limit - OTHER_FILES))
