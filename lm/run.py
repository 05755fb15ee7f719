"""A run in progress: its data, programs, state and records, and what can be done with them.

`train.py` decides when; the methods here are the single acts: dispatch a step, settle what was
dispatched, evaluate, save, roll back, sum up.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax

from lm import data
from lm.checkpoint import BEST_BY, Checkpoints
from lm.config import Config, to_dict
from lm.evaluate import evaluate
from lm.flops import flops_per_token, peak_flops
from lm.host import device_name, git_commit, peak_memory_bytes, versions
from lm.mesh import make_mesh, put_batch
from lm.metrics import Recorder, Terminal, Throughput
from lm.model import build_model, kernel_implementation
from lm.state import hyper_from
from lm.step import MUST_BE_FINITE, abstract_state, jit_eval_step, jit_init, jit_train_step
from lm.table import as_table, parameter_count, parameter_rows
from lm.workdir import SUMMARY, write_json

MAX_REPEATS = 5  # rollbacks in all, or skipped steps in a row: beyond that something else is wrong


class Diverged(Exception):
    """A step whose loss or update is not finite."""


@dataclasses.dataclass
class Counters:
    """What a checkpoint holds beside arrays. batch_index is the next batch of the stream; it runs
    ahead of the step only where a rollback left batches out.
    """

    batch_index: int = 0
    tokens: float = 0.0
    wall_sec: float = 0.0
    skipped_in_a_row: int = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Run:
    """Opened at its newest checkpoint, or freshly initialised."""

    def __init__(self, config: Config, workdir: Path, terminal: Terminal, continue_changed: bool):
        self.config, self.workdir, self.terminal = config, workdir, terminal
        self.began = time.perf_counter()
        self.mesh = make_mesh(config.mesh)
        self.dataset = data.open_dataset(config.data, say=terminal.say)
        self.dataset.tokenizer.save(workdir / 'tokenizer')
        data.check_epochs(config.data, config.train.steps, self.dataset.train)
        self.vocab_size = self.dataset.tokenizer.vocab_size
        self.platform = self.mesh.devices.flat[0].platform
        self.model = build_model(config, self.vocab_size, self.platform)
        self.hyper = hyper_from(config)
        bos_id = self.dataset.tokenizer.bos_id
        programs = (config, self.model, self.mesh, self.hyper)
        self.train_step = jit_train_step(*programs, bos_id)
        self.eval_step = jit_eval_step(*programs, bos_id)
        self.checkpoints = Checkpoints(
            workdir, config.train.keep_last, config.train.keep_best, terminal.say
        )
        self.like = abstract_state(*programs)
        self.counters = Counters()
        if not self._restore(continue_changed):
            key = jax.random.key(config.train.seed)
            self.state = jit_init(*programs)(key, self.hyper)
        self.step = int(self.state.step)
        self.recorder = Recorder(workdir, self.step)
        flops = flops_per_token(config.model, self.vocab_size, config.data.seq_len)
        self.peak, self.peak_source = peak_flops(self.mesh.size)
        self.throughput = Throughput(flops, self.peak)
        self.compile_sec = 0.0
        self.last: dict[str, Any] = {}
        self._pending = None
        self._saved_step = self.step
        self._start_stream()

    def _restore(self, continue_changed: bool) -> bool:
        found = self.checkpoints.restore(self.like)
        if found is None:
            return False
        self.state, meta = found
        self.counters = Counters(**meta['counters'])
        if meta['data'] != self.dataset.digest and not continue_changed:
            raise ValueError(
                f'{self.workdir} was trained on data {meta["data"]}, and {self.config.data.source} '
                f'is now {self.dataset.digest}. Give another --workdir, or --continue_changed.'
            )
        self.terminal.say(f'resuming after step {int(self.state.step)}')
        return True

    def _start_stream(self) -> None:
        config, start = self.config, self.counters.batch_index
        stop = start + config.train.steps - self.step
        epoch = data.steps_in_epoch(self.dataset.train, config.data.batch_size)
        if stop > epoch:
            self.terminal.say(f'NOTE: {stop} batches go over the text {stop / epoch:.2f} times')
        self._stream = data.batches(
            self.dataset.train,
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
        config, say = self.config, self.terminal.say
        train, validation = self.dataset.train, self.dataset.validation
        say(
            f'text: {train.n_bytes:,} bytes, {train.n_tokens:,} tokens, '
            f'{data.steps_in_epoch(train, config.data.batch_size):,} steps an epoch; validation: '
            f'{validation.n_bytes:,} bytes'
        )
        if config.optim.warmup_steps > config.train.steps:
            say(
                f'NOTE: warm-up takes {config.optim.warmup_steps} steps and the run has '
                f'{config.train.steps}: the learning rate never reaches its peak'
            )
        self.terminal.console.print(as_table(parameter_rows(config, self.model, self.mesh)))
        kernels = kernel_implementation(config.kernels.implementation, self.platform)
        say(
            f'{parameter_count(config, self.model):,} parameters; mesh {dict(self.mesh.shape)}, '
            f'kernels {kernels}; mfu is of {self.peak / 1e12:.3f} TFLOP/s ({self.peak_source})'
        )

    def compile(self) -> None:
        """Compiles the step for the shapes it will see."""
        start = time.perf_counter()
        config = self.config
        shape = (config.data.batch_size, config.data.seq_len + 1)
        rows = jax.ShapeDtypeStruct(shape, jax.numpy.int32)
        batch = {'tokens': rows, 'segments': rows}
        self.train_step = self.train_step.lower(self.like, batch, self.hyper).compile()
        self.compile_sec = time.perf_counter() - start
        self.throughput.go_on()

    def dispatch(self) -> None:
        """Starts the next step, then fetches the metrics of the one before, so that the device
        always has one to do.
        """
        start = time.perf_counter()
        batch = next(self._stream)
        self.throughput.waited += time.perf_counter() - start
        self.state, metrics = self.train_step(self.state, put_batch(self.mesh, batch), self.hyper)
        self.step += 1
        self.counters.batch_index += 1
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
        tokens = row.pop('batch_tokens')
        self.throughput.tokens += tokens
        self.throughput.steps += 1
        self.counters.tokens += tokens
        self._watch(step, row)
        if step == 1 or step % self.config.train.log_every == 0 or step == self.config.train.steps:
            row = {'step': step, **row, 'tokens': self.counters.tokens, **self.throughput.read()}
            self.recorder.write(row)
            self.terminal.row(row, self.config.train.steps)
            self.last |= row

    def _watch(self, step: int, row: dict[str, float]) -> None:
        """Raises Diverged for a step that is not finite, unless it was skipped, MAX_REPEATS at
        most.
        """
        seen = ', '.join(f'{name} {row[name]}' for name in MUST_BE_FINITE)
        skipped = row.get('skipped', 0.0)
        self.counters.skipped_in_a_row = self.counters.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self._event('skip_step', step, seen)
            if self.counters.skipped_in_a_row < MAX_REPEATS:
                return
            raise Diverged(f'{MAX_REPEATS} steps in a row skipped; step {step}: {seen}')
        if not all(math.isfinite(row[name]) for name in MUST_BE_FINITE):
            raise Diverged(f'step {step}: {seen}')

    def _event(self, kind: str, step: int, text: str) -> None:
        self.counters.events.append({'kind': kind, 'step': step, 'seen': text})
        self.terminal.say(f'{kind}: step {step}: {text}')

    def evaluate(self) -> None:
        """The validation losses of the present parameters, recorded."""
        self.throughput.pause()
        config = self.config
        batches = data.evaluation_batches(
            self.dataset.validation,
            batch_size=config.data.batch_size // config.train.microbatches,
            limit=config.train.eval_batches,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        rows = self.dataset.validation
        losses = evaluate(
            self.eval_step,
            self.state.params,
            self.state.reparam,
            self.hyper,
            self.mesh,
            batches,
            rows,
        )
        self.recorder.write({'step': self.step, **losses})
        self.terminal.say(
            f'step {self.step:>6}  validation loss {losses["validation_ce"]:.4f}  '
            f'bits per byte {losses["bits_per_byte"]:.4f}  perplexity {losses["perplexity"]:.2f}'
        )
        self.last |= losses | {'validated_step': self.step}
        self.throughput.go_on()

    def save(self) -> None:
        """Starts a checkpoint of the present step, if there is none. To be called when settled."""
        if self._saved_step == self.step:
            return
        self.throughput.pause()
        counters = dataclasses.asdict(self.counters) | {'wall_sec': self.wall_sec()}
        meta = {
            'counters': counters,
            'config': to_dict(self.config),
            'data': self.dataset.digest,
            'vocab_size': self.vocab_size,
            'versions': versions(),
        }
        validated = self.last.get('validated_step') == self.step
        self.checkpoints.save(
            self.state, meta, {BEST_BY: self.last[BEST_BY]} if validated else None
        )
        self._saved_step = self.step
        self.throughput.go_on()

    def last_good(self) -> str:
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        return str(self.checkpoints.folder / str(steps[-1])) if steps else 'none was saved'

    def roll_back(self, seen: Diverged) -> None:
        """Returns to the last checkpoint and leaves out the batches since. Raises Diverged where
        there is none, or after MAX_REPEATS times.
        """
        bad, counters = self.step, self.counters
        times = sum(event['kind'] == 'rollback' for event in counters.events)
        self.checkpoints.wait()
        if times >= MAX_REPEATS or not self._restore(continue_changed=True):
            why = f'{times} rollbacks did not help' if times else 'no checkpoint to roll back to'
            raise Diverged(f'{seen}; {why}')
        self.step = self._saved_step = int(self.state.step)
        self.counters = dataclasses.replace(counters, tokens=self.counters.tokens)
        self._event('rollback', bad, f'{seen}; back to step {self.step}, batches since left out')
        self._pending = None
        self.recorder.close()
        self.recorder = Recorder(self.workdir, self.step)
        self.throughput.reset()
        self._start_stream()

    def wall_sec(self) -> float:
        """Of this process and of those before it that saved."""
        return self.counters.wall_sec + time.perf_counter() - self.began

    def summarize(self, status: str) -> None:
        """Writes summary.json."""
        trained = self.throughput
        record = {
            'status': status,
            'step': self.step,
            **{name: value for name, value in self.last.items() if name != 'step'},
            'parameters': parameter_count(self.config, self.model),
            'tokens_per_sec_mean': trained.total_tokens / max(trained.total_seconds, 1e-9),
            'data_wait_fraction': trained.total_waited / max(trained.total_seconds, 1e-9),
            'compile_sec': self.compile_sec,
            'wall_sec': self.wall_sec(),
            'peak_memory_bytes': peak_memory_bytes(),
            'device': device_name(),
            'mfu_of': f'{self.peak:.4g} FLOP/s, {self.peak_source}',
            'versions': versions(),
            'git_commit': git_commit(),
            'data': {'digest': self.dataset.digest, **self.dataset.report},
            'events': self.counters.events,
        }
        write_json(self.workdir / SUMMARY, record)

    def close(self) -> None:
        self.checkpoints.wait()
        self.checkpoints.close()
        self.recorder.close()
