"""Networks with training of the norms only, or of equally many weights."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.lab import Task, measure
from modules.losses.base import cross_entropies
from modules.norms.base import broadcast_like
from modules.norms.batchnorm import moments, normalize

TASK, PASSES, BATCH = Task(10, 30, 0.7, n_train=4096, n_held_out=4096), 20, 64
HIDDEN, WIDTH, EPS = 4, 128, 1e-5
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # of Adam, falling to 0 by a cosine
SEEDS = 10
PARTS = ('norms', 'weights')
LEAST_GAIN = 0.01  # below which a unit hardly has a part

Params = dict[str, Any]  # kernels, gains and biases of hidden layers, and a readout


@measure('gain_of_norms_over_weights', 'share_of_gains_near_0')
def norms_alone() -> Iterator[np.ndarray]:
    """Yields the accuracy gained by training norms, not weights, and the share of small gains.

    HIDDEN layers of WIDTH have BatchNorm and ReLU, gains from U(0, 1) and biases of 0. `norms`
    trains gains and biases; `weights` trains two random weights of every unit, the same number.
    Each has the rate of RATES with the best mean over SEEDS. Accuracies are shares of held-out
    inputs, normalized as a single batch (arXiv:2003.00152).
    """
    accuracy, near_0 = {}, {}
    for part in PARTS:
        accuracy_SR, near_0_SR = train_part(part)
        best = lab.best_rate_index(accuracy_SR)
        accuracy[part], near_0[part] = accuracy_SR[:, best], near_0_SR[:, best]
    yield accuracy['norms'] - accuracy['weights']
    yield near_0['norms']


def train_part(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (accuracy, share of small gains), [seed, rate] each."""
    steps = PASSES * TASK.n_train // BATCH

    def prepare(seed):
        data_key, start_key, mask_key, row_key = jax.random.split(jax.random.key(seed), 4)
        rows, params = lab.draw_rows(data_key, TASK), init_params(start_key)
        mask = build_mask(part, params, mask_key)

        def loss(params, index_B):
            return jnp.mean(
                cross_entropies(normed_logits(params, rows.x[index_B]), rows.labels[index_B])
            )

        def run(rate):
            mask_updates = optax.stateless(
                lambda updates, _: jax.tree.map(jnp.multiply, mask, updates)
            )
            optimizer = optax.chain(lab.cosine_adam(rate, steps), mask_updates)
            batches = lab.draw_batches(row_key, steps, BATCH, TASK.n_train)
            trained = lab.train(loss, params, optimizer, batches).params
            accuracy = lab.accuracy(normed_logits(trained, rows.held_out), rows.held_out_labels)
            return accuracy, jnp.mean(jnp.abs(trained['gains']) < LEAST_GAIN)

        return run

    return lab.map_rates(prepare, jnp.arange(SEEDS), RATES)


def init_params(key: jax.Array) -> Params:
    """Draws the parameters of a network."""
    matrix_key, gain_key = jax.random.split(key)
    *kernels, readout = lab.he_matrices(matrix_key, (TASK.inputs, *[WIDTH] * HIDDEN, TASK.classes))
    gains = jax.random.uniform(gain_key, (HIDDEN, WIDTH))
    biases = jnp.zeros((HIDDEN, WIDTH))
    return {'kernels': kernels, 'gains': gains, 'biases': biases, 'readout': readout}


def build_mask(part: str, params: Params, key: jax.Array) -> Params:
    """Returns a tree like the parameters, 1 where a parameter is trained and 0 elsewhere.

    Args:
      part: 'norms' or 'weights'.
      params: parameters of the network.
      key: selects the weights.
    """
    ones, zeros = (jax.tree.map(make, params) for make in (jnp.ones_like, jnp.zeros_like))
    if part == 'norms':
        return zeros | {'gains': ones['gains'], 'biases': ones['biases']}
    keys = jax.random.split(key, HIDDEN)
    kernels = zip(keys, params['kernels'], strict=True)
    return zeros | {
        'kernels': [two_per_unit_mask(kernel_key, kernel.shape) for kernel_key, kernel in kernels]
    }


def two_per_unit_mask(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns a mask [I, O] that is 1 at two random places of every column, 0 elsewhere."""
    ranks_IO = jnp.argsort(jnp.argsort(jax.random.uniform(key, shape), 0), 0)
    return jnp.float32(ranks_IO < 2)


def normed_logits(params: Params, x: jax.Array) -> jax.Array:
    """Returns the logits of inputs that are normalized as a single batch."""
    hidden = zip(params['kernels'], params['gains'], params['biases'], strict=True)
    for kernel, gain, bias in hidden:
        x = x @ kernel
        x = normalize(x, *moments(x, None), EPS)
        x = jax.nn.relu(broadcast_like(gain, x) * x + broadcast_like(bias, x))
    return x @ params['readout']
