"""Suites during training (eval.suites): what a wave needs of them.

Suites are in `eval`, which `lm` does not import: whoever opens an experiment brings a SuiteLoader.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.recipe import Recipe
from lm.inference.load import Checkpoint
from lm.launch.distributed import is_multiprocess
from lm.record.checkpoint import FOLDER
from lm.training.state import State, make_hyper

if TYPE_CHECKING:
    from lm.run.program import Experiment

Evaluate = Callable[[Checkpoint], Mapping[str, float]]  # the numbers of a model, by name


@dataclasses.dataclass(frozen=True)
class SuiteLoader:
    """Opens the suites of eval.suites.

    check: check(recipe) raises ValueError for a suite or an option that is wrong, or that cannot
    run during training; it reads no data. open: open(experiment) reads the data of the suites, and
    returns a function for each, by the suite's name in records.
    """

    check: Callable[[Recipe], None]
    open: Callable[['Experiment'], Mapping[str, Evaluate]]


def check_suites(recipe: Recipe, loader: SuiteLoader | None) -> None:
    """Raises ValueError if the suites of a recipe cannot run.

    Args:
      recipe: the config of a run.
      loader: the loader of whoever trains it; None if it has none.
    """
    if recipe.eval.suites is None:
        return
    if is_multiprocess():
        raise ValueError(
            'eval.suites needs a run of one process: its suites read batches that only one has. '
            'Leave it out, and evaluate checkpoints with "python -m eval --checkpoint=WORKDIR '
            '--step=all".'
        )
    if loader is None:
        raise ValueError('eval.suites needs train.py, which brings the suites. Leave it out.')
    loader.check(recipe)


def open_suites(experiment: 'Experiment', loader: SuiteLoader | None) -> Mapping[str, Evaluate]:
    """Returns the suites of an experiment, with their data, by name.

    Args:
      experiment: the text, devices and model.
      loader: the loader of whoever trains it; None if it has none.
    """
    if experiment.recipe.eval.suites is None:
        return {}
    check_suites(experiment.recipe, loader)
    assert loader is not None
    return loader.open(experiment)


def view_state(experiment: 'Experiment', recipe: Recipe, workdir: Path, state: State) -> Checkpoint:
    """Returns a run's present state as the checkpoint that its step would have. Nothing is copied.

    Args:
      experiment: the text, devices and model of the run.
      recipe: the config of the run.
      workdir: its folder.
      state: the state; the next step overwrites its arrays.
    """
    # The learner of the experiment, whose programs all its runs share.
    step, learner, hyper = int(state.step), experiment.learner, make_hyper(recipe)
    return Checkpoint(
        workdir / FOLDER / str(step),
        recipe,
        step,
        {'data': experiment.dataset.digest, 'vocab_size': experiment.vocab_size},
        learner,
        experiment.mesh,
        hyper,
        learner.select_eval_weights(state.weights, state.average, hyper),
        experiment.dataset.tokenizer,
        experiment.dataset,
    )
