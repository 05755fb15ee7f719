"""The records of one run: its workdir, its counters, and the work due at each step.

Each run of a wave (`lm.run.wave`) has one Journal, which restores and saves checkpoints, watches
losses, records and sums up. With several processes each has a Journal, and they save and restore
together; only process 0 reads and writes records.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from lm import data
from lm.config.checkpoint_steps import list_checkpoint_steps
from lm.config.mixture import source_flag, split_by_source
from lm.config.recipe import Recipe
from lm.config.resolve import to_dict
from lm.config.stages import find_stage
from lm.launch.distributed import broadcast_from_first, is_first
from lm.launch.invocation import describe_invocation
from lm.launch.streams import output_loss
from lm.launch.terminal import Terminal
from lm.record.checkpoint import TreeMismatch, format_differences, name_checkpoint, read_meta
from lm.record.checkpoints import LOSS, Checkpoints
from lm.record.code import Code, extend_code_history, find_other_code, running_code
from lm.record.machine import git_commit, versions
from lm.record.metrics import NoRecorder, Recorder, Throughput, replace_non_finite
from lm.record.names import BRANCH, DAMAGED_FOLDER
from lm.record.run import SUITE, Run, group_evaluations
from lm.record.time_use import (
    COMPILE,
    DATA_WAIT,
    EVALUATION,
    REDONE,
    RESTORING,
    SAVING,
    START,
    STEPS,
    Preparation,
    Seconds,
    add_seconds,
    append_start,
    last_written,
    read_starts,
    start_record,
    summarize_time,
)
from lm.record.upgrade import resolve_stored
from lm.record.workdir import CONFIG, SUMMARY, write_config
from lm.run.evaluate import objective_loss_name
from lm.run.program import TOKENIZER, Experiment
from lm.run.remaining import SUITES, TEXTS, RemainingTime
from lm.run.spikes import SpikeCounter
from lm.run.summary import describe_machine, describe_model, describe_text
from lm.run.warnings import Detector, format_warning
from lm.storage.buckets import is_url
from lm.storage.files import describe_full_disk, seal_record, write_json
from lm.training.guard import MUST_BE_FINITE
from lm.training.state import State

MAX_REPEATS = 5  # rollbacks in all, or skipped steps in a row; more would not help


class DivergenceError(Exception):
    """A step with a loss or update that is not finite."""


class SpikeError(DivergenceError):
    """A spike, at which train.on_spike=stop ends a run."""


class CheckpointsLost(OSError):
    """A run has trained before, and none of its checkpoints can be read."""


@dataclasses.dataclass
class Counters:
    """Numbers and events that a checkpoint holds beside arrays."""

    batch_index: int = 0  # the next batch; ahead of the step only after a rollback
    tokens: float = 0.0
    wall_sec: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of `time_use.PARTS`
    skipped_in_a_row: int = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best: dict[str, float] = dataclasses.field(default_factory=dict)  # lowest validation losses
    rows: int | None = None  # of metrics.jsonl; None in checkpoints of an older version
    warnings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    code: list[Code] = dataclasses.field(default_factory=list)  # that trained the run so far
    ancestors: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of a branch
    spikes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `SpikeCounter`


class Journal:
    """The records of one run.

    `step` is the last dispatched step; `saved_step` is the step of its newest checkpoint, None if
    there is none; `last` is the newest value of everything recorded; `other_code` is the code that
    trained the checkpoint from which the run resumes, if it differs from this code; `spent` are the
    seconds of this process by part, as far as no clock of its own counts them.

    Args:
      recipe: the config of the run.
      workdir: its folder.
      experiment: the text, devices and model.
      terminal: prints progress and events.
    """

    def __init__(self, recipe: Recipe, workdir: Path, experiment: Experiment, terminal: Terminal):
        self.recipe, self.workdir, self.experiment = recipe, workdir, experiment
        self.terminal, self.start_time = terminal, time.perf_counter()
        self.step, self.compile_sec = 0, 0.0
        self.saved_step: int | None = None
        self.branch_record: dict[str, Any] | None = None  # of a branch that begins
        self.side_by_side = 1  # runs of the wave, itself included
        self.counters, self.last = Counters(), {}
        self.other_code: Code | None = None
        self.preparation = Preparation()
        self.spent = Seconds(float)
        self._is_open = False
        self.remaining = RemainingTime(recipe)
        self.throughput = Throughput(experiment.flops_per_token, experiment.utilisation)
        self.permanent_steps = list_checkpoint_steps(recipe)
        self.checkpoints = Checkpoints(
            workdir,
            recipe.train.keep_last,
            recipe.train.keep_best,
            terminal.say,
            permanent_steps=self.permanent_steps,
        )
        self.recorder: Recorder | NoRecorder  # set by `open`
        self.detector = Detector(recipe, [])
        self.spikes = SpikeCounter(recipe.train)
        self._bad_step: int | None = None
        self._noted_output_loss = False

    def _save_tokenizer(self) -> None:
        """Saves the tokenizer. A run that is refused keeps that of its checkpoints."""
        if is_first():
            self.experiment.dataset.tokenizer.save(self.workdir / TOKENIZER)

    def restore(
        self, template: State, continue_changed: bool = False, start_over: bool = False
    ) -> State | None:
        """Restores the state and the counters of the newest checkpoint.

        Args:
          template: shapes, types and shardings of the state.
          continue_changed: accept a checkpoint that was trained on other data.
          start_over: accept that all checkpoints are lost.

        Returns:
          The state; None if there is no checkpoint.

        Raises:
          ValueError: if the checkpoint was trained on other data, or belongs to another model.
          CheckpointsLost: if the run must have had checkpoints and none is left.
        """
        try:
            restored = self.checkpoints.restore(template)
        except TreeMismatch as error:
            raise TreeMismatch(self._describe_differences() + str(error)) from error
        if restored is None:
            if not start_over and is_first():
                self._refuse_to_start_over()
            self._save_tokenizer()
            return None
        state, meta = restored
        digest, data_source = self.experiment.dataset.digest, source_flag(self.recipe.data)
        if meta['data'] != digest and not continue_changed:
            raise ValueError(
                f'{self.workdir} was trained on data {meta["data"]}, but {data_source} is now '
                f'{digest}. Use another --workdir, or pass --continue_changed to train on the new '
                'data.'
            )
        if not continue_changed:
            self._check_texts(meta.get('texts', {}))
        self._save_tokenizer()
        self.counters = Counters(**meta['counters'])
        self.spikes = SpikeCounter(self.recipe.train, self.counters.spikes)
        self.step = self.saved_step = int(state.step)
        self.other_code = find_other_code(self.counters.code, Run(self.workdir).summary)
        self.last = broadcast_from_first(self._read_newest_values() if is_first() else None)
        self.terminal.say(f'resuming after step {self.step}')
        for name in ('init_from', 'branch_from'):
            source = vars(self.recipe.train)[name]
            if source and not is_url(source) and not Path(name_checkpoint(source)).exists():
                self.terminal.say(
                    f'NOTE: train.{name}={source} no longer exists, and is no longer needed'
                )
        return state

    def _check_texts(self, stored: dict[str, str]) -> None:
        """Raises ValueError if a held-out text has changed since it was evaluated.

        stored: the digest of each text of eval.texts in the checkpoint.
        """
        for name, text in self.experiment.texts.items():
            if stored.get(name, text.digest) != text.digest:
                raise ValueError(
                    f'{self.workdir} was evaluated on the text {name!r} of eval.texts with the '
                    f'digest {stored[name]}, but {self.recipe.texts[name]} is now {text.digest}: '
                    'its numbers would not be comparable. Restore the text, give the new one '
                    'another name, or pass --continue_changed to evaluate it under this name.'
                )

    def _read_newest_values(self) -> dict[str, Any]:
        """Returns the newest value of each recorded name up to the present step.

        `validated_step` is the step of the last evaluation.
        """
        newest: dict[str, Any] = {}
        for row in Run(self.workdir).rows():
            if row['step'] <= self.step:
                validated = {'validated_step': row['step']} if LOSS in row else {}
                # Later rows belong to steps that will be repeated.
                newest |= _drop_lists(row) | validated
        newest.pop('step', None)
        return newest

    def _describe_differences(self) -> str:
        """Returns the config fields that differ from the newest checkpoint's, as text."""
        if not (steps := self.checkpoints.steps()):
            return ''  # the checkpoint is on the disk of process 0
        meta = read_meta(self.checkpoints.folder, steps[-1])
        return format_differences(resolve_stored(meta['config']), self.recipe)

    def _refuse_to_start_over(self) -> None:
        """Raises CheckpointsLost if step 1 would write over the records of a run."""
        damaged, rows = self.checkpoints.damaged_steps(), Run(self.workdir).rows()
        last, interval = rows[-1]['step'] if rows else 0, self.recipe.train.checkpoint_every
        # A run may have been killed before its first checkpoint was complete. The second waits for
        # the first, so a run beyond the second must have had one.
        had_one = 0 < 2 * interval < last or Run(self.workdir).status == 'done'
        if not damaged and not had_one:
            return
        place = f'{self.checkpoints.folder} is empty'
        if damaged:
            place = f'checkpoints {damaged} are damaged and now in {self.workdir / DAMAGED_FOLDER}'
        raise CheckpointsLost(
            f'{self.workdir} was trained to step {last}, but none of its checkpoints can be read: '
            f'{place}. Restore a checkpoint, use another --workdir, or pass --start_over to start '
            f'again at step 1, which overwrites the {len(rows)} recorded rows.'
        )

    def open(self) -> None:
        """Takes over the folder: drops the summary and rows after `step`, and starts recording."""
        self.counters.code = extend_code_history(self.counters.code, self.step)
        if is_first():
            # Only now, not when the folder is created: a start that fails leaves no config.json, by
            # which a folder counts as a run.
            write_config(self.workdir, self.recipe)
            if self.branch_record is not None:
                write_json(self.workdir / BRANCH, seal_record(self.branch_record))
        last_sign, status = last_written(self.workdir), Run(self.workdir).status
        self._open_recorder()
        self._count_preparation()
        if is_first():
            start = start_record(
                self.preparation.began, self.step, status, last_sign, self.recorder.dropped
            )
            append_start(self.workdir, start | running_code() | describe_invocation())
            # A summary means that the run has ended; one that is killed from here on must not look
            # so.
            (self.workdir / SUMMARY).unlink(missing_ok=True)

    def _count_preparation(self) -> None:
        """Counts the time before `open`. Compilation is among `spent`, and is no start."""
        before = self.preparation.measure()
        before[START] = max(0.0, before[START] - self.spent[COMPILE])
        self.spent = add_seconds(self.spent, before)
        self.throughput.reset()  # only now may its clock count
        self._is_open = True

    def _open_recorder(self) -> None:
        if not is_first():
            self.recorder = NoRecorder()
            return
        self.recorder = Recorder(self.workdir, self.step, self.counters.rows, self.terminal.say)
        self.detector = Detector(self.recipe, self.counters.warnings)
        # Symptoms are changes since earlier rows, so the detector needs the rows before a restart.
        for row in Run(self.workdir).rows():
            self.detector.observe(row)

    def is_evaluation_due(self) -> bool:
        return self._is_at(self.recipe.train.eval_every)

    def are_texts_due(self) -> bool:
        return bool(self.recipe.texts) and self._is_at(self.recipe.texts_every)

    def are_suites_due(self) -> bool:
        return self.recipe.eval.suites is not None and self._is_at(self.recipe.suites_every)

    def is_diagnosis_due(self) -> bool:
        interval = self.recipe.train.diagnose_every
        return interval > 0 and self._is_at(interval)

    def is_save_due(self) -> bool:
        return self._is_at(self.recipe.train.checkpoint_every) or self.step in self.permanent_steps

    def is_first_save_due(self) -> bool:
        """Returns whether the state before the first step must be saved: on request, or of a
        branch, which then never needs its parent again.
        """
        is_due = self.step in self.permanent_steps or self.branch_record is not None
        return self.saved_step is None and is_due

    def _is_at(self, interval: int) -> bool:
        """Returns whether this is the last step, or a multiple of `interval` (never for 0)."""
        return self.is_finished or (interval > 0 and self.step % interval == 0)

    def is_due(self) -> bool:
        """Returns whether the run must be evaluated, diagnosed, saved or ended before the next
        step.
        """
        is_evaluated = self.is_evaluation_due() or self.are_texts_due() or self.are_suites_due()
        return is_evaluated or self.is_diagnosis_due() or self.is_save_due()

    @property
    def is_finished(self) -> bool:
        return self.step >= self.recipe.train.steps

    def next_place(self) -> data.Cursor:
        """Returns the position of the next step's batch."""
        # The last number is the end of the run's batches, beyond which nothing is prefetched. After
        # a rollback it exceeds train.steps.
        index = self.counters.batch_index
        stop, skipped = index + self.recipe.train.steps - self.step, index - self.step
        return data.Cursor(self.recipe.data.seed, index, stop, skipped)

    def advance(self) -> None:
        """Counts a dispatched step."""
        self.step += 1
        self.counters.batch_index += 1
        stages = self.recipe.stages
        if self.recipe.train.stages and self.step - 1 == (
            stages[number := find_stage(stages, self.step - 1)].start
        ):
            shape = stages[number].shape
            self.terminal.say(
                f'step {self.step:>6}  stage {number + 1} of {len(stages)}: {shape.batch_size} '
                f'rows of {shape.seq_len} tokens'
            )

    def record(self, step: int, row: dict[str, float]) -> None:
        """Records the fetched metrics of one step. Raises DivergenceError."""
        tokens = row.pop('batch_tokens')
        # Tokens that are no target cost the same work, and count in tokens/s.
        target_share = row.get('target_share', 1.0)
        computed_tokens = tokens / target_share if target_share else 0.0
        self.throughput.tokens += computed_tokens
        self._count_flops(step, computed_tokens)
        self.throughput.steps += 1
        self.counters.tokens += tokens
        spike = self.spikes.observe(row)
        self._check_step(step, row, spike)
        self._note_output_loss(step)
        interval, steps = self.recipe.train.log_every, self.recipe.train.steps
        if step == 1 or step % interval == 0 or step == steps:
            row = {'step': step, **row, **self.spikes.score, 'tokens': self.counters.tokens}
            row |= self.throughput.read()
            self.recorder.write(row)
            self.terminal.show_row(row, steps, self.remaining.estimate(step, row['step_sec']))
            self.last |= row
            self._warn(row)

    def _count_flops(self, step: int, tokens: float) -> None:
        """Counts the operations of a step's tokens as far as its stage differs from the mean."""
        flops, mean = self.experiment.stage_flops, self.experiment.flops_per_token
        stage_flops = flops[find_stage(self.recipe.stages, step - 1)]
        self.throughput.extra_flops += tokens * (stage_flops - mean)

    def _check_step(self, step: int, row: dict[str, float], spike: str) -> None:
        """Raises DivergenceError for a step that is not finite, and SpikeError for a spike that
        ends the run.

        A skipped step is accepted. Up to MAX_REPEATS in a row may diverge. Spikes need no limit, as
        each raises the limit of the next.

        Args:
          step: the step.
          row: its metrics.
          spike: a description of its spike; '' if it is none.
        """
        losses = ', '.join(f'{name} {row[name]}' for name in MUST_BE_FINITE)
        message, counters = f'step {step}: {losses}', self.counters
        is_finite = all(math.isfinite(row[name]) for name in MUST_BE_FINITE)
        is_skipped = bool(row.get('skipped'))
        counters.skipped_in_a_row = 0 if is_finite else counters.skipped_in_a_row + is_skipped
        if is_skipped:
            self._event('skip_step', step, spike or losses)
            if counters.skipped_in_a_row < MAX_REPEATS:
                return
            message = f'{MAX_REPEATS} steps in a row were skipped; {message}'
        elif is_finite:
            if not spike or self.recipe.train.on_spike != 'stop':
                return
            self._bad_step = step
            raise SpikeError(f'step {step}: {spike} (train.on_spike=stop)')
        self._bad_step = step
        raise DivergenceError(message)

    def _note_output_loss(self, step: int) -> None:
        """Notes once that printed output is lost (`lm.launch.streams`)."""
        if not self._noted_output_loss and (reason := output_loss()):
            self._noted_output_loss = True
            self._event('output_lost', step, f'standard output failed: {reason}')

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
            best_losses = {'best_validation_ce': ce, 'best_bits_per_byte': bits}
            self.counters.best = best_losses | {'best_step': self.step}

    def record_texts(self, losses: dict[str, float]) -> None:
        """Records the losses of the held-out texts (`lm.run.evaluate.text_losses`)."""
        self.recorder.write({'step': self.step, **losses})
        by_name = group_evaluations(losses)['texts']
        self.terminal.say(
            f'step {self.step:>6}  texts: bits per byte {losses["texts_bits_per_byte"]:.4f}'
            + ''.join(f'  {name} {bits:.4f}' for name, bits in by_name.items())
        )
        self.last |= losses

    def record_suites(self, numbers: dict[str, dict[str, float]]) -> None:
        """Records the numbers of suites, by suite and name, as suite_SUITE_NAME."""
        by_name = {
            f'{SUITE}{suite}_{name}': value
            for suite, by_suite in numbers.items()
            for name, value in by_suite.items()
        }
        self.recorder.write({'step': self.step, **by_name})
        for suite, by_suite in numbers.items():
            listed = '  '.join(f'{name} {value:.4g}' for name, value in by_suite.items())
            self.terminal.say(f'step {self.step:>6}  {suite}: {listed}')
        self.last |= by_name

    def record_diagnosis(self, diagnostics: dict[str, Any]) -> None:
        """Records `lm.training.diagnostics`: numbers for each layer or head, by name."""
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
        self.recorder.sync()  # before the checkpoint, which must not be ahead of the records
        self.counters.rows, self.counters.spikes = self.recorder.rows, self.spikes.counts
        meta = {
            'counters': dataclasses.asdict(self.counters)
            | {'wall_sec': self.wall_sec(), 'seconds': self.seconds()},
            'config': to_dict(self.recipe),
            'data': self.experiment.dataset.digest,
            'vocab_size': self.experiment.vocab_size,
            'versions': versions(),
        }
        if self.experiment.texts:
            meta['texts'] = {name: text.digest for name, text in self.experiment.texts.items()}
        is_validated = self.last.get('validated_step') == self.step
        self.checkpoints.save(state, meta, self.last[LOSS] if is_validated else None)
        if self.saved_step is None and self.branch_record is not None:
            self.checkpoints.wait()
        self.saved_step = self.step

    def find_last_good(self) -> str:
        """Returns the newest checkpoint that can be read, found by reading it."""
        self.checkpoints.wait()
        checkpoint = self.checkpoints.find_newest_intact(self.experiment.state_shapes)
        return str(checkpoint) if checkpoint else 'none was saved'

    def explain_error(self, error: OSError) -> OSError:
        """Adds the consequences for the run to an error of writing."""
        if not (self.workdir / CONFIG).exists():
            return OSError(
                f'{self.workdir.absolute()} no longer exists ({error}): it was moved or deleted '
                f'during training, at step {self.step}; {self._describe_newest()}. Move it back or '
                'pass its new path as --workdir, then run the same command to resume from its '
                'newest checkpoint. If it was deleted, the same command starts again at step 1.'
            )
        problem, remedy = f'{self.workdir} cannot be written', 'Make it writable'
        if full_disk := describe_full_disk(error, self.workdir):
            problem, remedy = full_disk, 'Free some space'
        newest, effect = 'no checkpoint was saved', 'start again at step 1'
        if steps := self.checkpoints.steps():
            newest = f'the newest checkpoint is {self.checkpoints.folder / str(steps[-1])}'
            effect = 'resume from it'
        return OSError(
            f'{problem} ({error}); {newest}. {remedy}, then run the same command to {effect}.'
        )

    def _describe_newest(self) -> str:
        if self.saved_step is None:
            return 'no checkpoint had been saved'
        return f'its last checkpoint is step {self.saved_step}, if it was completely written'

    def roll_back(self, error: DivergenceError, template: State) -> State:
        """Returns the state of the last checkpoint, and skips the batches since.

        Raises DivergenceError if there is none, or after MAX_REPEATS times.
        """
        bad_step, counters, before = self.step, self.counters, self.seconds()
        start = time.perf_counter()
        n_rollbacks = sum(event['kind'] == 'rollback' for event in counters.events)
        # The newest checkpoint may still be in the writing thread.
        self.checkpoints.wait()
        state = (
            None if n_rollbacks >= MAX_REPEATS else self.restore(template, True, start_over=True)
        )
        if state is None:
            reason = (
                f'{n_rollbacks} rollbacks did not help'
                if n_rollbacks
                else 'no checkpoint to roll back to'
            )
            raise DivergenceError(f'{error}; {reason}')
        # Only what the lost steps had changed goes back. The batch index does not, so that the
        # batches since the checkpoint are left out; nor do the events, which count the rollbacks.
        restored = self.counters
        self.counters = dataclasses.replace(
            counters, tokens=restored.tokens, best=restored.best, rows=restored.rows
        )
        self._event(
            'rollback', bad_step, f'{error}; back to step {self.step}, skipping the batches since'
        )
        self._open_recorder()
        self.throughput.reset()
        self._count_redone(before, restored.seconds)
        self.spent[RESTORING] += time.perf_counter() - start
        return state

    def _count_redone(self, before: dict[str, float], at_checkpoint: dict[str, float]) -> None:
        """Counts the steps since a checkpoint as done in vain.

        before: `seconds` before the rollback. at_checkpoint: those in the checkpoint.
        """
        counted = self.seconds()
        for part in (STEPS, DATA_WAIT):
            sec = at_checkpoint.get(part, 0.0)
            self.spent[part] += sec - counted[part]
            self.spent[REDONE] += before[part] - sec

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by part of this process, and of earlier ones up to their last save.

        Parts that only a start can tell (`time_use.start_record`) are left out.
        """
        steps, wait = self.throughput.spent() if self._is_open else (0.0, 0.0)
        clock = {STEPS: steps - wait, DATA_WAIT: wait}
        total = add_seconds(self.counters.seconds, self.spent, clock)
        for work, sec in self.remaining.total_sec.items():
            total[{TEXTS: EVALUATION, SUITES: EVALUATION}.get(work, work)] += sec
        return dict(total)

    def wall_sec(self) -> float:
        """Returns the seconds of training by this process, and by earlier ones up to their last
        save.
        """
        return self.counters.wall_sec + time.perf_counter() - self.start_time

    def summarize(self, status: str, reason: str = '') -> None:
        """Writes summary.json. status: done, stopped, or diverged or failed with a reason."""
        if not is_first():
            return
        self._note_output_loss(self.step)
        throughput, experiment = self.throughput, self.experiment
        seconds, code = throughput.total_seconds or math.nan, self.counters.code
        record = {
            'status': status,
            'reason': reason,
            'step': self.step,
            **{name: value for name, value in self.last.items() if name != 'step'},
            **self.counters.best,
            **self.spikes.score,
            'spikes': self.spikes.n_spikes,
            'skipped_steps': self.spikes.n_skipped,
            **({'diverged_step': self._bad_step} if status == 'diverged' else {}),
            **describe_model(experiment),
            'tokens_per_sec_mean': throughput.total_tokens / seconds,
            'data_wait_fraction': throughput.total_wait_seconds / seconds,
            'compile_sec': self.compile_sec,
            'wall_sec': self.wall_sec(),
            'side_by_side': self.side_by_side,
            **summarize_time(read_starts(self.workdir), self.seconds(), self._end_time()),
            **describe_machine(experiment),
            'git_commit': code[-1]['commit'] if code else git_commit(),
            'code': code,
            'ancestors': self.counters.ancestors,
            'checkpoints': self.checkpoints.steps(),
            **describe_text(experiment),
            'events': self.counters.events,
            'warnings': self.counters.warnings,
        }
        write_json(self.workdir / SUMMARY, seal_record(replace_non_finite(record)))

    def _end_time(self) -> float:
        """Returns now, or the last sign of life of a run that had ended before this process."""
        last_sign = None if self._is_open else last_written(self.workdir)
        return last_sign if last_sign is not None else time.time()

    def end(self, status: str) -> None:
        """Writes the summary, once all checkpoints are on disk."""
        self.throughput.pause()  # no step is to come
        start = time.perf_counter()
        self.checkpoints.wait()
        self.spent[SAVING] += time.perf_counter() - start
        self.summarize(status)

    def close(self) -> None:
        """Waits for checkpoints. Raises OSError if one cannot be written."""
        self.checkpoints.close()


def _drop_lists(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, list)}
