"""Writes into a cache: in a loop over rows, as on CPUs, and by a scatter, as elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention.base import scatter_rows, write_row_by_row

SLOTS = 6
CASES = {
    'token': (1, [0, 3, 5], [1, 0, 1]),
    'token of one row': (1, [4], [1]),
    'token of a full row': (1, [6, 2], [1, 1]),
    'padded': (4, [0, 1, 2], [4, 2, 0]),
    'beyond the last slot': (4, [3, 4, 6], [4, 3, 2]),
    'wider than the cache': (8, [0, 2], [8, 3]),
}


@pytest.mark.parametrize('case', CASES)
def test_row_by_row_equals_scatter(case):
    """Compares with a loop in NumPy; tokens without a slot and padding change nothing."""
    width, starts, counts = CASES[case]
    random = np.random.default_rng(0)
    caches = tuple(random.normal(size=(len(starts), 2, SLOTS, 3)) for _ in 'kv')
    tokens = tuple(random.normal(size=(len(starts), 2, width, 3)) for _ in 'kv')
    expected = tuple(cache.copy() for cache in caches)
    for cache_BKSH, x_BKTH in zip(expected, tokens, strict=True):
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for column in range(min(count, SLOTS - start)):
                cache_BKSH[row, :, start + column] = x_BKTH[row, :, column]
    arguments = caches, tokens, jnp.array(starts), jnp.array(counts)
    for write in (write_row_by_row, scatter_rows):
        written = jax.jit(write)(*arguments)
        for cache_BKSH, expected_BKSH in zip(written, expected, strict=True):
            np.testing.assert_allclose(cache_BKSH, expected_BKSH, rtol=1e-6)
