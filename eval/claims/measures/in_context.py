"""In-context learning: trained linear attention against a step of gradient descent."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.kernels.linear_attention import LINEAR_ATTENTION_KERNELS

DIM, PAIRS, NOISE = 4, 10, 0.25  # of x, of a prompt, the variance of the noise on w x
DEVIATIONS = {'alike': (1.0, 1.0, 1.0, 1.0), 'stretched': (0.5, 1.0, 1.0, 2.0)}  # of x
ROWS, STEPS, PEAK, START = 256, 2000, 0.01, 0.3  # of training; deviation of initial weights
PROMPTS, SEEDS = 2**16, 5  # of the evaluation
LONGER = 1.1  # the step of a control over the best step

BEST_STEP = 1 / (PAIRS + DIM + 1 + NOISE)
# E (w x - BEST_STEP sum_i y_i x_i x)^2 + NOISE, with E tr (X'X)^2 = n d (n + d + 1).
BEST_LOSS = NOISE + DIM * (DIM + 1 + NOISE) * BEST_STEP

Params = dict[str, jax.Array]


class Regressions(NamedTuple):
    """Prompts. tokens_BTE: (x_i, y_i), at the end the query (x, 0); target_B: y of the query."""

    tokens_BTE: jax.Array
    target_B: jax.Array


@measure(
    *('excess_loss', 'step_over_best', 'unexplained_by_one_step'),
    'unexplained_by_one_step_of_stretched_inputs',
    'unexplained_by_preconditioned_step_of_stretched_inputs',
    *('excess_loss_of_longer_step', 'unexplained_by_one_step_of_best_layer_of_stretched_inputs'),
    *('excess_loss_without_last_pair', 'unexplained_by_one_step_without_last_pair'),
)
def one_step() -> Iterator[Estimate | list[float]]:
    """Yields how far a trained layer of linear attention is from one step of gradient descent.

    x ~ N(0, I) and w ~ N(0, I) in DIM dimensions, y = w x + N(0, NOISE), PAIRS pairs a prompt. The
    best such layer is BEST_STEP sum_i y_i x_i x, with loss BEST_LOSS (arXiv:2307.03576, theorem 1;
    the step follows from the moments of X'X). excess_loss: the loss above the best layer's on
    the same PROMPTS prompts, over BEST_LOSS. step_over_best: the step that fits the layer's
    predictions, over BEST_STEP. unexplained_by_one_step: the share of the predictions' squares that
    the step leaves. For x with DEVIATIONS and w with their inverses, the best layer is that step
    with x divided by its variances (theorem 2): `..._of_stretched_inputs`. SEEDS trainings each.

    Without training: the excess loss of LONGER times the best step, and the share that a plain step
    leaves of the best layer for stretched inputs. Last, excess loss and share of layers whose mask
    ends one pair early, in training too.
    """
    alike, stretched, masked = (
        [train_and_compare(DEVIATIONS[inputs], seed, STEPS, n_pairs) for seed in range(SEEDS)]
        for inputs, n_pairs in (('alike', PAIRS), ('stretched', PAIRS), ('alike', PAIRS - 1))
    )

    def share(runs, name):
        return mean_over_seeds([run[name] for run in runs], 'logit')

    yield [run['excess_loss'] for run in alike]
    yield [run['step_over_best'] for run in alike]
    yield share(alike, 'unexplained_by_plain')
    yield share(stretched, 'unexplained_by_plain')
    yield share(stretched, 'unexplained_by_preconditioned')
    yield [run['excess_loss_of_longer_step'] for run in alike]
    yield share(stretched, 'best_unexplained_by_plain')
    yield [run['excess_loss'] for run in masked]
    yield share(masked, 'unexplained_by_plain')


def draw_prompts(key: jax.Array, rows: int, deviations_D: jax.Array) -> Regressions:
    """Draws prompts.

    Args:
      key: random key.
      rows: number of prompts.
      deviations_D: deviations of x; w has their inverses, so that w x has the variance DIM.
    """
    w_key, x_key, noise_key = jax.random.split(key, 3)
    w_BD = jax.random.normal(w_key, (rows, DIM))
    z_BTD = jax.random.normal(x_key, (rows, PAIRS + 1, DIM))
    noise_BT = NOISE**0.5 * jax.random.normal(noise_key, (rows, PAIRS + 1))
    y_BT = jnp.einsum('btd,bd->bt', z_BTD, w_BD) + noise_BT
    x_BTD = jnp.einsum('btd,d->btd', z_BTD, deviations_D)
    y_seen_BT1 = y_BT.at[:, -1].set(0.0)[..., None]
    return Regressions(jnp.concatenate([x_BTD, y_seen_BT1], -1), y_BT[:, -1])


def predict(params: Params, tokens_BTE: jax.Array, n_pairs: int) -> jax.Array:
    """Returns the prediction of a layer of linear attention for the query, [B].

    The layer of the theorem is sum_i (q k_i) v_i over the pairs alone. Unlike
    `modules.attention.linear`, it maps q and k to no positive features and divides by no sum. So
    this calls the kernel with plain features, a divisor of 0 + 1, and a query without a key.

    Args:
      params: matrices of the layer.
      tokens_BTE: tokens of prompts.
      n_pairs: pairs that have a key.
    """
    q, k, v = (
        jnp.einsum('bte,ef->btf', tokens_BTE, params[name])[:, None]
        for name in ('query', 'key', 'value')
    )
    k = k.at[:, :, n_pairs:].set(0.0)
    zeros = jnp.zeros_like(q)
    mixed_BNTE, _ = LINEAR_ATTENTION_KERNELS['quadratic'](q, k, zeros, zeros, v, 1.0)
    return mixed_BNTE[:, 0, -1, -1]


def gradient_step(tokens_BTE: jax.Array, weights_D: jax.Array) -> jax.Array:
    """Returns sum_i y_i x_i (weights * x) of prompts, [B]: a step of size 1 from w = 0."""
    x_BTD, y_BT = tokens_BTE[..., :-1], tokens_BTE[:, :-1, -1]
    return jnp.einsum('bt,btd,bd,d->b', y_BT, x_BTD[:, :-1], x_BTD[:, -1], weights_D)


def train_layer(seed: int, deviations_D: jax.Array, steps: int, n_pairs: int) -> Params:
    """Trains a layer with Adam and a cosine schedule to 0, each prompt seen once.

    Args:
      seed: of initial weights and prompts.
      deviations_D: deviations of x.
      steps: number of steps.
      n_pairs: pairs that the layer sees.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(PEAK, steps))
    start_key, text_key = jax.random.split(jax.random.key(seed))
    shape = (DIM + 1, DIM + 1)
    names = ('query', 'key', 'value')
    keys = jax.random.split(start_key, len(names))
    params = {
        name: START * jax.random.normal(key, shape) for name, key in zip(names, keys, strict=True)
    }

    def loss(params, number):
        prompts = draw_prompts(jax.random.fold_in(text_key, number), ROWS, deviations_D)
        return jnp.mean((predict(params, prompts.tokens_BTE, n_pairs) - prompts.target_B) ** 2)

    return lab.train(loss, params, optimizer, jnp.arange(steps)).params


def train_and_compare(
    deviations: Sequence[float], seed: int, steps: int, n_pairs: int = PAIRS
) -> dict[str, float]:
    """Trains a layer and returns its values for `one_step`.

    Args:
      deviations: deviations of x.
      seed: of initial weights and prompts.
      steps: training steps.
      n_pairs: pairs that the layer sees.
    """
    deviations_D = jnp.array(deviations)
    params = jax.jit(train_layer, static_argnums=(2, 3))(seed, deviations_D, steps, n_pairs)
    prompts = jax.jit(draw_prompts, static_argnums=1)(
        jax.random.key(-1 - seed), PROMPTS, deviations_D
    )
    predicted_B = jax.jit(predict, static_argnums=2)(params, prompts.tokens_BTE, n_pairs)
    plain_B, best_B = (
        np.asarray(gradient_step(prompts.tokens_BTE, weights_D), np.float64)
        for weights_D in (jnp.ones(DIM), deviations_D**-2)
    )
    predicted_B, target_B = (np.asarray(x, np.float64) for x in (predicted_B, prompts.target_B))
    return compare_steps(predicted_B, plain_B, best_B, target_B)


def compare_steps(
    predicted_B: np.ndarray, plain_B: np.ndarray, best_B: np.ndarray, target_B: np.ndarray
) -> dict[str, float]:
    """Compares predictions with steps of size 1.

    Args:
      predicted_B: predictions of the layer.
      plain_B: predictions of a plain gradient step.
      best_B: predictions of the preconditioned step.
      target_B: targets.

    Returns:
      The values of `one_step` by name.
    """
    fitted_step = predicted_B @ best_B / (best_B @ best_B)

    def excess_loss(prediction_B):
        excess_B = (prediction_B - target_B) ** 2 - (BEST_STEP * best_B - target_B) ** 2
        return float(excess_B.mean() / BEST_LOSS)

    return {
        'excess_loss': excess_loss(predicted_B),
        'excess_loss_of_longer_step': excess_loss(LONGER * BEST_STEP * best_B),
        'step_over_best': float(fitted_step / BEST_STEP),
        'unexplained_by_plain': unexplained_share(predicted_B, plain_B),
        'unexplained_by_preconditioned': unexplained_share(predicted_B, best_B),
        'best_unexplained_by_plain': unexplained_share(best_B, plain_B),
    }


def unexplained_share(predicted_B: np.ndarray, basis_B: np.ndarray) -> float:
    """Returns the share of the squares that the best multiple of basis_B leaves."""
    return float(
        1 - (predicted_B @ basis_B) ** 2 / (predicted_B @ predicted_B) / (basis_B @ basis_B)
    )
