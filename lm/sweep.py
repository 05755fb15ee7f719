"""Many runs in one program: a wave of runs trains side by side, a slot of the run axis each.

Cells that differ only in what a program takes as data (`lm.cells.RUN_PATHS`) form a group, which is
compiled once. A group that does not fit in memory goes in waves. Every run keeps its own step,
batches, journal and checkpoints, so it may resume, end, roll back or diverge on its own.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from lm import data
from lm.cells import Cell
from lm.config import Config
from lm.evaluate import validation_losses
from lm.host import device_memory_bytes
from lm.journal import Diverged, Journal
from lm.many import run_axis
from lm.mesh import put_batch
from lm.metrics import Terminal
from lm.run import first_batch, validation_batches
from lm.setting import Setting
from lm.state import State
from lm.sweep_program import Program, runs_that_fit
from lm.workdir import SUMMARY, open_workdir, read_json, write_json

FINAL = ('done', 'diverged')  # a cell that failed is tried again


def is_final(folder: Path) -> bool:
    """Whether the run in `folder` has ended in a way that will not change."""
    return (folder / SUMMARY).exists() and read_json(folder / SUMMARY)['status'] in FINAL


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
    if not waiting:
        return
    try:
        for cell in waiting:
            open_workdir(workdir / cell.name, cell.config, continue_changed=False)
        setting = Setting(longest(waiting), say, len(waiting))
        if jax.process_count() > 1:
            raise ValueError('a sweep trains in one process; --engine=ray goes beyond one host')
        how = run_axis(setting.config.kernels.run_axis, setting.platform)
        program = Program(setting, how)
        slots = slots_for(program, len(waiting), runs_at_once, say)
        for start in range(0, len(waiting), slots):
            if caught:
                return
            cells = waiting[start : start + slots]
            say(f'{len(cells)} runs side by side ({how}), compiled in {program.compile_sec:.1f} s')
            Wave(program, cells, workdir, slots, say).train(caught, tick)
    except Exception as error:  # of any kind: the other groups can still be trained
        for cell in waiting:
            if not is_final(workdir / cell.name):
                record_failure(workdir / cell.name, error)
        say(f'FAILED: {type(error).__name__}: {error}')


def longest(cells: list[Cell]) -> Config:
    """The config of the run with the most steps, which the text has to suffice for."""
    return max((cell.config for cell in cells), key=lambda config: config.train.steps)


def record_failure(folder: Path, error: Exception) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    reason = f'{type(error).__name__}: {error}'
    write_json(folder / SUMMARY, {'status': 'failed', 'reason': reason})


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


@dataclasses.dataclass
class Slot:
    """A run in its place on the run axis. `active`: it still trains."""

    journal: Journal
    active: bool

    @property
    def config(self) -> Config:
        return self.journal.config


class Wave:
    """Opened with every run at its newest checkpoint, or freshly initialised."""

    def __init__(
        self, program: Program, cells: list[Cell], workdir: Path, slots: int, say: Callable
    ):
        self.program, self.setting, self.say = program, program.setting, say
        self.size = slots
        self.slots: list[Slot] = []
        self.states = program.empty(slots)
        self._pending = None
        for i, cell in enumerate(cells):
            quiet = CellTerminal(cell.name, say)
            journal = Journal(cell.config, workdir / cell.name, self.setting, quiet)
            journal.compile_sec = program.compile_sec
            state = journal.restore(self.setting.like)
            if state is None:
                state = program.initial(cell.config)
            self.states = program.put(self.states, state, i)
            self.slots.append(Slot(journal, active=not journal.finished))
            if journal.finished:
                journal.conclude()
            else:
                journal.open()
        self._bind()

    def _bind(self) -> None:
        """The program and the hyperparameters of the present slots; an empty one repeats slot 0."""
        self.step_program = self.program.compiled(self.size)
        configs = [slot.config for slot in self.slots]
        configs += [configs[0]] * (self.size - len(configs))
        self.hypers = self.program.hypers(configs)

    @property
    def active(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.active]

    def train(self, caught: list[int], tick: Callable[[], None]) -> None:
        """Steps until every run has ended, or a signal came."""
        try:
            self.diagnose([i for i in self._which(Journal.diagnoses) if self._is_new(i)])
            self._each(lambda journal: journal.throughput.reset())
            while self.active and not caught:
                self.dispatch()
                if any(self.due(i) for i in self.active):
                    self.settle()
                    self.evaluate(self._which(Journal.evaluates))
                    self.diagnose(self._which(Journal.diagnoses))
                    for i in self._which(Journal.saves):
                        self.save(i)
                    self.end_finished()
                    self.compact()
                tick()
            if caught:
                self.leave()
        finally:
            for slot in self.slots:
                slot.journal.close()

    def due(self, i: int) -> bool:
        journal = self.slots[i].journal
        return journal.evaluates() or journal.diagnoses() or journal.saves()

    def _is_new(self, i: int) -> bool:
        return self.slots[i].journal.step == 0

    def _which(self, test: Callable[[Journal], bool]) -> list[int]:
        return [i for i in self.active if test(self.slots[i].journal)]

    def dispatch(self) -> None:
        """Starts the next step of every active run, then fetches the metrics of the one before."""
        start = time.perf_counter()
        batch = self._batch()
        waited = time.perf_counter() - start
        self._each(lambda journal: journal.throughput.wait(waited))
        active = np.zeros(self.size, bool)
        active[self.active] = True
        self.states, metrics = self.step_program(active, self.states, batch, self.hypers)
        for i in self.active:
            self.slots[i].journal.dispatched()
        steps = [(i, self.slots[i].journal.step) for i in self.active]
        before, self._pending = self._pending, (steps, metrics)
        self._finish(before)

    def _batch(self) -> dict[str, jax.Array]:
        """[R, B, T+1]: for each run the batch that its own order of the text has next."""
        made: dict[tuple[int, int], data.Batch] = {}
        stacked = []
        for slot in self.slots:
            config, index = slot.config.data, slot.journal.counters.batch_index
            key = (config.seed, index)
            if key not in made:
                rows = self.setting.dataset.train
                made[key] = data.batch_at(
                    rows, index, batch_size=config.batch_size, seed=config.seed
                )
            stacked.append(made[key])
        stacked += [stacked[0]] * (self.size - len(stacked))
        batch = {name: np.stack([one[name] for one in stacked]) for name in stacked[0]}
        return put_batch(self.setting.mesh, batch, self.program.batch_sharding)

    def settle(self) -> None:
        """Fetches the metrics of the last step too: what is still active was finite."""
        before, self._pending = self._pending, None
        self._finish(before)

    def _finish(self, dispatched) -> None:
        if dispatched is None:
            return
        steps, metrics = dispatched
        fetched = {name: np.asarray(values, float) for name, values in metrics.items()}
        for i, step in steps:
            if not self.slots[i].active:
                continue
            try:
                row = {name: float(values[i]) for name, values in fetched.items()}
                self.slots[i].journal.record(step, row)
            except Diverged as seen:
                self._mend(i, seen)

    def _mend(self, i: int, seen: Diverged) -> None:
        """Rolls a run back where its config asks for it and it can; otherwise it ends here."""
        journal = self.slots[i].journal
        try:
            if journal.config.train.on_divergence != 'rollback':
                raise seen
            state = journal.roll_back(seen, self.setting.like)
            self.states = self.program.put(self.states, state, i)
            self._forget_pending(i)
        except Diverged as final:
            journal.summarize('diverged', str(final))
            self.slots[i].active = False
            self.say(f'{journal.workdir.name} diverged: {final}')

    def _forget_pending(self, i: int) -> None:
        """The step in flight was made from the state that a rollback has replaced."""
        if self._pending:
            steps, metrics = self._pending
            self._pending = ([(slot, step) for slot, step in steps if slot != i], metrics)

    def evaluate(self, slots: list[int]) -> None:
        """The validation losses of the runs in `slots`, recorded."""
        if not slots:
            return
        self._each(lambda journal: journal.throughput.pause())
        rows = self.setting.dataset.validation
        batches = validation_batches(self.setting.config, rows)
        pending = [self._look(self.program.evaluate, batch, slots) for batch in batches]
        sums = jax.device_get(pending)
        for i in slots:
            own = [{name: values[i] for name, values in batch.items()} for batch in sums]
            self.slots[i].journal.evaluated(validation_losses(own, rows))
        self._each(lambda journal: journal.throughput.go_on())

    def diagnose(self, slots: list[int]) -> None:
        """What each layer of the runs in `slots` does on a fixed batch, recorded."""
        if not slots:
            return
        self._each(lambda journal: journal.throughput.pause())
        batch = first_batch(self.setting.config, self.setting.dataset.validation)
        seen = jax.device_get(self._look(self.program.diagnose, batch, slots))
        for i in slots:
            self.slots[i].journal.diagnosed({name: v[i] for name, v in seen.items()})
        self._each(lambda journal: journal.throughput.go_on())

    def _look(self, program: Callable, batch: data.Batch, slots: list[int]) -> dict:
        """A program over the states of the runs in `slots`, all on the same batch."""
        chosen = np.zeros(self.size, bool)
        chosen[slots] = True
        return program(put_batch(self.setting.mesh, batch), chosen, self.states, self.hypers)

    def save(self, i: int) -> None:
        """Starts a checkpoint of run i. To be called when settled."""
        if self.slots[i].journal.saved:
            return
        self._each(lambda journal: journal.throughput.pause())
        self.slots[i].journal.save(self.state(i))
        self._each(lambda journal: journal.throughput.go_on())

    def state(self, i: int) -> State:
        return self.program.take(self.states, i)

    def end_finished(self) -> None:
        for i in self.active:
            journal = self.slots[i].journal
            if journal.finished:
                journal.checkpoints.wait()
                journal.summarize('done')
                self.slots[i].active = False

    def compact(self) -> None:
        """Moves on with fewer slots where the runs left are few and their steps many: where the
        time that empty slots would cost exceeds that of compiling anew. A loop skips empty slots.
        """
        multiple = self.setting.mesh.shape['run']
        fewer = max(1, -(-len(self.active) // multiple)) * multiple
        if self.program.skips_inactive or not self.active or fewer > self.size // 2:
            return
        left = max(s.config.train.steps - s.journal.step for s in self.slots if s.active)
        step_sec = self.slots[self.active[0]].journal.last.get('step_sec', 0.0)
        if left * step_sec * (1 - fewer / self.size) < self.program.compile_sec:
            return
        kept = [(self.slots[i], self.state(i)) for i in self.active]
        for slot in self.slots:
            if not slot.active:
                slot.journal.close()
        self.slots, self.size = [slot for slot, _ in kept], fewer
        self.states = self.program.empty(fewer)
        for i, (_, state) in enumerate(kept):
            self.states = self.program.put(self.states, state, i)
        self._bind()

    def leave(self) -> None:
        """Saves the runs that are left, for the same command to go on from."""
        self.settle()
        for i in self.active:
            self.save(i)
        for i in self.active:
            journal = self.slots[i].journal
            journal.checkpoints.wait()
            journal.summarize('done' if journal.finished else 'stopped')

    def _each(self, act: Callable[[Journal], None]) -> None:
        for i in self.active:
            act(self.slots[i].journal)


class CellTerminal(Terminal):
    """What a run beside others says: its events with its name, and no rows."""

    def __init__(self, name: str, say: Callable[[str], None]):
        self._name, self._say = name, say

    def say(self, text: str) -> None:
        if not text.startswith('step '):
            self._say(f'{self._name}: {text}')

    def row(self, row, steps) -> None:
        pass
