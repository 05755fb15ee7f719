"""Learning in context: a layer of linear attention that was trained on regressions, against one
step of gradient descent.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.lab import measure
from modules.kernels.linear_attention import LINEAR_ATTENTION_KERNELS

DIM, PAIRS, NOISE = 4, 10, 0.25  # of x, of a prompt, the variance of what is added to w x
DEVIATIONS = {'alike': (1.0, 1.0, 1.0, 1.0), 'stretched': (0.5, 1.0, 1.0, 2.0)}  # of x
ROWS, STEPS, PEAK, START = 256, 2000, 0.01, 0.3  # of training; deviation of initial weights
PROMPTS, SEEDS = 2**16, 5  # of the evaluation

BEST_STEP = 1 / (PAIRS + DIM + 1 + NOISE)
# E (w x - BEST_STEP sum_i y_i x_i x)^2 + NOISE, with E tr (X'X)^2 = n d (n + d + 1).
BEST_LOSS = NOISE + DIM * (DIM + 1 + NOISE) * BEST_STEP

Params = dict[str, jax.Array]


class Regressions(NamedTuple):
    """tokens_BTE: (x_i, y_i), in the last place the query (x, 0); target_B: its y."""

    tokens_BTE: jax.Array
    target_B: jax.Array


@measure(
    *('excess_loss', 'step_over_best', 'unexplained_by_one_step'),
    'unexplained_by_one_step_of_stretched_inputs',
    'unexplained_by_preconditioned_step_of_stretched_inputs',
)
def one_step() -> Iterator[list[float]]:
    """Returns how far a trained layer of linear attention is from one step of gradient descent.

    x ~ N(0, I) and w ~ N(0, I) in DIM dimensions, y = w x + N(0, NOISE), PAIRS pairs a prompt. The
    best of all such layers is BEST_STEP sum_i y_i x_i x, of loss BEST_LOSS (arXiv:2307.03576,
    theorem 1; the step follows from the moments of X'X). excess_loss: over BEST_LOSS, in its
    shares, from PROMPTS prompts on which the best is subtracted; step_over_best: of the step that
    fits the layer's predictions; unexplained_by_one_step: the share of their squares that it leaves
    over. Of x with DEVIATIONS and w with one over them, the best is that step with x over their
    variances (theorem 2): `..._of_stretched_inputs`. SEEDS trainings each.
    """
    alike, stretched = (
        [train_and_compare(deviations, seed) for seed in range(SEEDS)]
        for deviations in DEVIATIONS.values()
    )
    for name in ('excess_loss', 'step_over_best', 'unexplained_by_plain'):
        yield [run[name] for run in alike]
    for name in ('unexplained_by_plain', 'unexplained_by_preconditioned'):
        yield [run[name] for run in stretched]


def draw_prompts(key: jax.Array, rows: int, deviations_D: jax.Array) -> Regressions:
    """Draws prompts; w has the deviations 1 / deviations_D, so that w x has the variance DIM."""
    of_w, of_x, of_noise = jax.random.split(key, 3)
    w_BD = jax.random.normal(of_w, (rows, DIM))
    z_BTD = jax.random.normal(of_x, (rows, PAIRS + 1, DIM))
    noise_BT = NOISE**0.5 * jax.random.normal(of_noise, (rows, PAIRS + 1))
    y_BT = jnp.einsum('btd,bd->bt', z_BTD, w_BD) + noise_BT
    x_BTD = jnp.einsum('btd,d->btd', z_BTD, deviations_D)
    seen_BT1 = y_BT.at[:, -1].set(0.0)[..., None]
    return Regressions(jnp.concatenate([x_BTD, seen_BT1], -1), y_BT[:, -1])


def predict(params: Params, tokens_BTE: jax.Array) -> jax.Array:
    """Returns the last number that a layer of linear attention gives at the query's place, [B].

    The layer of the theorem is sum_i (q k_i) v_i over the pairs alone: no map of q and k to
    positive features and no sum that divides, which `modules.attention.linear` has. So this is the
    kernel behind that, with features as they are, 0 + 1 to divide by, and a query that has no key.
    """
    q, k, v = (
        jnp.einsum('bte,ef->btf', tokens_BTE, params[name])[:, None]
        for name in ('query', 'key', 'value')
    )
    k = k.at[:, :, -1].set(0.0)
    nothing = jnp.zeros_like(q)
    out_BNTE, _ = LINEAR_ATTENTION_KERNELS['quadratic'](q, k, nothing, nothing, v, 1.0)
    return out_BNTE[:, 0, -1, -1]


def gradient_step(tokens_BTE: jax.Array, weights_D: jax.Array) -> jax.Array:
    """Returns sum_i y_i x_i (weights * x) of prompts, [B]: a step from w = 0 of size 1."""
    x_BTD, y_BT = tokens_BTE[..., :-1], tokens_BTE[:, :-1, -1]
    return jnp.einsum('bt,btd,bd,d->b', y_BT, x_BTD[:, :-1], x_BTD[:, -1], weights_D)


def train_layer(seed: int, deviations_D: jax.Array, steps: int) -> Params:
    """Trains a layer with Adam, whose rate falls to 0 as a cosine, on prompts seen once."""
    optimizer = optax.adam(optax.cosine_decay_schedule(PEAK, steps))
    of_start, of_text = jax.random.split(jax.random.key(seed))
    shape = (DIM + 1, DIM + 1)
    names = ('query', 'key', 'value')
    keys = jax.random.split(of_start, len(names))
    params = {
        name: START * jax.random.normal(key, shape) for name, key in zip(names, keys, strict=True)
    }

    def loss(params, number):
        prompts = draw_prompts(jax.random.fold_in(of_text, number), ROWS, deviations_D)
        return jnp.mean((predict(params, prompts.tokens_BTE) - prompts.target_B) ** 2)

    return lab.train(loss, params, optimizer, jnp.arange(steps)).params


def train_and_compare(
    deviations: Sequence[float], seed: int, steps: int = STEPS
) -> dict[str, float]:
    """Trains a layer and returns what `one_step` says of it."""
    deviations_D = jnp.array(deviations)
    params = jax.jit(train_layer, static_argnums=2)(seed, deviations_D, steps)
    prompts = jax.jit(draw_prompts, static_argnums=1)(
        jax.random.key(-1 - seed), PROMPTS, deviations_D
    )
    found_B = np.float64(jax.jit(predict)(params, prompts.tokens_BTE))
    plain_B, best_B = (
        np.float64(gradient_step(prompts.tokens_BTE, weights_D))
        for weights_D in (jnp.ones(DIM), deviations_D**-2)
    )
    return compare_steps(found_B, plain_B, best_B, np.float64(prompts.target_B))


def compare_steps(
    predicted_B: np.ndarray, plain_B: np.ndarray, best_B: np.ndarray, target_B: np.ndarray
) -> dict[str, float]:
    """Returns predictions against steps of size 1, without and with the preconditioner."""
    fitted = predicted_B @ best_B / (best_B @ best_B)
    excess_B = (predicted_B - target_B) ** 2 - (BEST_STEP * best_B - target_B) ** 2
    return {
        'excess_loss': float(excess_B.mean() / BEST_LOSS),
        'step_over_best': float(fitted / BEST_STEP),
        'unexplained_by_plain': unexplained_share(predicted_B, plain_B),
        'unexplained_by_preconditioned': unexplained_share(predicted_B, best_B),
    }


def unexplained_share(predicted_B: np.ndarray, by_B: np.ndarray) -> float:
    """Returns the share of the squares that is left without a multiple of `by_B`."""
    return float(1 - (predicted_B @ by_B) ** 2 / (predicted_B @ predicted_B) / (by_B @ by_B))
