"""Moments: how layers with an activation change the mean and variance of their inputs."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import he_matrix, measure
from modules.activations import ACTIVATIONS, SELU_SCALE

REACH, POINTS = 12.0, 400_001  # of the integral over a normal variable
LAYERS, WIDTH, INPUTS, SEEDS = 32, 512, 1024, 10
STEP = 1e-4  # of the variance, for its slope
GAIN = 1.1  # of weights that are too large: the variance tends to another fixed point
Activation = Callable[[np.ndarray], np.ndarray]


@measure(
    *('mean', 'variance', 'slope'),
    f'variance_behind_{LAYERS}_layers_of_selu',
    f'variance_behind_{LAYERS}_layers_of_selu_with_large_weights',
    *('mean_of_half_scaled_selu', 'variance_of_half_scaled_selu'),
    f'variance_behind_{LAYERS}_layers_of_half_scaled_selu',
    trains=False,
)
def self_normalizing() -> Iterator[float | Estimate]:
    """Yields the moments after a selu layer on normal inputs, and after LAYERS layers.

    mean, variance: E f(z) and Var f(z), z ~ N(0, 1), as in layers of mean 0 and variance 1 with
    weights of sum 0 and sum of squares 1. slope: |d (mean, variance) / d variance| at this point,
    below 1 if the fixed point attracts. variance_behind_32_layers: for WIDTH units with Gaussian
    weights of variance 1 / WIDTH, over SEEDS (arXiv:1706.02515); for large weights, of variance
    GAIN / WIDTH. The same follows, without the slope, for a selu that is scaled above 0 only.
    """
    low, high = (np.array(moments(selu, 1 + sign * STEP)) for sign in (-1, 1))
    yield from moments(selu)
    yield float(np.linalg.norm((high - low) / (2 * STEP)))
    yield _deep_variances(selu)
    yield _deep_variances(selu, GAIN)
    yield from moments(half_scaled_selu)
    yield _deep_variances(half_scaled_selu)


def selu(x: np.ndarray) -> np.ndarray:
    """Returns selu(x) of the product in float64."""
    return np.asarray(ACTIVATIONS['selu'].fn(jnp.asarray(x)), np.float64)


def half_scaled_selu(x: np.ndarray) -> np.ndarray:
    """Returns selu(x) with the scale on positive values only, a broken equation."""
    return selu(x) / np.where(x > 0, 1.0, SELU_SCALE)


def moments(activation: Activation, variance: float = 1.0) -> tuple[float, float]:
    """Returns mean and variance of f(N(0, variance)) by the trapezoidal rule."""
    z = np.linspace(-REACH, REACH, POINTS)
    weight = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    with jax.enable_x64(True):  # the fixed point is exact
        f = activation(np.sqrt(variance) * z)
    mean = float(np.sum(weight * f))
    return mean, float(np.sum(weight * f**2) - mean**2)


def _deep_variances(activation: Activation, gain: float = 1.0) -> Estimate:
    return mean_over_seeds([_deep_variance(activation, gain, seed) for seed in range(SEEDS)], 'log')


def _deep_variance(activation: Activation, gain: float, seed: int) -> float:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((INPUTS, WIDTH))
    for _ in range(LAYERS):
        x = activation(x @ he_matrix(rng, (WIDTH, WIDTH), gain))
    return float(x.var())
