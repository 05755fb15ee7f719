"""A wave: runs that train side by side in one program, each in a slot.

A single run is a wave of size one. Every run has its own step, batches, journal and checkpoints, so
it may resume, end, roll back or diverge on its own. Several processes go through the same steps
with the same decisions: they agree on everything that a clock, a disk or a signal decides
(`lm.launch.distributed`).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from lm import data
from lm.config.stages import BatchShape, find_stage
from lm.devices.mesh import process_share
from lm.launch.distributed import StopAgreement, broadcast_from_first, is_first, is_multiprocess
from lm.record.run import Run
from lm.record.time_use import COMPILE, RESTORING
from lm.run import evaluate
from lm.run.branch import start_branch
from lm.run.journal import DivergenceError, Journal, SpikeError
from lm.run.program import Experiment, Program
from lm.run.remaining import DIAGNOSIS, EVALUATION, SAVING, SUITES, TEXTS
from lm.run.runs import RunSpec, Slot, Status
from lm.run.start import initial_state
from lm.run.suites import view_state
from lm.run.tables import parameter_rows, write_parameters
from lm.run.trace import ASIDE, DATA_WAIT, FETCH, STEP
from lm.training.state import State


@contextlib.contextmanager
def closing(wave: 'Wave') -> Generator['Wave']:
    """Closes the wave at the end of the block; after an error only if this is the only process.

    Checkpoints are closed together, and a process with an error ends at once.
    """
    try:
        yield wave
    except BaseException:
        if not is_multiprocess():
            wave.close()
        raise
    wave.close()


class Wave:
    """Runs of one program, each opened at its newest checkpoint or freshly initialised.

    Call compile, train and close, in this order.

    Args:
      program: the program.
      runs: the runs to train.
      size: number of slots of the program; some may be empty.
      on_failure: on_failure(folder, error) is called for an error that concerns one run. The other
        runs continue unless it raises, which is the default.
    """

    def __init__(
        self,
        program: Program,
        runs: list[RunSpec],
        size: int,
        on_failure: Callable[[Path, Exception], None] | None = None,
    ):
        # Only tpu.plan compiles programs of a mere Blueprint.
        self.program, self.experiment = program, cast(Experiment, program.experiment)
        self.size, self._on_failure = size, on_failure
        self.slots: list[Slot] = []
        self.states = program.make_buffer(size)
        self._pending: tuple[list[tuple[int, int]], Any] | None = None
        self._stopping = StopAgreement([])
        self._traced_journal: Journal | None = None  # its folder gets the trace
        fields, self._stages = self.experiment.recipe.data, self.experiment.recipe.stages
        process_index, process_count = process_share(self.experiment.mesh)
        self.feed = data.Feed(
            self.experiment.dataset.train,
            batch_size=fields.batch_size,
            prefetch=fields.prefetch,
            transform=self.experiment.mixture,
            process_index=process_index,
            process_count=process_count,
            stages=self._stages if self.experiment.recipe.train.stages else (),
        )
        for run in runs:
            try:
                self._open_slot(run)
            except (OSError, ValueError) as error:  # such as a damaged checkpoint
                self._fail(run.folder, error)

    def _open_slot(self, run: RunSpec) -> None:
        """Opens a run and puts its state in the next slot."""
        journal = Journal(run.recipe, run.folder, self.experiment, run.terminal)
        journal.preparation = run.preparation
        with run.preparation.time_part(RESTORING):
            state = journal.restore(
                self.experiment.state_shapes, run.continue_changed, run.start_over
            )
        if state is None and run.recipe.train.branch_from:
            state = start_branch(journal, self.experiment.state_shapes, run.continue_changed)
        elif state is None:
            state = initial_state(run.recipe, self.experiment, run.terminal.say)
        if journal.is_finished and is_first() and Run(run.folder).status is None:
            journal.summarize(Status.DONE)  # killed before it wrote its summary
        if is_first():
            learner = dataclasses.replace(self.experiment.learner, recipe=run.recipe)
            write_parameters(run.folder, parameter_rows(learner, self.experiment.mesh))
        self.states = self.program.put(self.states, state, len(self.slots))
        self.slots.append(Slot(journal, Status.DONE if journal.is_finished else Status.TRAINING))

    def compile(self) -> None:
        """Compiles the steps of all stages that are to come, so that none begins with it.

        Stacks the hyperparameters; an empty slot repeats slot 0.
        """
        if not self.slots:
            return
        start = time.perf_counter()
        first = min(slot.journal.step for slot in self.slots)
        with self._pause_clocks():  # of a wave that goes on with fewer slots
            self._steps = self.program.compile_stages(self.size, first)
        recipes = [slot.recipe for slot in self.slots]
        recipes += [recipes[0]] * (self.size - len(recipes))
        self.hypers = self.program.stack_hypers(recipes)
        for slot in self.slots:
            slot.journal.compile_sec = self.program.compile_sec
            slot.journal.side_by_side = len(self.slots)
            # The program may have compiled it for another wave, which has taken that time.
            slot.journal.spent[COMPILE] += time.perf_counter() - start

    @property
    def active_slots(self) -> list[int]:
        """Indices of the slots that still train."""
        return [i for i, slot in enumerate(self.slots) if slot.is_active]

    def train(self, signals: list[int], tick: Callable[[], None] = lambda: None) -> None:
        """Trains until every run has ended, or a signal is in `signals`; then saves unfinished
        runs.

        Calls `tick` after every step.
        """
        self._stopping = StopAgreement(signals)
        for i in self.active_slots:
            self._call_journal(i, Journal.open)
        # Before the diagnosis of step 0, which is recorded again after a restart from there.
        for i in self._select_slots(Journal.is_first_save_due):
            self.save_run(i)
        self._diagnose(
            # Only runs that start: a resumed run has recorded the diagnosis of its step.
            self._select_slots(lambda journal: journal.is_diagnosis_due() and journal.step == 0)
        )
        # A suite that fails does so before the first step. A resumed run has evaluated its suites.
        self._evaluate_suites(
            self._select_slots(
                lambda journal: journal.step == 0 and bool(journal.recipe.eval.suites)
            )
        )
        # Opening files and the first diagnosis are no training time.
        for i in self.active_slots:
            self.slots[i].journal.throughput.reset()
        for journal in [self.slots[i].journal for i in self.active_slots[:1]]:
            for line in self.program.tracer.list_missed_notes(journal.step, journal.workdir):
                journal.terminal.say(line)
        self._begin_trace()
        while self.active_slots and not self._stopping.should_stop:
            self.dispatch()
            if self.program.tracer.is_complete:
                self._end_trace()
            is_due = bool(self._select_slots(Journal.is_due))
            if is_due:
                # A divergence in the last step must be known before its weights are evaluated or
                # saved.
                self.fetch_pending()
                # Before saving, since a checkpoint records the validation loss of its step, by
                # which the best checkpoints are kept.
                self._evaluate()
                self._evaluate_texts()
                self._evaluate_suites(self._select_slots(Journal.are_suites_due))
                self._diagnose(self._select_slots(Journal.is_diagnosis_due))
                for i in self._select_slots(Journal.is_save_due):
                    self.save_run(i)  # training goes on while a checkpoint is written
                self._end_runs(self._select_slots(lambda journal: journal.is_finished), Status.DONE)
                self.compact()
            tick()
            self._begin_trace()
        if self.program.tracer.is_tracing:
            self._end_trace()
        if self._stopping.should_stop:
            self.fetch_pending()
            for i in self._select_slots(lambda journal: journal.step > 0):
                self.save_run(i)
            self._end_runs(self.active_slots, Status.STOPPED)

    def _select_slots(self, test: Callable[[Journal], bool]) -> list[int]:
        """Returns active slots that pass `test`, except runs that wait or were rolled back."""
        slots = self.slots
        return [
            i
            for i in self.active_slots
            if not (slots[i].is_rolled_back or slots[i].is_waiting) and test(slots[i].journal)
        ]

    def dispatch(self) -> None:
        """Starts a step of all active runs, then fetches the previous step, to keep the devices
        busy.
        """
        shape, active = self._select_stage()
        step = self.slots[active[0]].journal.step + 1  # the trace names one run's step
        with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
            batch = self._take_batches(active)
            train_step = self._find_step(shape)
            # A step does not keep the states of runs that it leaves out.
            waiting = {i: self.take_state(i) for i in self.active_slots if i not in active}
            self.states, metrics = train_step(self._mask(active), self.states, batch, self.hypers)
            for i, state in waiting.items():
                self.states = self.program.put(self.states, state, i)
            for i in self.active_slots:
                self.slots[i].is_waiting = i in waiting
            for i in active:
                self.slots[i].is_rolled_back = False
                self.slots[i].journal.advance()
            self.program.tracer.count_step()
            steps = [(i, self.slots[i].journal.step) for i in active]
            previous, self._pending = (
                self._pending,
                (steps, (metrics, self._stopping.begin_exchange())),
            )
            # Only now, with the next step queued, wait for the metrics of the previous one.
            self._record_metrics(previous)

    def _select_stage(self) -> tuple[BatchShape, list[int]]:
        """Returns the shape of the next batches, and the runs that have one of this shape.

        Runs that have gone further, since others resumed earlier or were rolled back, wait.
        """
        numbers = {
            i: find_stage(self._stages, self.slots[i].journal.step) for i in self.active_slots
        }
        shape = self._stages[min(numbers.values())].shape
        return shape, [i for i, number in numbers.items() if self._stages[number].shape == shape]

    def _find_step(self, shape: BatchShape) -> Any:
        """Returns the compiled step of a stage; a rollback may need one that had ended before."""
        if shape not in self._steps:
            self._steps[shape] = self.program.compile_step(self.size, shape)
        return self._steps[shape]

    def _begin_trace(self) -> None:
        """Begins the trace of train.profile if the next step is its first."""
        if not self.active_slots:
            return
        journal = self.slots[self.active_slots[0]].journal
        if self.program.tracer.is_first_step(journal.step + 1):
            # Otherwise the trace would begin with operations of the step before.
            self.fetch_pending()
            with self._pause_clocks():
                self.program.tracer.begin(journal.workdir)
            self._traced_journal = journal

    def _end_trace(self) -> None:
        """Ends the trace once its last step is done, and prints a summary of its time."""
        self.fetch_pending()
        with self._pause_clocks():
            assert self._traced_journal is not None  # set by `_begin_trace`
            stage = find_stage(self._stages, self._traced_journal.step - 1)
            program_text = self._find_step(self._stages[stage].shape).as_text
            for line in self.program.tracer.end(program_text, self.size):
                self._traced_journal.terminal.say(line)

    def _take_batches(self, active: list[int]) -> dict[str, jax.Array]:
        """Returns the next batch of each active run, in its own order of the text.

        Other slots repeat one of them.
        """
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(DATA_WAIT):
            batches = self.feed.take([self.slots[i].journal.next_place() for i in active])
        slot_batches = [batches[0]] * self.size
        for i, batch in zip(active, batches, strict=True):
            slot_batches[i] = batch
        waited = time.perf_counter() - start
        for i in active:
            # Each run gets the whole wait: the step of all runs waits for it.
            self.slots[i].journal.throughput.add_wait(waited)
        return self.program.stack_batches(slot_batches)

    def _mask(self, slots: list[int]) -> np.ndarray:
        mask = np.zeros(self.size, bool)
        mask[slots] = True
        return mask

    def fetch_pending(self) -> None:
        """Fetches the metrics of the last step too; runs that are still active were finite."""
        previous, self._pending = self._pending, None
        self._record_metrics(previous)

    def _record_metrics(self, pending: tuple[list[tuple[int, int]], Any] | None) -> None:
        if pending is None:
            return
        steps, metrics = pending
        step = steps[0][1] if steps else 0  # a rolled-back run leaves none
        with jax.profiler.TraceAnnotation(FETCH, step=step):
            fetched, answer = jax.device_get(metrics)
        self._stopping.finish_exchange(answer)
        for i, step in steps:
            # A run that diverged had already dispatched its next step, which does not count.
            if self.slots[i].is_active:
                row = self.program.pick(fetched, i).items()
                self._call_journal(
                    i, Journal.record, step, {name: float(value) for name, value in row}
                )

    def _call_journal(self, i: int, method: Callable, *arguments) -> None:
        """Calls method(journal, *arguments).

        An error ends the run, and all runs if `on_failure` raises.
        """
        journal = self.slots[i].journal
        try:
            try:
                method(journal, *arguments)
            except DivergenceError as seen:
                self._recover(i, seen)
        except OSError as error:
            self.slots[i].status = Status.FAILED
            self._fail(journal.workdir, journal.explain_error(error))

    def _fail(self, folder: Path, error: Exception) -> None:
        if self._on_failure is None:
            raise error
        self._on_failure(folder, error)

    def _recover(self, i: int, error: DivergenceError) -> None:
        """Rolls a run back, or ends it if its config does not ask for that or it is impossible."""
        slot, journal = self.slots[i], self.slots[i].journal
        try:
            is_spike = isinstance(error, SpikeError)
            if is_spike or journal.recipe.train.on_divergence != 'rollback':
                raise error
            state = journal.roll_back(error, self.experiment.state_shapes)
        except DivergenceError as final:
            journal.summarize(Status.DIVERGED, str(final))
            slot.status = Status.DIVERGED
            journal.terminal.show_divergence(str(final))
            return
        self.states = self.program.put(self.states, state, i)
        if self._pending:  # the step in flight used the replaced state
            steps, metrics = self._pending
            self._pending = ([pair for pair in steps if pair[0] != i], metrics)
        slot.is_rolled_back = True

    def _evaluate(self) -> None:
        """Records the validation losses of the runs that are due."""
        slots = self._select_slots(Journal.is_evaluation_due)
        if not slots:
            return
        rows, mask = self.experiment.dataset.validation, self._mask(slots)
        batches = functools.partial(evaluate.validation_batches, self.experiment)

        def step(batch):
            return self.program.evaluate(batch, mask, self.states, self.hypers)

        with self._pause_clocks(EVALUATION):
            sums = evaluate.sums_by_source(step, batches, rows)
            objective_sums = {
                name: evaluate.sums_by_source(step, batches, objective_rows)
                for name, objective_rows in self.experiment.objective_rows.items()
            }
            for i in slots:
                losses = evaluate.validation_losses(self.program.pick(sums, i), rows)
                for name, batch_sums in objective_sums.items():
                    losses |= evaluate.objective_loss(name, self.program.pick(batch_sums, i), rows)
                self._call_journal(i, Journal.record_evaluation, losses)

    def _evaluate_texts(self) -> None:
        """Records the losses of held-out texts of the runs that are due."""
        slots = self._select_slots(Journal.are_texts_due)
        if not slots:
            return
        texts = {name: text.rows for name, text in self.experiment.texts.items()}
        mask = self._mask(slots)
        batches = functools.partial(evaluate.text_batches, self.experiment)

        def step(batch):
            return self.program.evaluate(batch, mask, self.states, self.hypers)

        with self._pause_clocks(TEXTS):
            sums = {
                name: evaluate.sums_by_source(step, batches, rows) for name, rows in texts.items()
            }
            for i in slots:
                losses = evaluate.text_losses(self.program.pick(sums, i), texts)
                self._call_journal(i, Journal.record_texts, losses)

    def _evaluate_suites(self, slots: list[int]) -> None:
        """Records the numbers of suites for the present weights of each run."""
        if not slots:
            return
        with self._pause_clocks(SUITES):
            for i in slots:
                journal = self.slots[i].journal
                checkpoint = view_state(
                    self.experiment, journal.recipe, journal.workdir, self.take_state(i)
                )
                numbers = {
                    name: {key: float(value) for key, value in evaluate_suite(checkpoint).items()}
                    for name, evaluate_suite in self.experiment.suites.items()
                }
                self._call_journal(i, Journal.record_suites, numbers)

    def _diagnose(self, slots: list[int]) -> None:
        """Records diagnostics of each layer on the first validation batch, always the same."""
        if not slots:
            return
        batch = next(
            evaluate.validation_batches(self.experiment, self.experiment.dataset.validation)
        )
        with self._pause_clocks(DIAGNOSIS):
            diagnostics = self.program.diagnose(batch, self._mask(slots), self.states, self.hypers)
            diagnostics = jax.device_get(diagnostics)
            for i in slots:
                self._call_journal(i, Journal.record_diagnosis, self.program.pick(diagnostics, i))

    def save_run(self, i: int) -> None:
        """Starts a checkpoint of run i, unless it has one of this step.

        Call `fetch_pending` before.
        """
        if self.slots[i].journal.saved_step != self.slots[i].journal.step:
            with self._pause_clocks(SAVING):
                self._call_journal(i, Journal.save, self.take_state(i))

    def take_state(self, i: int) -> State:
        return self.program.take(self.states, i)

    def _end_runs(self, slots: list[int], status: Status) -> None:
        for i in slots:
            self._call_journal(i, Journal.end, status)
            if self.slots[i].is_active:  # the last checkpoint may have failed
                self.slots[i].status = status

    def compact(self) -> None:
        """Continues with fewer slots if empty slots would cost more time than compiling again."""
        multiple = self.experiment.mesh.shape['run']  # the mesh cuts slots evenly
        fewer = max(1, -(-len(self.active_slots) // multiple)) * multiple
        # kernels.run_axis=loop skips empty slots, vmap computes them. A wave shrinks only to half
        # its slots or fewer, so it compiles again at most log2(size) times.
        skipped = self.program.layout.skips_inactive
        if skipped or not self.active_slots or fewer > self.size // 2:
            return
        steps_left = max(s.recipe.train.steps - s.journal.step for s in self.slots if s.is_active)
        step_sec = self.slots[self.active_slots[0]].journal.last.get('step_sec') or 0.0
        worth_it = steps_left * step_sec * (1 - fewer / self.size) >= self.program.compile_sec
        # Clocks differ between processes, but all of them must run the same program.
        if not broadcast_from_first(worth_it):
            return
        states = [self.take_state(i) for i in self.active_slots]
        self._close_journals([slot for slot in self.slots if not slot.is_active])
        self.slots, self.size = [slot for slot in self.slots if slot.is_active], fewer
        self.states = self.program.make_buffer(fewer)
        for i, state in enumerate(states):
            self.states = self.program.put(self.states, state, i)
        self.compile()

    def close(self) -> None:
        """Ends the reading threads and closes the journals."""
        self.program.tracer.abandon()
        self.feed.close()
        self._close_journals(self.slots)

    def _close_journals(self, slots: list[Slot]) -> None:
        for slot in slots:
            with contextlib.suppress(OSError):  # it has ended that run, and was reported
                slot.journal.close()

    @contextlib.contextmanager
    def _pause_clocks(self, work: str | None = None) -> Generator[None]:
        """Leaves the time of the block out of every run's tokens/s.

        work: kind of the block's work, whose time counts for the remaining time of the runs.
        """
        start = time.perf_counter()
        for i in self.active_slots:
            self.slots[i].journal.throughput.pause()
        with jax.profiler.TraceAnnotation(ASIDE):
            yield
        for i in self.active_slots:
            self.slots[i].journal.throughput.resume()
            if work is not None:
                self.slots[i].journal.remaining.record(work, time.perf_counter() - start)
