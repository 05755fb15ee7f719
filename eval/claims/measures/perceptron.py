"""Steps of gradient descent for logistic regression until points are separated."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.optim.classic import sgd
from modules.optim.variants import normalized_gd
from modules.params import ParamSpec

SPECS = {'theta': ParamSpec('vector', ('embed',))}
DESCENTS = {'plain': sgd(SPECS, momentum=0.0), 'normalized': normalized_gd(SPECS)}
SMALL, LARGE = 1.0, 100.0  # learning rates, of those of the paper
FLOW = SMALL / 10  # at which descent follows the gradient flow
MOST_STEPS = 1_000_000
DISAGREEING = (50, 100, 200, 400, 800)  # numbers of points, of which one disagrees
MARGIN = 0.3
POINTS, DIMENSIONS, LEAST_MARGIN, SEEDS = 600, 32, 0.05, 50
FEW_SEEDS = 5  # of SEEDS, at FLOW, where descent takes ten times as many steps
POSITIVES = {'balanced': POINTS // 2, 'imbalanced': POINTS // 50}


class Descent(NamedTuple):
    """The steps until every margin is positive, and the largest loss before any of them."""

    steps: int
    largest_loss: float


def descend_until_separated(
    points: np.ndarray, descent: str, lr: float, power: float = 1.0
) -> Descent:
    """Runs gradient descent from 0 on points y_i a_i until each margin y_i a_i . theta > 0.

    The loss is the mean of log(1 + exp(-margin)). Raises ValueError after MOST_STEPS.

    Args:
      points: y_i a_i, [n, d].
      descent: key of DESCENTS.
      lr: learning rate.
      power: normalized descent divides by the error probability to this power.
    """
    with jax.enable_x64(True):  # with a large rate margins are far apart
        steps, largest = jax.device_get(_descend(jnp.asarray(points), descent, lr, power))
    if steps >= MOST_STEPS:
        raise ValueError(f'{descent} descent at {lr} did not separate {len(points)} points')
    return Descent(int(steps), float(largest))


@functools.partial(jax.jit, static_argnums=(1, 3))
def _descend(points: jax.Array, descent: str, lr: Any, power: float) -> tuple[Any, Any]:
    transform = DESCENTS[descent]

    def margins(params):
        return points @ params['theta']

    def loss(params):
        return jnp.mean(jax.nn.softplus(-margins(params)))

    def step(carry):
        params, state, steps, largest = carry
        value, grads = jax.value_and_grad(loss)(params)
        means = {'error_probability': jnp.mean(jax.nn.sigmoid(-margins(params))) ** power}
        direction, state = transform.update(grads, state, params, means=means)
        params = jax.tree.map(lambda w, d: w - lr * d, params, direction)
        return params, state, steps + 1, jnp.maximum(largest, value)

    def is_running(carry):
        return (jnp.min(margins(carry[0])) <= 0) & (carry[2] < MOST_STEPS)

    params = {'theta': jnp.zeros(points.shape[1])}
    start = params, transform.init(params), 0, -jnp.inf
    *_, steps, largest = jax.lax.while_loop(is_running, step, start)
    return steps, largest


def build_disagreeing_points(n: int) -> np.ndarray:
    """Returns n points (m, s) of length 1 with m = MARGIN; the last point has -s."""
    points = np.full((n, 2), [MARGIN, np.sqrt(1 - MARGIN**2)])
    points[-1, 1] *= -1
    return points


def draw_points(positives: int, seed: int) -> np.ndarray:
    """Draws POINTS points with coordinates in [0, 1], as pixels have, times their labels.

    They are the points of a larger draw with a distance of at least LEAST_MARGIN to a random
    hyperplane, which is shifted such that the requested number of them is positive.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(DIMENSIONS)
    normal /= np.linalg.norm(normal)
    x = rng.uniform(size=(10 * POINTS, DIMENSIONS))
    along = x @ normal
    along -= np.quantile(along, 1 - positives / POINTS)
    above, below = np.flatnonzero(along > LEAST_MARGIN), np.flatnonzero(along < -LEAST_MARGIN)
    selected = np.concatenate([above[:positives], below[: POINTS - positives]])
    with_bias = np.concatenate([x[selected], np.ones((len(selected), 1))], 1)
    return np.sign(along[selected])[:, None] * with_bias


@measure(
    *(f'slope_of_{descent}_steps_over_points' for descent in DESCENTS),
    'plain_steps_at_large_over_small_rate',
    *(f'largest_loss_over_first_at_{rate}_rate' for rate in ('small', 'large')),
    *(f'normalized_over_plain_steps_of_{kind}_points' for kind in POSITIVES),
    *('plain_steps_at_small_rate_over_a_tenth', 'largest_loss_over_first_of_doubled_gradients'),
    'normalized_over_plain_steps_of_disagreeing_points',
    'slope_of_steps_over_points_of_root',
)
def steps_to_separate() -> Iterator[float | Estimate]:
    """Yields the steps until plain and normalized gradient descent separate points.

    Source: arXiv:2412.08424.

    With one disagreeing point: the slope of log steps over log number of points at the rate LARGE.
    With random points, over SEEDS: the steps of plain descent at LARGE over those at SMALL; its
    largest loss at each rate over the loss at 0; the steps of normalized descent at LARGE over the
    steps of plain descent, with equally many points on both sides and with few on one side.

    Then the steps of plain descent at SMALL over those at FLOW, over FEW_SEEDS; its largest
    loss at SMALL for gradients that are twice as large; the steps of normalized descent over those
    of plain descent for the most points with one that disagrees; and the slope for gradients
    divided by the root of the error probability.
    """

    def count_steps(descent, power=1.0):
        return [
            descend_until_separated(build_disagreeing_points(n), descent, LARGE, power).steps
            for n in DISAGREEING
        ]

    def slope(steps):
        return float(np.polyfit(np.log(DISAGREEING), np.log(steps), 1)[0])

    def run_seeds(kind, descent, lr, seeds=SEEDS):
        return [
            descend_until_separated(draw_points(POSITIVES[kind], seed), descent, lr)
            for seed in range(seeds)
        ]

    def compare_steps(runs, baselines):
        return mean_over_seeds(
            [run.steps / baseline.steps for run, baseline in zip(runs, baselines, strict=True)],
            'log',
        )

    def compare_loss(runs):
        return mean_over_seeds([run.largest_loss / np.log(2) for run in runs], 'log')

    steps = {descent: count_steps(descent) for descent in DESCENTS}
    yield from (slope(steps[descent]) for descent in DESCENTS)
    slow, fast = (run_seeds('balanced', 'plain', lr) for lr in (SMALL, LARGE))
    yield compare_steps(fast, slow)
    yield from (compare_loss(runs) for runs in (slow, fast))
    for kind, plain in (
        ('balanced', fast),
        ('imbalanced', run_seeds('imbalanced', 'plain', LARGE)),
    ):
        yield compare_steps(run_seeds(kind, 'normalized', LARGE), plain)
    yield compare_steps(slow[:FEW_SEEDS], run_seeds('balanced', 'plain', FLOW, FEW_SEEDS))
    yield compare_loss(run_seeds('balanced', 'plain', 2 * SMALL))
    yield steps['normalized'][-1] / steps['plain'][-1]
    yield slope(count_steps('normalized', power=0.5))
