"""What one run leaves in its workdir, and the counters that go with it.

Each run of a wave (`lm.run.wave`) has one Journal: it restores and saves the run's checkpoints,
watches its losses, records and sums up. Of several processes each has one, and all save and restore
together; what is read of the records, and all that is written of them, process 0 reads and writes.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from lm import data
from lm.config.mixture import by_source, source_of
from lm.config.recipe import Recipe
from lm.config.resolve import to_dict
from lm.launch.agreement import from_first, is_first
from lm.launch.terminal import Terminal
from lm.record.checkpoint import TreeMismatch, fields_that_differ, read_meta
from lm.record.checkpoints import DAMAGED, LOSS, Checkpoints
from lm.record.machine import device_name, git_commit, peak_memory_bytes, versions
from lm.record.metrics import FILE, NoRecorder, Recorder, Throughput, read_rows, without_nan
from lm.record.upgrade import stored_config
from lm.record.workdir import SUMMARY, status_of, write_config
from lm.run.counters import Counters, newest_values
from lm.run.evaluate import objective_loss_name
from lm.run.experiment import Experiment
from lm.run.parameter_table import optimizer_state_bytes, parameter_count
from lm.run.warnings import Watch, told
from lm.storage.files import is_full, write_json
from lm.training.state import State
from lm.training.step import MUST_BE_FINITE

MAX_REPEATS = 5  # rollbacks in all, or skipped steps in a row: beyond that something else is wrong


class Diverged(Exception):
    """A step whose loss or update is not finite."""


class Lost(OSError):
    """A run has trained before, and none of its checkpoints can be read."""


class Journal:
    """`step` is the last one dispatched; `last` the newest value of everything recorded."""

    def __init__(self, recipe: Recipe, workdir: Path, experiment: Experiment, terminal: Terminal):
        self.recipe, self.workdir, self.experiment = recipe, workdir, experiment
        self.terminal = terminal
        self.began = time.perf_counter()
        self.step = 0
        self.counters = Counters()
        self.last: dict[str, Any] = {}
        self.compile_sec = 0.0
        self.throughput = Throughput(experiment.flops_per_token, experiment.peak)
        if is_first():
            experiment.dataset.tokenizer.save(workdir / 'tokenizer')
        self.checkpoints = Checkpoints(
            workdir, recipe.train.keep_last, recipe.train.keep_best, terminal.say
        )
        self.recorder: Recorder | NoRecorder | None = None
        self.watch = Watch(recipe, [])
        self._saved_step = 0
        self._bad_step: int | None = None

    def restore(
        self, template: State, continue_changed: bool = False, start_over: bool = False
    ) -> State | None:
        """The state of the newest checkpoint, its counters taken over; None where there is none.

        template: shapes, types and shardings of the state. Raises ValueError where it was trained
        on other data, unless `continue_changed`, or is one of another model; Lost where the run
        must have had checkpoints and none is left, unless `start_over`.
        """
        try:
            found = self.checkpoints.restore(template)
        except TreeMismatch as error:
            raise TreeMismatch(self._which_fields() + str(error)) from error
        if found is None:
            if not start_over and is_first():
                self._refuse_to_start_over()
            return None
        state, meta = found
        digest, source = self.experiment.dataset.digest, source_of(self.recipe.data)
        if meta['data'] != digest and not continue_changed:
            raise ValueError(
                f'{self.workdir} was trained on data {meta["data"]}, and {source} is now {digest}. '
                'Give another --workdir, or --continue_changed.'
            )
        self.counters = Counters(**meta['counters'])
        self.step = self._saved_step = int(state.step)
        self.last = from_first(newest_values(self.workdir, self.step) if is_first() else None)
        self.terminal.say(f'resuming after step {self.step}')
        return state

    def _which_fields(self) -> str:
        """The fields in which the newest checkpoint's config is another, for an error."""
        if not (steps := self.checkpoints.steps()):
            return ''  # it is on the disk of process 0
        meta = read_meta(self.checkpoints.folder, steps[-1])
        return fields_that_differ(stored_config(meta['config']), self.recipe)

    def _refuse_to_start_over(self) -> None:
        """Raises Lost where starting at step 1 would write over what a run has recorded."""
        aside, rows = self.checkpoints.set_aside(), read_rows(self.workdir / FILE)
        last = rows[-1]['step'] if rows else 0
        every = self.recipe.train.checkpoint_every
        # A run that was killed before its first checkpoint was written starts over rightly: that
        # happens until the second one is due, which waits for the first.
        had_one = 0 < 2 * every < last or status_of(self.workdir) == 'done'
        if not aside and not had_one:
            return
        where = (
            f'its checkpoints {aside} are damaged and in {self.workdir / DAMAGED}'
            if aside
            else f'{self.checkpoints.folder} holds none'
        )
        raise Lost(
            f'{self.workdir} has trained to step {last}, and none of its checkpoints can be read: '
            f'{where}. Put one back, or give another --workdir, or --start_over to begin at step 1 '
            f'and write over the {len(rows)} rows recorded.'
        )

    def open(self) -> None:
        """Starts recording after `step`: rows beyond it go, and so does an earlier summary. From
        now on the folder is that of this run.
        """
        if is_first():
            write_config(self.workdir, self.recipe)
        self._record_from_here()
        if is_first():
            (self.workdir / SUMMARY).unlink(missing_ok=True)

    def _record_from_here(self) -> None:
        if not is_first():
            self.recorder = NoRecorder()
            return
        self.recorder = Recorder(self.workdir, self.step, self.counters.rows, self.terminal.say)
        self.watch = Watch(self.recipe, self.counters.warnings)
        for row in read_rows(self.workdir / FILE):
            self.watch.recall(row)

    def evaluates(self) -> bool:
        return self.finished or is_multiple(self.step, self.recipe.train.eval_every)

    def diagnoses(self) -> bool:
        every = self.recipe.train.diagnose_every
        return is_multiple(self.step, every) or (every > 0 and self.finished)

    def saves(self) -> bool:
        return self.finished or is_multiple(self.step, self.recipe.train.checkpoint_every)

    def is_due(self) -> bool:
        """Whether anything is to be done at this step before the next."""
        return self.evaluates() or self.diagnoses() or self.saves()

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.train.steps

    def next_place(self) -> data.Place:
        """The batch that the next step takes."""
        index = self.counters.batch_index
        return data.Place(self.recipe.data.seed, index, index + self.recipe.train.steps - self.step)

    def dispatched(self) -> None:
        self.step += 1
        self.counters.batch_index += 1

    def record(self, step: int, row: dict[str, float]) -> None:
        """The metrics of one step, fetched. Raises Diverged."""
        tokens = row.pop('batch_tokens')
        share = row.get('target_share', 1.0)  # tokens that are no target are work all the same
        self.throughput.tokens += tokens / share if share else 0.0
        self.throughput.steps += 1
        self.counters.tokens += tokens
        self._watch(step, row)
        every, steps = self.recipe.train.log_every, self.recipe.train.steps
        if step == 1 or step % every == 0 or step == steps:
            row = {'step': step, **row, 'tokens': self.counters.tokens, **self.throughput.read()}
            self.recorder.write(row)
            self.terminal.row(row, steps)
            self.last |= row
            self._warn(row)

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
            self._bad_step = step
            raise Diverged(f'{MAX_REPEATS} steps in a row skipped; step {step}: {seen}')
        if not all(math.isfinite(row[name]) for name in MUST_BE_FINITE):
            self._bad_step = step
            raise Diverged(f'step {step}: {seen}')

    def _event(self, kind: str, step: int, text: str) -> None:
        self.counters.events.append({'kind': kind, 'step': step, 'seen': text})
        self.terminal.say(f'{kind}: step {step}: {text}')

    def evaluated(self, losses: dict[str, float]) -> None:
        """Records the validation losses of the present parameters."""
        self.recorder.write({'step': self.step, **losses})
        self.terminal.say(
            f'step {self.step:>6}  validation loss {losses["validation_ce"]:.4f}  '
            f'bits per byte {losses["bits_per_byte"]:.4f}  perplexity {losses["perplexity"]:.2f}'
            + ''.join(f'  {name} {losses[key]:.4f}' for name, key in self._parts_of_loss())
        )
        self.last |= losses | {'validated_step': self.step}
        if losses['validation_ce'] < self.counters.best.get('best_validation_ce', math.inf):
            self.counters.best = {
                'best_validation_ce': losses['validation_ce'],
                'best_bits_per_byte': losses['bits_per_byte'],
                'best_step': self.step,
            }

    def _parts_of_loss(self) -> list[tuple[str, str]]:
        """Sources of a mixture and other objectives, with the names their losses have."""
        sources = filter(None, by_source(self.experiment.dataset.validation))
        names = [*sources, *self.experiment.evaluated]
        return [(name, objective_loss_name(name)) for name in names]

    def diagnosed(self, found: dict[str, Any]) -> None:
        """Records what `lm.training.diagnostics` found: a number, one a layer, or one a head, by name."""
        row = {'step': self.step} | {name: value.tolist() for name, value in found.items()}
        self.recorder.write(row)
        self.last |= {name: value for name, value in row.items() if not isinstance(value, list)}
        self._warn(row)

    def _warn(self, row: dict[str, Any]) -> None:
        for warning in self.watch.read(row):
            self.counters.warnings.append(warning)
            self.terminal.say(f'WARNING: {told(warning)}')

    def save(self, state: State) -> None:
        """Starts a checkpoint of the present step, if there is none."""
        if self._saved_step == self.step:
            return
        self.recorder.sync()  # first, so that no checkpoint is ahead of the records
        self.counters.rows = self.recorder.rows
        meta = {
            'counters': dataclasses.asdict(self.counters) | {'wall_sec': self.wall_sec()},
            'config': to_dict(self.recipe),
            'data': self.experiment.dataset.digest,
            'vocab_size': self.experiment.vocab_size,
            'versions': versions(),
        }
        validated = self.last.get('validated_step') == self.step
        self.checkpoints.save(state, meta, self.last[LOSS] if validated else None)
        self._saved_step = self.step

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint of the present step."""
        return self._saved_step == self.step

    def last_good(self) -> str:
        """The newest checkpoint that can be read: it is read."""
        self.checkpoints.wait()
        found = self.checkpoints.newest_intact(self.experiment.state_shapes)
        return str(found) if found else 'none was saved'

    def explained(self, error: OSError) -> OSError:
        """An error of writing with what it means for the run."""
        what, then = f'{self.workdir} cannot be written', 'When it can be'
        if is_full(error):
            what, then = f'the disk that holds {self.workdir} is full', 'With room on it'
        newest, where = 'no checkpoint has been saved', 'anew'
        if steps := self.checkpoints.steps():
            newest = f'the newest checkpoint is {self.checkpoints.folder / str(steps[-1])}'
            where = 'from there'
        return OSError(f'{what} ({error}); {newest}. {then}, the same command goes on {where}.')

    def roll_back(self, seen: Diverged, template: State) -> State:
        """The state of the last checkpoint; the batches since are left out. Raises Diverged where
        there is none, or after MAX_REPEATS times.
        """
        bad, counters = self.step, self.counters
        times = sum(event['kind'] == 'rollback' for event in counters.events)
        self.checkpoints.wait()
        state = None if times >= MAX_REPEATS else self.restore(template, True, start_over=True)
        if state is None:
            why = f'{times} rollbacks did not help' if times else 'no checkpoint to roll back to'
            raise Diverged(f'{seen}; {why}')
        kept = {name: getattr(self.counters, name) for name in ('tokens', 'best', 'rows')}
        self.counters = dataclasses.replace(counters, **kept)
        self._event('rollback', bad, f'{seen}; back to step {self.step}, batches since left out')
        self._record_from_here()
        self.throughput.reset()
        return state

    def wall_sec(self) -> float:
        """Of this process and of those before it that saved."""
        return self.counters.wall_sec + time.perf_counter() - self.began

    def summarize(self, status: str, reason: str = '') -> None:
        """Writes summary.json. status: done, stopped, diverged or failed, and for these two why."""
        if not is_first():
            return
        trained, experiment = self.throughput, self.experiment
        seconds = trained.total_seconds or math.nan
        record = {
            'status': status,
            'reason': reason,
            'step': self.step,
            **{name: value for name, value in self.last.items() if name != 'step'},
            **self.counters.best,
            **({'diverged_step': self._bad_step} if status == 'diverged' else {}),
            'parameters': parameter_count(experiment.learner),
            'optimizer_state_bytes': optimizer_state_bytes(experiment.state_shapes),
            'tokens_per_sec_mean': trained.total_tokens / seconds,
            'data_wait_fraction': trained.total_waited / seconds,
            'compile_sec': self.compile_sec,
            'wall_sec': self.wall_sec(),
            'peak_memory_bytes': peak_memory_bytes(),
            'device': device_name(),
            'mfu_of': f'{experiment.peak:.4g} FLOP/s, {experiment.peak_source}',
            'versions': versions(),
            'git_commit': git_commit(),
            'data': {'digest': experiment.dataset.digest, **experiment.dataset.report},
            'events': self.counters.events,
            'warnings': self.counters.warnings,
        }
        write_json(self.workdir / SUMMARY, without_nan(record))

    def end(self, status: str) -> None:
        """Sums up once all that was saved is on disk."""
        self.checkpoints.wait()
        self.summarize(status)

    def conclude(self) -> None:
        """The summary of a run found finished, unless there is one that can be read."""
        if is_first() and status_of(self.workdir) is None:
            self.summarize('done')

    def close(self) -> None:
        """Raises OSError where a checkpoint that is still being written cannot be."""
        self.checkpoints.close()


def is_multiple(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 is never."""
    return every > 0 and step % every == 0
