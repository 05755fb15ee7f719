"""Reference: formats against ml_dtypes. Property: rounding is idempotent, and unbiased if it is
stochastic.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from modules.precision.formats import (
    decode_format,
    encode_format,
    floor_pow2,
    parse_format,
    round_to_format,
)

RNG = np.random.default_rng(0)
FLOAT16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
ANY_BITS = RNG.integers(0, 2**32, 10**6, dtype=np.uint32).view(np.float32)
VALUES = np.concatenate([FLOAT16, ANY_BITS])
VALUES = VALUES[np.isfinite(VALUES)]
FORMATS = {
    'e4m3': ml_dtypes.float8_e4m3fn,
    'e5m2': ml_dtypes.float8_e5m2,
    'e3m4': ml_dtypes.float8_e3m4,
    'e2m3': ml_dtypes.float6_e2m3fn,
    'e3m2': ml_dtypes.float6_e3m2fn,
    'e2m1': ml_dtypes.float4_e2m1fn,
    'e5m10': np.float16,
    'e8m7': ml_dtypes.bfloat16,
}


@pytest.mark.parametrize('name', FORMATS)
def test_rounding_matches_ml_dtypes(name):
    """On every float16 and a million float32 numbers, subnormal ones included; values above the
    largest become the largest. Catches ties away from even, and a range with other special codes.
    """
    format, dtype = parse_format(name), FORMATS[name]
    assert format.largest == float(ml_dtypes.finfo(dtype).max)
    values = VALUES
    if name == 'e8m7':  # its smaller values need steps that float32 does not have
        values = values[np.abs(values) >= 2.0**format.min_exponent]
    actual = jax.jit(lambda x: round_to_format(x, format))(values)
    expected = np.clip(values, -format.largest, format.largest).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


def test_traced_formats_match_constant_ones():
    """All with one program. Catches bits that are compiled into it."""
    values = VALUES[:: len(VALUES) // 20000]
    traced = jax.jit(lambda x, number: round_to_format(x, decode_format(number)))
    for name in (*FORMATS, 'e2m2', 'e8m1', 'e8m10', 'int2', 'int8', 'int16'):
        number, format = jnp.float32(encode_format(name)), parse_format(name)
        expected = jax.jit(lambda x, format=format: round_to_format(x, format))(values)
        np.testing.assert_array_equal(traced(values, number), expected, name)
        decoded = decode_format(number)
        assert (decoded.largest, decoded.max_exponent) == (format.largest, format.max_exponent)
    assert traced._cache_size() == 1
    assert encode_format('wide') is None and encode_format('int2|int8') is None


@pytest.mark.parametrize('n_bits', [2, 3, 4, 8])
def test_integers(n_bits):
    format = parse_format(f'int{n_bits}')
    values = np.float32(RNG.normal(size=1000) * 2**n_bits)
    largest = 2 ** (n_bits - 1) - 1
    expected = np.clip(np.round(values), -largest, largest)
    np.testing.assert_array_equal(round_to_format(values, format), expected)


@pytest.mark.parametrize('name', ['e4m3', 'e2m1', 'e8m3', 'int4'])
@pytest.mark.parametrize('rounding', ['nearest', 'truncate', 'stochastic'])
def test_format_values_stay(name, rounding):
    format = parse_format(name)
    once = round_to_format(jnp.float32(RNG.normal(size=1000)), format)
    again = round_to_format(once, format, rounding, jax.random.key(0))
    np.testing.assert_array_equal(again, once)


@pytest.mark.parametrize('value', [0.0029, 1.03, -1.03, 5.1, -300.0])
def test_stochastic_rounding_is_unbiased(value):
    """Within 4 standard errors of 100,000 draws, at subnormal values too; two neighbours occur.
    Catches rounding towards 0 of negative values.
    """
    format, draws = parse_format('e4m3'), 100_000
    rounded = round_to_format(
        jnp.full(draws, value, jnp.float32), format, 'stochastic', jax.random.key(1)
    )
    neighbours = np.unique(np.float64(rounded))
    assert len(neighbours) == 2 and neighbours[0] < value < neighbours[1]
    error = abs(np.float64(rounded).mean() - np.float64(np.float32(value)))
    assert error < 4 * np.ptp(neighbours) / 2 / np.sqrt(draws)


def test_truncation_is_towards_zero():
    values = np.float32(RNG.normal(size=1000))
    truncated = np.asarray(round_to_format(values, parse_format('e5m2'), 'truncate'))
    assert np.all(np.abs(truncated) <= np.abs(values)) and np.all(values * truncated >= 0)
    assert np.any(truncated != round_to_format(values, parse_format('e5m2')))


def test_special_values():
    """An infinity becomes the largest value, and NaN stays: a loss that is not finite shows."""
    values = jnp.float32([np.inf, -np.inf, np.nan, 0.0])
    for name in ('e4m3', 'e2m1', 'int8'):
        largest = parse_format(name).largest
        expected = [largest, -largest, np.nan, 0.0]
        np.testing.assert_array_equal(round_to_format(values, parse_format(name)), expected)


def test_floor_pow2_is_exact():
    """At all powers of two and one step beside them, where a floor of log2 is wrong."""
    powers = np.ldexp(np.float32(1), np.arange(-125, 126))
    below, above = np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))
    floor = jax.jit(floor_pow2)
    np.testing.assert_array_equal(floor(powers), powers)
    np.testing.assert_array_equal(floor(above), powers)
    np.testing.assert_array_equal(floor(below), powers / 2)


UNKNOWN = ['fp8', 'e4', 'e9m2', 'e1m5', 'e4m0', 'e4m11', 'int1', 'int17', 'E4M3']
NOT_ELASTIC = ['int4|', 'int4|int4', 'int2|e4m3', 'int2|int17', 'wide|int4']


@pytest.mark.parametrize('text', ['', *UNKNOWN, *NOT_ELASTIC])
def test_unknown_format_is_refused(text):
    with pytest.raises(ValueError, match='a format is eXmY with X from 2 to 8'):
        parse_format(text)
