"""Networks of which the norms alone are trained, as many of their weights, or all."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from eval.claims.measures.gaussians import Rows, Task, drawn, matrices
from modules.losses.base import cross_entropies
from modules.norms.base import along
from modules.norms.batchnorm import moments, normalize

TASK = Task(10, 30, 0.7, trained=4096, held_out=4096, passes=20)
HIDDEN, WIDTH, EPS = 4, 128, 1e-5
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # of Adam, falling to 0 by a cosine
SEEDS = 10
PARTS = ('all', 'norms', 'weights')
LEAST_GAIN = 0.01  # below which a unit hardly has a part

Params = dict[str, Any]  # kernels, gains and biases of hidden layers, and a readout


def norms_alone() -> dict[str, Estimate]:
    """Returns the accuracy of networks that are trained in part, and how many gains go to 0.

    HIDDEN layers of WIDTH have BatchNorm and ReLU, gains from U(0, 1) and biases of 0; `norms`
    trains these, `weights` two weights of every unit, drawn once, which are as many, and `all` all,
    each at the rate of RATES at which its mean over the SEEDS is best. Accuracies are shares of
    held-out inputs, normalized as one batch (arXiv:2003.00152).
    """
    found = {}
    for part in PARTS:
        right_SR, near_0_SR = np.float64(_program(part)(jnp.arange(SEEDS)))
        best = right_SR.mean(0).argmax()
        found[f'accuracy_by_{part}'] = right_SR[:, best]
        if part == 'norms':
            near_0_S = near_0_SR[:, best]
    found['gain_of_norms_over_weights'] = found['accuracy_by_norms'] - found['accuracy_by_weights']
    found['share_of_gains_near_0'] = near_0_S
    return {name: over_seeds(values) for name, values in found.items()}


def _program(part: str) -> Any:
    """The program of a part: seeds -> (accuracy, share of small gains), [seed, rate] each."""

    def of_seed(seed):
        of_data, of_start, of_mask, of_rows = jax.random.split(jax.random.key(seed), 4)
        rows, params = drawn(TASK, of_data), start(of_start)
        trained = functools.partial(_trained, rows, params, trained_of(part, params, of_mask))
        return jax.lax.map(functools.partial(trained, of_rows), jnp.float32(RATES))

    return jax.jit(lambda seeds: jax.lax.map(of_seed, seeds))


def start(key: jax.Array) -> Params:
    """Returns the parameters of a network."""
    of_matrices, of_gains = jax.random.split(key)
    *kernels, readout = matrices(of_matrices, (TASK.inputs, *[WIDTH] * HIDDEN, TASK.classes))
    gains = jax.random.uniform(of_gains, (HIDDEN, WIDTH))
    biases = jnp.zeros((HIDDEN, WIDTH))
    return {'kernels': kernels, 'gains': gains, 'biases': biases, 'readout': readout}


def trained_of(part: str, params: Params, key: jax.Array) -> Params:
    """Returns 1 where a parameter is trained and 0 elsewhere, in the shapes of the parameters."""
    ones, zeros = (jax.tree.map(make, params) for make in (jnp.ones_like, jnp.zeros_like))
    if part == 'all':
        return ones
    if part == 'norms':
        return zeros | {'gains': ones['gains'], 'biases': ones['biases']}
    keys = jax.random.split(key, HIDDEN)
    each = zip(keys, params['kernels'], strict=True)
    return zeros | {'kernels': [two_of_each_unit(one, kernel.shape) for one, kernel in each]}


def two_of_each_unit(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns a mask [I, O] of zeros and two ones in every column."""
    ranks_IO = jnp.argsort(jnp.argsort(jax.random.uniform(key, shape), 0), 0)
    return jnp.float32(ranks_IO < 2)


def logits_of(params: Params, x: jax.Array) -> jax.Array:
    """Returns the logits of inputs that are one batch."""
    hidden = zip(params['kernels'], params['gains'], params['biases'], strict=True)
    for kernel, gain, bias in hidden:
        x = x @ kernel
        x = normalize(x, *moments(x, None), EPS)
        x = jax.nn.relu(along(gain, x) * x + along(bias, x))
    return x @ params['readout']


def _trained(rows: Rows, params: Params, mask: Params, key: jax.Array, rate: jax.Array):
    steps = TASK.passes * TASK.trained // TASK.batch
    transform = optax.adam(optax.cosine_decay_schedule(1.0, steps))

    def step(carry, at_B):
        params, state = carry

        def loss(params):
            return jnp.mean(cross_entropies(logits_of(params, rows.x[at_B]), rows.labels[at_B]))

        updates, state = transform.update(jax.grad(loss)(params), state)
        updates = jax.tree.map(lambda u, m: rate * m * u, updates, mask)
        return (optax.apply_updates(params, updates), state), None

    at_TB = jax.random.randint(key, (steps, TASK.batch), 0, TASK.trained)
    (params, _), _ = jax.lax.scan(step, (params, transform.init(params)), at_TB)
    right_H = jnp.argmax(logits_of(params, rows.held_out), -1) == rows.held_out_labels
    return jnp.mean(right_H), jnp.mean(jnp.abs(params['gains']) < LEAST_GAIN)
