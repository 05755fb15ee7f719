"""Networks of which the norms alone are trained, as many of their weights, or all."""

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
    """Returns the accuracy of networks that are trained in part, and how many gains go to 0.

    HIDDEN layers of WIDTH have BatchNorm and ReLU, gains from U(0, 1) and biases of 0; `norms`
    trains these, `weights` two weights of every unit, drawn once, which are as many, each at the
    rate of RATES at which its mean over the SEEDS is best. Accuracies are shares of held-out
    inputs, normalized as one batch (arXiv:2003.00152).
    """
    right, near_0 = {}, {}
    for part in PARTS:
        right_SR, near_0_SR = train_part(part)
        best = lab.best_rate_index(right_SR)
        right[part], near_0[part] = right_SR[:, best], near_0_SR[:, best]
    yield right['norms'] - right['weights']
    yield near_0['norms']


def train_part(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (accuracy, share of small gains), [seed, rate] each."""
    steps = PASSES * TASK.n_train // BATCH

    def prepare(seed):
        of_data, of_start, of_mask, of_rows = jax.random.split(jax.random.key(seed), 4)
        rows, params = lab.draw_rows(of_data, TASK), init_params(of_start)
        mask = build_mask(part, params, of_mask)

        def loss(params, at_B):
            return jnp.mean(cross_entropies(normed_logits(params, rows.x[at_B]), rows.labels[at_B]))

        def run(rate):
            masked = optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, mask, updates))
            optimizer = optax.chain(lab.cosine_adam(rate, steps), masked)
            batches = lab.draw_batches(of_rows, steps, BATCH, TASK.n_train)
            found = lab.train(loss, params, optimizer, batches).params
            right = lab.accuracy(normed_logits(found, rows.held_out), rows.held_out_labels)
            return right, jnp.mean(jnp.abs(found['gains']) < LEAST_GAIN)

        return run

    return lab.map_rates(prepare, jnp.arange(SEEDS), RATES)


def init_params(key: jax.Array) -> Params:
    """Returns the parameters of a network."""
    of_matrices, of_gains = jax.random.split(key)
    *kernels, readout = lab.he_matrices(of_matrices, (TASK.inputs, *[WIDTH] * HIDDEN, TASK.classes))
    gains = jax.random.uniform(of_gains, (HIDDEN, WIDTH))
    biases = jnp.zeros((HIDDEN, WIDTH))
    return {'kernels': kernels, 'gains': gains, 'biases': biases, 'readout': readout}


def build_mask(part: str, params: Params, key: jax.Array) -> Params:
    """Returns 1 where a parameter is trained and 0 elsewhere, in the shapes of the parameters."""
    ones, zeros = (jax.tree.map(make, params) for make in (jnp.ones_like, jnp.zeros_like))
    if part == 'norms':
        return zeros | {'gains': ones['gains'], 'biases': ones['biases']}
    keys = jax.random.split(key, HIDDEN)
    each = zip(keys, params['kernels'], strict=True)
    return zeros | {'kernels': [two_per_unit_mask(one, kernel.shape) for one, kernel in each]}


def two_per_unit_mask(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns a mask [I, O] of zeros and two ones in every column."""
    ranks_IO = jnp.argsort(jnp.argsort(jax.random.uniform(key, shape), 0), 0)
    return jnp.float32(ranks_IO < 2)


def normed_logits(params: Params, x: jax.Array) -> jax.Array:
    """Returns the logits of inputs that are one batch."""
    hidden = zip(params['kernels'], params['gains'], params['biases'], strict=True)
    for kernel, gain, bias in hidden:
        x = x @ kernel
        x = normalize(x, *moments(x, None), EPS)
        x = jax.nn.relu(broadcast_like(gain, x) * x + broadcast_like(bias, x))
    return x @ params['readout']
