"""Moments: what layers of an activation do to mean and variance of what they get."""

from collections.abc import Iterator

import jax
import numpy as np

from eval.claims.lab import measure
from modules.activations import ACTIVATIONS

REACH, POINTS = 12.0, 400_001  # of the integral over a normal variable
LAYERS, WIDTH, INPUTS, SEEDS = 32, 512, 1024, 10
STEP = 1e-4  # of the variance, for its slope


@measure(
    *('mean', 'variance', 'slope'),
    *(f'variance_behind_{LAYERS}_layers_of_{name}' for name in ('selu', 'gelu')),
    trains=False,
)
def self_normalizing() -> Iterator[float | list[float]]:
    """Returns the moments behind a layer of selu, whose inputs are normal, and behind LAYERS.

    mean, variance: E f(z) and Var f(z), z ~ N(0, 1), as layers of mean 0 and variance 1 with
    weights of sum 0 and of sum of squares 1 have it; slope: |d (mean, variance) / d variance|
    there, below 1 where the fixed point attracts. variance_behind_32_layers: of WIDTH units with
    Gaussian weights of variance 1 / WIDTH, over SEEDS; of gelu with the same weights beside it
    (arXiv:1706.02515).
    """
    mean, variance = _selu_moments(1.0)
    low, high = (np.array(_selu_moments(1 + sign * STEP)) for sign in (-1, 1))
    yield from (mean, variance, np.linalg.norm((high - low) / (2 * STEP)))
    for name in ('selu', 'gelu'):
        yield [_deep_variance(name, seed) for seed in range(SEEDS)]


def _activate(name: str, x: np.ndarray) -> np.ndarray:
    return np.asarray(ACTIVATIONS[name].fn(x), np.float64)


def _selu_moments(variance: float) -> tuple[float, float]:
    """The mean and the variance of selu of N(0, variance), by the trapezoidal rule."""
    z = np.linspace(-REACH, REACH, POINTS)
    weight = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    with jax.enable_x64(True):  # the fixed point is exact
        f = _activate('selu', np.sqrt(variance) * z)
    mean = float(np.sum(weight * f))
    return mean, float(np.sum(weight * f**2) - mean**2)


def _deep_variance(name: str, seed: int) -> float:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((INPUTS, WIDTH))
    for _ in range(LAYERS):
        x = _activate(name, x @ (rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)))
    return float(x.var())
