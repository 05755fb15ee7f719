"""Products with operands of few bits: a class for each published recipe.

The options of a class have the values of its recipe, and any of them can be set. Numbers are
simulated: rounded values are multiplied in a type that has them, with sums in float32.
"""

import dataclasses
import sys
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from modules.choices import choose
from modules.options import Option
from modules.precision.blocks import (
    ROW,
    SCALES,
    TENSOR,
    Operand,
    check_operand,
    measure_rounding,
)
from modules.precision.formats import ROUNDINGS, WIDE, encode_format
from modules.precision.products import BACKWARD, ProductPrecision, rounded_product

#: Layers whose products may stay wide, joined by + in `wide_layers`.
LAYERS = ('attention', 'mlp', 'router', 'readout')
XFormat = Annotated[str, Option('format of activations: e4m3, int8, ..., or wide')]
WFormat = Annotated[str, Option('format of weights')]
GFormat = Annotated[str, Option('format of gradients of the output')]
XBlock = Annotated[str, Option('activations that share a scale: tensor, row, N or NxN')]
WBlock = Annotated[str, Option('weights that share a scale')]
GBlock = Annotated[str, Option('gradients of the output that share a scale')]
DxWBlock = Annotated[str, Option('the same in the gradient of the input; empty: w_block')]
XScale = Annotated[str, Option('how scales of activations are found', choices=(*SCALES,))]
WScale = Annotated[str, Option('how scales of weights are found', choices=(*SCALES,))]
GScale = Annotated[str, Option('how scales of gradients are found', choices=(*SCALES,))]
Rounding = Annotated[str, Option('rounding of activations and weights', choices=ROUNDINGS)]
GRounding = Annotated[str, Option('rounding of gradients of the output', choices=ROUNDINGS)]
Backward = Annotated[
    str,
    Option('operands of gradients: all rounded, not in dw, as saved, or wide', choices=BACKWARD),
]
Hadamard = Annotated[
    int, Option('tokens that random signs mix in weight gradients; 0: none', 0, 256)
]
Outliers = Annotated[
    float,
    Option('columns with an activation as large stay wide in y; 0: none', 0, sys.float_info.max),
]
WideLayers = Annotated[str, Option('layers that are not rounded, joined by +; none: all are')]
Real = Annotated[bool, Option('multiply in the formats themselves where the scales allow it')]
Traced = Annotated[
    bool, Option('formats are numbers of the program, which runs with other formats share')
]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Products of rounded operands, `y = R(x) R(w)`, in any format.

    `R(v) = s clip(round(v / s), -largest, largest)`

    A block of values shares a scale `s`. In the backward pass, `dx = R(g) R(w)^T` and
    `dw = R(x)^T R(g)`, where blocks lie along the axis that is summed there, so that operands are
    rounded again from the values before rounding. Gradients pass `R` unchanged.

    Formats are `eXmY` (bits of exponent and mantissa), `intN`, or `wide`. `e4m3` and `e5m2` are
    float8_e4m3fn and float8_e5m2, `e8m7` is bfloat16, `e2m1` is the four-bit format of MX and
    NVFP4. Without a scale (`none`) the formats' own range counts, as in arXiv:2405.18710.
    """

    x_format: XFormat = 'e4m3'
    w_format: WFormat = 'e4m3'
    g_format: GFormat = 'e5m2'
    x_block: XBlock = 'tensor'
    w_block: WBlock = 'tensor'
    g_block: GBlock = 'tensor'
    dx_w_block: DxWBlock = ''
    x_scale: XScale = 'max'
    w_scale: WScale = 'max'
    g_scale: GScale = 'max'
    rounding: Rounding = 'nearest'
    g_rounding: GRounding = 'nearest'
    backward: Backward = 'rounded'
    hadamard: Hadamard = 0
    outlier_size: Outliers = 0.0
    wide_layers: WideLayers = 'router+readout'
    real_products: Real = False
    traced_formats: Traced = False
    #: `encode_format` of each operand as scalars of a program, as pairs; (): they are constants.
    numbers: tuple[tuple[str, Any], ...] = ()

    flat: ClassVar[bool] = True
    any_rank: ClassVar[bool] = True

    @staticmethod
    def check(recipe: Any, part: Any) -> None:
        """Raises ValueError for an unknown format, block or layer, and for second derivatives.

        Args:
          recipe: the resolved config.
          part: the matmul kernel with its options.
        """
        kernel = part.build()
        precision = kernel.precision
        for name in ('x', 'w', 'g'):
            check_operand(vars(precision)[name], f'kernels.{name}')
        if kernel.dx_w_block:
            check_operand(precision.w_backward, 'kernels.dx_w')
        for layer in kernel.list_wide_layers():
            choose(dict.fromkeys(LAYERS), layer, 'kernels.wide_layers')
        if kernel.hadamard & (kernel.hadamard - 1):
            raise ValueError(
                f'kernels.hadamard must be a power of two, or 0; got {kernel.hadamard}'
            )
        if kernel.outlier_size and kernel.x_scale in ('mean', 'median'):
            raise ValueError(
                f'kernels.x_scale={kernel.x_scale} is of all values, but kernels.outlier_size='
                f'{kernel.outlier_size:g} leaves some out. Set it to 0, or x_scale to max.'
            )
        kernel.check_effects(part)
        if kernel.traced_formats:
            kernel.check_traced()
        if 'readout' not in kernel.list_wide_layers():
            kernel.check_readout(recipe, part)
        for source, quantity in recipe.forward_mode_targets.items():
            raise ValueError(
                f'{source} differentiates the {quantity}, but {part} rounds the operands of '
                'products, and a rounded product has no correct derivative of its gradient. Leave '
                'kernels.matmul at auto, or leave the other out.'
            )

    def check_traced(self) -> None:
        """Raises ValueError if formats cannot be numbers of a program."""
        reasons = {
            'kernels.real_products=True': self.real_products,
            'a rounded readout': 'readout' not in self.list_wide_layers(),
            'formats without a number of bits': not self.encode_formats(),
        }
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(
                    f'kernels.traced_formats=True cannot be combined with {reason}. Leave it out.'
                )

    def encode_formats(self) -> dict[str, float]:
        """Returns {option: number} of the formats that are numbers of the program."""
        names = [f'{name}_format' for name in 'xwg'] if self.traced_formats else []
        codes = {name: encode_format(vars(self)[name]) for name in names}
        return {name: code for name, code in codes.items() if code is not None}

    def check_effects(self, part: Any) -> None:
        """Raises ValueError if the kernel rounds nothing, or for an option without effect.

        part: the matmul kernel with its options, for the error.
        """
        precision = self.precision
        if {o.format for o in (precision.x, precision.w, precision.g)} == {WIDE}:
            raise ValueError(f'{part} rounds nothing: all formats are {WIDE}. Choose a format.')
        if set(self.list_wide_layers()) == set(LAYERS):
            raise ValueError(f'{part} rounds nothing: kernels.wide_layers has all layers.')
        idle, values = self.list_idle_options(), dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            value = values[field.name]
            if field.name in idle and value != field.default:
                raise ValueError(
                    f'kernels.{field.name}={value} has no effect with {idle[field.name]}. Leave '
                    'one of them out.'
                )

    def list_idle_options(self) -> dict[str, str]:
        """Returns {option that has no effect: the setting that takes it}."""
        idle, precision = {}, self.precision
        operands = {'x': precision.x, 'w': precision.w, 'g': precision.g}
        wide = {name: operand.format == WIDE for name, operand in operands.items()}
        for name, operand in operands.items():
            if operand.scale == 'none':
                idle[f'{name}_block'] = f'kernels.{name}_scale=none'
            if wide[name]:
                idle |= dict.fromkeys(
                    (f'{name}_block', f'{name}_scale'), f'kernels.{name}_format={WIDE}'
                )
        if wide['x'] and wide['w']:
            idle['rounding'] = 'wide x and w'
        if wide['g']:
            idle['g_rounding'] = f'kernels.g_format={WIDE}'
        if self.backward == 'wide':
            names = ('g_format', 'g_block', 'g_scale', 'g_rounding')
            idle |= dict.fromkeys(names, 'kernels.backward=wide')
        if self.backward in ('saved', 'wide'):
            idle['dx_w_block'] = f'kernels.backward={self.backward}'
        elif wide['w']:
            idle['dx_w_block'] = f'kernels.w_format={WIDE}'
        if self.backward != 'rounded':
            idle['hadamard'] = f'kernels.backward={self.backward}'
        elif wide['x'] and wide['g']:
            idle['hadamard'] = 'wide x and g'
        if wide['x']:
            idle['outlier_size'] = f'kernels.x_format={WIDE}'
        blocks = {self.x_block, self.w_block, self.g_block}
        if not blocks <= {TENSOR, ROW}:
            idle['real_products'] = f'blocks within a sum ({", ".join(sorted(blocks))})'
        elif self.outlier_size:
            idle['real_products'] = f'kernels.outlier_size={self.outlier_size:g}'
        return idle

    def check_readout(self, recipe: Any, part: Any) -> None:
        """Raises ValueError if the rounding or the loss does not fit a rounded readout.

        Args:
          recipe: the resolved config.
          part: the matmul kernel with its options, for the error.
        """
        if self.precision.is_random:
            raise ValueError(
                f'{part} rounds stochastically, which the readout cannot. Add readout to '
                'kernels.wide_layers, or set the rounding to nearest.'
            )
        if recipe.loss.row.linear_readout:
            raise ValueError(
                f'{recipe.loss} reads the weights of the readout, which {part} does not round '
                'there. Add readout to kernels.wide_layers.'
            )

    def list_wide_layers(self) -> list[str]:
        """Returns the layers of `wide_layers`."""
        return [] if self.wide_layers == 'none' else self.wide_layers.split('+')

    @property
    def precision(self) -> ProductPrecision:
        """The rounding of each operand."""
        w = Operand(self.w_format, self.w_block, self.w_scale, self.rounding)
        return ProductPrecision(
            x=Operand(self.x_format, self.x_block, self.x_scale, self.rounding),
            w=w,
            g=Operand(self.g_format, self.g_block, self.g_scale, self.g_rounding),
            w_backward=dataclasses.replace(w, block=self.dx_w_block or self.w_block),
            backward=self.backward,
            hadamard=self.hadamard,
            outlier_size=self.outlier_size,
            real=self.real_products,
        )

    def __call__(
        self,
        x_MI: jax.Array,
        w_IO: jax.Array,
        out_dtype: jnp.dtype | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Computes R(x) R(w).

        Args:
          x_MI: activations, [M, I] or [B, T, I].
          w_IO: a weight matrix.
          out_dtype: the type of the result; None: the type of x and w.
          key: the random key for stochastic rounding; None: values are rounded to nearest.
        """
        dtype = out_dtype or x_MI.dtype
        return rounded_product(self.precision, dtype, x_MI, w_IO, key, dict(self.numbers))

    def multiply_with_key(self, x_MI: jax.Array, w_IO: jax.Array, key: jax.Array) -> jax.Array:
        """Computes R(x) R(w) with stochastic rounding.

        Args:
          x_MI: activations, [M, I] or [B, T, I].
          w_IO: a weight matrix.
          key: the random key.
        """
        return self(x_MI, w_IO, key=key)

    def measure_rounding(self, x_MI: jax.Array, w_IO: jax.Array) -> dict[str, jax.Array]:
        """Returns the errors of both operands of the forward pass, by names such as `underflow_x`.

        `rounding_error` is `|R(v) - v| / |v|`; `underflow` is the share of values that become 0,
        and `overflow` the share that is larger than the largest value of its block's format.
        """
        precision = self.precision.with_formats(dict(self.numbers))
        by_operand = {
            'x': measure_rounding(x_MI, precision.x, (-1,), precision.outlier_size),
            'w': measure_rounding(w_IO, precision.w, (-2,)),
        }
        return {
            f'{quantity}_{name}': value
            for name, measured in by_operand.items()
            for quantity, value in measured.items()
        }


@dataclasses.dataclass(frozen=True)
class FP8Tensorwise(Simulated):
    """FP8 with a scale for each tensor: E4M3 activations and weights, E5M2 gradients.

    `s = max |v| / largest`, of the present values. The default recipe of torchao.float8, named
    tensorwise.
    """


@dataclasses.dataclass(frozen=True)
class FP8Rowwise(Simulated):
    """FP8 with a scale for the values of each sum: E4M3 for all operands.

    `s = 2^ceil(log2(max |v| / 448))`: scales are powers of two. The recipe `rowwise` of
    torchao.float8.
    """

    g_format: GFormat = 'e4m3'
    x_block: XBlock = 'row'
    w_block: WBlock = 'row'
    g_block: GBlock = 'row'
    x_scale: XScale = 'pow2'
    w_scale: WScale = 'pow2'
    g_scale: GScale = 'pow2'


@dataclasses.dataclass(frozen=True)
class FP8RowwiseWideDw(FP8Rowwise):
    """FP8 with a scale for the values of each sum, and weight gradients that are not rounded.

    In the gradient of the input, weights have one scale. The recipe `rowwise_with_gw_hp` of
    torchao.float8, its most accurate.
    """

    dx_w_block: DxWBlock = 'tensor'
    backward: Backward = 'wide_dw'


@dataclasses.dataclass(frozen=True)
class DeepSeekFP8(Simulated):
    """FP8 of DeepSeek-V3 (arXiv:2412.19437, section 3.3): E4M3 for all operands, in blocks.

    Activations and gradients share a scale among 128 values of a sum, weights among 128 x 128.
    Embeddings, readout, routers, norms and attention scores stay wide. The authors round the
    activations of a weight gradient from their rounded values, and give some activations scales
    that are powers of two or five bits of exponent; here they are rounded once, and all alike.
    """

    g_format: GFormat = 'e4m3'
    x_block: XBlock = '128'
    w_block: WBlock = '128x128'
    g_block: GBlock = '128'


@dataclasses.dataclass(frozen=True)
class MXFP8(Simulated):
    """MXFP8: E4M3 in blocks of 32 values of a sum, with scales that are powers of two (E8M0).

    `s = 2^(floor(log2 max |v|) - 8)`; values above `448 s` become `448 s`. With the scale `pow2`
    there are no such values. Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """

    g_format: GFormat = 'e4m3'
    x_block: XBlock = '32'
    w_block: WBlock = '32'
    g_block: GBlock = '32'
    x_scale: XScale = 'e8m0'
    w_scale: WScale = 'e8m0'
    g_scale: GScale = 'e8m0'


@dataclasses.dataclass(frozen=True)
class NVFP4(Simulated):
    """NVFP4 training (arXiv:2509.25149): E2M1 in blocks of 16 values of a sum, with E4M3 scales.

    `s = t E4M3(max |v| / (6 t))`, with `t = max |V| / (6 448)` of the whole tensor. Weights share a
    scale among 16 x 16 values, so that both passes have the same weights; gradients are rounded
    stochastically; both operands of weight gradients are mixed by a 16 x 16 Hadamard matrix with
    random signs. The authors keep some 15% of the blocks, mostly the last ones, wide: give the last
    items of model.pattern the option matmul=auto.
    """

    x_format: XFormat = 'e2m1'
    w_format: WFormat = 'e2m1'
    g_format: GFormat = 'e2m1'
    x_block: XBlock = '16'
    w_block: WBlock = '16x16'
    g_block: GBlock = '16'
    x_scale: XScale = 'e4m3'
    w_scale: WScale = 'e4m3'
    g_scale: GScale = 'e4m3'
    g_rounding: GRounding = 'stochastic'
    hadamard: Hadamard = 16


@dataclasses.dataclass(frozen=True)
class Int8(Simulated):
    """Eight-bit integers with an outlier split: LLM.int8() (arXiv:2208.07339) in the forward pass.

    Rows of activations and columns of weights have their own scales. Columns of activations with a
    value of 6 or more are not rounded, their weights are, and such values do not count for scales.
    In the backward pass, the gradient of the output is rounded by rows and weights by tensor, and
    weight gradients are not rounded, as in SwitchBack (arXiv:2304.13013).
    """

    x_format: XFormat = 'int8'
    w_format: WFormat = 'int8'
    g_format: GFormat = 'int8'
    x_block: XBlock = 'row'
    w_block: WBlock = 'row'
    g_block: GBlock = 'row'
    dx_w_block: DxWBlock = 'tensor'
    backward: Backward = 'wide_dw'
    outlier_size: Outliers = 6.0


@dataclasses.dataclass(frozen=True)
class Int6(Simulated):
    """Six-bit integers for all operands, by rows, with stochastic gradients.

    As in arXiv:2411.10948, but each row has one scale, where the authors give groups of columns
    scales that are shifted by bits. Their models have norms that divide by the mean absolute value:
    `model.norm=l1norm`.
    """

    x_format: XFormat = 'int6'
    w_format: WFormat = 'int6'
    g_format: GFormat = 'int6'
    x_block: XBlock = 'row'
    w_block: WBlock = 'row'
    g_block: GBlock = 'row'
    g_rounding: GRounding = 'stochastic'


@dataclasses.dataclass(frozen=True)
class BitNet(Simulated):
    """BitNet b1.58 (arXiv:2402.17764): ternary weights, and activations of eight bits by token.

    `R(w) = s clip(round(w / s), -1, 1)`, `s = mean |w|`. Gradients are those of the rounded
    product, and reach the float32 weights unchanged. `kernels.w_scale=median` is BitNet b1.58
    Reloaded (arXiv:2407.09527), whose layers also normalise their input.
    """

    x_format: XFormat = 'int8'
    w_format: WFormat = 'int2'
    g_format: GFormat = WIDE
    x_block: XBlock = 'row'
    w_scale: WScale = 'mean'
    backward: Backward = 'saved'
