"""A wave: runs that train side by side in one program, a slot each. A run alone is a wave of one.

Every run keeps its own step, batches, journal and checkpoints, so it may resume, end, roll back or
diverge on its own. Several processes go through the same steps with the same decisions: what is
decided by a clock, a disk or a signal is agreed on (`lm.launch.agreement`, `lm.launch.stopping`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm import data
from lm.config.mixture import by_source
from lm.devices.mesh import share_of_process
from lm.launch.agreement import from_first, several
from lm.launch.stopping import Stopping, stopping
from lm.run.evaluate import (
    Sums,
    first_batch,
    objective_loss,
    validation_batches,
    validation_losses,
)
from lm.run.journal import Diverged, Journal
from lm.run.program import Program
from lm.run.slot import RunSpec, Slot, Status, raise_error
from lm.training.state import State


@contextlib.contextmanager
def closing(wave: 'Wave') -> Iterator['Wave']:
    """Closes the wave. After an error of one of several processes it does not, as the others would
    have to come to it too: checkpoints are closed together. Such a process ends at once.
    """
    try:
        yield wave
    except BaseException:
        if not several():
            wave.close()
        raise
    wave.close()


class Wave:
    """Opened with every run at its newest checkpoint, or freshly initialised.

    size: how many slots the program has; some may be empty. on_failure(folder, error) is called for
    an error that concerns one run; unless it raises, the others go on. To be compiled, then:

        for is_due in wave.steps(caught):
            if is_due:
                wave.evaluate()
                wave.diagnose()
                wave.save()
                wave.end_finished()

    and to be closed.
    """

    def __init__(
        self,
        program: Program,
        runs: list[RunSpec],
        size: int,
        on_failure: Callable[[Path, Exception], None] = raise_error,
    ):
        self.program, self.experiment = program, program.experiment
        self.size, self._on_failure = size, on_failure
        self.slots: list[Slot] = []
        self.states = program.empty(size)
        self._pending: tuple[list[tuple[int, int]], Any] | None = None
        self._stopping = Stopping([])
        fields = self.experiment.recipe.data
        process_index, process_count = share_of_process(self.experiment.mesh)
        self.feed = data.Feed(
            self.experiment.dataset.train,
            batch_size=fields.batch_size,
            prefetch=fields.prefetch,
            mixture=self.experiment.mixture,
            process_index=process_index,
            process_count=process_count,
        )
        for run in runs:
            try:
                self._seat(run)
            except (OSError, ValueError) as error:  # such as a checkpoint that cannot be read
                on_failure(run.folder, error)

    def _seat(self, run: RunSpec) -> None:
        """Opens a run and puts its state in the next slot."""
        journal = Journal(run.recipe, run.folder, self.experiment, run.terminal)
        state = journal.restore(self.experiment.state_shapes, run.continue_changed, run.start_over)
        if state is None:
            state = self.program.initial(run.recipe)
        if journal.finished:
            journal.conclude()
        self.states = self.program.put(self.states, state, len(self.slots))
        self.slots.append(Slot(journal, Status.DONE if journal.finished else Status.TRAINING))

    def compile(self) -> None:
        """The step and the hyperparameters of the present slots; an empty one repeats slot 0."""
        if not self.slots:
            return
        self._step = self.program.compiled(self.size)
        recipes = [slot.recipe for slot in self.slots]
        recipes += [recipes[0]] * (self.size - len(recipes))
        self.hypers = self.program.hypers(recipes)
        for slot in self.slots:
            slot.journal.compile_sec = self.program.compile_sec

    @property
    def active(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.active]

    def steps(self, caught: list[int]) -> Iterator[bool]:
        """Makes steps until every run has ended, or a signal is in `caught`: then saves those left.

        After each it yields whether a run is due to be evaluated, diagnosed or saved, or to end.
        Then the metrics of all steps are here, and what is still active was finite.
        """
        self._stopping = stopping(caught)
        for i in self.active:
            self._act(i, Journal.open)
        self._diagnose([i for i in self._which(Journal.diagnoses) if self._is_new(i)])
        for i in self.active:
            self.slots[i].journal.throughput.reset()
        while self.active and not self._stopping.now:
            self.dispatch()
            is_due = bool(self._which(Journal.is_due))
            if is_due:
                self.settle()
            yield is_due
        if self._stopping.now:
            self.leave()

    def _is_new(self, i: int) -> bool:
        return self.slots[i].journal.step == 0

    def _which(self, test: Callable[[Journal], bool]) -> list[int]:
        """Active runs whose journal says so; not one just rolled back: it was there before."""
        slots = self.slots
        return [i for i in self.active if not slots[i].rolled_back and test(slots[i].journal)]

    def dispatch(self) -> None:
        """Starts the next step of every active run, then fetches the metrics of the one before, so
        that the device always has one to do.
        """
        active = self.active
        batch = self._batch(active)
        self.states, metrics = self._step(self._mask(active), self.states, batch, self.hypers)
        for i in active:
            self.slots[i].rolled_back = False
            self.slots[i].journal.dispatched()
        steps = [(i, self.slots[i].journal.step) for i in active]
        before, self._pending = self._pending, (steps, (metrics, self._stopping.ask()))
        self._finish(before)

    def _batch(self, active: list[int]) -> dict[str, jax.Array]:
        """For each run the batch that its own order of the text has next. A slot that is not active
        repeats another's.
        """
        start = time.perf_counter()
        taken = self.feed.take([self.slots[i].journal.next_place() for i in active])
        of_each = [taken[0]] * self.size
        for i, batch in zip(active, taken, strict=True):
            of_each[i] = batch
        waited = time.perf_counter() - start
        for i in active:
            self.slots[i].journal.throughput.wait(waited)
        return self.program.batch(of_each)

    def _mask(self, slots: list[int]) -> np.ndarray:
        """True for the given slots."""
        mask = np.zeros(self.size, bool)
        mask[slots] = True
        return mask

    def settle(self) -> None:
        """Fetches the metrics of the last step too: what is still active was finite."""
        before, self._pending = self._pending, None
        self._finish(before)

    def _finish(self, dispatched: tuple[list[tuple[int, int]], Any] | None) -> None:
        if dispatched is None:
            return
        steps, metrics = dispatched
        fetched, answer = jax.device_get(metrics)
        self._stopping.hear(answer)
        for i, step in steps:
            if self.slots[i].active:
                own = self.program.pick(fetched, i)
                row = {name: float(value) for name, value in own.items()}
                self._act(i, Journal.record, step, row)

    def _act(self, i: int, act: Callable, *arguments) -> None:
        """An act of one journal. What goes wrong with it ends that run, and no other unless
        `on_failure` raises.
        """
        journal = self.slots[i].journal
        try:
            try:
                act(journal, *arguments)
            except Diverged as seen:
                self._recover(i, seen)
        except OSError as error:
            self.slots[i].status = Status.FAILED
            self._on_failure(journal.workdir, journal.explained(error))

    def _recover(self, i: int, seen: Diverged) -> None:
        """Rolls a run back where its config asks for it and it can; otherwise it ends here."""
        slot, journal = self.slots[i], self.slots[i].journal
        try:
            if journal.recipe.train.on_divergence != 'rollback':
                raise seen
            state = journal.roll_back(seen, self.experiment.state_shapes)
        except Diverged as final:
            journal.summarize(Status.DIVERGED, str(final))
            slot.status = Status.DIVERGED
            journal.terminal.diverged(str(final))
            return
        self.states = self.program.put(self.states, state, i)
        self._forget_pending(i)
        slot.rolled_back = True

    def _forget_pending(self, i: int) -> None:
        """The step in flight was made from the state that a rollback has replaced."""
        if self._pending:
            steps, metrics = self._pending
            self._pending = ([(slot, step) for slot, step in steps if slot != i], metrics)

    def evaluate(self) -> None:
        """Records the validation losses of the runs that are due."""
        slots = self._which(Journal.evaluates)
        if not slots:
            return
        rows = self.experiment.dataset.validation
        with self._clocks_stopped():
            sums = self._sums(slots, rows)
            others = {
                name: self._sums(slots, own) for name, own in self.experiment.evaluated.items()
            }
            for i in slots:
                losses = validation_losses(self._of_run(sums, i), rows)
                for name, of_batches in others.items():
                    losses |= objective_loss(name, self._of_run(of_batches, i), rows)
                self._act(i, Journal.evaluated, losses)

    def _sums(self, slots: list[int], rows: Any) -> Sums:
        """What evaluation gives of each batch of each source of `rows`."""
        mask = self._mask(slots)
        return jax.device_get(
            {
                name: [
                    self.program.evaluate(batch, mask, self.states, self.hypers)
                    for batch in validation_batches(self.experiment, own)
                ]
                for name, own in by_source(rows).items()
            }
        )

    def _of_run(self, sums: Sums, i: int) -> Sums:
        return {
            name: [self.program.pick(of_batch, i) for of_batch in own] for name, own in sums.items()
        }

    def diagnose(self) -> None:
        """Records what each layer of the runs that are due does on a fixed batch."""
        self._diagnose(self._which(Journal.diagnoses))

    def _diagnose(self, slots: list[int]) -> None:
        if not slots:
            return
        batch = first_batch(self.experiment, self.experiment.dataset.validation)
        with self._clocks_stopped():
            seen = self.program.diagnose(batch, self._mask(slots), self.states, self.hypers)
            seen = jax.device_get(seen)
            for i in slots:
                self._act(i, Journal.diagnosed, self.program.pick(seen, i))

    def save(self) -> None:
        """Starts checkpoints of the runs that are due."""
        for i in self._which(Journal.saves):
            self.save_run(i)

    def save_run(self, i: int) -> None:
        """Starts a checkpoint of run i. To be called when settled."""
        if self.slots[i].journal.saved:
            return
        with self._clocks_stopped():
            self._act(i, Journal.save, self.state(i))

    def state(self, i: int) -> State:
        return self.program.take(self.states, i)

    def end_finished(self) -> None:
        """Sums up the runs that have made their last step."""
        self._end(self._which(lambda journal: journal.finished), Status.DONE)

    def _end(self, slots: list[int], status: Status) -> None:
        for i in slots:
            self._act(i, Journal.end, status)
            if self.slots[i].active:  # the last checkpoint may have failed
                self.slots[i].status = status

    def compact(self) -> None:
        """Moves on with fewer slots where the runs left are few and their steps many: where the
        time that empty slots would cost exceeds that of compiling anew. Some layouts skip them.
        """
        multiple = self.experiment.mesh.shape['run']
        fewer = max(1, -(-len(self.active) // multiple)) * multiple
        skipped = self.program.layout.skips_inactive
        if skipped or not self.active or fewer > self.size // 2:
            return
        left = max(s.recipe.train.steps - s.journal.step for s in self.slots if s.active)
        step_sec = self.slots[self.active[0]].journal.last.get('step_sec') or 0.0
        worth_it = left * step_sec * (1 - fewer / self.size) >= self.program.compile_sec
        if not from_first(worth_it):
            return
        kept = [(self.slots[i], self.state(i)) for i in self.active]
        self._close_journals([slot for slot in self.slots if not slot.active])
        self.slots, self.size = [slot for slot, _ in kept], fewer
        self.states = self.program.empty(fewer)
        for i, (_, state) in enumerate(kept):
            self.states = self.program.put(self.states, state, i)
        self.compile()

    def leave(self) -> None:
        """Saves the runs that are left, for the same command to go on from."""
        self.settle()
        for i in self.active:
            self.save_run(i)
        self._end(self.active, Status.STOPPED)

    def close(self) -> None:
        """Ends the reading threads and closes the journals."""
        self.feed.close()
        self._close_journals(self.slots)

    def _close_journals(self, slots: list[Slot]) -> None:
        for slot in slots:
            with contextlib.suppress(OSError):  # which ended that run, and was reported
                slot.journal.close()

    @contextlib.contextmanager
    def _clocks_stopped(self) -> Iterator[None]:
        """What is done meanwhile is not training, and does not count in anybody's tokens/s."""
        for i in self.active:
            self.slots[i].journal.throughput.pause()
        yield
        for i in self.active:
            self.slots[i].journal.throughput.go_on()
