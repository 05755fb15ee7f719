"""Reference and property: how tokens get their order, and where documents begin."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.numerics import REMAT_POLICIES
from modules.options import declared_options
from modules.params import split_boxes
from modules.positions import POSITIONS, LearnedPositions, alibi_slopes, rope, scale_frequencies
from modules.sequence import packed_rows, whole_rows

ROPE = {name: declared.default for name, declared in declared_options(rope).items()}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize('given', [{}, {'rope_base': 500_000.0}, {'rope_fraction': 0.5}], ids=str)
def test_rope_is_a_rotation_of_complex_numbers(given):
    """Pair i is x_i + j x_{i+R/2}, times exp(j p base^(-2i/R)), of the first R features. Forward
    and gradient. Catches frequencies of the whole width where a part is turned, or the last part.
    """
    base, half = 10_000.0, 4
    base, half = given.get('rope_base', base), int(half * given.get('rope_fraction', 1.0))
    x, grad = draw(2, 3, 5, 8), draw(2, 3, 5, 8, seed=1)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 1000]])
    turn = np.exp(1j * positions[:, None, :, None] * base ** (-np.arange(half) / half))

    def rotate(x, by):
        z = (x[..., :half] + 1j * x[..., half : 2 * half]) * by
        return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)

    turned, pull = jax.vjp(lambda x: rope(x, jnp.int32(positions), **given), jnp.float32(x))
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


@pytest.mark.default_rows('1.0')
@pytest.mark.parametrize('fraction', [1.0, 0.5])
def test_rope_by_a_product_is_rope(fraction):
    """Reference: forward bitwise, and the gradient to the rounding of one of its two terms.
    Property: `dots` keeps no more. Catches a sign, and features that are not turned left out.
    """
    x, g = (jnp.bfloat16(draw(2, 3, 6, 8, seed=seed)) for seed in (0, 1))
    turned, pulled, kept = [], [], []
    for platform in ('cpu', 'tpu'):
        how = {'rope_fraction': fraction, 'platform': platform}
        turn = functools.partial(rope, positions_BT=whole_rows(6).positions_BT, **how)
        out, pull = jax.vjp(turn, x)
        turned.append(out)
        pulled.append(np.float32(pull(g)[0]))
        loss = jax.checkpoint(lambda x, turn=turn: jnp.sin(turn(x)), policy=REMAT_POLICIES['dots'])
        arrays = jax.tree.leaves(jax.vjp(loss, x)[1])
        kept.append([a.shape for a in arrays if a.size >= x.size])
    np.testing.assert_array_equal(*turned)
    np.testing.assert_allclose(*pulled, atol=2**-7 * np.abs(g).max())
    assert kept[0] == kept[1], kept


def llama3_frequencies(frequencies, factor, length, low, high):
    """By wavelengths and one at a time, as the released code of Llama 3.1 has it."""
    found = []
    for f in frequencies:
        wavelength = 2 * math.pi / f
        if wavelength < length / high:
            found.append(f)
        elif wavelength > length / low:
            found.append(f / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append((1 - smooth) * f / factor + smooth * f)
    return np.array(found)


@pytest.mark.parametrize(
    ('base', 'head_dim', 'factor', 'length', 'low', 'high'),
    [
        (500_000.0, 128, 8.0, 8192, 1.0, 4.0),  # Llama 3.1
        (500_000.0, 64, 32.0, 8192, 1.0, 4.0),  # Llama 3.2
        (10_000.0, 32, 4.0, 100, 2.0, 3.0),
    ],
)
def test_llama3_scaling_is_the_released_rule(base, head_dim, factor, length, low, high):
    """All three cases occur. Catches low and high exchanged, and turns counted in radians."""
    plain = base ** (-2 * np.arange(head_dim // 2) / head_dim)
    wanted = llama3_frequencies(plain, factor, length, low, high)
    ours = scale_frequencies(jnp.float32(plain), 'llama3', factor, length, low, high)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    divided = plain / wanted
    assert divided[0] == 1 and divided[-1] == factor
    assert np.any((divided > 1.001) & (divided < 0.999 * factor))


def test_scaled_rope_turns_by_the_scaled_frequencies():
    """Reference: linear scaling reads position 12 as position 3; llama3 by `scaled`."""
    x = jnp.float32(draw(1, 2, 3, 8))
    positions = jnp.int32([[0, 4, 12]])
    linear = rope(x, positions, rope_scaling='linear', rope_factor=4.0)
    np.testing.assert_allclose(linear, rope(x, positions // 4), rtol=1e-5, atol=1e-5)
    given = {'rope_factor': 8.0, 'rope_original_length': 32, 'rope_base': 100.0}
    turned = rope(x, positions, rope_scaling='llama3', **given)
    frequencies = llama3_frequencies(100.0 ** (-np.arange(4) / 4), 8.0, 32, 1.0, 4.0)
    turn = np.exp(1j * np.array([0, 4, 12])[:, None] * frequencies)
    z = (np.float64(x)[..., :4] + 1j * np.float64(x)[..., 4:]) * turn
    np.testing.assert_allclose(turned, np.concatenate([z.real, z.imag], -1), rtol=1e-4, atol=1e-5)


def turns_of(head_dim, position=1, length=1, **given):
    """(f, m) of each pair, from where the vectors (1, 0) are turned to at `position`."""
    x = jnp.concatenate([jnp.ones((1, 1, length, head_dim // 2)), jnp.zeros((1, 1, length, 1))], -1)
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, head_dim // 2 - 1),))
    turned = np.float64(rope(x, jnp.full((1, length), position), **given))[0, 0, 0]
    cos, sin = np.split(turned, 2)
    return np.arctan2(sin, cos) / position, np.hypot(cos, sin)


def yarn_frequencies(frequencies, base, factor, length, truncate):
    """One at a time, as the released code has it: a ramp between pairs of 32 and of 1 turns."""
    half, found = len(frequencies), []
    ends = [half * math.log(length / (n * 2 * math.pi)) / math.log(base) for n in (32, 1)]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    for i, f in enumerate(frequencies):
        ramp = min(max((i - first) / (last - first), 0), 1)
        found.append(f / factor * ramp + f * (1 - ramp))
    return np.array(found)


@pytest.mark.parametrize(
    ('base', 'head_dim', 'factor', 'length', 'truncate'),
    [
        (150_000.0, 64, 32.0, 4096, False),  # gpt-oss
        (1_000_000.0, 128, 4.0, 32_768, True),  # Qwen3
    ],
)
def test_yarn_is_the_released_rule(base, head_dim, factor, length, truncate):
    """Catches fast and slow exchanged, ends rounded inwards, and m left out or squared."""
    plain = base ** (-2 * np.arange(head_dim // 2) / head_dim)
    wanted = yarn_frequencies(plain, base, factor, length, truncate)
    given = {'rope_scaling': 'yarn', 'rope_factor': factor, 'rope_original_length': length}
    given |= {'rope_base': base, 'rope_truncate': truncate}
    found, m = turns_of(head_dim, **given)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(m, 0.1 * math.log(factor) + 1, rtol=1e-6)
    kept = wanted / plain
    assert (
        kept[0] == 1 and kept[-1] == 1 / factor and np.any((kept < 0.999) & (kept > 1.1 / factor))
    )
    _, m = turns_of(head_dim, **given, rope_attention_factor=1.5)
    np.testing.assert_allclose(m, 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    ('length', 'capacity', 'is_long'),
    [(8, None, False), (9, None, True), (1, 8, False), (1, 9, True)],
)
def test_longrope_divides_by_the_list_of_its_length(length, capacity, is_long):
    """Rows decide, or what a cache has room for, so that a cache holds keys of one list."""
    given = {'rope_short_factor': '1,1.5', 'rope_long_factor': '2,30.0', 'rope_factor': 4.0}
    given |= {'rope_original_length': 8, 'rope_base': 100.0, 'rope_scaling': 'longrope'}
    found, m = turns_of(4, length=length, capacity=capacity, **given)
    factors = np.array([2, 30] if is_long else [1, 1.5])
    np.testing.assert_allclose(found, np.array([1, 0.1]) / factors, rtol=1e-5)
    np.testing.assert_allclose(m, math.sqrt(1 + math.log(4) / math.log(8)), rtol=1e-6)


@pytest.mark.full
def test_rope_by_layer():
    """In windows another base and no scaling; each third layer as it is, to the bit. One program
    for all layers. Catches m on layers that are not scaled, and layers counted from 0.
    """
    x, positions = jnp.float32(draw(1, 2, 3, 8)), jnp.int32([[0, 4, 12]])
    yarn = {'rope_scaling': 'yarn', 'rope_factor': 8.0, 'rope_original_length': 32}
    given = yarn | {'rope_base': 1e6, 'rope_local_base': 100.0, 'no_rope_every': 3}
    layers = jax.vmap(lambda block, is_full: rope(x, positions, block, is_full, **given))
    found = layers(jnp.arange(1.0, 7), jnp.arange(1, 7) % 2 == 0)
    local = rope(x, positions, rope_base=100.0)
    full = rope(x, positions, rope_base=1e6, **yarn)
    for block, wanted in enumerate((local, full, x, full, local, x)):
        np.testing.assert_allclose(found[block], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[2], x)


def test_options_of_rope_left_out_add_nothing_to_its_program():
    """The published values spelt out, too: the same operations, so old runs go on bitwise."""
    x, positions = jnp.ones((1, 1, 3, 8)), whole_rows(3).positions_BT
    plain = jax.make_jaxpr(rope)(x, positions)
    spelt = jax.make_jaxpr(lambda x, p: rope(x, p, **ROPE))(x, positions)
    assert str(plain) == str(spelt)
    assert str(plain).count('concatenate') == 1 and str(plain).count(' slice[') == 0


@pytest.mark.parametrize(
    ('head_dim', 'fraction', 'said'),
    [
        (8, 0.3, r'2.4 features.*works: 0.25 \(2 features\)'),
        (8, 0.9, r'7.2 features.*works: 1.0 \(8 features\)'),
        (12, 0.25, r'3 features.*Nearest that works: 0.3333333333333333 \(4 features\)'),
        (7, 1.0, r'7 features.*Nearest that works: 0.8571428571428571 \(6 features\)'),
        (64, 0.01, r'0.64 features.*works: 0.03125 \(2 features\)'),
        (1, 1.0, 'rope turns pairs of features, and a head has 1'),
    ],
)
def test_features_that_make_no_pairs_are_refused(head_dim, fraction, said):
    """And the one that is named works."""
    x, positions = jnp.ones((1, 1, 2, head_dim)), whole_rows(2).positions_BT
    with pytest.raises(ValueError, match=said) as error:
        rope(x, positions, rope_fraction=fraction)
    if head_dim > 1:
        near = float(str(error.value).split('works: ')[1].split(' ')[0])
        rope(x, positions, rope_fraction=near)


def test_alibi_slopes_are_the_published_ones():
    """Reference: the paper's for 8 heads, and for 6 and 12 what its code adds between them."""
    eight = [2.0**-n for n in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(8), eight)
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])
    np.testing.assert_allclose(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), [*eight, *between], rtol=1e-6)


def test_learned_positions_are_rows_of_a_table():
    module = LearnedPositions(length=6, features=4)
    positions = jnp.int32([[0, 1, 5], [2, 0, 1]])
    params, specs = split_boxes(module.init(jax.random.key(0), positions)['params'])
    assert (specs['table'].role, specs['table'].axes) == ('embedding', ('position', 'embed'))
    assert params['table'].shape == (6, 4)
    np.testing.assert_array_equal(
        module.apply({'params': params}, positions), np.asarray(params['table'])[positions]
    )


@pytest.mark.parametrize('name', POSITIONS)
def test_each_position_tells_order_in_one_way(name):
    """rope turns, learned adds, alibi takes from logits, none does neither."""
    x = jnp.float32(draw(1, 1, 3, 4))
    turned = POSITIONS[name].rotate(x, whole_rows(3).positions_BT)
    ways = {
        'rope': bool(np.any(np.asarray(turned != x))),
        'learned': POSITIONS[name].table is not None,
        'alibi': POSITIONS[name].slopes is not None,
    }
    assert [way for way, holds in ways.items() if holds] == [name for _ in 'x' if name != 'none']


def test_whole_rows_count_from_zero():
    sequence = whole_rows(4)
    np.testing.assert_array_equal(sequence.positions_BT, [[0, 1, 2, 3]])
    assert sequence.segments_BT is None


def test_documents_restart_positions():
    """Also where a row begins in the middle of a document, and in the padding, segment 0."""
    segments = jnp.int32([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3], [0, 1, 1, 4, 0, 0]])
    sequence = packed_rows(segments)
    wanted = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 1]]
    np.testing.assert_array_equal(sequence.positions_BT, wanted)
    np.testing.assert_array_equal(sequence.segments_BT, segments)
