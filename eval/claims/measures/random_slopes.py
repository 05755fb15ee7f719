"""Binary classifiers whose loss is another calibrated one in every step, by random slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds

CLUSTERS, INPUTS, SPREAD = 32, 16, 0.8  # Gaussians around N(0, 1), each of one of two classes
TRAINED, HELD_OUT, WIDTH = 1024, 4096, 128
BATCH, EPOCHS, PERIOD = 64, 60, 10  # epochs between two families of losses
RATES = (0.01, 0.03, 0.1)  # of SGD with momentum, falling to 0 by a cosine
MOMENTUM, LEAST_SLOPE = 0.9, 1e-6
SEEDS = 10
METHODS = ('logistic', 'random_slopes')


def binary_accuracy() -> dict[str, Estimate]:
    """Returns the accuracy of classifiers by random slopes less that by the logistic loss.

    Both are shares of held-out inputs, of networks of two hidden layers of WIDTH after EPOCHS, with
    one start and order of batches, each at the rate of RATES at which its mean over the SEEDS is
    best (arXiv:2409.00908).
    """
    keys = jax.random.split(jax.random.key(0), SEEDS)
    right_SMR = np.float64(jax.jit(lambda keys: jax.lax.map(_accuracies, keys))(keys))
    best_M = np.argmax(right_SMR.mean(0), -1)
    right = {name: right_SMR[:, i, best_M[i]] for i, name in enumerate(METHODS)}
    found = {f'accuracy_by_{name}': over_seeds(values) for name, values in right.items()}
    found['gain_of_random_slopes'] = over_seeds(right['random_slopes'] - right['logistic'])
    return found


def logistic_slopes(margins_B: jax.Array) -> jax.Array:
    """Returns the slopes of log(1 + e^-s) at margins s, [B]."""
    return -jax.nn.sigmoid(-margins_B)


def random_slopes(key: jax.Array, margins_B: jax.Array, power: jax.Array) -> jax.Array:
    """Returns slopes of a random convex calibrated loss at margins_B, [B].

    Slopes of size min(r, 1), r = (1 + power z)^(1 / power) with z ~ N(0, 1), e^z for a power of 0,
    are given to the margins in order, the steepest to the least; beyond a margin of 1 they are
    divided by it. All are LEAST_SLOPE steeper. As in https://github.com/statmlben/ensLoss.
    """
    z_B = jax.random.normal(key, margins_B.shape)
    base_B = 1 + power * z_B
    is_small = jnp.abs(power) < 1e-4
    powered_B = jnp.maximum(base_B, 1e-30) ** (1 / jnp.where(is_small, 1.0, power))
    sizes_B = jnp.minimum(jnp.where(is_small, jnp.exp(z_B), powered_B), 1.0)
    ranks_B = jnp.argsort(jnp.argsort(margins_B))
    slopes_B = jnp.sort(-sizes_B)[ranks_B] / jnp.maximum(margins_B, 1.0)
    return slopes_B - LEAST_SLOPE


def _accuracies(key: jax.Array) -> jax.Array:
    """The results of one data set, [method, rate]."""
    of_data, of_start, of_training = jax.random.split(key, 3)
    x, signs = _data(of_data)
    start = _start(of_start)
    steps = EPOCHS * TRAINED // BATCH

    def trained(given):
        method, rate = given
        transform = optax.sgd(optax.cosine_decay_schedule(1.0, steps), MOMENTUM)

        def step(carry, given):
            params, state = carry
            at, key = given
            of_rows, of_slopes = jax.random.split(key)
            period = at // (PERIOD * TRAINED // BATCH)
            of_power = jax.random.fold_in(of_training, period)
            power = jax.random.uniform(of_power, minval=-1.0, maxval=1.0)
            power = jnp.where(period > 0, power, 0.0)
            rows = jax.random.randint(of_rows, (BATCH,), 0, TRAINED)

            def loss(params):
                margins_B = signs[rows] * _scores(params, x[rows])
                fixed_B = jax.lax.stop_gradient(margins_B)
                both = logistic_slopes(fixed_B), random_slopes(of_slopes, fixed_B, power)
                return jnp.mean(jnp.stack(both)[method] * margins_B)

            updates, state = transform.update(jax.grad(loss)(params), state)
            updates = jax.tree.map(lambda u: rate * u, updates)
            return (optax.apply_updates(params, updates), state), None

        given = jnp.arange(steps), jax.random.split(of_training, steps)
        (params, _), _ = jax.lax.scan(step, (start, transform.init(start)), given)
        return jnp.mean(signs[TRAINED:] * _scores(params, x[TRAINED:]) > 0)

    methods, rates = np.indices((len(METHODS), len(RATES))).reshape(2, -1)
    found = jax.lax.map(trained, (jnp.array(methods), jnp.float32(RATES)[rates]))
    return found.reshape(len(METHODS), len(RATES))


def _data(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inputs, and 1 or -1 for their class; the first TRAINED are to train on."""
    of_centres, of_clusters, of_noise = jax.random.split(key, 3)
    centres = jax.random.normal(of_centres, (CLUSTERS, INPUTS))
    clusters = jax.random.randint(of_clusters, (TRAINED + HELD_OUT,), 0, CLUSTERS)
    noise = SPREAD * jax.random.normal(of_noise, (len(clusters), INPUTS))
    return centres[clusters] + noise, 2.0 * (clusters % 2) - 1


def _start(key: jax.Array) -> list[jax.Array]:
    sizes = (INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)
    keys = jax.random.split(key, len(sizes))
    return [
        jax.random.normal(k, size) * (2 / size[0]) ** 0.5
        for k, size in zip(keys, sizes, strict=True)
    ]


def _scores(params: list[jax.Array], x: jax.Array) -> jax.Array:
    first, second, last = params
    return (jax.nn.relu(jax.nn.relu(x @ first) @ second) @ last)[:, 0]
