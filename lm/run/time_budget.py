"""Fits the number of steps of a run to train.seconds, by the time of a step on its devices.

The steps are timed once, before the first one. From then on the run is an ordinary one with that
train.steps, which config.json records: its schedule ends with it, it resumes bitwise, and
`train.steps=N train.seconds=None` trains it again on another machine.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lm.config.recipe import Recipe
from lm.config.resolve import resolve, to_dict, update_config
from lm.launch.distributed import broadcast_from_first, is_first
from lm.launch.terminal import Terminal
from lm.record.workdir import read_previous_config
from lm.run.program import Experiment, Program, check_run_epochs
from lm.run.runs import RunSpec
from lm.run.wave import Wave, closing
from lm.storage.files import discard_line

SHARE, MIN_SEC, MAX_SEC = 0.05, 1.0, 10.0  # of the budget, for which steps are timed


def follow_begun(recipe: Recipe, workdir: Path) -> Recipe:
    """Returns the recipe, with the steps of the run in the folder if it has the same budget."""
    if recipe.train.seconds is None:
        return recipe
    steps = broadcast_from_first(_read_begun_steps(recipe, workdir) if is_first() else None)
    return recipe if steps is None else _replace_steps(recipe, steps)


def fit_steps(
    recipe: Recipe, program: Program, workdir: Path, say: Callable[[str], None]
) -> Recipe:
    """Returns the recipe with as many steps as its budget allows; a run that has begun keeps its.

    `steps = seconds / (seconds per step)`. If a run is continued with another budget, the new one
    too counts the whole run. Compiles the program.

    Args:
      recipe: the config.
      program: its program.
      workdir: the folder of the run.
      say: prints a line.

    Raises:
      ValueError: if the budget is shorter than a step, or the text too short for the steps.
    """
    seconds = recipe.train.seconds
    if seconds is None:
        return recipe
    assert isinstance(program.experiment, Experiment)  # a program that trains has text
    rows = program.experiment.dataset.train
    if broadcast_from_first(_read_begun_steps(recipe, workdir) if is_first() else None):
        check_run_epochs(recipe, rows, workdir)
        return recipe
    step_sec = time_step(recipe, program, min(MAX_SEC, max(MIN_SEC, SHARE * seconds)))
    if seconds < step_sec:
        raise ValueError(
            f'train.seconds={seconds:g} is shorter than one step, which takes {step_sec:.3g} s here'
        )
    steps = int(seconds / step_sec)
    say(
        f'train.seconds={seconds:g}: a step takes {step_sec:.3g} s here, so the run has '
        f'{steps:,} steps (train.steps)'
    )
    fitted = _replace_steps(recipe, steps)
    check_run_epochs(fitted, rows, workdir)
    return fitted


def time_step(recipe: Recipe, program: Program, min_sec: float) -> float:
    """Returns the seconds of a step, measured over the first steps of a run that is thrown away.

    A step takes longer in a run than alone: rows are read, metrics fetched and recorded. After one
    step it times 1, 2, 4, ... steps together, until these take long enough.

    Args:
      recipe: the config.
      program: its program.
      min_sec: the seconds that the timed steps take at least.

    Raises:
      ValueError: if the run diverges meanwhile.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = RunSpec(recipe, Path(folder), Terminal(silent=True))
        with closing(Wave(program, [run], size=1)) as wave:
            wave.compile()
            wave.slots[0].journal.open()
            _train_steps(wave, 1)
            n = 1
            while (spent := broadcast_from_first(_train_steps(wave, n))) < min_sec:
                n *= 2
            return spent / n


def _train_steps(wave: Wave, n: int) -> float:
    """Trains n steps, and returns their seconds."""
    start = time.perf_counter()
    for _ in range(n):
        if not wave.active_slots:
            raise ValueError(
                'train.seconds: the run diverged while its first steps were timed. Lower the '
                'learning rate, or set train.steps'
            )
        wave.dispatch()
    wave.fetch_pending()
    return time.perf_counter() - start


def _read_begun_steps(recipe: Recipe, workdir: Path) -> int | None:
    """Returns the steps of the run in a folder; None if it has not begun, or with another
    budget.
    """
    begun = read_previous_config(workdir, discard_line)
    if begun is None or begun.train.seconds != recipe.train.seconds:
        return None
    return begun.train.steps


def _replace_steps(recipe: Recipe, steps: int) -> Recipe:
    return resolve(to_dict(update_config(recipe.config, {'train.steps': steps})))
