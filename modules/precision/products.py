"""Products of two matrices with operands of few bits, forward and backward."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from modules.precision.blocks import ROW, TENSOR, Operand, measure_rounding, round_operand
from modules.precision.formats import (
    WIDE,
    ElasticFormat,
    Format,
    TracedFormat,
    decode_format,
    parse_format,
)

Numbers = Mapping[str, jax.Array] | None  # formats as numbers of a program, by operand
BACKWARD = ('rounded', 'wide_dw', 'saved', 'wide')
HADAMARD_SEED = 0
#: JAX's types in which devices multiply, by (exponent bits, mantissa bits).
REAL_DTYPES = {(4, 3): 'float8_e4m3fn', (5, 2): 'float8_e5m2'} | {(0, m): 'int8' for m in range(8)}


@dataclasses.dataclass(frozen=True)
class ProductPrecision:
    """The rounding of each operand of `y = x w`, `dx = g w^T` and `dw = x^T g`.

    Attributes:
      x, w, g: activations, weights, and the gradient of y.
      w_backward: weights in `dx`.
      backward: of BACKWARD: 'rounded' rounds all operands again, along the axis that is summed
        there; 'wide_dw' does not round those of `dw`; 'saved' has the rounded x and w of the
        forward pass, in the type of matmuls, and rounds g; 'wide' rounds no operand of gradients.
      hadamard: the size of the blocks of tokens that a Hadamard matrix with random signs mixes in
        both operands of `dw`; 0: none.
      outlier_size: columns of x with a value as large are not rounded in `y`; 0: all are.
      real: whether to multiply in the formats themselves where a whole sum shares its scales.
    """

    x: Operand
    w: Operand
    g: Operand
    w_backward: Operand
    backward: str = 'rounded'
    hadamard: int = 0
    outlier_size: float = 0.0
    real: bool = False

    def with_formats(self, numbers: Numbers) -> 'ProductPrecision':
        """Returns it with the formats that are numbers of a program.

        numbers: `encode_format` of operands, by name; None or {}: as it is.
        """
        if not numbers:
            return self
        named = {'x': self.x, 'w': self.w, 'g': self.g, 'w_backward': self.w_backward}
        replaced = {
            name: dataclasses.replace(operand, format=decode_format(numbers[name[0]]))
            for name, operand in named.items()
            if name[0] in numbers
        }
        return dataclasses.replace(self, **replaced)

    @property
    def rounded_g(self) -> Operand:
        """The rounding of g in `dx`."""
        return Operand(WIDE) if self.backward == 'wide' else self.g

    @property
    def is_random(self) -> bool:
        """Whether any rounding draws random numbers."""
        operands = self.x, self.w, self.g, self.w_backward
        return any(
            o.rounding == 'stochastic' or isinstance(parse_format(o.format), ElasticFormat)
            for o in operands
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rounded_product(
    precision: ProductPrecision,
    out_dtype: jnp.dtype,
    x_MI: jax.Array,
    w_IO: jax.Array,
    key: jax.Array | None,
    numbers: Numbers = None,
) -> jax.Array:
    """Computes `y = R(x) R(w)`, where R rounds an operand; gradients pass R unchanged.

    `dx = R(g) R(w)^T` and `dw = R(x)^T R(g)`. Sums are in float32.

    Args:
      precision: how R rounds each operand.
      out_dtype: the type of y.
      x_MI: activations, [M, I] or [B, T, I].
      w_IO: weights.
      key: the random key for stochastic rounding; None: nearest.
      numbers: formats that replace those of `precision`, as numbers of the program.

    Returns:
      y, [M, O] or [B, T, O].
    """
    return _forward(precision, out_dtype, x_MI, w_IO, key, numbers)[0]


def _forward(precision, out_dtype, x_MI, w_IO, key, numbers):
    precision = precision.with_formats(numbers)
    x_key, w_key, *_ = _split_key(key)
    x_draw, w_draw, _ = _split_draws(key)
    ignored_MI = None
    if precision.outlier_size:
        ignored_MI = jnp.abs(x_MI) >= precision.outlier_size
    x = round_operand(x_MI, precision.x, (-1,), x_key, ignored_MI, x_draw)
    w = round_operand(w_IO, precision.w, (-2,), w_key, draw_key=w_draw)
    formats = precision.x.format, precision.w.format
    if ignored_MI is not None:
        x, formats = (_keep_columns(x_MI, x, ignored_MI), jnp.ones((1,) * x_MI.ndim)), None
    y_MO = _multiply(precision, x, w, formats, ((-1,), (0,)), x_MI.dtype)
    saved_x, saved_w = x_MI, w_IO
    if precision.backward == 'saved':
        saved_x, saved_w = ((codes * s).astype(x_MI.dtype) for codes, s in (x, w))
    return y_MO.astype(out_dtype), (saved_x, saved_w, key, numbers)


def _backward(precision, out_dtype, residuals, g_MO):
    del out_dtype
    x_MI, w_IO, key, numbers = residuals
    precision = precision.with_formats(numbers)
    dtype, backward, wide = x_MI.dtype, precision.backward, Operand(WIDE)
    _, _, dx_key, w_key, x_key, dw_key = _split_key(key)
    x_draw, w_draw, g_draw = _split_draws(key)
    x, w, g = precision.x, precision.w_backward, precision.rounded_g
    if backward != 'rounded':
        x = wide
    if backward in ('saved', 'wide'):
        w = wide
    operands = (
        round_operand(g_MO, g, (-1,), dx_key, draw_key=g_draw),
        round_operand(w_IO, w, (-1,), w_key, draw_key=w_draw),
    )
    dx_MI = _multiply(precision, *operands, (g.format, w.format), ((-1,), (1,)), dtype)
    if backward == 'wide_dw':
        g = wide
    has_blocks = any(o.format != WIDE and o.block not in (TENSOR, ROW) for o in (x, g))
    mixes = precision.hadamard > 0 and backward == 'rounded'
    if has_blocks or mixes:  # blocks of tokens do not see where a row of text ends
        x_MI, g_MO = (a.reshape(-1, a.shape[-1]) for a in (x_MI, g_MO))
    if mixes:
        x_MI, g_MO = (mix_rows(a, precision.hadamard) for a in (x_MI, g_MO))
    tokens = tuple(range(-x_MI.ndim, -1))
    operands = (
        round_operand(x_MI, x, tokens, x_key, draw_key=x_draw),
        round_operand(g_MO, g, tokens, dw_key, draw_key=g_draw),
    )
    dw_IO = _multiply(precision, *operands, (x.format, g.format), (tokens, tokens), dtype)
    return dx_MI.astype(dtype), dw_IO.astype(w_IO.dtype), None, None


rounded_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def record_gradient(
    precision: ProductPrecision,
    y_MO: jax.Array,
    errors: dict[str, jax.Array],
    numbers: Numbers = None,
) -> jax.Array:
    """Returns y; the gradients of `errors` are the errors of rounding the gradient of y.

    Args:
      precision: how `rounded_product` rounds.
      y_MO: its result.
      errors: a scalar for each quantity of `measure_rounding`.
      numbers: as in `rounded_product`.
    """
    del precision, errors, numbers
    return y_MO


def _record_forward(precision, y_MO, errors, numbers):
    del precision, errors
    return y_MO, numbers


def _record_backward(precision, numbers, g_MO):
    rounded_g = precision.with_formats(numbers).rounded_g
    return g_MO, measure_rounding(g_MO, rounded_g, (-1,)), None


record_gradient.defvjp(_record_forward, _record_backward)


def _split_key(key: jax.Array | None) -> list[jax.Array | None]:
    """Returns a key for each rounding: x and w forward; g, w, x and g backward."""
    return [None] * 6 if key is None else list(jax.random.split(key, 6))


def _split_draws(key: jax.Array | None) -> list[jax.Array | None]:
    """Returns a key for the width of x, w and g, the same forward and backward."""
    return [None] * 3 if key is None else list(jax.random.split(jax.random.fold_in(key, 1), 3))


def _keep_columns(
    x_MI: jax.Array, rounded: tuple[jax.Array, jax.Array], outliers_MI: jax.Array
) -> jax.Array:
    """Returns rounded x, with the columns that have an outlier as they are."""
    codes, s = rounded
    has_outlier_1I = jnp.any(outliers_MI, axis=tuple(range(x_MI.ndim - 1)), keepdims=True)
    return jnp.where(has_outlier_1I, x_MI.astype(jnp.float32), codes * s)


def mix_rows(x_MI: jax.Array, size: int) -> jax.Array:
    """Multiplies each block of `size` rows by an orthogonal matrix: `H D x / sqrt(size)`.

    H is Hadamard's matrix, D has random signs, the same everywhere. The product `x^T g` of two
    mixed matrices is that of the matrices themselves, but outliers are spread over a block.

    Args:
      x_MI: a matrix; zeros are added below if the blocks are not full.
      size: a power of two.
    """
    signs = jax.random.rademacher(jax.random.key(HADAMARD_SEED), (size,), jnp.float32)
    hadamard_KN = np.ones((1, 1), np.float32)
    while len(hadamard_KN) < size:
        hadamard_KN = np.kron(np.array([[1, 1], [1, -1]], np.float32), hadamard_KN)
    mixing_KN = hadamard_KN * signs[None] / math.sqrt(size)
    padded_MI = jnp.pad(x_MI.astype(jnp.float32), ((0, -len(x_MI) % size), (0, 0)))
    blocks = padded_MI.reshape(-1, size, x_MI.shape[-1])
    mixed = jnp.einsum('kn,bni->bki', mixing_KN, blocks, precision='highest')
    return mixed.reshape(padded_MI.shape)


def _multiply(
    precision: ProductPrecision,
    a: tuple[jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array],
    formats: tuple[str | Format, str | Format] | None,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: jnp.dtype,
) -> jax.Array:
    """Returns the sums of products of two rounded matrices, in float32.

    Args:
      precision: says whether to multiply in the formats themselves.
      a: (codes, scales), as `round_operand` returns them.
      b: the same.
      formats: of a and b; None: neither has codes.
      summed: the axes of a and of b that are summed.
      dtype: the type of matmuls; codes are multiplied in it if it has all of them.
    """
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    axes = [
        tuple(axis % array.ndim for axis in summed_axes)
        for array, summed_axes in ((a_codes, summed[0]), (b_codes, summed[1]))
    ]
    shares_scales = all(
        scale.shape[axis] == 1
        for scale, summed_axes in ((a_scale, axes[0]), (b_scale, axes[1]))
        for axis in summed_axes
    )
    if formats is None or not shares_scales:
        return _dot(a_codes * a_scale, b_codes * b_scale, axes)
    types = [_code_dtype(parse_format(text), dtype, precision.real) for text in formats]
    y = _dot(a_codes.astype(types[0]), b_codes.astype(types[1]), axes)
    a_outer, b_outer = (
        scale.reshape([n for axis, n in enumerate(scale.shape) if axis not in summed_axes])
        for scale, summed_axes in ((a_scale, axes[0]), (b_scale, axes[1]))
    )
    n_a, n_b = a_outer.ndim, b_outer.ndim
    return (
        y
        * a_outer.reshape(*a_outer.shape, *[1] * n_b)
        * b_outer.reshape(*[1] * n_a, *b_outer.shape)
    )


def _code_dtype(format: Format | None, dtype: jnp.dtype, is_real: bool) -> jnp.dtype:
    """Returns a type that has all codes of a format; None: of values that are not rounded."""
    if format is None:
        return dtype
    if isinstance(format, TracedFormat):
        return jnp.dtype(jnp.float32)
    if is_real and (name := REAL_DTYPES.get((format.exponent_bits, format.mantissa_bits))):
        return jnp.dtype(name)
    return dtype if format.mantissa_bits <= 7 else jnp.dtype(jnp.float32)


def _dot(a: jax.Array, b: jax.Array, axes: list[tuple[int, ...]]) -> jax.Array:
    dims = ((axes[0], axes[1]), ((), ()))
    if a.dtype == b.dtype == jnp.int8:
        return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.int32).astype(jnp.float32)
    are_integers = [jnp.issubdtype(array.dtype, jnp.integer) for array in (a, b)]
    if a.dtype.itemsize != b.dtype.itemsize or any(are_integers):
        a, b = (array.astype(jnp.float32) for array in (a, b))
    exact = 'highest' if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
