"""Rounding of a matrix to few bits, with a scale for each block of values.

A matrix is an operand of a product: one of its last two axes is summed. Blocks lie along that axis.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from modules.precision.formats import (
    MAX_EXPONENT_BITS,
    WIDE,
    ElasticFormat,
    Format,
    floor_pow2,
    parse_format,
    pow2,
    round_to_format,
)

TENSOR, ROW = 'tensor', 'row'
BLOCK_FORM = (
    f'{TENSOR}, {ROW} (the values of one sum), N (N values of one sum), or NxN (also of N sums)'
)
SMALLEST = 1e-12  # a smaller maximum counts as this one, as in torchao
E4M3 = Format(4, 3)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Rounding of a matrix to few bits.

    Attributes:
      format: a text of `parse_format`, or a format; 'wide' leaves the matrix as it is.
      block: the values that share a scale: see BLOCK_FORM.
      scale: a key of SCALES.
      rounding: of `modules.precision.formats.ROUNDINGS`.
    """

    format: str | Format = 'e4m3'
    block: str = TENSOR
    scale: str = 'max'
    rounding: str = 'nearest'


@functools.cache
def parse_block(text: str) -> tuple[int, int] | None:
    """Returns (values of a sum, sums) that share a scale, 0 for all of them; None for a tensor.

    Raises ValueError for another text than BLOCK_FORM says.
    """
    if text == TENSOR:
        return None
    if text == ROW:
        return 0, 1
    sizes = text.split('x')
    if len(sizes) <= 2 and all(size.isdecimal() and int(size) for size in sizes):
        summed, sums = int(sizes[0]), int(sizes[-1]) if len(sizes) == 2 else 1
        if sums in (1, summed):
            return summed, sums
    raise ValueError(f'a block is {BLOCK_FORM}; got {text!r}')


def _scale_to_max(size: jax.Array, format: Format, _) -> tuple[jax.Array, jax.Array]:
    """`s = max |x| / largest`."""
    inverse = format.largest / jnp.maximum(size, SMALLEST)
    return 1 / inverse, inverse


def _scale_to_max_pow2(size: jax.Array, format: Format, _) -> tuple[jax.Array, jax.Array]:
    """`s = 2^ceil(log2(max |x| / largest))`, as `1 / s` is rounded down to a power of two."""
    inverse = floor_pow2(format.largest / jnp.maximum(size, SMALLEST))
    return 1 / inverse, inverse


def _scale_mx(size: jax.Array, format: Format, _) -> tuple[jax.Array, jax.Array]:
    """`s = 2^(floor(log2 max |x|) - e_max)`, an E8M0 number: values above `largest` become it."""
    smallest_step = pow2(-jnp.asarray(format.max_exponent, jnp.int32))
    scale = floor_pow2(jnp.maximum(size, SMALLEST)) * smallest_step
    return scale, 1 / scale


def _scale_e4m3(
    size: jax.Array, format: Format, tensor_size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`s = t E4M3(max |x| / (largest t))`, where `t = max |X| / (448 largest)` is of the tensor."""
    tensor_scale = jnp.maximum(tensor_size, SMALLEST) / (E4M3.largest * format.largest)
    scale = tensor_scale * round_to_format(size / (format.largest * tensor_scale), E4M3)
    return scale, jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def _scale_to_size(size: jax.Array, format: Format, _) -> tuple[jax.Array, jax.Array]:
    """`s = size`: of ternary weights, the mean or the median of `|x|`."""
    scale = jnp.maximum(size, 1e-5)
    return scale, 1 / scale


def _no_scale(size: jax.Array, format: Format, _) -> tuple[jax.Array, jax.Array]:
    """`s = 1`."""
    return jnp.ones_like(size), jnp.ones_like(size)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Scale of a block of values.

    Attributes:
      scale: (size of each block, format, size of the tensor) -> (s, 1 / s).
      measure: the size of values: (|x|, axes) -> size, with these axes of length 1.
    """

    scale: Callable[..., tuple[jax.Array, jax.Array]]
    measure: Callable[..., jax.Array] = jnp.max


SCALES = {
    'max': Scale(_scale_to_max),
    'pow2': Scale(_scale_to_max_pow2),
    'e8m0': Scale(_scale_mx),
    'e4m3': Scale(_scale_e4m3),
    'mean': Scale(_scale_to_size, jnp.mean),
    'median': Scale(_scale_to_size, jnp.median),
    'none': Scale(_no_scale),
}


def round_operand(
    x: jax.Array,
    operand: Operand,
    summed: tuple[int, ...],
    key: jax.Array | None = None,
    ignored: jax.Array | None = None,
    draw_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rounds a matrix by blocks: `x ~ c s` with `c = round(x / s)`.

    Args:
      x: [..., A, B].
      operand: its format, blocks, scales and rounding.
      summed: the axes that the product sums, counted from the end. Blocks of N values need one
        axis, -2 or -1.
      key: the random key for stochastic rounding; without it, values are rounded to nearest.
      ignored: bool, of the shape of x: values that do not count for scales.
      draw_key: the random key for an `ElasticFormat`; without it, values have its widest.

    Returns:
      (c, s): float32, s with axes of length 1 if a whole axis shares a scale, else of x's shape.
    """
    format, scale = parse_format(operand.format), SCALES[operand.scale]
    x = x.astype(jnp.float32)
    if format is None:
        return x, jnp.ones((1,) * x.ndim)
    format = format.draw(draw_key)
    sizes = jnp.abs(x) if ignored is None else jnp.where(ignored, 0, jnp.abs(x))
    block = parse_block(operand.block)
    tensor_size = jnp.max(sizes)
    if block is None:
        axes = tuple(range(x.ndim))
        s, inverse = scale.scale(scale.measure(sizes, axes, keepdims=True), format, tensor_size)
    elif block == (0, 1):
        row_sizes = scale.measure(sizes, summed, keepdims=True)
        s, inverse = scale.scale(row_sizes, format, tensor_size)
    else:
        n_summed, n_sums = block
        lengths = (n_summed, n_sums) if summed == (-2,) else (n_sums, n_summed)
        measure = functools.partial(scale.measure, axis=(-3, -1), keepdims=True)
        block_sizes = measure(_split_blocks(sizes, lengths))
        s, inverse = (
            _repeat_blocks(a, lengths, x.shape)
            for a in scale.scale(block_sizes, format, tensor_size)
        )
    return round_to_format(x * inverse, format, operand.rounding, key), s


#: What `measure_rounding` returns.
ROUNDING_ERRORS = ('rounding_error', 'underflow', 'overflow')


def measure_rounding(
    x: jax.Array, operand: Operand, summed: tuple[int, ...], outlier_size: float = 0.0
) -> dict[str, jax.Array]:
    """Returns `rounding_error`, `underflow` and `overflow` of a matrix rounded to nearest.

    Args:
      x: [..., A, B].
      operand: its format, blocks and scales.
      summed: the axes that the product sums.
      outlier_size: columns with a value as large are not rounded; 0: all are.
    """
    is_outlier = jnp.abs(x) >= (outlier_size or jnp.inf)
    codes, s = round_operand(x, operand, summed, ignored=is_outlier if outlier_size else None)
    x, format = x.astype(jnp.float32), parse_format(operand.format)
    is_rounded = ~jnp.any(is_outlier, axis=tuple(range(x.ndim - 1)), keepdims=True)
    largest = jnp.inf if format is None else format.largest
    error = jnp.linalg.norm(jnp.where(is_rounded, codes * s - x, 0))
    # A value that is scaled to the largest one may be above it by its own rounding.
    values = (
        error / jnp.maximum(jnp.linalg.norm(x), SMALLEST),
        jnp.mean((codes == 0) & (x != 0) & is_rounded),
        jnp.mean((jnp.abs(x) > largest * s * (1 + 1e-6)) & is_rounded),
    )
    return dict(zip(ROUNDING_ERRORS, values, strict=True))


def _split_blocks(x: jax.Array, lengths: tuple[int, int]) -> jax.Array:
    """Returns [..., A / a, a, B / b, b], with zeros at the ends of A and B."""
    padding = [(0, -size % n) for size, n in zip(x.shape[-2:], lengths, strict=True)]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + padding)
    (rows, columns), (a, b) = x.shape[-2:], lengths
    return x.reshape(*x.shape[:-2], rows // a, a, columns // b, b)


def _repeat_blocks(x: jax.Array, lengths: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """Returns [..., A, B] from a number of each block, [..., A / a, 1, B / b, 1]."""
    (a, b), (rows, columns) = lengths, shape[-2:]
    x = jnp.broadcast_to(x, (*x.shape[:-3], a, x.shape[-2], b))
    x = x.reshape(*x.shape[:-4], x.shape[-4] * a, x.shape[-2] * b)
    return x[..., :rows, :columns]


def check_operand(operand: Operand, path: str) -> None:
    """Raises ValueError for an unknown format or block.

    Args:
      operand: to be checked.
      path: the fields of its format and its block begin with it: 'kernels.x'.
    """
    for name, parse in (('format', parse_format), ('block', parse_block)):
        try:
            parse(vars(operand)[name])
        except ValueError as error:
            raise ValueError(f'{path}_{name}: {error}') from None
    format = parse_format(operand.format)
    if format and format.exponent_bits == MAX_EXPONENT_BITS and operand.scale != 'none':
        raise ValueError(
            f'{path}_format={operand.format} has the range of float32, so that its scale would '
            f'overflow: set {path}_scale=none'
        )
    if isinstance(format, ElasticFormat) and operand.scale == 'e8m0':
        raise ValueError(
            f'{path}_format={operand.format} has no exponent for {path}_scale=e8m0. Set the scale '
            'to pow2 or max.'
        )
    is_scaled_by_size = operand.scale in ('mean', 'median')
    if is_scaled_by_size and operand.format not in (WIDE, 'int2'):
        raise ValueError(
            f'{path}_scale={operand.scale} is for ternary weights, {path}_format=int2; got '
            f'{operand.format}'
        )
    if is_scaled_by_size and parse_block(operand.block) not in (None, (0, 1)):
        raise ValueError(
            f'{path}_scale={operand.scale} is of a {TENSOR} or a {ROW}; got {path}_block='
            f'{operand.block}'
        )
