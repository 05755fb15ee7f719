"""The steps that train.profile names: STEP:COUNT."""

import re
from typing import NamedTuple

from lm.config.recipe import Recipe


class TracedSteps(NamedTuple):
    """`count` steps from `first` on, counted from 1 as metrics.jsonl does."""

    first: int
    count: int


def parse_traced_steps(recipe: Recipe) -> TracedSteps | None:
    """Returns the steps of train.profile; None where it is empty.

    Raises ValueError for anything but STEP:COUNT, and for steps that the run does not have.
    """
    asked, steps = recipe.train.profile, recipe.train.steps
    if not asked:
        return None
    found = re.fullmatch(r'([1-9]\d*):([1-9]\d*)', asked)
    if found is None:
        raise ValueError(
            'train.profile must be STEP:COUNT, two numbers from 1 on, such as 100:3 for steps 100 '
            f'to 102; got {asked!r}. Empty traces none.'
        )
    first, count = map(int, found.groups())
    if first + count - 1 > steps:
        raise ValueError(
            f'train.profile={asked} traces steps {first} to {first + count - 1}, and the run ends '
            f'at train.steps={steps}. The last that can be is {max(1, steps - count + 1)}:'
            f'{min(count, steps)}.'
        )
    return TracedSteps(first, count)
