"""Matrices of few values, as integers in few bits.

Names of axes: I inputs, O outputs, G blocks of inputs that share a range.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

WORD_VALUES = 2**64  # of the words that hold codes


class OutputGrid:
    """Evenly spaced values between the smallest and the largest weight of each output, and 0.

    `q = s (clip(round(w / s) + z, 0, n - 1) - z)`, with `s = (max - min) / (n - 1)`,
    `z = round(-min / s)` and `n` levels. A single level is the mean.

    Args:
      ranges_KO: smallest weight, largest weight and, for inputs of a single level, mean of the
        weights of each output, in float32.
      levels: n, a number or one for each input [I, 1].
    """

    def __init__(self, ranges_KO: np.ndarray, levels: Any):
        low_O, high_O, *mean_O = np.asarray(ranges_KO, np.float64)
        is_zero_O = (low_O == 0) & (high_O == 0)
        low_O, high_O = np.where(is_zero_O, -1.0, low_O), np.where(is_zero_O, 1.0, high_O)
        self.levels_I1 = np.reshape(levels, (-1, 1))
        self.scale_IO = (high_O - low_O) / np.maximum(self.levels_I1 - 1, 1)
        self.zero_IO = np.round(-low_O / self.scale_IO)
        self.mean_O = mean_O[0] if mean_O else 0.0

    def encode(self, weights_IO: np.ndarray) -> np.ndarray:
        """Returns the codes of the nearest values, from 0."""
        codes_IO = np.round(weights_IO / self.scale_IO) + self.zero_IO
        return np.clip(codes_IO, 0, self.levels_I1 - 1)

    def decode(self, codes_IO: np.ndarray) -> np.ndarray:
        """Returns the values of codes."""
        values_IO = self.scale_IO * (codes_IO - self.zero_IO)
        return np.where(self.levels_I1 > 1, values_IO, self.mean_O)


class PowerGrid:
    """Values `sign(c) s (|c| / n)^(1 / a)` for the codes `n + c`, with `c` from `-n` to `n`.

    Args:
      ranges_KO: smallest and largest value, `-s` and `s`.
      levels: `2 n + 1`, or one more, which is not used.
      exponent: a.
    """

    def __init__(self, ranges_KO: np.ndarray, levels: Any, exponent: float):
        self.largest_O = np.asarray(ranges_KO, np.float64)[1]
        self.n_magnitudes, self.exponent = (np.max(levels) - 1) // 2, exponent

    def encode(self, weights_IO: np.ndarray) -> np.ndarray:
        """Returns the codes of the nearest powers, from 0."""
        largest_O = np.where(self.largest_O > 0, self.largest_O, 1.0)
        shares_IO = np.minimum(np.abs(weights_IO) / largest_O, 1.0)
        magnitudes_IO = np.round(self.n_magnitudes * shares_IO**self.exponent)
        return self.n_magnitudes + np.sign(weights_IO) * magnitudes_IO

    def decode(self, codes_IO: np.ndarray) -> np.ndarray:
        """Returns the values of codes."""
        c_IO = codes_IO - self.n_magnitudes
        powers_IO = (np.abs(c_IO) / self.n_magnitudes) ** (1 / self.exponent)
        return np.sign(c_IO) * self.largest_O * powers_IO


@dataclasses.dataclass(frozen=True)
class CodedMatrix:
    """A matrix of few values.

    Attributes:
      codes_IO: number of the value of each weight, from 0.
      levels_I: number of values of each input.
      ranges_GKO: the range of each block and output, as `OutputGrid` or `PowerGrid` reads it, in
        float32.
      block: inputs that share a range; 0: all.
      exponent: of a `PowerGrid`; None: an `OutputGrid`.
    """

    codes_IO: np.ndarray
    levels_I: np.ndarray
    ranges_GKO: np.ndarray
    block: int = 0
    exponent: float | None = None

    def values(self) -> np.ndarray:
        """Returns the matrix, [I, O], in float64."""
        size = self.block or len(self.codes_IO)
        parts = []
        for i, ranges_KO in zip(range(0, len(self.codes_IO), size), self.ranges_GKO, strict=True):
            levels = self.levels_I[i : i + size, None]
            grid = make_grid(ranges_KO, levels, self.exponent)
            parts.append(grid.decode(np.asarray(self.codes_IO[i : i + size], np.float64)))
        return np.concatenate(parts)


def make_grid(ranges_KO: np.ndarray, levels: Any, exponent: float | None) -> OutputGrid | PowerGrid:
    """Returns the grid of a block.

    Args:
      ranges_KO: ranges of its outputs.
      levels: number of values, of all inputs or of each [I, 1].
      exponent: of a `PowerGrid`; None: an `OutputGrid`.
    """
    if exponent is None:
        return OutputGrid(ranges_KO, levels)
    return PowerGrid(ranges_KO, levels, exponent)


def measure_ranges(weights_IO: np.ndarray, levels: Any) -> np.ndarray:
    """Returns the ranges of the outputs of a block for an `OutputGrid`, [K, O], in float32.

    Args:
      weights_IO: the weights of the block.
      levels: number of values, of all inputs or of each; some of these may have a single one.
    """
    rows = [np.minimum(weights_IO.min(0), 0.0), np.maximum(weights_IO.max(0), 0.0)]
    if np.ndim(levels) or levels == 1:
        rows.append(weights_IO.mean(0))
    return np.stack(rows).astype(np.float32)


@functools.cache
def count_digits(base: int) -> int:
    """Returns how many digits of a base fit in a word of 64 bits."""
    n_digits = 0
    while base ** (n_digits + 1) <= WORD_VALUES:
        n_digits += 1
    return n_digits


def pack(codes_IO: np.ndarray, levels_I: np.ndarray) -> np.ndarray:
    """Packs codes into bytes [N], as many in 64 bits as fit.

    The codes of all inputs with n levels are the digits of words in base n, the lowest first, and
    words of fewer levels come first. So 16 weights of four bits take 64 bits, and 40 weights of
    three values.

    Args:
      codes_IO: numbers from 0.
      levels_I: number of values of each input.
    """
    words = [np.zeros(0, np.uint64)]
    for levels in sorted(set(levels_I.tolist()) - {1}):
        digits = codes_IO[levels_I == levels].reshape(-1).astype(np.uint64)
        n_digits = count_digits(levels)
        digits = np.pad(digits, (0, -len(digits) % n_digits)).reshape(-1, n_digits)
        total = np.zeros(len(digits), np.uint64)
        for digit in digits.T[::-1]:
            total = total * np.uint64(levels) + digit
        words.append(total)
    return np.concatenate(words).astype('<u8').view(np.uint8)


def unpack(packed_N: np.ndarray, levels_I: np.ndarray, n_outputs: int) -> np.ndarray:
    """Returns the codes that `pack` was given, [I, O].

    Args:
      packed_N: bytes.
      levels_I: number of values of each input.
      n_outputs: O.
    """
    words = np.ascontiguousarray(packed_N).view('<u8')
    codes_IO = np.zeros((len(levels_I), n_outputs), np.uint16)
    start = 0
    for levels in sorted(set(levels_I.tolist()) - {1}):
        is_row_I, n_digits = levels_I == levels, count_digits(levels)
        n_codes = int(is_row_I.sum()) * n_outputs
        n_words = -(-n_codes // n_digits)
        total = words[start : start + n_words]
        digits = np.empty((n_words, n_digits), np.uint16)
        for i in range(n_digits):
            digits[:, i] = total % np.uint64(levels)
            total = total // np.uint64(levels)
        codes_IO[is_row_I] = digits.reshape(-1)[:n_codes].reshape(-1, n_outputs)
        start += n_words
    return codes_IO


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A parameter as packed matrices.

    Attributes:
      matrices: of each index of its batch axes, in order.
      order: the axes of the parameter, those of the batch first, then of inputs and of outputs.
      shape: of the parameter.
    """

    matrices: Sequence[CodedMatrix]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    dtype: ClassVar[np.dtype] = np.dtype(np.float32)

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays to store: `codes` [N], `ranges` [S, G, K, O] and, unless all are
        equal, `levels` [S, I].
        """
        levels_SI = np.stack([matrix.levels_I for matrix in self.matrices])
        codes_IO = np.concatenate([matrix.codes_IO for matrix in self.matrices])
        ranges = np.stack([matrix.ranges_GKO for matrix in self.matrices])
        arrays = {'codes': pack(codes_IO, levels_SI.reshape(-1)), 'ranges': ranges}
        if self.levels is None:
            arrays['levels'] = levels_SI.astype(np.int32)
        return arrays

    @property
    def levels(self) -> int | None:
        """Number of values of all inputs; None if it differs."""
        numbers = {n for matrix in self.matrices for n in matrix.levels_I.tolist()}
        return numbers.pop() if len(numbers) == 1 else None

    def record(self) -> dict[str, Any]:
        """Returns the record that `unpack_weight` reads besides the arrays, for JSON."""
        matrix = self.matrices[0]
        return {
            'order': list(self.order),
            'shape': list(self.shape),
            'inputs': len(matrix.levels_I),
            'levels': self.levels,
            'block': matrix.block,
            'exponent': matrix.exponent,
        }

    def values(self) -> np.ndarray:
        """Returns the parameter, in float32."""
        return self.assemble([matrix.values() for matrix in self.matrices])

    def assemble(self, matrices: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a parameter like this one, in float32, from its matrices [I, O]."""
        ordered = np.stack(matrices).astype(np.float32).reshape([self.shape[i] for i in self.order])
        return np.transpose(ordered, np.argsort(self.order))


def unpack_weight(arrays: dict[str, np.ndarray], record: dict[str, Any]) -> PackedWeight:
    """Inverts `PackedWeight.arrays` and `PackedWeight.record`.

    Args:
      arrays: the stored arrays.
      record: the rest.
    """
    ranges = np.asarray(arrays['ranges'])
    n_matrices, n_inputs, n_outputs = len(ranges), record['inputs'], ranges.shape[-1]
    levels = arrays.get('levels', record['levels'])
    levels_SI = np.broadcast_to(np.asarray(levels), (n_matrices, n_inputs))
    codes = unpack(np.asarray(arrays['codes']), levels_SI.reshape(-1), n_outputs)
    matrices = [
        CodedMatrix(codes_IO, levels_I, ranges_GKO, record['block'], record['exponent'])
        for codes_IO, levels_I, ranges_GKO in zip(
            codes.reshape(n_matrices, n_inputs, n_outputs), levels_SI, ranges, strict=True
        )
    ]
    return PackedWeight(matrices, tuple(record['order']), tuple(record['shape']))
