"""Moments: how layers with an activation change the mean and variance of their inputs."""

from collections.abc import Iterator
from typing import Any

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
    """Yields the moments after a selu layer on normal inputs, and after LAYERS layers.

    mean, variance: E f(z) and Var f(z), z ~ N(0, 1), as in layers of mean 0 and variance 1 with
    weights of sum 0 and sum of squares 1. slope: |d (mean, variance) / d variance| at this point,
    below 1 if the fixed point attracts. variance_behind_32_layers: for WIDTH units with Gaussian
    weights of variance 1 / WIDTH, over SEEDS; for gelu with the same weights (arXiv:1706.02515).
    """
    mean, variance = _selu_moments(1.0)
    low, high = (np.array(_selu_moments(1 + sign * STEP)) for sign in (-1, 1))
    yield from (mean, variance, np.linalg.norm((high - low) / (2 * STEP)))
    for name in ('selu', 'gelu'):
        yield [_deep_variance(name, seed) for seed in range(SEEDS)]


def _activate(name: str, x: Any) -> np.ndarray:
    return np.asarray(ACTIVATIONS[name].fn(x), np.float64)


def _selu_moments(variance: float) -> tuple[float, float]:
    """Returns mean and variance of selu(N(0, variance)) by the trapezoidal rule."""
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
