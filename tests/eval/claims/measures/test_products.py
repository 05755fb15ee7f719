"""Reference: sampled products of numbers, whose estimates do not vary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import products


@pytest.mark.parametrize('divides_by_all', [False, True])
def test_single_numbers_give_exact_products(divides_by_all):
    """A drawn row contributes x / q, the same for each row. Catches a broken method with another
    number of largest rows.
    """
    x_M = np.exp(np.random.default_rng(0).standard_normal(products.TOKENS))
    remaining_M = x_M.sum() - np.cumsum(np.sort(x_M)[::-1])  # without the c + 1 largest
    n_drawn_c = products.N_ROWS - 1 - np.arange(products.N_ROWS - 1)
    c = 1 + np.argmin(remaining_M[: len(n_drawn_c)] / n_drawn_c)
    drawn_share = (products.N_ROWS - c) / products.N_ROWS if divides_by_all else 1.0
    expected = x_M.sum() - (1 - drawn_share) * remaining_M[c - 1]
    arrays = jnp.float32(x_M)[:, None], jnp.ones((products.TOKENS, 1)), jnp.float32(x_M)
    estimates = products._estimate_products(*arrays, jax.random.key(0), divides_by_all)
    np.testing.assert_allclose(estimates[:, 0, 0], expected, rtol=1e-4)
