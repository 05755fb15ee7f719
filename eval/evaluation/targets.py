"""The checkpoints that a command names, and their results, read from files or computed."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.evaluation import kept
from eval.evaluation.suite_flags import SuiteRequest
from eval.load import Checkpoint, find_checkpoint, load, load_step
from eval.suites.base import SuiteResult
from lm.config.resolve import flatten, to_dict
from lm.record.checkpoint import FOLDER, list_steps, name_checkpoint, read_meta
from lm.record.digests import DamagedCheckpoint
from lm.record.remote.local_copy import fetch_checkpoints
from lm.record.upgrade import resolve_stored
from lm.record.workdir import SWEEP
from lm.storage.buckets import is_url
from lm.storage.files import UnreadableFile

ALL = 'all'
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Target:
    """A checkpoint to evaluate: the first of `steps` that can be read.

    run: the workdir as named by the command. folder: WORKDIR/checkpoints. keeps_results: whether
    results are stored in the workdir, which does not apply to a local copy of a bucket.
    """

    run: str
    folder: Path
    steps: tuple[int, ...]
    keeps_results: bool = True


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of a checkpoint by the labels of their suites. config: its fields by path."""

    run: str
    step: int
    config: Mapping[str, Any]
    results: Mapping[str, SuiteResult]


def find_targets(checkpoints: Sequence[str], step: str | None, say: Say) -> list[Target]:
    """Returns the checkpoints named by --checkpoint and --step; for a sweep, of all its cells.

    Args:
      checkpoints: workdirs, sweeps, WORKDIR@STEP or WORKDIR/checkpoints/STEP, or URLs.
      step: a number; 'all'; or None for the newest.
      say: receives messages about cells without the step.

    Raises:
      ValueError: if a path has no checkpoint, or not that step; the error lists the steps.
    """
    if step not in (None, ALL) and not step.isdecimal():
        raise ValueError(f'--step must be a step number or {ALL!r}; got {step!r}')
    targets: list[Target] = []
    for path in map(name_checkpoint, checkpoints):
        targets += (
            _find_url_targets(path, step)
            if is_url(path)
            else _find_path_targets(Path(path), step, say)
        )
    counts = Counter((target.folder.resolve(), target.steps[0]) for target in targets)
    if duplicates := [folder.parent for (folder, _), n in counts.items() if n > 1]:
        raise ValueError(f'--checkpoint names {duplicates[0]} twice; name each checkpoint once')
    return targets


def _find_url_targets(url: str, step: str | None) -> list[Target]:
    if step == ALL:
        places = sorted(fetch_checkpoints(url), key=lambda place: place[1])
        if not places:
            find_checkpoint(url)  # raises the error of a folder without checkpoints
        return [Target(url, folder, (at,), keeps_results=False) for folder, at in places]
    folder, at = find_checkpoint(url if step is None else f'{url.rstrip("/")}/{FOLDER}/{step}')
    return [Target(url, folder, (at,), keeps_results=False)]


def _find_path_targets(path: Path, step: str | None, say: Say) -> list[Target]:
    steps_here = list_steps(path / FOLDER)
    # A folder without checkpoints may be a sweep, with checkpoints in its cells.
    cells = (
        [] if steps_here else [cell for cell in sorted(path.glob('*')) if list_steps(cell / FOLDER)]
    )
    if cells and (path / SWEEP).exists():
        lacking = [cell for cell in cells if not _has_step(cell, step)]
        if len(lacking) == len(cells):
            _check_step(cells[0], step)
        for cell in lacking:
            say(f'NOTE: {cell} is skipped: it has no checkpoint of step {step}')
        return [
            target
            for cell in cells
            if cell not in lacking
            for target in _find_path_targets(cell, step, say)
        ]
    folder, newest = find_checkpoint(path)
    if folder == path.parent:
        if step is not None:
            raise ValueError(f'{path} already names a step; leave out --step={step}')
        return [Target(str(folder.parent), folder, (newest,))]
    steps = list_steps(folder)
    if step is None:
        return [Target(str(path), folder, (*reversed(steps),))]
    _check_step(path, step)
    return [Target(str(path), folder, (at,)) for at in (steps if step == ALL else [int(step)])]


def _has_step(workdir: Path, step: str | None) -> bool:
    return step in (None, ALL) or int(step) in list_steps(workdir / FOLDER)


def _check_step(workdir: Path, step: str | None) -> None:
    if not _has_step(workdir, step):
        steps = ', '.join(map(str, list_steps(workdir / FOLDER)))
        raise ValueError(f'{workdir} has no checkpoint of step {step}; its steps are {steps}')


def evaluate_all(
    targets: Sequence[Target], requests: Sequence[SuiteRequest], again: bool, say: Say
) -> Iterator[Evaluation]:
    """Yields the evaluation of each target.

    An unreadable checkpoint is reported and skipped if there are others.

    Args:
      targets: the checkpoints.
      requests: the suites.
      again: whether stored results are computed again.
      say: receives messages.

    Raises:
      ValueError: if no checkpoint can be read.
    """
    loaded: Checkpoint | None = None
    damaged: list[DamagedCheckpoint] = []
    for target in targets:
        for step in target.steps:
            try:
                evaluator = Evaluator(target, step, again, say, loaded)
                evaluation = evaluator.evaluate(requests)
            except DamagedCheckpoint as error:
                damaged.append(error)
                if len(target.steps) > 1:
                    say(f'NOTE: {error}; using the previous checkpoint')
                elif len(targets) > 1:
                    say(f'NOTE: {error}; skipped')
                continue
            # The next target may reuse the compiled programs of this checkpoint.
            loaded = evaluator.checkpoint
            yield evaluation
            break
    if damaged and len(damaged) == sum(len(target.steps) for target in targets):
        words = 'none of the checkpoints can be read; last error: ' if len(damaged) > 1 else ''
        raise ValueError(f'{words}{damaged[-1]}')


class Evaluator:
    """Evaluates a checkpoint; loads it only if a result is not stored.

    checkpoint: another checkpoint of the same run, to reuse its compiled programs.
    """

    def __init__(
        self, target: Target, step: int, again: bool, say: Say, checkpoint: Checkpoint | None = None
    ):
        self.target, self.step, self.again, self.say = target, step, again, say
        self.checkpoint, self.meta = checkpoint, read_meta(target.folder, step)

    def evaluate(self, requests: Sequence[SuiteRequest]) -> Evaluation:
        """Returns the results of the requested suites, and stores each as it is computed."""
        results_by_label = {request.label: self._result(request) for request in requests}
        config = flatten(to_dict(resolve_stored(self.meta['config'])))
        return Evaluation(self.target.run, self.step, config, results_by_label)

    def _result(self, request: SuiteRequest) -> SuiteResult:
        path = kept.result_path(self.target.folder.parent, self.step, request)
        if self.target.keeps_results and not self.again:
            try:
                stored = kept.read_result(path, request, self.meta)
            except (UnreadableFile, OSError) as error:
                self.say(f'NOTE: {error}; computing it again')
                stored = None
            if stored is not None:
                self.say(f'NOTE: {request.label} at step {self.step}: stored result from {path}')
                return stored
        computed = request.suite.function(self._load_checkpoint(), **request.options)
        if self.target.keeps_results:
            try:
                kept.write_result(path, request, self.meta, computed)
            except OSError as error:
                self.say(f'NOTE: the result could not be stored in the workdir ({error})')
        return computed

    def _load_checkpoint(self) -> Checkpoint:
        path, loaded = self.target.folder / str(self.step), self.checkpoint
        if loaded is None or loaded.path.parent != path.parent:
            loaded = load(path, self.say)
        elif loaded.step != self.step:
            loaded = load_step(loaded, self.step)
        self.checkpoint = loaded
        return loaded
