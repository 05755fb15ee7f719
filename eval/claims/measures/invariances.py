"""Changes of weights and data that a subsequent norm removes."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.norms import NORMS

CASES, INPUTS, NEURONS, SEEDS = 256, 48, 64, 10
SCALE, SHIFT = 10.0, 1.0
LARGE_EPS = 3e-3  # changes a result of mean square 1 by LARGE_EPS / 2 if the weights grow
NAMES = ('layernorm', 'rmsnorm')

Normalize = Callable[[jax.Array], jax.Array]  # x W [B, O] -> norm(x W)
Pair = tuple[jax.Array, jax.Array]
Change = Callable[[jax.Array, jax.Array, jax.Array], Pair]  # (key, W, x) -> changed (W, x)


def scale_weights(key: jax.Array, w_IO: jax.Array, x_BI: jax.Array) -> Pair:
    return SCALE * w_IO, x_BI


def centre_weights(key: jax.Array, w_IO: jax.Array, x_BI: jax.Array) -> Pair:
    """Adds the same weights to every neuron. Arguments as in `Change`."""
    shift_I1 = SHIFT * jax.random.normal(key, (INPUTS, 1))
    return w_IO + jnp.broadcast_to(shift_I1, w_IO.shape), x_BI


def scale_a_neuron(key: jax.Array, w_IO: jax.Array, x_BI: jax.Array) -> Pair:
    return w_IO.at[:, 0].multiply(SCALE), x_BI


def scale_data(key: jax.Array, w_IO: jax.Array, x_BI: jax.Array) -> Pair:
    return w_IO, SCALE * x_BI


def centre_data(key: jax.Array, w_IO: jax.Array, x_BI: jax.Array) -> Pair:
    """Adds the same inputs to every case."""
    shift_1I = SHIFT * jax.random.normal(key, (1, INPUTS))
    return w_IO, x_BI + jnp.broadcast_to(shift_1I, x_BI.shape)


def scale_each_case(key: jax.Array, w_IO: jax.Array, x_BI: jax.Array) -> Pair:
    scales_B = jax.random.uniform(key, (CASES,), minval=1.0, maxval=SCALE)
    return w_IO, jnp.einsum('b,bi->bi', scales_B, x_BI)


CHANGES: dict[str, Change] = {
    'scaled_weights': scale_weights,
    'centred_weights': centre_weights,
    'a_scaled_neuron': scale_a_neuron,
    'scaled_data': scale_data,
    'centred_data': centre_data,
    'scaled_cases': scale_each_case,
}


def build_norm(name: str, **options: Any) -> Normalize:
    """Returns an untrained norm.

    Args:
      name: row of NORMS.
      **options: of the norm.
    """
    norm = NORMS[name](**options)
    return lambda a_BO: cast(jax.Array, norm.apply(norm.init(jax.random.key(0), a_BO), a_BO))


def divide_without_root(a_BO: jax.Array) -> jax.Array:
    return build_norm('rmsnorm')(a_BO) / jnp.sqrt(jnp.mean(a_BO**2, -1, keepdims=True))


def normalize_over_cases(a_BO: jax.Array) -> jax.Array:
    return build_norm('rmsnorm')(a_BO.T).T


NORMALIZERS: dict[str, Normalize] = {
    **{name: build_norm(name) for name in NAMES},
    'rmsnorm_over_cases': normalize_over_cases,
    'rmsnorm_without_root': divide_without_root,
    'rmsnorm_with_large_eps': build_norm('rmsnorm', eps=LARGE_EPS),
}
MORE_CASES = (
    ('rmsnorm_over_cases', 'scaled_cases'),
    ('rmsnorm_over_cases', 'a_scaled_neuron'),
    ('rmsnorm_without_root', 'scaled_weights'),
    ('rmsnorm_with_large_eps', 'scaled_weights'),
)
WITH_GRADIENT = (*NAMES, 'rmsnorm_without_root', 'rmsnorm_with_large_eps')


@measure(
    *(f'{name}_of_{change}' for name in NAMES for change in CHANGES),
    *(f'{name}_of_{change}' for name, change in MORE_CASES),
    *(f'gradient_times_scale_of_{name}' for name in WITH_GRADIENT),
    trains=False,
)
def invariances() -> Iterator[Estimate]:
    """Yields how much norm(x W) changes with W and x, by norm and change (arXiv:1910.07467).

    The changes are from the paper's table 1. The value is the root mean square of the difference
    over the root mean square of norm(x W), for Gaussian x and W. MORE_CASES have RMSNorm with a
    broken equation: with the mean square over the cases, or a division by the mean square in place
    of its root; and with an eps of LARGE_EPS, which changes the result by about LARGE_EPS / 2.
    gradient_times_scale: the gradient of a linear function of the norm at SCALE W, times SCALE,
    over the gradient at W; 1 if the gradient falls as the weights grow (section 4), and about
    1 + LARGE_EPS / 2 with that eps. Over SEEDS.
    """
    for name, change in [(name, change) for name in NAMES for change in CHANGES] + [*MORE_CASES]:
        normalize = NORMALIZERS[name]
        changes = (relative_difference(normalize, CHANGES[change], seed) for seed in range(SEEDS))
        yield mean_over_seeds(changes, 'log')
    for name in WITH_GRADIENT:
        ratios = (gradient_times_scale(NORMALIZERS[name], seed) for seed in range(SEEDS))
        yield mean_over_seeds(ratios, 'log')


def draw_inputs(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a key, W of deviation 1 / sqrt(INPUTS), and x."""
    w_key, x_key, key = jax.random.split(jax.random.key(seed), 3)
    w_IO = jax.random.normal(w_key, (INPUTS, NEURONS)) / INPUTS**0.5
    return key, w_IO, jax.random.normal(x_key, (CASES, INPUTS))


def relative_difference(normalize: Normalize, change: Change, seed: int) -> float:
    """Returns the size of the change of norm(x W), relative to norm(x W).

    Args:
      normalize: the norm.
      change: function that changes weights or inputs.
      seed: of weights, inputs and change.
    """
    key, w_IO, x_BI = draw_inputs(seed)
    new_w_IO, new_x_BI = change(key, w_IO, x_BI)
    before_BO, after_BO = normalize(x_BI @ w_IO), normalize(new_x_BI @ new_w_IO)
    return float(jnp.linalg.norm(after_BO - before_BO) / jnp.linalg.norm(before_BO))


def gradient_times_scale(normalize: Normalize, seed: int) -> float:
    key, w_IO, x_BI = draw_inputs(seed)
    cotangent_BO = jax.random.normal(key, (CASES, NEURONS))

    def gradient(w_IO):
        return jax.grad(lambda w_IO: jnp.sum(cotangent_BO * normalize(x_BI @ w_IO)))(w_IO)

    large, small = gradient(SCALE * w_IO), gradient(w_IO)
    return float(SCALE * jnp.linalg.norm(large) / jnp.linalg.norm(small))
