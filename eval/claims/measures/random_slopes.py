"""Binary classifiers trained by random slopes: a different calibrated loss in every step."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate
from eval.claims.lab import KeyedRng, Task, measure

TASK = Task(2, 32, 0.8, n_train=1024, n_held_out=4096)
WIDTH, BATCH = 128, 64
EPOCHS, PERIOD = 60, 10  # epochs between two families of losses
RATES = (0.03, 0.1, 0.3, 1.0)  # of SGD with momentum, falling to 0 by a cosine
MOMENTUM, LEAST_SLOPE = 0.9, 1e-6
SEEDS = 13


@measure('gain_of_random_slopes', 'gain_of_all_rows_over_half')
def binary_accuracy() -> Iterator[Estimate]:
    """Yields the accuracy by random slopes minus that by the logistic loss, and a gain by data.

    Both are shares of held-out inputs, for networks of two hidden layers of WIDTH after EPOCHS,
    with the same initial weights and order of batches, each at its best rate of RATES
    (arXiv:2409.00908). `gain_of_all_rows_over_half`: accuracy by the logistic loss minus that after
    equally many steps on half of the rows.
    """
    by_random = lab.tune(train_slopes(random_slopes, TASK.n_train))
    by_logistic = lab.tune(train_slopes(logistic_slopes, TASK.n_train))
    by_half = lab.tune(train_slopes(logistic_slopes, TASK.n_train // 2))
    yield lab.estimate_difference(by_random, by_logistic)
    yield lab.estimate_difference(by_logistic, by_half)


def logistic_slopes(key: jax.Array, margins_B: jax.Array, power: jax.Array) -> jax.Array:
    """Returns the slopes of log(1 + e^-s) at margins s, [B].

    Args:
      key: not used.
      margins_B: margins of the rows.
      power: not used.
    """
    del key, power
    return -jax.nn.sigmoid(-margins_B)


def random_slopes(key: jax.Array, margins_B: jax.Array, power: jax.Array) -> jax.Array:
    """Returns slopes of a random convex calibrated loss at margins_B, [B].

    Sizes are min(r, 1) with r = (1 + power z)^(1 / power), z ~ N(0, 1), or e^z for a power of 0.
    The margins get them in order, the smallest margin the steepest slope. Beyond a margin of 1 a
    slope is divided by the margin. LEAST_SLOPE is added to the size of all. As in
    https://github.com/statmlben/ensLoss.

    Args:
      key: random key.
      margins_B: margins of the rows.
      power: exponent of the family of losses.
    """
    z_B = jax.random.normal(key, margins_B.shape)
    base_B = 1 + power * z_B
    is_small = jnp.abs(power) < 1e-4
    powered_B = jnp.maximum(base_B, 1e-30) ** (1 / jnp.where(is_small, 1.0, power))
    sizes_B = jnp.minimum(jnp.where(is_small, jnp.exp(z_B), powered_B), 1.0)
    ranks_B = jnp.argsort(jnp.argsort(margins_B))
    slopes_B = jnp.sort(-sizes_B)[ranks_B] / jnp.maximum(margins_B, 1.0)
    return slopes_B - LEAST_SLOPE


def train_slopes(slopes: Callable[..., jax.Array], n_train: int) -> np.ndarray:
    """Returns the accuracy [seed, rate] of training by slopes(key, margins_B, power).

    Only the first n_train rows are seen. The number of steps does not depend on n_train.
    """
    steps = EPOCHS * TASK.n_train // BATCH

    def prepare(key):
        data_key, start_key, training_key = jax.random.split(key, 3)
        x, cluster_M = lab.draw_clusters(KeyedRng(jax.random.split(data_key, 3)), TASK)
        signs = 2.0 * (cluster_M % 2) - 1
        start = lab.he_matrices(start_key, (TASK.inputs, WIDTH, WIDTH, 1))

        def loss(params, batch):
            step, key = batch
            row_key, slope_key = jax.random.split(key)
            period = step // (PERIOD * TASK.n_train // BATCH)
            power_key = jax.random.fold_in(training_key, period)
            power = jax.random.uniform(power_key, minval=-1.0, maxval=1.0)
            power = jnp.where(period > 0, power, 0.0)
            rows = jax.random.randint(row_key, (BATCH,), 0, n_train)
            margins_B = signs[rows] * lab.logits(params, x[rows])[:, 0]
            fixed_B = jax.lax.stop_gradient(margins_B)
            return jnp.mean(slopes(slope_key, fixed_B, power) * margins_B)

        def run(rate):
            falling = optax.sgd(optax.cosine_decay_schedule(1.0, steps), MOMENTUM)
            batches = jnp.arange(steps), jax.random.split(training_key, steps)
            optimizer = optax.chain(falling, optax.scale(rate))
            params = lab.train(loss, start, optimizer, batches).params
            held_out_M = lab.logits(params, x[TASK.n_train :])[:, 0]
            return jnp.mean(signs[TASK.n_train :] * held_out_M > 0)

        return run

    return lab.map_rates(prepare, jax.random.split(jax.random.key(0), SEEDS), RATES)
