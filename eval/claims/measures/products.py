"""Noise of the gradient of a matrix that is computed from a sample of the tokens."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.lab import measure
from modules.kernels.matmul.wta_crs import sample_indices

TOKENS, WIDE, NARROW = 1024, 64, 32
SPREADS = {'alike': 0.0, 'different': 1.0}  # sd of the log of rows' sizes
SHARE, DRAWS, SEEDS = 0.3, 400, 10


@measure(
    *(
        f'{what}_of_rows_{rows}'
        for rows in SPREADS
        for what in ('error_over_plain_sampling', 'bias')
    ),
    trains=False,
)
def sampled_products() -> Iterator[list[float]]:
    """Yields the error of X^T G from SHARE of the rows, winner-take-all over plain sampling.

    Mean squared errors over DRAWS, with rows drawn by their sizes (arXiv:2305.15265): with the
    largest rows always included, over drawing all of them. The error of plain sampling is (sum
    |x_i| sum |x_i| |g_i|^2 - |X^T G|^2) / K for K rows. `bias` is the squared mean error over its
    variance; 1 / DRAWS is expected by chance. SEEDS matrices each.
    """
    for spread in SPREADS.values():
        errors = [_measure_errors(spread, seed) for seed in range(SEEDS)]
        yield [error / plain for error, plain, _ in errors]
        yield [bias for *_, bias in errors]


def _measure_errors(spread: float, seed: int) -> tuple[float, float, float]:
    """Returns the mean squared errors of both, and the share of bias in the first."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(spread * rng.standard_normal((TOKENS, 1)))
    x = sizes * rng.standard_normal((TOKENS, WIDE)) / np.sqrt(WIDE)
    g = rng.standard_normal((TOKENS, NARROW)) / np.sqrt(NARROW)
    n_rows, exact = int(SHARE * TOKENS), x.T @ g
    norms = np.linalg.norm(x, axis=1)

    def estimate_product(key):
        indices, weights = sample_indices(key, jnp.asarray(norms, jnp.float32), n_rows)
        rows = jnp.asarray(x, jnp.float32)[indices] * weights[:, None]
        return rows.T @ jnp.asarray(g, jnp.float32)[indices]

    estimates = np.float64(
        jax.lax.map(estimate_product, jax.random.split(jax.random.key(seed), DRAWS))
    )
    error = float(np.mean(np.sum((estimates - exact) ** 2, (1, 2))))
    bias = float(np.sum((estimates.mean(0) - exact) ** 2)) / error
    plain = float(norms.sum() * np.sum(norms * np.sum(g**2, 1)) - np.sum(exact**2)) / n_rows
    return error, plain, bias
