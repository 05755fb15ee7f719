"""Equivalence: a model that reads rows in parts gives what it gives when it reads them whole.

Each attention layer, option and position by itself is in tests/modules/test_attention.py.
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
}


@pytest.mark.full
@pytest.mark.parametrize('changes', ROWS.values(), ids=ROWS)
def test_rows_read_in_parts(changes):
    """Five tokens and three, then three and one, of rows of eight and four."""
    learner = tiny_learner(checked_config(changes))
    variables = learner.variables(initial_state(learner.recipe).weights)
    tokens = tiny_batch(rows=2)['tokens'][:, :-1]

    @jax.jit
    def whole(variables):
        return learner.model.apply(variables, tokens)

    def part(variables, cache, tokens, counts):
        return extend(learner, variables, cache, tokens, counts)

    wanted, run = whole(variables), jax.jit(part)
    cache = init_cache(learner, variables, 2, 8)
    first, cache = run(variables, cache, tokens[:, :5], jnp.int32([5, 3]))
    then = np.stack([tokens[0, 5:], tokens[1, 3:6]])
    second, cache = run(variables, cache, then, jnp.int32([3, 1]))
    np.testing.assert_array_equal(cache.lengths_B, [8, 4])
    for found, right in (
        (first[0], wanted[0, :5]),
        (first[1, :3], wanted[1, :3]),
        (second[0], wanted[0, 5:]),
        (second[1, :1], wanted[1, 3:4]),
    ):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_learned_positions_end():
    """Beyond them a table lookup would give the last one in silence."""
    learner = tiny_learner(checked_config({'model.position': 'learned'}))
    variables = learner.variables(initial_state(learner.recipe).weights)
    with pytest.raises(ValueError, match=r'data.seq_len=8 positions; got a cache for 9 tokens'):
        init_cache(learner, variables, 1, 9)
