"""Formats of numbers with few bits, and rounding to them.

A format is written `e4m3` (4 bits of exponent, 3 of mantissa, besides the sign) or `int8`. Values
stay in float32, so that any format runs on any device.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDE = 'wide'  # in place of a format: values are not rounded
SEPARATOR = '|'  # of integers of which an update draws one
ROUNDINGS = ('nearest', 'stochastic', 'truncate')
MAX_EXPONENT_BITS, MAX_MANTISSA_BITS, MAX_INTEGER_BITS = 8, 10, 16
FORM = (
    f'eXmY with X from 2 to 8 and Y from 1 to 10, int2 to int16, or {WIDE}, or different integers '
    'joined by | such as int2|int4|int8'
)
CODE_BASE = 16  # of `encode_format`: more than bits of a mantissa
FINITE_BITS = 6  # formats of so many bits, or fewer, spend no code on infinities
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127  # of float32


@dataclasses.dataclass(frozen=True)
class Format:
    """Numbers with a sign, an exponent and a mantissa; without an exponent they are integers.

    As in ml_dtypes, formats of more than 6 bits keep their largest exponent for infinities, except
    e4m3, which is float8_e4m3fn and keeps one code for NaN. Smaller formats are finite throughout.
    """

    exponent_bits: int
    mantissa_bits: int

    def draw(self, key: jax.Array | None) -> 'Format':
        """Returns the format of one update; key: the random key; None: outside of training."""
        return self

    @property
    def is_integer(self) -> bool:
        return not self.exponent_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest value."""
        if self.is_integer:
            return self.mantissa_bits - 1
        n_bits = 1 + self.exponent_bits + self.mantissa_bits
        keeps_infinity = n_bits > FINITE_BITS and (self.exponent_bits, self.mantissa_bits) != (4, 3)
        return 2**self.exponent_bits - 1 - self.bias - keeps_infinity

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value.

        It is larger than in ml_dtypes if subnormal values would be below the normal ones of
        float32, which devices flush to 0.
        """
        return max(1 - self.bias, 1 - _EXPONENT_BIAS + self.mantissa_bits)

    @property
    def largest(self) -> float:
        """The largest value."""
        if self.is_integer:
            return 2.0**self.mantissa_bits - 1
        has_nan_code = (self.exponent_bits, self.mantissa_bits) == (4, 3)
        return 2.0**self.max_exponent * (2 - 2.0**-self.mantissa_bits * (1 + has_nan_code))

    @property
    def n_bits(self) -> int:
        """The bits of a number, its sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits


@dataclasses.dataclass(frozen=True)
class ElasticFormat(Format):
    """Integers of several widths, of which each update draws one; the widest outside of training.

    So one model learns to work with each of them. Source: EQ-Net (arXiv:2308.07650), which also
    draws blocks and symmetry, and adds losses that this has not.

    Attributes:
      widths: numbers of bits.
    """

    widths: tuple[int, ...] = ()

    def draw(self, key: jax.Array | None) -> Format:
        if key is None:
            return self
        index = jax.random.randint(key, (), 0, len(self.widths))
        largest = jnp.float32([Format(0, n_bits - 1).largest for n_bits in self.widths])
        return DrawnFormat(0, self.mantissa_bits, largest[index])


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnFormat(Format):
    """Integers with an array as the largest value.

    Attributes:
      drawn_largest: the largest value.
    """

    drawn_largest: Any = None

    @property
    def largest(self) -> Any:
        return self.drawn_largest


@dataclasses.dataclass(frozen=True, eq=False)
class TracedFormat(Format):
    """A format of a program, with scalars of the program as its facts.

    Integers are numbers with the step of 1: their smallest exponent is their bits of mantissa.

    Attributes:
      exponent_bits, mantissa_bits: int32 scalars.
      facts: as `_tabulate_formats` orders them.
    """

    exponent_bits: Any
    mantissa_bits: Any
    facts: tuple[Any, ...] = ()

    @property
    def is_integer(self) -> bool:
        return False

    @property
    def min_exponent(self) -> Any:
        return self.facts[0]

    @property
    def max_exponent(self) -> Any:
        return self.facts[1]

    @property
    def largest(self) -> Any:
        return self.facts[2]


@functools.cache
def _tabulate_formats() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the smallest exponent, the largest and the largest value of all formats, each by bits
    of exponent and of mantissa.
    """
    formats = [[Format(e, m) for m in range(CODE_BASE)] for e in range(MAX_EXPONENT_BITS + 1)]
    smallest = [
        [m if f.is_integer else f.min_exponent for m, f in enumerate(row)] for row in formats
    ]
    return (
        np.array(smallest, np.int32),
        np.array([[f.max_exponent for f in row] for row in formats], np.int32),
        np.array([[f.largest for f in row] for row in formats], np.float32),
    )


def encode_format(text: str) -> float | None:
    """Returns a number for a format with one number of bits of each kind, else None."""
    format = parse_format(text)
    if format is None or isinstance(format, ElasticFormat):
        return None
    return format.exponent_bits + format.mantissa_bits / CODE_BASE


def decode_format(number: jax.Array) -> TracedFormat:
    """Inverts `encode_format` for a scalar of a program."""
    exponent_bits = jnp.floor(number)
    mantissa_bits = jnp.round((number - exponent_bits) * CODE_BASE).astype(jnp.int32)
    exponent_bits = exponent_bits.astype(jnp.int32)
    tables = map(jnp.asarray, _tabulate_formats())
    facts = tuple(table[exponent_bits, mantissa_bits] for table in tables)
    return TracedFormat(exponent_bits, mantissa_bits, facts)


def parse_format(text: str | Format) -> Format | None:
    """Returns the format of a text such as 'e4m3', 'int8' or 'int2|int8'; None for 'wide'.

    A format is returned as it is. Raises ValueError for another text.
    """
    return text if isinstance(text, Format) else _parse_text(text)


@functools.cache
def _parse_text(text: str) -> Format | None:
    if text == WIDE:
        return None
    if SEPARATOR in text:
        widths = [re.fullmatch(r'int(\d+)', name) for name in text.split(SEPARATOR)]
        n_bits = [int(width[1]) if width else 0 for width in widths]
        if min(n_bits) >= 2 and max(n_bits) <= MAX_INTEGER_BITS and len({*n_bits}) == len(n_bits):
            return ElasticFormat(0, max(n_bits) - 1, tuple(n_bits))
    if match := re.fullmatch(r'e(\d+)m(\d+)', text):
        exponent_bits, mantissa_bits = map(int, match.groups())
        is_known = exponent_bits <= MAX_EXPONENT_BITS and mantissa_bits <= MAX_MANTISSA_BITS
        if is_known and exponent_bits >= 2 and mantissa_bits >= 1:
            return Format(exponent_bits, mantissa_bits)
    elif match := re.fullmatch(r'int(\d+)', text):
        n_bits = int(match[1])
        if 2 <= n_bits <= MAX_INTEGER_BITS:
            return Format(0, n_bits - 1)
    raise ValueError(f'a format is {FORM}; got {text!r}')


def floor_pow2(x: jax.Array) -> jax.Array:
    """Returns the largest power of two that is at most x, for positive normal float32 numbers.

    It is exact, unlike the floor of a logarithm.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & (0xFF << _MANTISSA_BITS)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def round_to_format(
    x: jax.Array, format: Format, rounding: str = 'nearest', key: jax.Array | None = None
) -> jax.Array:
    """Rounds to a format; larger values become the largest one.

    `step = 2^(max(floor(log2 |x|), e_min) - m)`
    `y = clip(step round(x / step), -largest, largest)`

    Args:
      x: any values; NaN stays.
      format: of the result. For integers `step` is 1.
      rounding: of ROUNDINGS. 'nearest' rounds ties to even, 'truncate' towards 0; 'stochastic' goes
        to either neighbour, with x as the expectation.
      key: the random key for 'stochastic'; without it, values are rounded to nearest.

    Returns:
      float32 values, each of which the format has.
    """
    x = x.astype(jnp.float32)
    if not format.is_integer:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        exponent = ((bits >> _MANTISSA_BITS) & 0xFF) - _EXPONENT_BIAS
        # Infinity has the exponent 128, and its step must be finite.
        exponent = jnp.clip(exponent, format.min_exponent, _EXPONENT_BIAS) - format.mantissa_bits
        step, per_step = pow2(exponent), pow2(-exponent)
    else:
        step = per_step = jnp.float32(1)
    n_steps = x * per_step
    if rounding == 'truncate':
        n_steps = jnp.trunc(n_steps)
    elif rounding == 'stochastic' and key is not None:
        whole = jnp.floor(n_steps)  # u < n - floor(n) is exact, where n + u would be rounded
        n_steps = whole + (jax.random.uniform(key, x.shape) < n_steps - whole)
    else:
        n_steps = jnp.round(n_steps)
    return jnp.clip(n_steps * step, -format.largest, format.largest)


def pow2(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent in float32, for exponents from -126 to 127."""
    bits = (exponent + _EXPONENT_BIAS) << _MANTISSA_BITS
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
