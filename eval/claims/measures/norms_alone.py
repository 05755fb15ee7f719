"""Networks with training of the norms only, or of equally many weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import Task, measure
from modules.losses.base import cross_entropies
from modules.norms.base import broadcast_like
from modules.norms.batchnorm import moments, normalize

TASK, PASSES, BATCH = Task(10, 30, 0.7, n_train=4096, n_held_out=4096), 20, 64
HIDDEN, WIDTH, EPS = 4, 128, 1e-5
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of Adam, falling to 0 by a cosine
SEEDS = 13
PARTS = {  # the parameters that are trained
    'norms': ('gains', 'biases'),
    'gains': ('gains',),
    'all_weights': ('kernels',),
    'weights': (),  # two of each unit
}
DECAY = 0.005  # of gains and biases in each step; without a gradient a share of e^-6 remains
LEAST_GAIN = 0.01  # below which a unit hardly has a part

Params = dict[str, Any]  # kernels, gains and biases of hidden layers, and a readout


@measure(
    *('gain_of_norms_over_weights', 'share_of_gains_near_0'),
    *('gain_of_all_weights_over_weights', 'share_of_decayed_gains_near_0'),
    'gain_of_gains_over_weights',
)
def norms_alone() -> Iterator[Estimate | np.ndarray]:
    """Yields the accuracy gained by training norms, not weights, and the share of small gains.

    HIDDEN layers of WIDTH have BatchNorm and ReLU, gains from U(0, 1) and biases of 0. `norms`
    trains gains and biases; `weights` trains two random weights of every unit, the same number.
    Each has its best rate of RATES. Accuracies are shares of held-out inputs, normalized as a
    single batch (arXiv:2003.00152).

    Three variants follow: the accuracy gained by training all weights of hidden layers, and the
    share of small gains if they decay by DECAY in each step, both at the rate of `norms`; and the
    accuracy gained by training gains without biases, at their best rate.
    """
    accuracy_SR, near_0_SR = train_part('norms', RATES)
    norms = lab.tune(accuracy_SR)
    weights, gains = (lab.tune(train_part(part, RATES)[0]) for part in ('weights', 'gains'))
    yield lab.estimate_difference(norms, weights)
    yield mean_over_seeds(norms.select(near_0_SR), 'logit')
    rates, fresh = [RATES[norms.index]], np.s_[lab.TUNING_SEEDS :, 0]
    yield train_part('all_weights', rates)[0][fresh] - weights.scores
    yield mean_over_seeds(train_part('norms', rates, DECAY)[1][fresh], 'logit')
    yield lab.estimate_difference(gains, weights)


def train_part(
    part: str, rates: Sequence[float], decay: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Trains networks of all seeds.

    Args:
      part: the parameters that are trained, a row of PARTS.
      rates: learning rates.
      decay: share of a trained parameter that each step removes.

    Returns:
      (accuracy, share of small gains), [seed, rate] each.
    """
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
            decay_and_mask = optax.stateless(
                lambda updates, params: jax.tree.map(
                    lambda is_trained, update, x: is_trained * (update - decay * x),
                    *(mask, updates, params),
                )
            )
            optimizer = optax.chain(lab.cosine_adam(rate, steps), decay_and_mask)
            batches = lab.draw_batches(row_key, steps, BATCH, TASK.n_train)
            trained = lab.train(loss, params, optimizer, batches).params
            accuracy = lab.accuracy(normed_logits(trained, rows.held_out), rows.held_out_labels)
            return accuracy, jnp.mean(jnp.abs(trained['gains']) < LEAST_GAIN)

        return run

    return lab.map_rates(prepare, jnp.arange(SEEDS), rates)


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
      part: a row of PARTS.
      params: parameters of the network.
      key: selects the weights.
    """
    ones, zeros = (jax.tree.map(make, params) for make in (jnp.ones_like, jnp.zeros_like))
    if PARTS[part]:
        return zeros | {name: ones[name] for name in PARTS[part]}
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
