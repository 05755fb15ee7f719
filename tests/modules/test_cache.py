"""Writing into a cache, in a loop over rows or by a scatter, and attention to a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention.base import scatter_rows, write_row_by_row
from modules.kernels.attention import base
from modules.kernels.attention.base import Scores, attend_at_positions, attend_to_cache

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


ATTENTION_CASES = {
    'one query': (1, 3, {}, ()),
    'several queries': (4, 3, {}, ()),
    'one query of a head': (1, 6, {}, ()),
    'window': (4, 3, {'window': 3}, ()),
    'key bias': (1, 3, {'key_bias': True}, ('key_bias_BKS',)),
    'sinks': (2, 3, {'sinks': True}, ('sinks_N',)),
    'slopes': (2, 2, {'slopes': True, 'softcap': 2.0}, ('slopes_N',)),
}


@pytest.mark.parametrize('case', ATTENTION_CASES)
def test_attention_to_a_cache(case, monkeypatch):
    """Equals attention to repeated keys, with groups of heads and with a query computed twice."""
    width, n_kv_heads, options, names = ATTENTION_CASES[case]
    shapes = {'key_bias_BKS': (2, n_kv_heads, 12), 'sinks_N': (6,), 'slopes_N': (6,)}
    random = np.random.default_rng(0)
    arrays = {name: jnp.array(random.normal(size=shapes[name])) for name in names}
    q_BNTH, k_BKSH, v_BKSH = (
        jnp.array(random.normal(size=shape))
        for shape in ((2, 6, width, 8), (2, n_kv_heads, 12, 8), (2, n_kv_heads, 12, 5))
    )
    positions_BT = jnp.array([[3], [7]]) + jnp.arange(width)[None]
    arguments = q_BNTH, k_BKSH, v_BKSH, Scores(**options), positions_BT
    expected_BNTH = attend_at_positions(*arguments, **arrays)
    for least_bytes in (0, 1 << 20):
        monkeypatch.setattr(base, 'MIN_BYTES_FOR_TWO', least_bytes)
        np.testing.assert_allclose(
            attend_to_cache(*arguments, **arrays), expected_BNTH, rtol=2e-5, atol=1e-6
        )
