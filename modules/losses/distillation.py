"""Distillation: distances of a student's logits from a teacher's, and balances of two teachers.

They are functions of logits and numbers, without a row in `LOSSES`: rows know no teacher.
"""

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32

TEMPERATURE_BOUNDS = 1.0, 10.0  # bounds of `balanced_temperatures`


def kl_divergence(student_MV: jax.Array, teacher_MV: jax.Array, temperature: float) -> jax.Array:
    """T^2 KL(softmax(t / T) | softmax(s / T)) in nats, [M], float32 at least.

    With T^2 the size of the gradient in student_MV hardly depends on T. The teacher has a gradient
    too, unless it is stopped. Source: arXiv:1503.02531, section 2.

    Args:
      student_MV: logits s.
      teacher_MV: logits t.
      temperature: T.

    Returns:
      The divergence of each token.
    """
    log_s_MV, log_t_MV = (
        jax.nn.log_softmax(at_least_float32(z_MV) / temperature)
        for z_MV in (student_MV, teacher_MV)
    )
    return temperature**2 * jnp.sum(jnp.exp(log_t_MV) * (log_t_MV - log_s_MV), -1)


def log_cosh(student_MV: jax.Array, teacher_MV: jax.Array, temperature: float) -> jax.Array:
    """T^2 sum_v log cosh((s_v - t_v) / 2T), [M], float32 at least.

    This is the BinaryKL-Norm of arXiv:2411.08937, T^2 sum_v KL(1/2 | sigmoid((s_v - t_v) / T)), as
    in https://github.com/penghui-yang/DHKD: close to sum_v (s_v - t_v)^2 / 8 for a large T, and
    linear in far logits. Here the mean over words is subtracted from student and teacher: logits of
    a language model are free up to a number per token, which would count V times. The sum over
    words makes the loss about V times as large as `kl_divergence`.

    Args:
      student_MV: logits s.
      teacher_MV: logits t.
      temperature: T.

    Returns:
      The distance of each token.
    """
    s_MV, t_MV = (center_logits(at_least_float32(z_MV)) for z_MV in (student_MV, teacher_MV))
    distance_MV = jnp.abs(s_MV - t_MV) / (2 * temperature)
    # log cosh x = |x| + log(1 + e^(-2|x|)) - log 2, which does not overflow
    log_cosh_MV = distance_MV + jnp.log1p(jnp.exp(-2 * distance_MV)) - jnp.log(2.0)
    return temperature**2 * jnp.sum(log_cosh_MV, -1)


def center_logits(logits_MV: jax.Array) -> jax.Array:
    """Subtracts the mean over words."""
    return logits_MV - jnp.mean(logits_MV, -1, keepdims=True)


def balanced_temperatures(
    temperatures_2: jax.Array, entropies_2: jax.Array, rate: float
) -> jax.Array:
    """Returns the next temperatures of two teachers: the sharper teacher becomes smoother.

        tau_i - rate sign(H_i / H_j - 1), within TEMPERATURE_BOUNDS

    Source: arXiv:2306.16170, and https://github.com/zhaoshiji123/MTARD-extension.

    Args:
      temperatures_2: the present temperatures, which start at 1.
      entropies_2: mean entropies H of both teachers at these temperatures.
      rate: the step.

    Returns:
      The temperatures, [2].
    """
    next_2 = temperatures_2 - rate * jnp.sign(entropies_2 / entropies_2[::-1] - 1)
    return jnp.clip(next_2, *TEMPERATURE_BOUNDS)


def balanced_weights(
    weights_K: jax.Array, losses_K: jax.Array, first_K: jax.Array, rate: float
) -> jax.Array:
    """Returns the next weights of teachers' losses, of sum 1: losses that fell least get more.

        w_i - rate (w_i - l_i / sum_j l_j), at least 0, over their sum; l_i = losses_i / first_i

    Source: as `balanced_temperatures`.

    Args:
      weights_K: the present weights w.
      losses_K: the present losses.
      first_K: the losses of the first batch, which is noisy.
      rate: the step.

    Returns:
      The weights, [K].
    """
    relative_K = losses_K / first_K
    next_K = weights_K - rate * (weights_K - relative_K / jnp.sum(relative_K))
    clipped_K = jnp.maximum(next_K, 0.0)
    return clipped_K / jnp.sum(clipped_K)


def entropies(logits_MV: jax.Array, temperature: float) -> jax.Array:
    """Returns the entropy of softmax(z / temperature) in nats, [M]."""
    log_p_MV = jax.nn.log_softmax(at_least_float32(logits_MV) / temperature)
    return -jnp.sum(jnp.exp(log_p_MV) * log_p_MV, -1)
