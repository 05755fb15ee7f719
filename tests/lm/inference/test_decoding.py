"""Equivalence: a model that reads rows in parts gives the same as one that reads them whole.

Each attention layer, option and position is tested in tests/modules/test_attention.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.inference.decoding import extend, init_cache
from tests.helpers import checked_config, initial_state, tiny_batch, tiny_learner

ROWS = {
    'learned': {'model.position': 'learned', 'model.n_kv_heads': 1},
    'window': {'attention.window': 3, 'attention.full_every': 2, 'model.scan_layers': False},
    'mix': {'model.placement': 'mix', 'model.mix_fraction': 0.5, 'model.norm': 'batchnorm'},
    'moe': {'model.placement': 'resi_dual', 'model.mlp': 'moe', 'attention.affine_scaled': True},
    'linear': {'model.attention': 'linear', 'model.n_kv_heads': 1},
    'nala': {'model.attention': 'nala', 'model.position': 'none', 'model.reparam': 'sigma'},
    'gla': {'model.attention': 'gla', 'model.n_kv_heads': 1, 'attention.conv_width': 6},
    'gated_delta': {'model.attention': 'gated_delta', 'model.qk_norm': 'none'},
}


@pytest.mark.full
@pytest.mark.parametrize('changes', ROWS.values(), ids=ROWS)
def test_reading_in_parts_equals_whole_rows(changes):
    """Reads five and three tokens, then three and one, of rows of eight and four."""
    learner = tiny_learner(checked_config(changes))
    variables = learner.variables(initial_state(learner.recipe).weights)
    tokens = tiny_batch(rows=2)['tokens'][:, :-1]

    @jax.jit
    def whole(variables):
        return learner.model.apply(variables, tokens)

    def part(variables, cache, tokens, counts):
        return extend(learner, variables, cache, tokens, counts)

    expected, run = whole(variables), jax.jit(part)
    cache = init_cache(learner, variables, 2, 8)
    first, cache = run(variables, cache, tokens[:, :5], jnp.int32([5, 3]))
    second_tokens = np.stack([tokens[0, 5:], tokens[1, 3:6]])
    second, cache = run(variables, cache, second_tokens, jnp.int32([3, 1]))
    np.testing.assert_array_equal(cache.lengths_B, [8, 4])
    for logits, target in (
        (first[0], expected[0, :5]),
        (first[1, :3], expected[1, :3]),
        (second[0], expected[0, 5:]),
        (second[1, :1], expected[1, 3:4]),
    ):
        np.testing.assert_allclose(logits, target, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_learned_positions_limit_capacity():
    """Beyond the table a lookup would silently give the last position."""
    learner = tiny_learner(checked_config({'model.position': 'learned'}))
    variables = learner.variables(initial_state(learner.recipe).weights)
    with pytest.raises(ValueError, match=r'data.seq_len=8 positions; got a cache for 9 tokens'):
        init_cache(learner, variables, 1, 9)
