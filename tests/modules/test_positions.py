"""Reference and property: how tokens get their order, and where documents begin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import split
from modules.positions import POSITIONS, ROPE_BASE, LearnedPositions, rope
from modules.sequence import documents, whole_rows


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_rope_is_a_rotation_of_complex_numbers():
    """Pair i is x_i + j x_{i+H/2}, times exp(j p ROPE_BASE^(-2i/H)). Forward and gradient."""
    x, grad = draw(2, 3, 5, 8), draw(2, 3, 5, 8, seed=1)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 1000]])
    turn = np.exp(1j * positions[:, None, :, None] * ROPE_BASE ** (-2 * np.arange(4) / 8))

    def rotate(x, by):
        z = (x[..., :4] + 1j * x[..., 4:]) * by
        return np.concatenate([z.real, z.imag], -1)

    turned, pull = jax.vjp(lambda x: rope(x, jnp.int32(positions)), jnp.float32(x))
    np.testing.assert_allclose(turned, rotate(x, turn), rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(pull(jnp.float32(grad))[0], rotate(grad, turn.conj()), atol=2e-4)


def test_rope_keeps_norms_and_type():
    x = draw(1, 2, 6, 8)
    turned = rope(jnp.float32(x), whole_rows(6).positions_BT)
    np.testing.assert_allclose(
        np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6
    )
    np.testing.assert_array_equal(turned[:, :, 0], jnp.float32(x)[:, :, 0])  # position 0
    assert rope(jnp.bfloat16(x), whole_rows(6).positions_BT).dtype == jnp.bfloat16


def test_rope_scores_depend_on_the_distance_alone():
    """Shifting all positions changes nothing; shifting only those of the keys does."""
    q, k = jnp.float32(draw(1, 1, 6, 8)), jnp.float32(draw(1, 1, 6, 8, seed=1))
    here = whole_rows(6).positions_BT

    def scores(query_shift, key_shift):
        return jnp.einsum('bnth,bnsh->ts', rope(q, here + query_shift), rope(k, here + key_shift))

    np.testing.assert_allclose(scores(37, 37), scores(0, 0), rtol=1e-4, atol=1e-4)
    assert np.abs(scores(0, 1) - scores(0, 0)).max() > 0.1


def test_rope_angles_are_exact_at_long_contexts():
    """Catches angles computed in bfloat16, which cannot tell position 1000 from 1001."""
    x = jnp.ones((1, 1, 2, 8), jnp.bfloat16)
    turned = rope(x, jnp.int32([[4000, 4001]]))[0, 0].astype(jnp.float32)
    angle = np.array([4000.0, 4001.0])
    np.testing.assert_allclose(turned[:, 0], np.cos(angle) - np.sin(angle), atol=1e-2)


def test_learned_positions_are_rows_of_a_table():
    module = LearnedPositions(length=6, features=4)
    positions = jnp.int32([[0, 1, 5], [2, 0, 1]])
    params, specs = split(module.init(jax.random.key(0), positions)['params'])
    assert (specs['table'].role, specs['table'].axes) == ('embedding', ('position', 'embed'))
    assert params['table'].shape == (6, 4)
    np.testing.assert_array_equal(
        module.apply({'params': params}, positions), np.asarray(params['table'])[positions]
    )


@pytest.mark.parametrize('name', POSITIONS)
def test_each_position_tells_order_in_one_way(name):
    """rope turns, learned adds, none does neither."""
    x = jnp.float32(draw(1, 1, 3, 4))
    turned = POSITIONS[name].rotate(x, whole_rows(3).positions_BT)
    ways = (bool(np.any(np.asarray(turned != x))), POSITIONS[name].table is not None)
    assert ways == {'rope': (True, False), 'learned': (False, True), 'none': (False, False)}[name]


def test_whole_rows_count_from_zero():
    sequence = whole_rows(4)
    np.testing.assert_array_equal(sequence.positions_BT, [[0, 1, 2, 3]])
    assert sequence.segments_BT is None


def test_documents_restart_positions():
    """Also where a row begins in the middle of a document, and in the padding, segment 0."""
    segments = jnp.int32([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3], [0, 1, 1, 4, 0, 0]])
    sequence = documents(segments)
    wanted = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 1]]
    np.testing.assert_array_equal(sequence.positions_BT, wanted)
    np.testing.assert_array_equal(sequence.segments_BT, segments)
