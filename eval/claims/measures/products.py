"""Noise of the gradient of a matrix that is computed from a sample of the tokens."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.kernels.matmul.wta_crs import count_winners, sample_indices

TOKENS, WIDE, NARROW = 1024, 64, 32
SPREADS = {'alike': 0.0, 'different': 1.0}  # sd of the log of rows' sizes
SHARE, DRAWS, SEEDS = 0.3, 400, 10
N_ROWS = int(SHARE * TOKENS)  # K


class Errors(NamedTuple):
    """The bias of an estimate of X^T G, and its squared error over the error of plain sampling."""

    ratio: float
    bias: float


@measure(
    *(
        f'{what}_of_rows_{rows}'
        for rows in SPREADS
        for what in ('error_over_plain_sampling', 'bias')
    ),
    'error_over_plain_sampling_of_uniform_draws_of_rows_different',
    *(f'{what}_of_rows_different_divided_by_all' for what in ('error_over_plain_sampling', 'bias')),
    trains=False,
)
def sampled_products() -> Iterator[Estimate]:
    """Yields the error of X^T G from SHARE of the rows, winner-take-all over plain sampling.

    Mean squared errors over DRAWS, with rows drawn by their sizes (arXiv:2305.15265): with the
    largest rows always included, over drawing all of them. The error of plain sampling is (sum
    |x_i| sum |x_i| |g_i|^2 - |X^T G|^2) / K for K rows. `bias` is the squared mean error over its
    variance; 1 / DRAWS is expected by chance. SEEDS matrices each.

    Uniform draws ignore the sizes. In the broken method the K - c rows that are drawn beside the c
    largest are divided by q K in place of q (K - c).
    """
    matrices = {
        rows: [draw_matrices(spread, seed) for seed in range(SEEDS)]
        for rows, spread in SPREADS.items()
    }

    def measure_all(rows, **changes):
        errors = [
            measure_errors(*pair, seed, **changes) for seed, pair in enumerate(matrices[rows])
        ]
        yield mean_over_seeds([error.ratio for error in errors], 'log')
        yield mean_over_seeds([error.bias for error in errors], 'logit')

    for rows in SPREADS:
        yield from measure_all(rows)
    yield next(measure_all('different', draws_uniformly=True))
    yield from measure_all('different', divides_by_all=True)


def draw_matrices(spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns X [M, I] with rows of log-normal sizes, and G [M, O]."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(spread * rng.standard_normal((TOKENS, 1)))
    x = sizes * rng.standard_normal((TOKENS, WIDE)) / np.sqrt(WIDE)
    return x, rng.standard_normal((TOKENS, NARROW)) / np.sqrt(NARROW)


def measure_errors(
    x: np.ndarray,
    g: np.ndarray,
    seed: int,
    draws_uniformly: bool = False,
    divides_by_all: bool = False,
) -> Errors:
    """Returns the errors of DRAWS estimates of X^T G.

    Args:
      x: X [M, I].
      g: G [M, O].
      seed: of the draws.
      draws_uniformly: whether all rows count as equally large.
      divides_by_all: whether drawn rows are divided by q K, not by q (K - c).
    """
    exact, norms = x.T @ g, np.linalg.norm(x, axis=1)
    sizes = np.ones_like(norms) if draws_uniformly else norms
    arrays = (jnp.asarray(array, jnp.float32) for array in (x, g, sizes))
    estimates = np.float64(_estimate_products(*arrays, jax.random.key(seed), divides_by_all))
    error = float(np.mean(np.sum((estimates - exact) ** 2, (1, 2))))
    plain = float(norms.sum() * np.sum(norms * np.sum(g**2, 1)) - np.sum(exact**2)) / N_ROWS
    return Errors(error / plain, float(np.sum((estimates.mean(0) - exact) ** 2)) / error)


@functools.partial(jax.jit, static_argnames='divides_by_all')
def _estimate_products(x_MI, g_MO, sizes_M, key, divides_by_all):
    """Returns estimates [DRAWS, I, O] of X^T G from N_ROWS rows."""

    def estimate_product(key):
        indices, weights = sample_indices(key, sizes_M, N_ROWS)
        if divides_by_all:
            c = count_winners(jnp.sort(sizes_M / sizes_M.sum(), descending=True)[:N_ROWS])
            weights *= jnp.where(jnp.arange(N_ROWS) < c, 1.0, (N_ROWS - c) / N_ROWS)
        return (x_MI[indices] * weights[:, None]).T @ g_MO[indices]

    return jax.lax.map(estimate_product, jax.random.split(key, DRAWS))
