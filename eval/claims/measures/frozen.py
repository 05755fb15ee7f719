"""Parts that stay at their random initial values: rows of readouts, and features of MLPs."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.lab import measure
from modules.activations import ACTIVATIONS
from modules.mlp import FEATURES
from modules.readouts import normalize, spread_rows, welch_bound

SIZES = ((512, 64), (2048, 128))  # rows, and their width
SEEDS = 5
WIDTH, COUNTS = 64, (64, 256, 1024, 4096)  # of inputs; how many random features
PAIRS, DRAWS, SEEDS_OF_FEATURES = 128, 16, 10


@measure(
    *(f'over_{what}_of_{rows}_rows' for rows, _ in SIZES for what in ('welch', 'random')),
    trains=False,
)
def equiangular_rows() -> Iterator[list[float]]:
    """Yields the largest |cosine| of two rows of the readout `equiangular`, relative to references.

    over_welch: over the lower bound for any rows. over_random: over random rows from the same key
    (arXiv:2303.11637). For each of SIZES, over SEEDS.
    """
    for vocab, width in SIZES:
        pairs = [_largest_cosines(seed, vocab, width) for seed in range(SEEDS)]
        bound = welch_bound(vocab, width)
        yield [float(spread) / bound for spread, _ in pairs]
        yield [float(spread / random) for spread, random in pairs]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _largest_cosines(seed: jax.Array, vocab: int, width: int) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(seed)
    random_VD = normalize(jax.random.normal(key, (vocab, width)), 1)
    return _largest_cosine(spread_rows(key, vocab, width)), _largest_cosine(random_VD)


def _largest_cosine(rows_VD: jax.Array) -> jax.Array:
    rows_VD = normalize(rows_VD, 1)
    return jnp.max(jnp.abs(rows_VD @ rows_VD.T) * (1 - jnp.eye(len(rows_VD))))


@measure(*(f'slope_of_{name}' for name in FEATURES), 'orthogonal_over_gaussian', trains=False)
def random_features() -> Iterator[np.ndarray]:
    """Yields how the error of the kernel of a ReLU layer falls with the number of its features.

    The kernel is `relu_kernel`; the features are as in model.mlp=random_features
    (arXiv:2310.13225). slope_of: slope of the log root mean square error over the log of COUNTS;
    -1/2 for a mean of independent terms. orthogonal_over_gaussian: the error with orthogonal
    directions over the error with independent directions, geometric mean over COUNTS. Over PAIRS at
    angles from 0 to pi, DRAWS of the features, and seeds.
    """
    logs_SC = {
        name: np.log([_kernel_errors(name, seed) for seed in range(SEEDS_OF_FEATURES)])
        for name in FEATURES
    }
    yield from (np.polyfit(np.log(COUNTS), logs.T, 1)[0] for logs in logs_SC.values())
    yield np.exp(np.mean(logs_SC['orthogonal'] - logs_SC['gaussian'], 1))


def relu_kernel(x_PD: np.ndarray, w_PD: np.ndarray) -> np.ndarray:
    """Returns |x| |w| (sin t + (pi - t) cos t) / 2 pi for pairs with angle t.

    It is the mean of relu(g.x) relu(g.w) over g ~ N(0, I) (Cho and Saul, Kernel Methods for Deep
    Learning, 2009).
    """
    lengths_P = np.linalg.norm(x_PD, axis=1) * np.linalg.norm(w_PD, axis=1)
    angle_P = np.arccos(np.clip(np.sum(x_PD * w_PD, 1) / lengths_P, -1, 1))
    return lengths_P * (np.sin(angle_P) + (np.pi - angle_P) * np.cos(angle_P)) / (2 * np.pi)


def _kernel_errors(name: str, seed: int) -> list[float]:
    """Returns root mean square errors over pairs of unit vectors, for each of COUNTS."""
    rng = np.random.default_rng(seed)
    x_PD, other_PD = rng.standard_normal((2, PAIRS, WIDTH))
    x_PD /= np.linalg.norm(x_PD, axis=1, keepdims=True)
    other_PD -= np.sum(other_PD * x_PD, 1, keepdims=True) * x_PD
    other_PD /= np.linalg.norm(other_PD, axis=1, keepdims=True)
    angle_P1 = rng.uniform(0, np.pi, (PAIRS, 1))
    w_PD = np.cos(angle_P1) * x_PD + np.sin(angle_P1) * other_PD
    exact_P = relu_kernel(x_PD, w_PD)
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    estimates = (np.float64(_estimate_kernels(name, count, keys, x_PD, w_PD)) for count in COUNTS)
    return [float(np.sqrt(np.mean((estimate_RP - exact_P) ** 2))) for estimate_RP in estimates]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimate_kernels(
    name: str, count: int, keys: jax.Array, x_PD: jax.Array, w_PD: jax.Array
) -> jax.Array:
    """Returns the mean over `count` features of each pair, for each key: [R, P]."""

    def estimate(key):
        up_DF = FEATURES[name](key, (WIDTH, count), jnp.dtype('float32'))
        relu = ACTIVATIONS['relu'].fn
        return jnp.mean(relu(x_PD @ up_DF) * relu(w_PD @ up_DF), 1)

    return jax.lax.map(estimate, keys)
