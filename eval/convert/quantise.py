"""Quantises checkpoints after training: rounds the weights of their blocks to few bits."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.convert.merge import check_stored_as_used, flat_params
from eval.convert.prune import ScoreReader
from eval.convert.scores import MOMENTS, invert_moments
from eval.load import Checkpoint
from modules.choices import choose
from modules.params import as_matrices, matrix_axes
from modules.precision.codes import (
    CodedMatrix,
    OutputGrid,
    PackedWeight,
    PowerGrid,
    measure_ranges,
)

MAX_BITS = 8
EXPONENTS = np.arange(0.2, 1.001, 0.05)  # of the method `power`, of which the best is taken
LOSS_EXPONENT = 1.95  # theta of BAQ's code: the loss of an input falls with 2^(-theta bits)
MAX_LEVELS = 2**16  # of an input


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """Quantisation of weights. Raises ValueError for an unknown choice.

    Args:
      method: a row of METHODS.
      bits: of a weight; their mean for a method that distributes bits.
      block: inputs of an output that share a scale; 0: all inputs.
    """

    method: str
    bits: int
    block: int = 0

    def __post_init__(self):
        choose(METHODS, self.method, '--method')
        if not 2 <= self.bits <= MAX_BITS:
            raise ValueError(f'--bits must be 2 to {MAX_BITS}; got {self.bits}')
        if self.block < 0:
            raise ValueError(f'--block must be at least 0; got {self.block}')
        if self.block and not METHODS[self.method].has_blocks:
            with_blocks = ', '.join(name for name, row in METHODS.items() if row.has_blocks)
            raise ValueError(
                f'--method={self.method} has one scale for an output, but --block={self.block}. '
                f'Leave --block out, or choose {with_blocks}.'
            )

    def check_text(self, source: str | None) -> None:
        """Raises ValueError if --text is missing for a method that needs it, or is not read.

        source: the flag --text.
        """
        needs_text = METHODS[self.method].needs_moments
        if needs_text and not source:
            raise ValueError(f'--method={self.method} reads a text: add --text=SOURCE')
        if source and not needs_text:
            raise ValueError(f'--method={self.method} reads no text: leave out --text={source}')


@dataclasses.dataclass(frozen=True)
class QuantisedModel:
    """Parameters with rounded weights, and what rounding did.

    Attributes:
      params: by path; rounded weights are a `PackedWeight`.
      n_weights: rounded weights.
      mean_bits: of a weight, without scales: the mean of log2 of the levels.
      error: relative error of the rounded weights, `|W - Q| / |W|`.
      n_bytes: of the rounded weights, with their scales.
      exponent: of the method `power`; None: another method.
    """

    params: Mapping[str, Any]
    n_weights: int
    mean_bits: float
    error: float
    n_bytes: int
    exponent: float | None = None


def round_to_nearest(weights_IO: np.ndarray, bits: int, block: int) -> CodedMatrix:
    """Returns the weights of a matrix rounded to nearest.

    Args:
      weights_IO: the matrix.
      bits: of a weight.
      block: inputs that share a scale; 0: all.
    """
    size, levels = block or len(weights_IO), 2**bits
    blocks = [weights_IO[i : i + size] for i in range(0, len(weights_IO), size)]
    ranges = [measure_ranges(part, levels) for part in blocks]
    codes = [
        OutputGrid(ranges_KO, levels).encode(part)
        for ranges_KO, part in zip(ranges, blocks, strict=True)
    ]
    return code_matrix(np.concatenate(codes), levels, ranges, block)


def round_to_powers(weights_IO: np.ndarray, bits: int, block: int, exponent: float) -> CodedMatrix:
    """Returns the weights of a matrix rounded on a grid of powers.

    `q = sign(w) s (c / n)^(1 / a)` and `c = round(n (|w| / s)^a)`, with `n = 2^(bits - 1) - 1`, `s`
    the largest weight and `a` the exponent. If `a` is below 1, small weights have finer steps.
    Source: NUPES (arXiv:2308.05600), which also learns the rounding.

    Args:
      weights_IO: the matrix.
      bits: of a weight.
      block: inputs that share a scale; 0: all.
      exponent: a.
    """
    size, levels = block or len(weights_IO), 2**bits
    ranges, codes = [], []
    for i in range(0, len(weights_IO), size):
        part = weights_IO[i : i + size]
        largest_O = np.abs(part).max(0)
        ranges.append(np.stack([-largest_O, largest_O]).astype(np.float32))
        codes.append(PowerGrid(ranges[-1], levels, exponent).encode(part))
    return code_matrix(np.concatenate(codes), levels, ranges, block, exponent)


def code_matrix(
    codes_IO: np.ndarray,
    levels: Any,
    ranges: Sequence[np.ndarray],
    block: int,
    exponent: float | None = None,
) -> CodedMatrix:
    """Returns a matrix of codes.

    Args:
      codes_IO: of its weights.
      levels: number of values: a number, or one for each input [I, 1].
      ranges: [K, O] of each block.
      block: inputs that share a range; 0: all.
      exponent: of a grid of powers; None: even steps.
    """
    levels_I = np.broadcast_to(np.asarray(levels, np.int64), (len(codes_IO), 1))[:, 0]
    codes_IO = codes_IO.astype(np.uint16)
    return CodedMatrix(codes_IO, levels_I, np.stack(ranges), block, exponent)


def gptq(
    weights_IO: np.ndarray, moments_II: np.ndarray, levels: Any, block: int = 0
) -> tuple[CodedMatrix, np.ndarray]:
    """Rounds the inputs of a matrix one after another; later inputs make up for each error.

    `e = (w_i - q_i) / U_ii`, `w_j <- w_j - U_ij e` for `j > i`, with `U' U = H^-1` and `U` upper
    triangular, where `H` holds the means of `x_i x_j`, damped. Source: GPTQ (arXiv:2210.17323),
    without reordering. With blocks, a block's scales are those of its weights when it begins. The
    weights of inputs that are always 0 on the text are rounded to nearest, where the authors' code
    sets them to 0: an expert that the text does not reach would be lost.

    Args:
      weights_IO: the matrix.
      moments_II: means of x_i x_j over the tokens of a text.
      levels: of the grid: a number, or one for each input [I, 1].
      block: inputs that share a scale; 0: all.

    Returns:
      (the rounded matrix, the loss of each input [I], `sum_o (w - q)^2 / (2 U_ii^2)`).
    """
    u_II, _ = invert_moments(moments_II)  # diagonal for an input that is always 0
    weights_IO = np.array(weights_IO, np.float64)
    codes_IO, losses_I = np.empty_like(weights_IO), np.empty(len(weights_IO))
    size, start, ranges = block or len(weights_IO), 0, []
    for i in range(len(weights_IO)):
        if i % size == 0:
            start = i
            ranges.append(measure_ranges(weights_IO[i : i + size], levels))
            block_grid = OutputGrid(ranges[-1], levels)
        grid = block_grid.select(slice(i - start, i - start + 1))
        codes_IO[i] = grid.encode(weights_IO[i : i + 1])[0]
        error_O = (weights_IO[i] - grid.decode(codes_IO[i : i + 1])[0]) / u_II[i, i]
        losses_I[i] = np.sum(error_O**2) / 2
        weights_IO[i + 1 :] -= u_II[i, i + 1 :, None] * error_O
    return code_matrix(codes_IO, levels, ranges, block), losses_I


def distribute_levels(losses_I: np.ndarray, bits: int) -> np.ndarray:
    """Returns the levels of each input for which all have the same loss, [I].

    `2^R_i = round(max(1, (l_i / (rho mean l) 2^(theta bits))^(1 / theta)))`, where `l` are the
    losses with the same bits for all, and `rho mean l` is their geometric mean. Source: BAQ
    (arXiv:2506.05664), https://github.com/CSU-ModelCompression/BAQ.

    Args:
      losses_I: of the inputs with `bits` each.
      bits: the mean, up to the rounding of levels and to inputs that keep a single one.
    """
    is_used = losses_I > 0
    if not is_used.any():
        return np.full(losses_I.shape, 2**bits)
    mean_log = np.mean(np.log(losses_I[is_used]))
    ratios_I = np.where(is_used, losses_I, 0.0) / np.exp(mean_log)
    levels_I = np.round(np.maximum(1.0, ratios_I ** (1 / LOSS_EXPONENT) * 2.0**bits))
    return np.minimum(levels_I, MAX_LEVELS).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of METHODS.

    Attributes:
      round: (weights [I, O], moments [I, I] or None, quantisation, exponent) -> `CodedMatrix`.
      needs_moments: whether it reads the means of x_i x_j over a text.
      has_blocks: whether inputs can share scales in blocks.
    """

    round: Callable[..., CodedMatrix]
    needs_moments: bool = False
    has_blocks: bool = True


def _apply_rtn(weights_IO, _, quantisation, exponent):
    return round_to_nearest(weights_IO, quantisation.bits, quantisation.block)


def _apply_power(weights_IO, _, quantisation, exponent):
    return round_to_powers(weights_IO, quantisation.bits, quantisation.block, exponent)


def _apply_gptq(weights_IO, moments_II, quantisation, exponent):
    return gptq(weights_IO, moments_II, 2**quantisation.bits, quantisation.block)[0]


def _apply_baq(weights_IO, moments_II, quantisation, exponent):
    _, losses_I = gptq(weights_IO, moments_II, 2**quantisation.bits)
    levels_I = distribute_levels(losses_I, quantisation.bits)
    return gptq(weights_IO, moments_II, levels_I[:, None])[0]


METHODS: Mapping[str, Method] = {
    'rtn': Method(_apply_rtn),
    'power': Method(_apply_power),
    'gptq': Method(_apply_gptq, needs_moments=True),
    'baq': Method(_apply_baq, needs_moments=True, has_blocks=False),
}


def quantise_checkpoint(
    checkpoint: Checkpoint, quantisation: Quantisation, tokens_BT: np.ndarray | None = None
) -> QuantisedModel:
    """Returns a model with rounded weights in all matrices of its blocks.

    Statistics of the text are those of the model before rounding. Embeddings, readout, norms and
    biases stay.

    Args:
      checkpoint: a loaded checkpoint.
      quantisation: how weights are rounded.
      tokens_BT: the text for methods that need it, a document per row.

    Raises:
      ValueError: for a model with a reparametrisation.
    """
    check_stored_as_used(checkpoint, 'quantised')
    reader = ScoreReader(checkpoint.learner, checkpoint.recipe.microbatch_size)
    method = METHODS[quantisation.method]
    params: Any = flat_params(checkpoint)
    moments = {}
    if tokens_BT is not None:
        moments = reader.compute_means(MOMENTS, checkpoint.weights, tokens_BT)
    matrices = {
        path: np.asarray(as_matrices(reader.specs[path], params[path]), np.float64)
        for path in reader.list_matrices(checkpoint.weights, tokens_BT)
    }
    exponent = find_exponent(matrices, quantisation) if quantisation.method == 'power' else None
    rounded: dict[str, Any] = dict(params)
    errors = sizes = n_bits = 0.0
    n_bytes = 0
    for path, stack_IO in matrices.items():
        n_inputs, n_outputs = stack_IO.shape[-2:]
        flat_IO = stack_IO.reshape(-1, n_inputs, n_outputs)
        flat_II: Any = [None] * len(flat_IO)
        if path in moments:
            flat_II = np.reshape(moments[path], (-1, n_inputs, n_inputs))
        coded = [
            method.round(weights_IO, moments_II, quantisation, exponent)
            for weights_IO, moments_II in zip(flat_IO, flat_II, strict=True)
        ]
        order = sum(matrix_axes(reader.specs[path]), ())
        rounded[path] = PackedWeight(coded, order, params[path].shape)
        for matrix, weights_IO in zip(coded, flat_IO, strict=True):
            errors += np.sum((matrix.values() - weights_IO) ** 2)
            n_bits += np.sum(np.log2(matrix.levels_I)) * n_outputs
        sizes += np.sum(stack_IO**2)
        n_bytes += sum(x.nbytes for x in rounded[path].arrays().values())
    n_weights = sum(stack_IO.size for stack_IO in matrices.values())
    mean_bits, error = float(n_bits / n_weights), float(np.sqrt(errors / sizes))
    return QuantisedModel(rounded, n_weights, mean_bits, error, n_bytes, exponent)


def find_exponent(matrices: Mapping[str, np.ndarray], quantisation: Quantisation) -> float:
    """Returns the exponent with the smallest error of all weights, one for the model.

    Args:
      matrices: [..., I, O], by path.
      quantisation: the bits and blocks.
    """

    def error(exponent):
        total = 0.0
        for stack_IO in matrices.values():
            for weights_IO in stack_IO.reshape(-1, *stack_IO.shape[-2:]):
                coded = round_to_powers(weights_IO, quantisation.bits, quantisation.block, exponent)
                total += np.sum((coded.values() - weights_IO) ** 2)
        return total

    return float(min(EXPONENTS, key=error))
