"""The records of one run: its workdir, its counters, and what is due at each step.

Each run of a wave (`lm.run.wave`) has one Journal, which restores and saves checkpoints, watches
losses, records and sums up. Several processes have one each, and save and restore together; records
are read and written by process 0 alone.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from lm import data
from lm.config.mixture import source_flag, split_by_source
from lm.config.recipe import Recipe
from lm.config.resolve import to_dict
from lm.launch.distributed import broadcast_from_first, is_first
from lm.launch.streams import output_loss
from lm.launch.terminal import Terminal
from lm.record.checkpoint import TreeMismatch, format_differences, read_meta
from lm.record.checkpoints import DAMAGED_FOLDER, LOSS, Checkpoints
from lm.record.code import Code, extend_code_history, find_other_code
from lm.record.machine import device_name, git_commit, peak_memory_bytes, versions
from lm.record.metrics import NoRecorder, Recorder, Throughput, replace_non_finite
from lm.record.run import Run
from lm.record.upgrade import resolve_stored
from lm.record.workdir import CONFIG, SUMMARY, write_config
from lm.run.evaluate import objective_loss_name
from lm.run.program import TOKENIZER, Experiment
from lm.run.tables import optimizer_state_bytes, parameter_count
from lm.run.warnings import Detector, format_warning
from lm.storage.buckets import is_url
from lm.storage.files import describe_full_disk, seal_record, write_json
from lm.training.state import State
from lm.training.step import MUST_BE_FINITE

MAX_REPEATS = 5  # rollbacks in all, or skipped steps in a row: beyond that something else is wrong


class DivergenceError(Exception):
    """A step whose loss or update is not finite."""


class CheckpointsLost(OSError):
    """A run has trained before, and none of its checkpoints can be read."""


@dataclasses.dataclass
class Counters:
    """Numbers and events that a checkpoint holds beside arrays."""

    batch_index: int = 0  # the next batch of the stream; ahead of the step after a rollback alone
    tokens: float = 0.0
    wall_sec: float = 0.0
    skipped_in_a_row: int = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best: dict[str, float] = dataclasses.field(default_factory=dict)  # lowest validation losses
    rows: int | None = None  # of metrics.jsonl; None in checkpoints of an older version
    warnings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    code: list[Code] = dataclasses.field(default_factory=list)  # that trained the run so far


class Journal:
    """One run's records. step: the last one dispatched; saved_step: of its newest checkpoint, 0 for
    none; last: the newest value of everything recorded; other_code: what trained the checkpoint
    that it goes on from, if that is other code than this.
    """

    def __init__(self, recipe: Recipe, workdir: Path, experiment: Experiment, terminal: Terminal):
        self.recipe, self.workdir, self.experiment = recipe, workdir, experiment
        self.terminal, self.start_time = terminal, time.perf_counter()
        self.step, self.saved_step, self.compile_sec = 0, 0, 0.0
        self.side_by_side = 1  # runs of the wave, itself included
        self.counters, self.last = Counters(), {}
        self.other_code: Code | None = None
        self.throughput = Throughput(experiment.flops_per_token, experiment.utilisation)
        if is_first():
            experiment.dataset.tokenizer.save(workdir / TOKENIZER)
        kept = recipe.train.keep_last, recipe.train.keep_best
        self.checkpoints = Checkpoints(workdir, *kept, terminal.say)
        self.recorder: Recorder | NoRecorder | None = None
        self.detector = Detector(recipe, [])
        self._bad_step: int | None = None
        self._noted_output_loss = False

    def restore(
        self, template: State, continue_changed: bool = False, start_over: bool = False
    ) -> State | None:
        """Returns the state of the newest checkpoint, and takes its counters; None without one.

        template: shapes, types and shardings of the state. Raises ValueError where it was trained
        on other data, unless `continue_changed`, or is one of another model; CheckpointsLost where
        the run must have had checkpoints and none is left, unless `start_over`.
        """
        try:
            found = self.checkpoints.restore(template)
        except TreeMismatch as error:
            raise TreeMismatch(self._describe_differences() + str(error)) from error
        if found is None:
            if not start_over and is_first():
                self._refuse_to_start_over()
            return None
        state, meta = found
        digest, source = self.experiment.dataset.digest, source_flag(self.recipe.data)
        if meta['data'] != digest and not continue_changed:
            raise ValueError(
                f'{self.workdir} was trained on data {meta["data"]}, and {source} is now {digest}. '
                'Give another --workdir, or --continue_changed.'
            )
        self.counters = Counters(**meta['counters'])
        self.step = self.saved_step = int(state.step)
        self.other_code = find_other_code(self.counters.code, Run(self.workdir).summary)
        self.last = broadcast_from_first(self._read_newest_values() if is_first() else None)
        self.terminal.say(f'resuming after step {self.step}')
        source = self.recipe.train.init_from
        if source and not is_url(source) and not Path(source).exists():
            self.terminal.say(f'NOTE: train.init_from={source} is gone, and not needed any more')
        return state

    def _read_newest_values(self) -> dict[str, Any]:
        """The newest of every value recorded up to the present step; with `validated_step`."""
        newest: dict[str, Any] = {}
        for row in Run(self.workdir).rows():
            if row['step'] <= self.step:
                validated = {'validated_step': row['step']} if LOSS in row else {}
                newest |= _drop_lists(row) | validated
        newest.pop('step', None)
        return newest

    def _describe_differences(self) -> str:
        """The fields in which the newest checkpoint's config differs, for an error."""
        if not (steps := self.checkpoints.steps()):
            return ''  # it is on the disk of process 0
        meta = read_meta(self.checkpoints.folder, steps[-1])
        return format_differences(resolve_stored(meta['config']), self.recipe)

    def _refuse_to_start_over(self) -> None:
        """Raises CheckpointsLost where step 1 would write over what a run has recorded."""
        aside, rows = self.checkpoints.damaged_steps(), Run(self.workdir).rows()
        last, every = rows[-1]['step'] if rows else 0, self.recipe.train.checkpoint_every
        # A run may have been killed before its first checkpoint was written, until the second one
        # is due, which waits for the first.
        had_one = 0 < 2 * every < last or Run(self.workdir).status == 'done'
        if not aside and not had_one:
            return
        where = f'{self.checkpoints.folder} holds none'
        if aside:
            where = f'its checkpoints {aside} are damaged and in {self.workdir / DAMAGED_FOLDER}'
        raise CheckpointsLost(
            f'{self.workdir} has trained to step {last}, and none of its checkpoints can be read: '
            f'{where}. Put one back, or give another --workdir, or --start_over to begin at step 1 '
            f'and write over the {len(rows)} rows recorded.'
        )

    def open(self) -> None:
        """Takes the folder over: records from `step` on, and removes later rows and a summary."""
        self.counters.code = extend_code_history(self.counters.code, self.step)
        if is_first():
            write_config(self.workdir, self.recipe)
        self._open_recorder()
        if is_first():
            (self.workdir / SUMMARY).unlink(missing_ok=True)

    def _open_recorder(self) -> None:
        if not is_first():
            self.recorder = NoRecorder()
            return
        self.recorder = Recorder(self.workdir, self.step, self.counters.rows, self.terminal.say)
        self.detector = Detector(self.recipe, self.counters.warnings)
        for row in Run(self.workdir).rows():
            self.detector.observe(row)

    def is_evaluation_due(self) -> bool:
        return self._is_at(self.recipe.train.eval_every)

    def is_diagnosis_due(self) -> bool:
        every = self.recipe.train.diagnose_every
        return every > 0 and self._is_at(every)

    def is_save_due(self) -> bool:
        return self._is_at(self.recipe.train.checkpoint_every)

    def _is_at(self, interval: int) -> bool:
        """Whether this is the last step, or a multiple of `every`, which never holds for 0."""
        return self.is_finished or (interval > 0 and self.step % interval == 0)

    def is_due(self) -> bool:
        """Whether the run is to be evaluated, diagnosed, saved or ended before the next step."""
        return self.is_evaluation_due() or self.is_diagnosis_due() or self.is_save_due()

    @property
    def is_finished(self) -> bool:
        return self.step >= self.recipe.train.steps

    def next_place(self) -> data.Cursor:
        """The batch that the next step takes."""
        index = self.counters.batch_index
        return data.Cursor(
            self.recipe.data.seed, index, index + self.recipe.train.steps - self.step
        )

    def advance(self) -> None:
        self.step += 1
        self.counters.batch_index += 1

    def record(self, step: int, row: dict[str, float]) -> None:
        """Records the fetched metrics of one step. Raises Diverged."""
        tokens = row.pop('batch_tokens')
        share = row.get('target_share', 1.0)  # tokens that are no target are work all the same
        self.throughput.tokens += tokens / share if share else 0.0
        self.throughput.steps += 1
        self.counters.tokens += tokens
        self._check_finite(step, row)
        self._note_output_loss(step)
        every, steps = self.recipe.train.log_every, self.recipe.train.steps
        if step == 1 or step % every == 0 or step == steps:
            row = {'step': step, **row, 'tokens': self.counters.tokens, **self.throughput.read()}
            self.recorder.write(row)
            self.terminal.show_row(row, steps)
            self.last |= row
            self._warn(row)

    def _check_finite(self, step: int, row: dict[str, float]) -> None:
        """Raises Diverged for a step that is not finite, and for MAX_REPEATS skipped in a row."""
        seen = ', '.join(f'{name} {row[name]}' for name in MUST_BE_FINITE)
        said, counters = f'step {step}: {seen}', self.counters
        counters.skipped_in_a_row = counters.skipped_in_a_row + 1 if row.get('skipped') else 0
        if counters.skipped_in_a_row:
            self._event('skip_step', step, seen)
            if counters.skipped_in_a_row < MAX_REPEATS:
                return
            said = f'{MAX_REPEATS} steps in a row skipped; {said}'
        elif all(math.isfinite(row[name]) for name in MUST_BE_FINITE):
            return
        self._bad_step = step
        raise DivergenceError(said)

    def _note_output_loss(self, step: int) -> None:
        """Notes once that what is printed is dropped (`lm.launch.streams`)."""
        if not self._noted_output_loss and (why := output_loss()):
            self._noted_output_loss = True
            self._event('output_lost', step, f'standard output is gone: {why}')

    def _event(self, kind: str, step: int, text: str) -> None:
        self.counters.events.append({'kind': kind, 'step': step, 'seen': text})
        self.terminal.say(f'{kind}: step {step}: {text}')

    def record_evaluation(self, losses: dict[str, float]) -> None:
        """Records the validation losses of the present parameters."""
        ce, bits, best = losses['validation_ce'], losses['bits_per_byte'], self.counters.best
        sources = filter(None, split_by_source(self.experiment.dataset.validation))
        parts = [*sources, *self.experiment.objective_rows]
        self.recorder.write({'step': self.step, **losses})
        self.terminal.say(
            f'step {self.step:>6}  validation loss {ce:.4f}  bits per byte {bits:.4f}  '
            f'perplexity {losses["perplexity"]:.2f}'
            + ''.join(f'  {name} {losses[objective_loss_name(name)]:.4f}' for name in parts)
        )
        self.last |= losses | {'validated_step': self.step}
        if ce < best.get('best_validation_ce', math.inf):
            found = {'best_validation_ce': ce, 'best_bits_per_byte': bits}
            self.counters.best = found | {'best_step': self.step}

    def record_diagnosis(self, diagnostics: dict[str, Any]) -> None:
        """Records what `lm.training.diagnostics` found: by name a number, one per layer or head."""
        row = {'step': self.step} | {name: value.tolist() for name, value in diagnostics.items()}
        self.recorder.write(row)
        self.last |= _drop_lists(row)
        self._warn(row)

    def _warn(self, row: dict[str, Any]) -> None:
        for warning in self.detector.detect(row):
            self.counters.warnings.append(warning)
            self.terminal.say(f'WARNING: {format_warning(warning)}')

    def save(self, state: State) -> None:
        """Starts a checkpoint of the present step."""
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
        self.saved_step = self.step

    def find_last_good(self) -> str:
        """The newest checkpoint that can be read, as a reading of it shows."""
        self.checkpoints.wait()
        found = self.checkpoints.find_newest_intact(self.experiment.state_shapes)
        return str(found) if found else 'none was saved'

    def explain_error(self, error: OSError) -> OSError:
        """Adds to an error of writing what it means for the run."""
        if not (self.workdir / CONFIG).exists():
            return OSError(
                f'{self.workdir.absolute()} is not there any more ({error}): it was moved or '
                f'deleted while it trained, at step {self.step}; {self._describe_newest()}. Move '
                'it back, or give its new place by --workdir: the same command then goes on from '
                'its newest checkpoint. If it was deleted, the same command begins anew.'
            )
        what, then = f'{self.workdir} cannot be written', 'When it can be'
        if full := describe_full_disk(error, self.workdir):
            what, then = full, 'With more room'
        newest, where = 'no checkpoint has been saved', 'anew'
        if steps := self.checkpoints.steps():
            newest = f'the newest checkpoint is {self.checkpoints.folder / str(steps[-1])}'
            where = 'from there'
        return OSError(f'{what} ({error}); {newest}. {then}, the same command goes on {where}.')

    def _describe_newest(self) -> str:
        if not self.saved_step:
            return 'no checkpoint had been saved'
        return f'its last checkpoint is of step {self.saved_step}, if that was written by then'

    def roll_back(self, error: DivergenceError, template: State) -> State:
        """Returns the state of the last checkpoint, and leaves out the batches since. Raises
        Diverged where there is none, or after MAX_REPEATS times.
        """
        bad, counters = self.step, self.counters
        times = sum(event['kind'] == 'rollback' for event in counters.events)
        self.checkpoints.wait()
        state = None if times >= MAX_REPEATS else self.restore(template, True, start_over=True)
        if state is None:
            why = f'{times} rollbacks did not help' if times else 'no checkpoint to roll back to'
            raise DivergenceError(f'{error}; {why}')
        kept = {name: getattr(self.counters, name) for name in ('tokens', 'best', 'rows')}
        self.counters = dataclasses.replace(counters, **kept)
        self._event('rollback', bad, f'{error}; back to step {self.step}, batches since left out')
        self._open_recorder()
        self.throughput.reset()
        return state

    def wall_sec(self) -> float:
        """Seconds that this process, and those before it that saved, have taken."""
        return self.counters.wall_sec + time.perf_counter() - self.start_time

    def summarize(self, status: str, reason: str = '') -> None:
        """Writes summary.json. status: done, stopped, or diverged or failed with a reason."""
        if not is_first():
            return
        self._note_output_loss(self.step)
        trained, experiment = self.throughput, self.experiment
        seconds, code = trained.total_seconds or math.nan, self.counters.code
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
            'data_wait_fraction': trained.total_wait_seconds / seconds,
            'compile_sec': self.compile_sec,
            'wall_sec': self.wall_sec(),
            'side_by_side': self.side_by_side,
            'peak_memory_bytes': peak_memory_bytes(),
            'device': device_name(),
            'mfu_of': f'{experiment.peak:.4g} FLOP/s, {experiment.peak_source}',
            'versions': versions(),
            'git_commit': code[-1]['commit'] if code else git_commit(),
            'code': code,
            'data': {'digest': experiment.dataset.digest, **experiment.dataset.report},
            'events': self.counters.events,
            'warnings': self.counters.warnings,
        }
        write_json(self.workdir / SUMMARY, seal_record(replace_non_finite(record)))

    def end(self, status: str) -> None:
        """Writes the summary, once all that was saved is on disk."""
        self.checkpoints.wait()
        self.summarize(status)

    def close(self) -> None:
        """Waits for checkpoints. Raises OSError where one cannot be written."""
        self.checkpoints.close()


def _drop_lists(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, list)}
