"""A wave: runs that train side by side in one program, a slot of its run axis each.

Every run keeps its own step, batches, journal and checkpoints, so it may resume, end, roll back or
diverge on its own.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from lm import data
from lm.config import Config
from lm.mesh import put_batch
from lm.record.metrics import Terminal
from lm.record.workdir import record_failure
from lm.run.evaluate import validation_losses
from lm.run.journal import Diverged, Journal
from lm.run.program import Program
from lm.run.run import first_batch, validation_batches
from lm.state import State
from lm.sweep.cells import Cell


@dataclasses.dataclass
class Slot:
    """A run in its place on the run axis.

    active: it still trains; rolled_back: it has gone back since the last dispatch.
    """

    journal: Journal
    active: bool
    rolled_back: bool = False

    @property
    def config(self) -> Config:
        return self.journal.config


class Wave:
    """Opened with every run at its newest checkpoint, or freshly initialised."""

    def __init__(
        self, program: Program, cells: list[Cell], workdir: Path, slots: int, say: Callable
    ):
        self.program, self.experiment, self.say = program, program.experiment, say
        self.size = slots
        self.slots: list[Slot] = []
        self.states = program.empty(slots)
        self._pending = None
        for cell in cells:
            try:
                self._seat(cell, workdir / cell.name)
            except (OSError, ValueError) as error:  # such as a checkpoint that cannot be read
                record_failure(workdir / cell.name, error, say)
        if self.slots:
            self._bind()

    def _seat(self, cell: Cell, folder: Path) -> None:
        """Opens a run and puts its state in the next slot."""
        journal = Journal(cell.config, folder, self.experiment, CellTerminal(cell.name, self.say))
        journal.compile_sec = self.program.compile_sec
        state = journal.restore(self.experiment.state_like)
        if state is None:
            state = self.program.initial(cell.config)
        if journal.finished:
            journal.conclude()
        else:
            journal.open()
        self.states = self.program.put(self.states, state, len(self.slots))
        self.slots.append(Slot(journal, active=not journal.finished))

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
            for i in self.active:
                self.slots[i].journal.throughput.reset()
            while self.active and not caught:
                self.dispatch()
                if self._which(Journal.is_due):
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
                with contextlib.suppress(OSError):  # which ended that run, and was recorded
                    slot.journal.close()

    def _is_new(self, i: int) -> bool:
        return self.slots[i].journal.step == 0

    def _which(self, test: Callable[[Journal], bool]) -> list[int]:
        """Active runs whose journal says so; not one just rolled back: it was there before."""
        slots = self.slots
        return [i for i in self.active if not slots[i].rolled_back and test(slots[i].journal)]

    def dispatch(self) -> None:
        """Starts the next step of every active run, then fetches the metrics of the one before."""
        start = time.perf_counter()
        batch = self._batch()
        waited = time.perf_counter() - start
        for i in self.active:
            self.slots[i].journal.throughput.wait(waited)
        active = np.zeros(self.size, bool)
        active[self.active] = True
        self.states, metrics = self.step_program(active, self.states, batch, self.hypers)
        for i in self.active:
            self.slots[i].rolled_back = False
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
                rows = self.experiment.dataset.train
                made[key] = data.batch_at(
                    rows, index, batch_size=config.batch_size, seed=config.seed
                )
            stacked.append(made[key])
        stacked += [stacked[0]] * (self.size - len(stacked))
        batch = {name: np.stack([one[name] for one in stacked]) for name in stacked[0]}
        return put_batch(self.experiment.mesh, batch, self.program.batch_sharding)

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
            if self.slots[i].active:
                row = {name: float(values[i]) for name, values in fetched.items()}
                self._act(i, Journal.record, step, row)

    def _act(self, i: int, act: Callable, *arguments) -> None:
        """An act of one journal. What goes wrong with it ends that run, and no other."""
        journal = self.slots[i].journal
        try:
            try:
                act(journal, *arguments)
            except Diverged as seen:
                self._mend(i, seen)
        except OSError as error:
            record_failure(journal.workdir, error, self.say)
            self.slots[i].active = False

    def _mend(self, i: int, seen: Diverged) -> None:
        """Rolls a run back where its config asks for it and it can; otherwise it ends here."""
        journal = self.slots[i].journal
        try:
            if journal.config.train.on_divergence != 'rollback':
                raise seen
            state = journal.roll_back(seen, self.experiment.state_like)
            self.states = self.program.put(self.states, state, i)
            self._forget_pending(i)
            self.slots[i].rolled_back = True
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
        rows = self.experiment.dataset.validation
        batches = validation_batches(self.experiment.config, rows)
        with self._clocks_stopped():
            pending = [self._look(self.program.evaluate, batch, slots) for batch in batches]
            sums = jax.device_get(pending)
            for i in slots:
                own = [{name: values[i] for name, values in batch.items()} for batch in sums]
                self._act(i, Journal.evaluated, validation_losses(own, rows))

    def diagnose(self, slots: list[int]) -> None:
        """What each layer of the runs in `slots` does on a fixed batch, recorded."""
        if not slots:
            return
        batch = first_batch(self.experiment.config, self.experiment.dataset.validation)
        with self._clocks_stopped():
            seen = jax.device_get(self._look(self.program.diagnose, batch, slots))
            for i in slots:
                self._act(i, Journal.diagnosed, {name: v[i] for name, v in seen.items()})

    def _look(self, program: Callable, batch: data.Batch, slots: list[int]) -> dict:
        """A program over the states of the runs in `slots`, all on the same batch."""
        chosen = np.zeros(self.size, bool)
        chosen[slots] = True
        return program(put_batch(self.experiment.mesh, batch), chosen, self.states, self.hypers)

    def save(self, i: int) -> None:
        """Starts a checkpoint of run i. To be called when settled."""
        if self.slots[i].journal.saved:
            return
        with self._clocks_stopped():
            self._act(i, Journal.save, self.state(i))

    def state(self, i: int) -> State:
        return self.program.take(self.states, i)

    def end_finished(self) -> None:
        for i in self._which(lambda journal: journal.finished):
            self._act(i, Journal.end, 'done')
            self.slots[i].active = False

    def compact(self) -> None:
        """Moves on with fewer slots where the runs left are few and their steps many: where the
        time that empty slots would cost exceeds that of compiling anew. A loop skips empty slots.
        """
        multiple = self.experiment.mesh.shape['run']
        fewer = max(1, -(-len(self.active) // multiple)) * multiple
        if self.program.skips_inactive or not self.active or fewer > self.size // 2:
            return
        left = max(s.config.train.steps - s.journal.step for s in self.slots if s.active)
        step_sec = self.slots[self.active[0]].journal.last.get('step_sec') or 0.0
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
            self._act(i, Journal.end, 'stopped')

    @contextlib.contextmanager
    def _clocks_stopped(self) -> Iterator[None]:
        """What is done meanwhile is not training, and does not count in anybody's tokens/s."""
        for i in self.active:
            self.slots[i].journal.throughput.pause()
        yield
        for i in self.active:
            self.slots[i].journal.throughput.go_on()


class CellTerminal(Terminal):
    """What a run beside others says: its events with its name, and no rows."""

    def __init__(self, name: str, say: Callable[[str], None]):
        self._name, self._say = name, say

    def say(self, text: str) -> None:
        if not text.startswith('step '):
            self._say(f'{self._name}: {text}')

    def row(self, row, steps) -> None:
        pass
