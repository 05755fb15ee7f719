"""A run in progress: its program, state and journal, and what can be done with them.

`train.py` decides when; the methods here are the single acts: dispatch a step, settle what was
dispatched, evaluate, save, roll back, sum up.
"""

import time
from pathlib import Path

import jax

from lm import data
from lm.config import Config
from lm.diagnostics import make_diagnose
from lm.mesh import put_batch
from lm.model import norm_kinds
from lm.record.metrics import Terminal
from lm.run.evaluate import evaluate
from lm.run.experiment import Experiment
from lm.run.journal import Diverged, Journal
from lm.run.start import initial_state
from lm.run.table import as_table, parameter_count, parameter_rows
from lm.shardings import batch_shapes, jit_eval_step, jit_train_step
from lm.state import hyper_from
from modules.norms import NORMS


class Run:
    """Opened at its newest checkpoint, or freshly initialised."""

    def __init__(self, config: Config, workdir: Path, terminal: Terminal, continue_changed: bool):
        self.config, self.terminal = config, terminal
        self.experiment = Experiment(config, terminal.say)
        self.journal = Journal(config, workdir, self.experiment, terminal)
        self.mesh, self.hyper = self.experiment.mesh, hyper_from(config)
        learner = self.experiment.learner
        self.train_step = jit_train_step(learner, self.mesh)
        self.eval_step = jit_eval_step(learner, self.mesh)
        self._diagnose = jax.jit(make_diagnose(learner))
        self.state = self.journal.restore(self.experiment.state_like, continue_changed)
        if self.state is None:
            self.state = initial_state(config, self.experiment)
        self._pending = None
        self._start_stream()

    @property
    def step(self) -> int:
        return self.journal.step

    def _start_stream(self) -> None:
        config, start = self.config, self.journal.counters.batch_index
        rows = self.experiment.dataset.train
        stop = start + config.train.steps - self.step
        epoch = data.steps_in_epoch(rows, config.data.batch_size)
        if stop > epoch:
            self.terminal.say(f'NOTE: {stop} batches go over the text {stop / epoch:.2f} times')
        self._stream = data.batches(
            rows,
            batch_size=config.data.batch_size,
            seed=config.data.seed,
            start=start,
            stop=stop,
            prefetch=config.data.prefetch,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    def describe(self) -> None:
        """What is about to be trained, on what, with what."""
        experiment, say = self.experiment, self.terminal.say
        describe(experiment, self.terminal)
        warmup, steps = self.config.optim.warmup_steps, self.config.train.steps
        if warmup > steps:
            say(
                f'NOTE: warm-up takes {warmup} steps and the run has {steps}: the learning rate '
                'never reaches its peak'
            )

    def compile(self) -> None:
        """Compiles the step for the shapes it will see."""
        start = time.perf_counter()
        batch = batch_shapes(self.config)
        self.train_step = self.train_step.lower(
            self.experiment.state_like, batch, self.hyper
        ).compile()
        self.journal.compile_sec = time.perf_counter() - start
        self.journal.open()
        self.journal.throughput.go_on()

    def dispatch(self) -> None:
        """Starts the next step, then fetches the metrics of the one before, so that the device
        always has one to do.
        """
        start = time.perf_counter()
        batch = next(self._stream)
        self.journal.throughput.wait(time.perf_counter() - start)
        self.state, metrics = self.train_step(self.state, put_batch(self.mesh, batch), self.hyper)
        self.journal.dispatched()
        before, self._pending = self._pending, (self.step, metrics)
        self._finish(before)

    def settle(self) -> None:
        """Fetches the metrics of the last step too: nothing is in flight, and it was finite."""
        before, self._pending = self._pending, None
        self._finish(before)

    def _finish(self, dispatched) -> None:
        if dispatched is None:
            return
        step, metrics = dispatched
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.journal.record(step, row)

    def evaluate(self) -> None:
        """The validation losses of the present parameters, recorded."""
        self.journal.throughput.pause()
        rows = self.experiment.dataset.validation
        batches = validation_batches(self.config, rows)
        weights = self.state.weights
        losses = evaluate(self.eval_step, weights, self.hyper, self.mesh, batches, rows)
        self.journal.evaluated(losses)
        self.journal.throughput.go_on()

    def diagnose(self) -> None:
        """What each layer does with the present parameters on a fixed batch, recorded."""
        self.journal.throughput.pause()
        batch = put_batch(self.mesh, first_batch(self.config, self.experiment.dataset.validation))
        seen = self._diagnose(self.state.weights, batch, self.hyper)
        self.journal.diagnosed(jax.device_get(seen))
        self.journal.throughput.go_on()

    def save(self) -> None:
        """Starts a checkpoint of the present step, if there is none. To be called when settled."""
        self.journal.throughput.pause()
        self.journal.save(self.state)
        self.journal.throughput.go_on()

    def roll_back(self, seen: Diverged) -> None:
        """Returns to the last checkpoint and leaves out the batches since. Raises Diverged where
        there is none, or after several times.
        """
        self.state = self.journal.roll_back(seen, self.experiment.state_like)
        self._pending = None
        self._start_stream()

    def close(self) -> None:
        self.journal.close()


def describe(experiment: Experiment, terminal: Terminal) -> None:
    """Says what text, parameters, devices and kernels a program has."""
    config = experiment.config
    train, validation = experiment.dataset.train, experiment.dataset.validation
    terminal.say(
        f'text: {train.n_bytes:,} bytes, {train.n_tokens:,} tokens, '
        f'{data.steps_in_epoch(train, config.data.batch_size):,} steps an epoch; validation: '
        f'{validation.n_bytes:,} bytes'
    )
    terminal.console.print(as_table(parameter_rows(experiment.learner, experiment.mesh)))
    terminal.say(
        f'{parameter_count(experiment.learner):,} parameters; mesh {dict(experiment.mesh.shape)}, '
        f'{experiment.learner.model.kernels}; mfu is of {experiment.peak / 1e12:.3f} TFLOP/s '
        f'({experiment.peak_source})'
    )
    for kind in sorted(norm_kinds(config.model)):
        if NORMS[kind].leaks:
            terminal.say(
                f'NOTE: in training {kind} shows each token {NORMS[kind].leaks}, later ones '
                'included: the training loss is not that of a causal model. Evaluation uses '
                'running statistics; compare validation losses.'
            )


def validation_batches(config: Config, rows: data.Rows):
    """Of the size of a microbatch, so that evaluation needs no more memory than training."""
    return data.evaluation_batches(
        rows,
        batch_size=config.data.batch_size // config.train.microbatches,
        limit=config.train.eval_batches,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def first_batch(config: Config, rows: data.Rows) -> data.Batch:
    """The validation batch that layers are looked at with, always the same."""
    return next(iter(validation_batches(config, rows)))
