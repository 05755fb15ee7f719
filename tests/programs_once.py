"""Builds the programs of runs in the process of the tests once.

Tracing, lowering and loading the program of a tiny run takes two CPU-seconds, and its steps none.
Tests with killed runs show that a process which builds them anew computes the same.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lm.config.recipe import Recipe
from lm.data import Dataset
from lm.devices.run_axis import SINGLE
from lm.run.program import Experiment, Program, open_held_out_texts
from lm.run.suites import SuiteLoader, open_suites
from lm.storage.files import discard_line

ASK = ('train', 'lm.study.train.groups')  # modules that make programs


@functools.lru_cache(maxsize=8)  # each has memory mapped
def _cached_programs(recipe: Recipe, digest: str, runs: int) -> dict[str, Any]:
    """Returns the programs of a recipe and text so far."""
    return {}


def experiment(
    recipe: Recipe,
    dataset: Dataset,
    say: Callable[[str], None],
    runs: int = 1,
    suite_loader: SuiteLoader | None = None,
) -> Experiment:
    programs = _cached_programs(recipe, dataset.digest, runs)
    if 'experiment' not in programs:
        programs['experiment'] = Experiment(recipe, dataset, say, runs, suite_loader)
        programs['experiment'].programs = programs
    programs['experiment'].dataset = dataset
    programs['experiment'].suites = open_suites(programs['experiment'], suite_loader)
    programs['experiment'].texts = open_held_out_texts(recipe, dataset.tokenizer, say)
    return programs['experiment']


def program(
    made_for: Experiment, axis_name: str = SINGLE, say: Callable[[str], None] = discard_line
) -> Program:
    programs = made_for.programs
    if axis_name not in programs:
        programs[axis_name] = Program(made_for, axis_name, say)
    return programs[axis_name]


@contextlib.contextmanager
def programs_once() -> Iterator[None]:
    """Lets runs and sweeps that train in this process share programs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ASK:
            patch.setattr(f'{module}.Experiment', experiment)
            patch.setattr(f'{module}.Program', program)
        yield
