"""Reference and property: how position methods encode order, and where documents begin."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.numerics import REMAT_POLICIES
from modules.options import declared_options
from modules.params import split_boxes
from modules.positions import (
    POSITIONS,
    LearnedPositions,
    SinusoidalPositions,
    alibi_slopes,
    rope,
    scale_frequencies,
)
from modules.sequence import packed_rows, whole_rows

ROPE = {name: declared.default for name, declared in declared_options(rope).items()}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize('options', [{}, {'rope_base': 500_000.0}, {'rope_fraction': 0.5}], ids=str)
def test_rope_rotates_complex_numbers(options):
    """Pair i is x_i + j x_{i+R/2}, times exp(j p base^(-2i/R)), in the first R features. Forward
    and gradient. Catches frequencies of the whole width for a partial rotation, or the last
    features.
    """
    base, half = 10_000.0, 4
    base, half = options.get('rope_base', base), int(half * options.get('rope_fraction', 1.0))
    x, grad = draw(2, 3, 5, 8), draw(2, 3, 5, 8, seed=1)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 1000]])
    rotation = np.exp(1j * positions[:, None, :, None] * base ** (-np.arange(half) / half))

    def rotate(x, by):
        z = (x[..., :half] + 1j * x[..., half : 2 * half]) * by
        return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)

    rotated, pull = jax.vjp(lambda x: rope(x, jnp.int32(positions), **options), jnp.float32(x))
    np.testing.assert_allclose(rotated, rotate(x, rotation), rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(pull(jnp.float32(grad))[0], rotate(grad, rotation.conj()), atol=2e-4)


def test_rope_keeps_norms_and_type():
    x = draw(1, 2, 6, 8)
    rotated = rope(jnp.float32(x), whole_rows(6).positions_BT)
    np.testing.assert_allclose(
        np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6
    )
    np.testing.assert_array_equal(rotated[:, :, 0], jnp.float32(x)[:, :, 0])  # position 0
    assert rope(jnp.bfloat16(x), whole_rows(6).positions_BT).dtype == jnp.bfloat16


def test_rope_scores_depend_on_distance_only():
    """Shifting all positions changes nothing; shifting only the keys' does."""
    q, k = jnp.float32(draw(1, 1, 6, 8)), jnp.float32(draw(1, 1, 6, 8, seed=1))
    positions = whole_rows(6).positions_BT

    def scores(query_shift, key_shift):
        return jnp.einsum(
            'bnth,bnsh->ts', rope(q, positions + query_shift), rope(k, positions + key_shift)
        )

    np.testing.assert_allclose(scores(37, 37), scores(0, 0), rtol=1e-4, atol=1e-4)
    assert np.abs(scores(0, 1) - scores(0, 0)).max() > 0.1


def test_rope_angles_are_exact_at_long_contexts():
    """Catches angles computed in bfloat16, which cannot tell position 1000 from 1001."""
    x = jnp.ones((1, 1, 2, 8), jnp.bfloat16)
    rotated = rope(x, jnp.int32([[4000, 4001]]))[0, 0].astype(jnp.float32)
    angle = np.array([4000.0, 4001.0])
    np.testing.assert_allclose(rotated[:, 0], np.cos(angle) - np.sin(angle), atol=1e-2)


@pytest.mark.default_rows('1.0')
@pytest.mark.parametrize('fraction', [1.0, 0.5])
def test_rope_as_product_matches_rope(fraction):
    """Reference: forward bitwise, and the gradient to the rounding of one of its two terms.
    Property: `dots` keeps no more. Catches a sign, and missing features outside the rotation.
    """
    x, g = (jnp.bfloat16(draw(2, 3, 6, 8, seed=seed)) for seed in (0, 1))
    rotated, gradients, residual_shapes = [], [], []
    for platform in ('cpu', 'tpu'):
        options = {'rope_fraction': fraction, 'platform': platform}
        rotate = functools.partial(rope, positions_BT=whole_rows(6).positions_BT, **options)
        y, pull = jax.vjp(rotate, x)
        rotated.append(y)
        gradients.append(np.float32(pull(g)[0]))
        loss = jax.checkpoint(
            lambda x, rotate=rotate: jnp.sin(rotate(x)), policy=REMAT_POLICIES['dots']
        )
        arrays = jax.tree.leaves(jax.vjp(loss, x)[1])
        residual_shapes.append([a.shape for a in arrays if a.size >= x.size])
    np.testing.assert_array_equal(*rotated)
    np.testing.assert_allclose(*gradients, atol=2**-7 * np.abs(g).max())
    assert residual_shapes[0] == residual_shapes[1], residual_shapes


def llama3_frequencies(frequencies, factor, length, low, high):
    """Computes frequencies one at a time by wavelength, as the released code of Llama 3.1 does."""
    scaled = []
    for f in frequencies:
        wavelength = 2 * math.pi / f
        if wavelength < length / high:
            scaled.append(f)
        elif wavelength > length / low:
            scaled.append(f / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * f / factor + smooth * f)
    return np.array(scaled)


@pytest.mark.parametrize(
    ('base', 'head_dim', 'factor', 'length', 'low', 'high'),
    [
        (500_000.0, 128, 8.0, 8192, 1.0, 4.0),  # Llama 3.1
        (500_000.0, 64, 32.0, 8192, 1.0, 4.0),  # Llama 3.2
        (10_000.0, 32, 4.0, 100, 2.0, 3.0),
    ],
)
def test_llama3_scaling_matches_released_code(base, head_dim, factor, length, low, high):
    """All three cases occur. Catches low and high exchanged, and turns counted in radians."""
    plain = base ** (-2 * np.arange(head_dim // 2) / head_dim)
    expected = llama3_frequencies(plain, factor, length, low, high)
    actual = scale_frequencies(jnp.float32(plain), 'llama3', factor, length, low, high)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    divided = plain / expected
    assert divided[0] == 1 and divided[-1] == factor
    assert np.any((divided > 1.001) & (divided < 0.999 * factor))


def test_scaled_rope_uses_scaled_frequencies():
    """Reference: linear scaling treats position 12 as position 3; llama3 by its frequencies."""
    x = jnp.float32(draw(1, 2, 3, 8))
    positions = jnp.int32([[0, 4, 12]])
    linear = rope(x, positions, rope_scaling='linear', rope_factor=4.0)
    np.testing.assert_allclose(linear, rope(x, positions // 4), rtol=1e-5, atol=1e-5)
    options = {'rope_factor': 8.0, 'rope_original_length': 32, 'rope_base': 100.0}
    rotated = rope(x, positions, rope_scaling='llama3', **options)
    frequencies = llama3_frequencies(100.0 ** (-np.arange(4) / 4), 8.0, 32, 1.0, 4.0)
    rotation = np.exp(1j * np.array([0, 4, 12])[:, None] * frequencies)
    z = (np.float64(x)[..., :4] + 1j * np.float64(x)[..., 4:]) * rotation
    np.testing.assert_allclose(rotated, np.concatenate([z.real, z.imag], -1), rtol=1e-4, atol=1e-5)


def rope_frequencies(head_dim, position=1, length=1, **options):
    """Returns (f, m) of each pair, from the rotation of the vectors (1, 0) at `position`."""
    x = jnp.concatenate([jnp.ones((1, 1, length, head_dim // 2)), jnp.zeros((1, 1, length, 1))], -1)
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, head_dim // 2 - 1),))
    rotated = np.float64(rope(x, jnp.full((1, length), position), **options))[0, 0, 0]
    cos, sin = np.split(rotated, 2)
    return np.arctan2(sin, cos) / position, np.hypot(cos, sin)


def yarn_frequencies(frequencies, base, factor, length, truncate):
    """Computes frequencies one at a time as the released code does: a ramp between 32 turns and
    1.
    """
    half, scaled = len(frequencies), []
    ends = [half * math.log(length / (n * 2 * math.pi)) / math.log(base) for n in (32, 1)]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    for i, f in enumerate(frequencies):
        ramp = min(max((i - first) / (last - first), 0), 1)
        scaled.append(f / factor * ramp + f * (1 - ramp))
    return np.array(scaled)


@pytest.mark.parametrize(
    ('base', 'head_dim', 'factor', 'length', 'truncate'),
    [
        (150_000.0, 64, 32.0, 4096, False),  # gpt-oss
        (1_000_000.0, 128, 4.0, 32_768, True),  # Qwen3
    ],
)
def test_yarn_matches_released_code(base, head_dim, factor, length, truncate):
    """Catches fast and slow exchanged, ends rounded inwards, and m omitted or squared."""
    plain = base ** (-2 * np.arange(head_dim // 2) / head_dim)
    expected = yarn_frequencies(plain, base, factor, length, truncate)
    options = {'rope_scaling': 'yarn', 'rope_factor': factor, 'rope_original_length': length}
    options |= {'rope_base': base, 'rope_truncate': truncate}
    frequencies, m = rope_frequencies(head_dim, **options)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-5)
    np.testing.assert_allclose(m, 0.1 * math.log(factor) + 1, rtol=1e-6)
    ratios = expected / plain
    assert (
        ratios[0] == 1
        and ratios[-1] == 1 / factor
        and np.any((ratios < 0.999) & (ratios > 1.1 / factor))
    )
    _, m = rope_frequencies(head_dim, **options, rope_attention_factor=1.5)
    np.testing.assert_allclose(m, 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    ('length', 'capacity', 'is_long'),
    [(8, None, False), (9, None, True), (1, 8, False), (1, 9, True)],
)
def test_longrope_selects_factors_by_length(length, capacity, is_long):
    """The length is the row's, or a cache's capacity, so that a cache holds keys of one list."""
    options = {'rope_short_factor': '1,1.5', 'rope_long_factor': '2,30.0', 'rope_factor': 4.0}
    options |= {'rope_original_length': 8, 'rope_base': 100.0, 'rope_scaling': 'longrope'}
    frequencies, m = rope_frequencies(4, length=length, capacity=capacity, **options)
    factors = np.array([2, 30] if is_long else [1, 1.5])
    np.testing.assert_allclose(frequencies, np.array([1, 0.1]) / factors, rtol=1e-5)
    np.testing.assert_allclose(m, math.sqrt(1 + math.log(4) / math.log(8)), rtol=1e-6)


@pytest.mark.parametrize(
    ('length', 'capacity', 'growth'),
    [(8, None, 1), (16, None, 5), (1, 8, 1), (1, 12, 3)],
)
def test_dynamic_scaling_grows_the_base(length, capacity, growth):
    """Closed form: growth is s T / L - s + 1 with s = 4 and L = 8, and the base grows by its power
    R / (R - 2). Catches a base that falls in short rows, and T of one step instead of the cache's.
    """
    options = {'rope_base': 100.0, 'rope_scaling': 'dynamic'}
    options |= {'rope_factor': 4.0, 'rope_original_length': 8}
    frequencies, m = rope_frequencies(4, length=length, capacity=capacity, **options)
    np.testing.assert_allclose(frequencies, [1, (100 * growth**2) ** -0.5], rtol=1e-5)
    np.testing.assert_allclose(m, 1, rtol=1e-6)


@pytest.mark.full
def test_rope_varies_by_layer():
    """Window layers have another base and no scaling; every third layer has no rope, bitwise. One
    program for all layers. Catches m on unscaled layers, and layers counted from 0.
    """
    x, positions = jnp.float32(draw(1, 2, 3, 8)), jnp.int32([[0, 4, 12]])
    yarn = {'rope_scaling': 'yarn', 'rope_factor': 8.0, 'rope_original_length': 32}
    options = yarn | {'rope_base': 1e6, 'rope_local_base': 100.0, 'no_rope_every': 3}
    layers = jax.vmap(lambda block, is_full: rope(x, positions, block, is_full, **options))
    rotated = layers(jnp.arange(1.0, 7), jnp.arange(1, 7) % 2 == 0)
    local = rope(x, positions, rope_base=100.0)
    full = rope(x, positions, rope_base=1e6, **yarn)
    for block, expected in enumerate((local, full, x, full, local, x)):
        np.testing.assert_allclose(rotated[block], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rotated[2], x)


def test_default_rope_options_add_no_operations():
    """The published values, spelt out, give the same operations, so old runs resume bitwise."""
    x, positions = jnp.ones((1, 1, 3, 8)), whole_rows(3).positions_BT
    plain = jax.make_jaxpr(rope)(x, positions)
    spelt = jax.make_jaxpr(lambda x, p: rope(x, p, **ROPE))(x, positions)
    assert str(plain) == str(spelt)
    assert str(plain).count('concatenate') == 1 and str(plain).count(' slice[') == 0


@pytest.mark.parametrize(
    ('head_dim', 'fraction', 'message'),
    [
        (8, 0.3, r'2.4 features.*works: 0.25 \(2 features\)'),
        (8, 0.9, r'7.2 features.*works: 1.0 \(8 features\)'),
        (12, 0.25, r'3 features.*Nearest that works: 0.3333333333333333 \(4 features\)'),
        (7, 1.0, r'7 features.*Nearest that works: 0.8571428571428571 \(6 features\)'),
        (64, 0.01, r'0.64 features.*works: 0.03125 \(2 features\)'),
        (1, 1.0, 'rope rotates pairs of features, so a head needs at least 2; got 1'),
    ],
)
def test_odd_rope_features_are_rejected(head_dim, fraction, message):
    """And the suggested value works."""
    x, positions = jnp.ones((1, 1, 2, head_dim)), whole_rows(2).positions_BT
    with pytest.raises(ValueError, match=message) as error:
        rope(x, positions, rope_fraction=fraction)
    if head_dim > 1:
        suggested = float(str(error.value).split('works: ')[1].split(' ')[0])
        rope(x, positions, rope_fraction=suggested)


def test_alibi_slopes_match_paper():
    """Reference: the paper's for 8 heads, and for 6 and 12 the slopes that its code inserts."""
    eight = [2.0**-n for n in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(8), eight)
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])
    np.testing.assert_allclose(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), [*eight, *between], rtol=1e-6)


def test_learned_positions_look_up_table():
    module = LearnedPositions(length=6, features=4)
    positions = jnp.int32([[0, 1, 5], [2, 0, 1]])
    params, specs = split_boxes(module.init(jax.random.key(0), positions)['params'])
    assert (specs['table'].role, specs['table'].axes) == ('embedding', ('position', 'embed'))
    assert params['table'].shape == (6, 4)
    np.testing.assert_array_equal(
        module.apply({'params': params}, positions), np.asarray(params['table'])[positions]
    )


def test_sinusoidal_positions_match_paper():
    """Reference: the equations for each pair of features, in float64, also for an odd width.

    A position moves to any other by one rotation per pair, which the paper gives as the reason.
    """
    for width in (8, 7):
        module = SinusoidalPositions(length=1, features=width)
        positions = jnp.int32([[0, 1, 2, 1000]])
        vectors = np.asarray(module.apply({}, positions))
        for feature in range(width):
            angles = np.float64(positions) / 10_000 ** (feature // 2 * 2 / width)
            expected = np.cos(angles) if feature % 2 else np.sin(angles)
            np.testing.assert_allclose(vectors[..., feature], expected, atol=1e-4)
    inner = vectors[0, :, :6] @ vectors[0, :, :6].T
    np.testing.assert_allclose(inner[0, 1], inner[1, 2], rtol=1e-5)
    np.testing.assert_allclose(np.diag(inner), 3.0, rtol=1e-5)


@pytest.mark.parametrize('name', POSITIONS)
def test_position_methods_encode_order_once(name):
    """rope rotates, learned and sinusoidal add, alibi subtracts from logits, none does nothing."""
    x = jnp.float32(draw(1, 1, 3, 4))
    rotated = POSITIONS[name].rotate(x, whole_rows(3).positions_BT)
    ways = {
        'rope': bool(np.any(np.asarray(rotated != x))),
        'learned': POSITIONS[name].is_limited,
        'sinusoidal': POSITIONS[name].table is not None and not POSITIONS[name].is_limited,
        'alibi': POSITIONS[name].slopes is not None,
    }
    assert [way for way, holds in ways.items() if holds] == [name for _ in 'x' if name != 'none']


def test_whole_rows_count_from_zero():
    sequence = whole_rows(4)
    np.testing.assert_array_equal(sequence.positions_BT, [[0, 1, 2, 3]])
    assert sequence.segments_BT is None


def test_documents_restart_positions():
    """Includes a row that begins in the middle of a document, and in the padding, segment 0."""
    segments = jnp.int32([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3], [0, 1, 1, 4, 0, 0]])
    sequence = packed_rows(segments)
    expected = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 1]]
    np.testing.assert_array_equal(sequence.positions_BT, expected)
    np.testing.assert_array_equal(sequence.segments_BT, segments)
