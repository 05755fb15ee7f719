"""The learning rate over a run as text, from the config alone: no data is read."""

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.recipe import Recipe
from lm.training.state import hyper_from, schedule_fraction

ROWS, BAR = 21, 40
FOLLOWED = 10**6  # steps: of longer runs only rows at equal distances are looked at


def schedule_listing(recipe: Recipe) -> str:
    """A line each for steps at equal distances, and for those at which the slope changes: the
    learning rate, that of the other parameters where it is given, and a bar.
    """
    steps, peaks = recipe.train.steps, {'lr': recipe.optim.lr}
    if recipe.optim.others_lr is not None:
        peaks['others_lr'] = recipe.optim.others_lr
    listed = np.unique(np.linspace(1, steps, min(ROWS, steps)).round().astype(np.int64))
    if steps <= FOLLOWED:
        fractions = fractions_at(recipe, np.arange(1, steps + 1))
        listed = np.union1d(listed, corners(fractions))
    width = max(len(f'{steps:,}'), len('step'))
    lines = [f'optim.schedule={recipe.optim.schedule}']
    lines += [f'{"step":>{width}}' + ''.join(f'{name:>12}' for name in peaks)]
    for step, fraction in zip(listed, fractions_at(recipe, listed), strict=True):
        rates = ''.join(f'{peak * fraction:>12.4g}' for peak in peaks.values())
        bar = '#' * round(BAR * fraction)
        lines.append(f'{step:>{width},}{rates}  {bar}'.rstrip())
    return '\n'.join(lines) + '\n'


def fractions_at(recipe: Recipe, steps: np.ndarray) -> np.ndarray:
    """Of the peak, at steps counted from 1, as metrics.jsonl counts them."""
    found = schedule_fraction(recipe, jnp.asarray(steps - 1, jnp.int32), hyper_from(recipe))
    return np.asarray(jax.device_get(found), float)


def corners(fractions: np.ndarray) -> np.ndarray:
    """The steps, from 1, at which the slope changes by half and more, none where they are many.

    What changes by less than a tenth of one fall over the whole run is a curve's, not a corner.
    """
    slopes = np.diff(fractions)
    if len(slopes) < 2:
        return np.array([], np.int64)
    steeper = np.maximum(np.abs(slopes[1:]), np.abs(slopes[:-1]))
    change = np.abs(np.diff(slopes))
    (found,) = np.nonzero((change > 0.5 * steeper) & (change > 0.1 / len(fractions)))
    return found + 2 if len(found) <= ROWS else found[:0]
