"""Networks that are trained by small batches, and by large ones for as many passes or steps."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from eval.claims.measures.gaussians import Rows, Task, drawn, logits_of, matrices
from modules.losses.base import cross_entropies

TASK = Task(10, 30, 0.7, trained=2048, held_out=8192, passes=20)
WIDTH, MOMENTUM = 128, 0.9
SMALL, LARGE = 16, 256  # rows of a batch
FACTORS = (1.0, 1.0, 0.1, 0.01)  # of the rate, in each quarter of the steps
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of SGD
SEEDS = 10


class Regime(NamedTuple):
    """Rows of a batch, and steps."""

    batch: int
    steps: int


REGIMES = {
    'small': Regime(SMALL, TASK.passes * TASK.trained // SMALL),
    'large': Regime(LARGE, TASK.passes * TASK.trained // LARGE),
    'adapted': Regime(LARGE, TASK.passes * TASK.trained // SMALL),
}


def large_batches() -> dict[str, Estimate]:
    """Returns what batches of LARGE rows lose against SMALL ones, and how far weights go.

    `lost_by_large` is the accuracy by small batches less that by large ones of as many passes over
    the rows, `lost_by_adapted` that of large ones of as many steps (regime adaptation). Networks of
    two hidden layers of WIDTH have one start, and each regime the rate of RATES at which its mean
    over the SEEDS is best. Distances |w_t - w_0| of `adapted` at its first rate are fitted by a + b
    log t and by a + b sqrt t; `unexplained` is the variance that is left, over that of the
    distances (arXiv:1705.08741).
    """
    found = {}
    for name, regime in REGIMES.items():
        right_SR, distances_SRT = (np.float64(x) for x in _program(regime)(jnp.arange(SEEDS)))
        best = right_SR.mean(0).argmax()
        found[f'accuracy_by_{name}'] = right_SR[:, best]
        if name == 'adapted':
            distances_ST = distances_SRT[:, best]
    for name in ('large', 'adapted'):
        found[f'lost_by_{name}'] = found['accuracy_by_small'] - found[f'accuracy_by_{name}']
    steps_T = np.arange(1, distances_ST.shape[1] + 1)
    for name, of_steps_T in (('log', np.log(steps_T)), ('root', np.sqrt(steps_T))):
        left = [unexplained(distances_T, of_steps_T) for distances_T in distances_ST]
        found[f'unexplained_by_{name}'] = np.array(left)
    found['unexplained_by_log_less_root'] = (
        found['unexplained_by_log'] - found['unexplained_by_root']
    )
    return {name: over_seeds(values) for name, values in found.items()}


def unexplained(y_T: np.ndarray, x_T: np.ndarray) -> float:
    """Returns the share of the variance of y that no line in x explains."""
    return float(1 - np.corrcoef(y_T, x_T)[0, 1] ** 2)


def _program(regime: Regime) -> Any:
    """The program of a regime: seeds -> (accuracy [seed, rate], distances [seed, rate, step])."""

    def of_seed(seed):
        of_data, of_start, of_rows = jax.random.split(jax.random.key(seed), 3)
        rows = drawn(TASK, of_data)
        params = matrices(of_start, (TASK.inputs, WIDTH, WIDTH, TASK.classes))
        trained = functools.partial(_trained, regime, rows, params, of_rows)
        return jax.lax.map(trained, jnp.float32(RATES))

    return jax.jit(lambda seeds: jax.lax.map(of_seed, seeds))


def _trained(regime: Regime, rows: Rows, start: list, key: jax.Array, rate: jax.Array):
    """The accuracy, and distances from the start after each step of the first rate."""
    transform = optax.trace(MOMENTUM)

    def step(carry, given):
        params, state = carry
        key, factor = given
        at_B = jax.random.randint(key, (regime.batch,), 0, TASK.trained)

        def loss(params):
            return jnp.mean(cross_entropies(logits_of(params, rows.x[at_B]), rows.labels[at_B]))

        updates, state = transform.update(jax.grad(loss)(params), state)
        params = jax.tree.map(lambda w, u: w - rate * factor * u, params, updates)
        squares = [jnp.sum(jnp.square(w - w0)) for w, w0 in zip(params, start, strict=True)]
        return (params, state), jnp.sqrt(sum(squares))

    factors_T = jnp.float32(FACTORS)[len(FACTORS) * jnp.arange(regime.steps) // regime.steps]
    given = jax.random.split(key, regime.steps), factors_T
    (params, _), distances_T = jax.lax.scan(step, (start, transform.init(start)), given)
    right_H = jnp.argmax(logits_of(params, rows.held_out), -1) == rows.held_out_labels
    return jnp.mean(right_H), distances_T[: FACTORS.count(1.0) * regime.steps // len(FACTORS)]
