"""The steps that train.profile names: STEP:COUNT."""

import re
from typing import NamedTuple

from lm.config.recipe import Recipe


class TracedSteps(NamedTuple):
    """`count` steps starting at `first`, numbered from 1 as in metrics.jsonl."""

    first: int
    count: int


def parse_traced_steps(recipe: Recipe) -> TracedSteps | None:
    """Returns the steps of train.profile, or None if it is empty.

    Raises ValueError for anything but STEP:COUNT, and for steps beyond train.steps.
    """
    profile, steps = recipe.train.profile, recipe.train.steps
    if not profile:
        return None
    match = re.fullmatch(r'([1-9]\d*):([1-9]\d*)', profile)
    if match is None:
        raise ValueError(
            'train.profile must be STEP:COUNT, two positive numbers, such as 100:3 for steps 100 '
            f'to 102; got {profile!r}. Leave it empty to trace nothing.'
        )
    first, count = map(int, match.groups())
    if first + count - 1 > steps:
        raise ValueError(
            f'train.profile={profile} traces steps {first} to {first + count - 1}, but the run '
            f'ends at train.steps={steps}. The last possible value is '
            f'{max(1, steps - count + 1)}:{min(count, steps)}.'
        )
    return TracedSteps(first, count)
