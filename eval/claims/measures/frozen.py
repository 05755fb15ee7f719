"""Parts that stay at their random initial values: rows of readouts, and features of MLPs."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.activations import ACTIVATIONS
from modules.mlp import FEATURES
from modules.readouts import (
    SPREAD_RATE,
    SPREAD_STEPS,
    THRESHOLD_SHARE,
    normalize,
    spread_rows,
    welch_bound,
)

SIZES = ((512, 64), (2048, 128))  # rows, and their width
SEEDS = 5
WIDTH, COUNTS = 64, (64, 256, 1024, 4096)  # of inputs; how many random features
PAIRS, DRAWS, SEEDS_OF_FEATURES = 128, 16, 10


@measure(
    *(f'over_{what}_of_{rows}_rows' for rows, _ in SIZES for what in ('welch', 'random')),
    *('over_welch_of_random_rows', 'over_welch_of_unit_columns'),
    trains=False,
)
def equiangular_rows() -> Iterator[Estimate]:
    """Yields the largest |cosine| of two rows of the readout `equiangular`, relative to references.

    over_welch: over the lower bound for any rows. over_random: over random rows from the same key
    (arXiv:2303.11637). For each of SIZES, over SEEDS. Then, at the first of SIZES, over_welch of
    the random rows, and of a descent that sets columns instead of rows to unit length.
    """
    controls = []
    for vocab, width in SIZES:
        pairs = [_largest_cosines(seed, vocab, width) for seed in range(SEEDS)]
        bound = welch_bound(vocab, width)
        yield mean_over_seeds([float(spread) / bound for spread, _ in pairs], 'log')
        yield mean_over_seeds([float(spread / random) for spread, random in pairs], 'log')
        controls.append(mean_over_seeds([float(random) / bound for _, random in pairs], 'log'))
    yield controls[0]
    vocab, width = SIZES[0]
    keys = [jax.random.key(seed) for seed in range(SEEDS)]
    cosines = [_largest_cosine(_descend(key, vocab, width, axis=0)) for key in keys]
    yield mean_over_seeds([float(cosine) / welch_bound(vocab, width) for cosine in cosines], 'log')


@functools.partial(jax.jit, static_argnums=(1, 2))
def _largest_cosines(seed: jax.Array, vocab: int, width: int) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(seed)
    random_VD = normalize(jax.random.normal(key, (vocab, width)), 1)
    return _largest_cosine(spread_rows(key, vocab, width)), _largest_cosine(random_VD)


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames='axis')
def _descend(key: jax.Array, vocab: int, width: int, axis: int) -> jax.Array:
    """Returns `spread_rows` from the gradient of its loss, with unit length along `axis`.

    Args:
      key: as for `spread_rows`.
      vocab: number of rows.
      width: of a row.
      axis: 1 sets rows to unit length after each step, as `spread_rows` does; 0 sets columns.
    """

    def magnitudes(rows_VD):
        return jnp.abs(rows_VD @ rows_VD.T) * (1 - jnp.eye(vocab))

    def loss(rows_VD, threshold):
        # Both orders of each pair, and half of the loss.
        return jnp.sum(jnp.maximum(magnitudes(rows_VD) - threshold, 0) ** 2) / 4

    def step(i, carry):
        rows_VD, largest = carry
        grad_VD = jax.grad(loss)(rows_VD, THRESHOLD_SHARE * largest)
        rate = SPREAD_RATE * (1 - i / SPREAD_STEPS)
        return normalize(rows_VD - rate * grad_VD, axis), jnp.max(magnitudes(rows_VD))

    rows_VD = normalize(jax.random.normal(key, (vocab, width)), 1)
    return jax.lax.fori_loop(0, SPREAD_STEPS, step, (rows_VD, jnp.float32(1.0)))[0]


def _largest_cosine(rows_VD: jax.Array) -> jax.Array:
    rows_VD = normalize(rows_VD, 1)
    return jnp.max(jnp.abs(rows_VD @ rows_VD.T) * (1 - jnp.eye(len(rows_VD))))


@measure(
    *(f'slope_of_{name}' for name in FEATURES),
    *('orthogonal_over_gaussian', 'all_over_half_of_gaussian'),
    *('slope_of_repeated', 'repeated_over_gaussian'),
    trains=False,
)
def random_features() -> Iterator[np.ndarray | Estimate]:
    """Yields how the error of the kernel of a ReLU layer falls with the number of its features.

    The kernel is `relu_kernel`; the features are as in model.mlp=random_features
    (arXiv:2310.13225). slope_of: slope of the log root mean square error over the log of COUNTS;
    -1/2 for a mean of independent terms. orthogonal_over_gaussian: the error with orthogonal
    directions over the error with independent directions, geometric mean over COUNTS. Then the
    same ratio for independent directions over half as many. Then slope and ratio of orthogonal
    directions of which each group has the same random key. Over PAIRS at angles from 0 to pi, DRAWS
    of the features, and seeds.
    """
    logs_SC = {name: _log_errors(name, COUNTS) for name in DIRECTIONS}
    slopes = {name: np.polyfit(np.log(COUNTS), logs.T, 1)[0] for name, logs in logs_SC.items()}

    def compare(name):
        ratios_S = np.exp(np.mean(logs_SC[name] - logs_SC['gaussian'], 1))
        return mean_over_seeds(ratios_S, 'log')

    yield from (slopes[name] for name in FEATURES)
    yield compare('orthogonal')
    halves = _log_errors('gaussian', [count // 2 for count in COUNTS])
    yield mean_over_seeds(np.exp(np.mean(logs_SC['gaussian'] - halves, 1)), 'log')
    yield slopes['repeated']
    yield compare('repeated')


def _repeat_directions(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Returns orthogonal directions [D, F], each D of them from the same key."""
    width, n_features = shape
    group_DD = FEATURES['orthogonal'](key, (width, width), dtype)
    return jnp.tile(group_DD, (1, n_features // width))


DIRECTIONS = FEATURES | {'repeated': _repeat_directions}


def relu_kernel(x_PD: np.ndarray, w_PD: np.ndarray) -> np.ndarray:
    """Returns |x| |w| (sin t + (pi - t) cos t) / 2 pi for pairs with angle t.

    It is the mean of relu(g.x) relu(g.w) over g ~ N(0, I) (Cho and Saul, Kernel Methods for Deep
    Learning, 2009).
    """
    lengths_P = np.linalg.norm(x_PD, axis=1) * np.linalg.norm(w_PD, axis=1)
    angle_P = np.arccos(np.clip(np.sum(x_PD * w_PD, 1) / lengths_P, -1, 1))
    return lengths_P * (np.sin(angle_P) + (np.pi - angle_P) * np.cos(angle_P)) / (2 * np.pi)


def _log_errors(name: str, counts: Sequence[int]) -> np.ndarray:
    """Returns the log of the error for each seed and count."""
    return np.log([_kernel_errors(name, counts, seed) for seed in range(SEEDS_OF_FEATURES)])


def _kernel_errors(name: str, counts: Sequence[int], seed: int) -> list[float]:
    """Returns root mean square errors over pairs of unit vectors, for each number of features.

    Args:
      name: of the directions.
      counts: numbers of features.
      seed: of pairs and directions.
    """
    rng = np.random.default_rng(seed)
    x_PD, other_PD = rng.standard_normal((2, PAIRS, WIDTH))
    x_PD /= np.linalg.norm(x_PD, axis=1, keepdims=True)
    other_PD -= np.sum(other_PD * x_PD, 1, keepdims=True) * x_PD
    other_PD /= np.linalg.norm(other_PD, axis=1, keepdims=True)
    angle_P1 = rng.uniform(0, np.pi, (PAIRS, 1))
    w_PD = np.cos(angle_P1) * x_PD + np.sin(angle_P1) * other_PD
    exact_P = relu_kernel(x_PD, w_PD)
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    estimates = (np.float64(_estimate_kernels(name, count, keys, x_PD, w_PD)) for count in counts)
    return [float(np.sqrt(np.mean((estimate_RP - exact_P) ** 2))) for estimate_RP in estimates]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimate_kernels(
    name: str, count: int, keys: jax.Array, x_PD: jax.Array, w_PD: jax.Array
) -> jax.Array:
    """Returns the mean over `count` features of each pair, for each key: [R, P]."""

    def estimate(key):
        up_DF = DIRECTIONS[name](key, (WIDTH, count), jnp.dtype('float32'))
        relu = ACTIVATIONS['relu'].fn
        return jnp.mean(relu(x_PD @ up_DF) * relu(w_PD @ up_DF), 1)

    return jax.lax.map(estimate, keys)
