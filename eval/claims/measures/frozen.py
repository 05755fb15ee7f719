"""Parts that stay as they are drawn: rows of readouts."""

import functools

import jax
import jax.numpy as jnp

from eval.claims.estimates import Estimate, over_seeds
from modules.readouts import spread_rows, unit, welch_bound

SIZES = ((512, 64), (2048, 128))  # rows, and their width
SEEDS = 5


def equiangular_rows() -> dict[str, Estimate]:
    """Returns the largest |cosine| of two rows of the readout `equiangular`, over what it can be.

    over_welch: over the bound that no rows are below; over_random: over that of rows as drawn, from
    the same key (arXiv:2303.11637). SIZES, over SEEDS.
    """
    found = {}
    for vocab, width in SIZES:
        pairs = [_largest_cosines(seed, vocab, width) for seed in range(SEEDS)]
        bound, of = welch_bound(vocab, width), f'of_{vocab}_rows'
        found[f'over_welch_{of}'] = over_seeds(float(spread) / bound for spread, _ in pairs)
        found[f'over_random_{of}'] = over_seeds(float(spread / drawn) for spread, drawn in pairs)
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _largest_cosines(seed: jax.Array, vocab: int, width: int) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(seed)
    drawn_VD = unit(jax.random.normal(key, (vocab, width)), 1)
    return _largest_cosine(spread_rows(key, vocab, width)), _largest_cosine(drawn_VD)


def _largest_cosine(rows_VD: jax.Array) -> jax.Array:
    rows_VD = unit(rows_VD, 1)
    return jnp.max(jnp.abs(rows_VD @ rows_VD.T) * (1 - jnp.eye(len(rows_VD))))
