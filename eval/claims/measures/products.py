"""Noise of the gradient of a matrix that is made of some of the tokens."""

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
    """Returns the error of X^T G from SHARE of the rows, winner-take-all over plain sampling.

    Mean squared errors over DRAWS, of rows drawn by their sizes (arXiv:2305.15265): with the
    largest kept for sure, over all of them drawn, whose error is
    (sum |x_i| sum |x_i| |g_i|^2 - |X^T G|^2) / K for K rows. The error on average, squared, over
    its variance is `bias`; 1 / DRAWS is what chance leaves. SEEDS matrices each.
    """
    for spread in SPREADS.values():
        errors = [_measure_errors(spread, seed) for seed in range(SEEDS)]
        yield [error / plain for error, plain, _ in errors]
        yield [bias for *_, bias in errors]


def _measure_errors(spread: float, seed: int) -> tuple[float, float, float]:
    """Mean squared errors of both, and the share of the first that is bias."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(spread * rng.standard_normal((TOKENS, 1)))
    x = sizes * rng.standard_normal((TOKENS, WIDE)) / np.sqrt(WIDE)
    g = rng.standard_normal((TOKENS, NARROW)) / np.sqrt(NARROW)
    kept, whole = int(SHARE * TOKENS), x.T @ g
    norms = np.linalg.norm(x, axis=1)

    def draw(key):
        places, weights = sample_indices(key, jnp.asarray(norms, jnp.float32), kept)
        rows = jnp.asarray(x, jnp.float32)[places] * weights[:, None]
        return rows.T @ jnp.asarray(g, jnp.float32)[places]

    drawn = np.float64(jax.lax.map(draw, jax.random.split(jax.random.key(seed), DRAWS)))
    error = float(np.mean(np.sum((drawn - whole) ** 2, (1, 2))))
    bias = float(np.sum((drawn.mean(0) - whole) ** 2)) / error
    plain = float(norms.sum() * np.sum(norms * np.sum(g**2, 1)) - np.sum(whole**2)) / kept
    return error, plain, bias
