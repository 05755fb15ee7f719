"""Distillation: distances of a student's logits from a teacher's, and balances of two teachers.

They are functions of logits and numbers, without a row in `LOSSES`, whose rows know no teacher.
"""

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32

TEMPERATURE_BOUNDS = 1.0, 10.0  # the least and the largest of `balanced_temperatures`


def kl_divergence(student_MV: jax.Array, teacher_MV: jax.Array, temperature: float) -> jax.Array:
    """T^2 KL(softmax(t / T) | softmax(s / T)) in nats, [M], float32 at least.

    T = temperature; with T^2 the gradient in student_MV has a size that hardly depends on T. The
    teacher has a gradient too, unless it is stopped. Source: arXiv:1503.02531, section 2.
    """
    log_s_MV, log_t_MV = (
        jax.nn.log_softmax(at_least_float32(z_MV) / temperature)
        for z_MV in (student_MV, teacher_MV)
    )
    return temperature**2 * jnp.sum(jnp.exp(log_t_MV) * (log_t_MV - log_s_MV), -1)


def log_cosh(student_MV: jax.Array, teacher_MV: jax.Array, temperature: float) -> jax.Array:
    """T^2 sum_v log cosh((s_v - t_v) / 2T), [M], float32 at least; T = temperature.

    It is the BinaryKL-Norm of arXiv:2411.08937, T^2 sum_v KL(1/2 | sigmoid((s_v - t_v) / T)), as in
    https://github.com/penghui-yang/DHKD: close to sum_v (s_v - t_v)^2 / 8 for a large T, and linear
    in far logits. Student and teacher are less their mean over words here: logits of a language
    model are free up to a number a token, which would count V times. The sum over words makes it
    about V times as large as `divergence`.
    """
    s_MV, t_MV = (center_logits(at_least_float32(z_MV)) for z_MV in (student_MV, teacher_MV))
    apart_MV = jnp.abs(s_MV - t_MV) / (2 * temperature)
    # log cosh x = |x| + log(1 + e^(-2|x|)) - log 2, which does not overflow
    each_MV = apart_MV + jnp.log1p(jnp.exp(-2 * apart_MV)) - jnp.log(2.0)
    return temperature**2 * jnp.sum(each_MV, -1)


def center_logits(logits_MV: jax.Array) -> jax.Array:
    """Takes the mean over words off."""
    return logits_MV - jnp.mean(logits_MV, -1, keepdims=True)


def balanced_temperatures(
    temperatures_2: jax.Array, entropies_2: jax.Array, rate: float
) -> jax.Array:
    """Returns the next temperatures of two teachers: the sharper one gets smoother.

        tau_i - rate sign(H_i / H_j - 1), within TEMPERATURES

    entropies_2: mean entropies of both teachers at their present temperatures_2, which start at 1.
    Source: arXiv:2306.16170, and https://github.com/zhaoshiji123/MTARD-extension.
    """
    moved_2 = temperatures_2 - rate * jnp.sign(entropies_2 / entropies_2[::-1] - 1)
    return jnp.clip(moved_2, *TEMPERATURE_BOUNDS)


def balanced_weights(
    weights_K: jax.Array, losses_K: jax.Array, first_K: jax.Array, rate: float
) -> jax.Array:
    """Returns the next weights_K of teachers' losses, of sum 1: what has fallen least gets more.

        w_i - rate (w_i - l_i / sum_j l_j), at least 0, over their sum; l_i = losses_i / first_i

    first_K: the losses of the first batch, which is noisy. Source: as `balanced_temperatures`.
    """
    left_K = losses_K / first_K
    moved_K = weights_K - rate * (weights_K - left_K / jnp.sum(left_K))
    kept_K = jnp.maximum(moved_K, 0.0)
    return kept_K / jnp.sum(kept_K)


def entropies(logits_MV: jax.Array, temperature: float) -> jax.Array:
    """Returns the entropy of softmax(z / temperature) in nats, [M]."""
    log_p_MV = jax.nn.log_softmax(at_least_float32(logits_MV) / temperature)
    return -jnp.sum(jnp.exp(log_p_MV) * log_p_MV, -1)
