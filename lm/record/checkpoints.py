"""The checkpoints of a run: written in the background; the newest, the best and some steps stay.

A run resumes from its newest intact checkpoint.
"""

import contextlib
import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from lm.launch.distributed import broadcast_from_first, has_private_disks, is_first, is_multiprocess
from lm.launch.exhausted import is_memory_error
from lm.record import checkpoint
from lm.record.checkpoint import FOLDER, MAX_ERROR_CHARS, list_steps, read_meta, read_state
from lm.record.digests import DamagedCheckpoint
from lm.record.names import DAMAGED_FOLDER
from lm.record.workdir import check_path
from lm.storage.files import first_line, sync
from lm.training.state import State

LOSS = 'validation_ce'  # decides which checkpoints are the best
ALL_PROCESSES = ocp.options.MultiprocessingOptions()
PROCESS_0_ONLY = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
JUMP_SEC = 60  # difference between two clocks by which one of them was set
MAX_WRITERS = 4  # per process; each writer has its own threads and descriptors


@dataclasses.dataclass
class LowestLoss:
    """Orbax policy that keeps the `n` checkpoints with the lowest finite loss."""

    n: int
    losses: dict[int, float]  # by step

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        finite_steps = [
            c.step for c in checkpoints if math.isfinite(self.losses.get(c.step, math.inf))
        ]
        best = sorted(finite_steps, key=self.losses.__getitem__)[: self.n]
        return [candidate.step in best for candidate in checkpoints]


@dataclasses.dataclass
class PermanentSteps:
    """Orbax policy that keeps the checkpoints of some steps for good."""

    steps: set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [candidate.step in self.steps for candidate in checkpoints]


class ClockJump(OSError):
    """The clock was set, or the machine suspended, while a checkpoint was being written.

    Orbax measures its time limits by the time of day, so that all of them end at once.
    """


class Checkpoints:
    """The checkpoints of a workdir: the `keep_last` newest and the `keep_best` best by loss.

    The permanent ones stay beside them, also if a later command names other steps: each says so in
    its record.

    Several processes save and restore together, from the listing of process 0. If only process 0
    has the disk, it writes and reads for all. At most MAX_WRITERS objects of a process write at a
    time; a further one first closes the oldest writer.

    Args:
      workdir: the folder of the run.
      keep_last: number of newest checkpoints to keep.
      keep_best: number of checkpoints with the lowest validation loss to keep.
      say: prints a line.
      save_concurrent_gb: limit on the arrays that are being written at a time, in GB; the writer
        needs as much host memory again. It must exceed the largest array on a device. None for no
        limit.
      permanent_steps: steps whose checkpoints are never removed.
    """

    _writers: ClassVar[list['Checkpoints']] = []

    def __init__(
        self,
        workdir: Path,
        keep_last: int,
        keep_best: int,
        say: Callable = print,
        save_concurrent_gb: float | None = None,
        permanent_steps: Collection[int] = (),
    ):
        check_path(workdir)
        self.workdir, self.say = Path(workdir), say
        self._keep_last, self._keep_best, self._save_concurrent_gb = (
            keep_last,
            keep_best,
            save_concurrent_gb,
        )
        self._manager: ocp.CheckpointManager | None = None
        self._failure: OSError | None = None  # of a write that failed after `save` had returned
        self._losses: dict[int, float] = {}
        self._permanent_steps = set(permanent_steps)
        self._saving_step = -1
        self._clocks = _read_clocks()  # when the newest write began

    @property
    def folder(self) -> Path:
        return self.workdir / FOLDER

    def steps(self) -> list[int]:
        return list_steps(self.folder)

    def save(self, state: State, meta: dict[str, Any], loss: float | None) -> None:
        """Starts writing a checkpoint; the state may change as soon as this returns.

        Args:
          state: the state to save.
          meta: the record to save beside it.
          loss: the validation loss of the state, if it was measured.

        Raises:
          OSError: if this checkpoint, or the previous one, cannot be written.
        """
        step = int(state.step)
        try:
            # One write at a time: an error of the previous write is raised here, and `_sync` knows
            # only the step that is being written.
            self._wait_for_write()
        except ClockJump as error:
            if is_multiprocess():
                raise
            self.say(f'NOTE: there is no checkpoint of step {self._saving_step}: {error}')
            self._close_manager()
            self._failure = None
        with _translate_errors():
            manager = self._open_manager()
            if loss is not None:
                # LowestLoss shares this dict, and judges the new checkpoint when the write ends.
                self._losses[step] = loss
            self._saving_step = step
            record = {'loss': loss, 'is_permanent': step in self._permanent_steps}
            items = checkpoint.build_items(state, meta | record)
            self._clocks = _read_clocks()
            if manager is not None:
                manager.save(step, args=items)

    def _wait_for_write(self) -> None:
        """Waits until the newest checkpoint is on disk.

        Raises:
          ClockJump: if it cannot be written, because a change of the clock ended a time limit.
          OSError: if it cannot be written for another reason.
        """
        try:
            with _translate_errors():
                if self._manager:
                    self._manager.wait_until_finished()
        except OSError as error:
            jump_sec = _compute_clock_jump(self._clocks)
            if isinstance(error.__cause__, TimeoutError) and abs(jump_sec) >= JUMP_SEC:
                raise ClockJump(
                    f'while it was being written, the clock of this machine jumped by '
                    f'{jump_sec:,.0f} s'
                ) from error
            raise

    def _open_manager(self) -> ocp.CheckpointManager | None:
        """Returns Orbax's manager, or None if another process writes the arrays of this one."""
        if self._failure:
            raise self._failure
        first_only = has_private_disks()
        if first_only and not is_first():
            return None
        # Opened at the first save: a run that only reads needs no writing threads.
        if self._manager is None:
            checkpoint.ignore_late_callbacks()
            while len(self._writers) >= MAX_WRITERS:
                self._writers[0]._close_manager()
            records = self._read_records()
            records = records if first_only else broadcast_from_first(records)
            self._losses |= dict(records[0])
            self._permanent_steps.update(records[1])
            policies = [LatestN(self._keep_last), PermanentSteps(self._permanent_steps)]
            if self._keep_best:
                policies.append(LowestLoss(self._keep_best, self._losses))
            if first_only:  # Orbax creates it for all processes or for none
                self.folder.mkdir(parents=True, exist_ok=True)
            barrier = _make_barrier() if is_multiprocess() and not first_only else None
            options = ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(policies),
                create=not first_only,
                multiprocessing_options=PROCESS_0_ONLY if first_only else ALL_PROCESSES,
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._sync, barrier_sync_fn=barrier
                ),
            )
            self._manager = ocp.CheckpointManager(
                self.folder.absolute(), options=options, handler_registry=self._build_handlers()
            )
            self._writers.append(self)
        return self._manager

    def _build_handlers(self) -> ocp.handlers.CheckpointHandlerRegistry | None:
        if self._save_concurrent_gb is None:
            return None
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for item in ('weights', 'training'):
            handler = ocp.StandardCheckpointHandler(
                # Orbax only multiplies it by 10**9, so that a fraction is fine.
                save_concurrent_gb=self._save_concurrent_gb  # ty: ignore[invalid-argument-type]
            )
            for args in (ocp.args.StandardSave, ocp.args.StandardRestore):
                registry.add(item, args, handler)
        return registry

    def _read_records(self) -> tuple[list[tuple[int, float]], list[int]]:
        """Returns the losses by step, as pairs, and the permanent steps, of all checkpoints."""
        losses: dict[int, float] = {}
        permanent_steps = []
        for step in self.steps():
            try:
                meta = read_meta(self.folder, step)
            except DamagedCheckpoint:
                continue  # a damaged checkpoint is never the best
            if meta.get('is_permanent'):
                permanent_steps.append(step)
            if best := meta['counters'].get('best', {}):  # older versions recorded no other loss
                losses[best['best_step']] = best['best_validation_ce']
            if meta.get('loss') is not None:
                losses[step] = meta['loss']
        return list(losses.items()), permanent_steps

    def _sync(self) -> None:
        """Flushes the written files to the disk, so that they outlast a power cut.

        Orbax calls it on process 0, before it renames the folder and removes older ones.
        TensorStore syncs the arrays of each process.
        """
        for unfinished in self.folder.glob(f'{self._saving_step}.*'):
            for path in (*unfinished.rglob('*'), unfinished):
                sync(path)

    def restore(self, shapes: State) -> tuple[State, dict[str, Any]] | None:
        """Returns (state, meta) of the newest intact checkpoint; None if there is none.

        Damaged checkpoints are moved to `checkpoints_damaged`, with a note. The arrays are sharded
        like `shapes`. Raises TreeMismatch.
        """
        for step in reversed(broadcast_from_first(self.steps())):
            try:
                # TreeMismatch is not caught: older checkpoints belong to the same model.
                state, meta = read_state(self.folder, step, shapes)
            except DamagedCheckpoint as error:
                self._move_aside(step, error)
                continue
            if 'digests' not in meta:
                self.say(
                    f'NOTE: {self.folder / str(step)} has no digests, because an older version '
                    'wrote it; damaged numbers in it are not detected'
                )
            return state, meta
        return None

    def find_newest_intact(self, shapes: State) -> Path | None:
        """Returns the path of the newest checkpoint that can be read; None if there is none."""
        for step in reversed(broadcast_from_first(self.steps())):
            with contextlib.suppress(DamagedCheckpoint):
                read_state(self.folder, step, shapes)
                return self.folder / str(step)
        return None

    def damaged_steps(self) -> list[int]:
        """Returns the steps of the damaged checkpoints that were moved away."""
        return list_steps(self.workdir / DAMAGED_FOLDER)

    def _move_aside(self, step: int, error: DamagedCheckpoint) -> None:
        self.say(
            f'{error}; moved to {self.workdir / DAMAGED_FOLDER}, falling back to the one before it'
        )
        self._close_manager()  # a manager caches its listing
        if is_first():
            target = self.workdir / DAMAGED_FOLDER / str(step)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            shutil.move(self.folder / str(step), target)

    def wait(self) -> None:
        """Waits until all checkpoints are on disk. Raises OSError if one cannot be written."""
        if self._failure:
            raise self._failure
        self._wait_for_write()
        if has_private_disks():
            broadcast_from_first(
                None
            )  # the others write nothing, but must not end before process 0

    def _close_manager(self) -> None:
        """Ends the writing threads; keeps an error for the next `save` or `wait`."""
        if self._manager is None:
            return
        self._writers.remove(self)
        manager, self._manager = self._manager, None
        try:
            with _translate_errors():
                manager.close()
        except OSError as error:
            self._failure = error

    def close(self) -> None:
        """Ends all writing. Raises OSError if a saved checkpoint cannot be written."""
        self._close_manager()
        self.wait()


def _make_barrier() -> Callable[..., None]:
    """Returns Orbax's barrier, skipped after a failed write.

    It would wait 20 minutes for the other processes.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(**arguments: Any) -> None:
        if sys.exception() is None:
            wait(**arguments)

    return barrier


def _read_clocks() -> tuple[float, float]:
    """Returns the time of day, which may be set, and a clock that only runs; in seconds."""
    return time.time(), time.monotonic()


def _compute_clock_jump(since: tuple[float, float]) -> float:
    """Returns the seconds by which the time of day has gained on the other clock since a reading.

    A suspended machine counts, since Linux stops the other clock meanwhile.
    """
    (wall, running), (wall_before, running_before) = _read_clocks(), since
    return (wall - wall_before) - (running - running_before)


@contextlib.contextmanager
def _translate_errors() -> Generator[None]:
    """Raises errors of a write as OSError, as Orbax raises several types."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if is_memory_error(error):
            raise
        reason = first_line(error, MAX_ERROR_CHARS)
        raise OSError(f'a checkpoint could not be written ({reason})') from error
