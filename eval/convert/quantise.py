"""Quantises checkpoints after training: rounds the weights of their blocks to few bits."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eval.convert.learned_rounding import (
    learn_rounding,
    learn_weights_and_ranges,
    make_problem,
)
from eval.convert.merge import check_stored_as_used, flat_params
from eval.convert.parts import NO_PARTS, Parts
from eval.convert.prune import ScoreReader, to_weights
from eval.convert.scores import MOMENTS, invert_moments
from eval.load import Checkpoint
from lm.config.resolve import digest
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
# The most tokens of a row of the text. In many models most attention goes to the first token of a
# row, whose activations are unlike all others. Among 2,048 tokens, its errors weigh too little.
# GPTQ of the value matrices of a llama of 135 million cost 0.165 nats with rows of 2,048 tokens and
# 0.036 with rows of 128 (to nearest 0.014); GPTQ of all matrices cost 0.29 and 0.13 (0.23).
ROW_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """Quantisation of weights. Raises ValueError for an unknown choice.

    Args:
      method: a row of METHODS.
      bits: of a weight; their mean for a method that distributes bits.
      block: inputs of an output that share a scale; 0: all inputs.
      mix: bits to choose from for each matrix, so that their mean is at most `bits`; (): all
        matrices have `bits`.
    """

    method: str
    bits: int
    block: int = 0
    mix: tuple[int, ...] = ()

    def __post_init__(self):
        choose(METHODS, self.method, '--method')
        for flag, bits in (('--bits', self.bits), *(('--mix', bits) for bits in self.mix)):
            if not 2 <= bits <= MAX_BITS:
                raise ValueError(f'{flag} must be 2 to {MAX_BITS}; got {bits}')
        if self.mix and not min(self.mix) < self.bits < max(self.mix):
            raise ValueError(
                f'--bits must lie between the smallest and the largest of --mix, as it is their '
                f'mean; got --bits={self.bits} and --mix={",".join(map(str, self.mix))}'
            )
        if self.mix and not METHODS[self.method].has_blocks:
            raise ValueError(
                f'--method={self.method} distributes bits itself, but --mix is given. Leave --mix '
                'out, or choose another method.'
            )
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
        needs_moments = METHODS[self.method].needs_moments
        if (needs_moments or self.mix) and not source:
            reader = f'--method={self.method}' if needs_moments else '--mix'
            raise ValueError(f'{reader} reads a text: add --text=SOURCE')
        if source and not (needs_moments or self.mix):
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
    levels = 2**bits
    ranges = [measure_ranges(part, levels) for part in split_inputs(weights_IO, block)]
    return encode_nearest(weights_IO, ranges, levels, block)


def encode_nearest(
    weights_IO: np.ndarray, ranges: Sequence[np.ndarray], levels: int, block: int
) -> CodedMatrix:
    """Returns the nearest values of the weights of a matrix.

    Args:
      weights_IO: the matrix.
      ranges: [K, O] of each block.
      levels: number of values.
      block: inputs that share a range; 0: all.
    """
    codes = [
        OutputGrid(ranges_KO, levels).encode(part)
        for ranges_KO, part in zip(ranges, split_inputs(weights_IO, block), strict=True)
    ]
    return code_matrix(np.concatenate(codes), levels, ranges, block)


def split_inputs(weights_IO: np.ndarray, block: int) -> list[np.ndarray]:
    """Returns the blocks of inputs of a matrix.

    block: inputs of a block; 0: all.
    """
    size = block or len(weights_IO)
    return [weights_IO[i : i + size] for i in range(0, len(weights_IO), size)]


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
    levels, ranges, codes = 2**bits, [], []
    for part in split_inputs(weights_IO, block):
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
    size, ranges = block or len(weights_IO), []
    for i in range(len(weights_IO)):
        if i % size == 0:
            ranges.append(measure_ranges(weights_IO[i : i + size], levels))
        grid = OutputGrid(ranges[-1], levels[i] if np.ndim(levels) else levels)
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


def _apply_adaquant(weights_IO, moments_II, quantisation, exponent):
    levels, block = 2**quantisation.bits, quantisation.block
    nearest = round_to_nearest(weights_IO, quantisation.bits, block)
    problem = make_problem(weights_IO, moments_II, nearest.ranges_GKO, block)
    learned_IO, ranges = jax.device_get(learn_weights_and_ranges(problem, levels))
    return encode_nearest(learned_IO.astype(np.float64), list(ranges), levels, block)


def _apply_adaround(weights_IO, moments_II, quantisation, exponent):
    levels, block = 2**quantisation.bits, quantisation.block
    ranges = _apply_adaquant(weights_IO, moments_II, quantisation, exponent).ranges_GKO
    problem = make_problem(weights_IO, moments_II, ranges, block)
    rounded_IO = np.asarray(learn_rounding(problem, levels), np.float64)
    return encode_nearest(rounded_IO, list(ranges), levels, block)


METHODS: Mapping[str, Method] = {
    'rtn': Method(_apply_rtn),
    'power': Method(_apply_power),
    'gptq': Method(_apply_gptq, needs_moments=True),
    'adaquant': Method(_apply_adaquant, needs_moments=True),
    'adaround': Method(_apply_adaround, needs_moments=True),
    'baq': Method(_apply_baq, needs_moments=True, has_blocks=False),
}


class Quantiser:
    """Rounds the weights in the blocks of one model, by any methods.

    Statistics of the text are those of the model before rounding, and are computed once.
    Embeddings, readout, norms and biases stay.

    Args:
      checkpoint: a loaded checkpoint.
      tokens_BT: a text, for methods that read one.

    Raises:
      ValueError: for a model with a reparametrisation.
    """

    def __init__(self, checkpoint: Checkpoint, tokens_BT: np.ndarray | None = None):
        check_stored_as_used(checkpoint, 'quantised')
        self._checkpoint, self._tokens_BT = checkpoint, tokens_BT
        self._reader = ScoreReader(checkpoint.learner, checkpoint.recipe.microbatch_size)
        self._params: dict[str, Any] = flat_params(checkpoint)
        specs = self._reader.specs
        self._matrices = {
            path: np.asarray(as_matrices(specs[path], self._params[path]), np.float64)
            for path in self._reader.list_matrices(checkpoint.weights, tokens_BT)
        }

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the model and the text."""
        recorded = hashlib.sha256(digest(self._checkpoint.recipe).encode())
        for path, leaf in sorted(self._params.items()):
            recorded.update(f'{path}{leaf.shape}'.encode())
            recorded.update(np.ascontiguousarray(leaf))
        if self._tokens_BT is not None:
            recorded.update(np.ascontiguousarray(self._tokens_BT))
        return recorded.hexdigest()

    @functools.cached_property
    def moments(self) -> dict[str, np.ndarray]:
        """Means of `x_i x_j` over the text, by path."""
        assert self._tokens_BT is not None  # `Quantisation.check_text`
        return self._reader.compute_means(MOMENTS, self._checkpoint.weights, self._tokens_BT)

    def quantise(self, quantisation: Quantisation, parts: Parts = NO_PARTS) -> QuantisedModel:
        """Returns the model with rounded weights.

        Args:
          quantisation: how weights are rounded.
          parts: keeps each parameter as soon as it is rounded, and has those of an interrupted
            command.
        """
        matrices = self._matrices
        exponent = find_exponent(matrices, quantisation) if quantisation.method == 'power' else None
        choices = sorted({*quantisation.mix}) or [quantisation.bits]
        packed: dict[str, dict[int, PackedWeight]] = {path: {} for path in matrices}
        for path, bits in itertools.product(matrices, choices):
            settings = dataclasses.replace(quantisation, bits=bits, mix=())
            packed[path][bits] = parts.compute(
                lambda path=path, settings=settings: (path, settings, exponent, self.digest),
                functools.partial(self.round_param, path, settings, exponent),
            )
        if quantisation.mix:
            selected = mix_bits(self.measure_loss, matrices, packed, quantisation.bits)
        else:
            selected = {path: by_bits[quantisation.bits] for path, by_bits in packed.items()}
        return self._describe(selected, exponent)

    def round_param(
        self, path: str, quantisation: Quantisation, exponent: float | None
    ) -> PackedWeight:
        """Returns a parameter with rounded matrices.

        Args:
          path: of the parameter.
          quantisation: how weights are rounded.
          exponent: of the method `power`.
        """
        method, stack_IO = METHODS[quantisation.method], self._matrices[path]
        stack_IO = stack_IO.reshape(-1, *stack_IO.shape[-2:])
        stack_II: Any = [None] * len(stack_IO)
        if method.needs_moments:
            stack_II = np.reshape(self.moments[path], (len(stack_IO), *[stack_IO.shape[1]] * 2))
        coded = [
            method.round(weights_IO, moments_II, quantisation, exponent)
            for weights_IO, moments_II in zip(stack_IO, stack_II, strict=True)
        ]
        order = sum(matrix_axes(self._reader.specs[path]), ())
        return PackedWeight(coded, order, self._params[path].shape)

    def measure_loss(
        self, changed: Mapping[str, Any], tokens_BT: np.ndarray | None = None
    ) -> float:
        """Returns the loss of the model with some other parameters.

        Args:
          changed: the other parameters, by path; they may be packed.
          tokens_BT: a text; None: that of the statistics.
        """
        tokens_BT = self._tokens_BT if tokens_BT is None else tokens_BT
        assert tokens_BT is not None  # `Quantisation.check_text`
        wide = {p: w.values() if isinstance(w, PackedWeight) else w for p, w in changed.items()}
        weights = to_weights(self._checkpoint, {**self._params, **wide})
        return self._reader.compute_loss(weights, tokens_BT)

    def _describe(
        self, selected: Mapping[str, PackedWeight], exponent: float | None
    ) -> QuantisedModel:
        errors = sizes = n_bits = 0.0
        for path, weight in selected.items():
            n_inputs, n_outputs = self._matrices[path].shape[-2:]
            for matrix, weights_IO in zip(
                weight.matrices, self._matrices[path].reshape(-1, n_inputs, n_outputs), strict=True
            ):
                errors += np.sum((matrix.values() - weights_IO) ** 2)
                n_bits += np.sum(np.log2(matrix.levels_I)) * n_outputs
            sizes += np.sum(self._matrices[path] ** 2)
        n_weights = sum(stack_IO.size for stack_IO in self._matrices.values())
        n_bytes = sum(x.nbytes for weight in selected.values() for x in weight.arrays.values())
        mean_bits, error = float(n_bits / n_weights), float(np.sqrt(errors / sizes))
        params = {**self._params, **selected}
        return QuantisedModel(params, n_weights, mean_bits, error, n_bytes, exponent)


def mix_bits(
    loss: Callable[[Mapping[str, Any]], float],
    matrices: Mapping[str, np.ndarray],
    packed: Mapping[str, Mapping[int, PackedWeight]],
    mean_bits: int,
) -> dict[str, PackedWeight]:
    """Chooses the bits of each matrix by an integer program.

    `min sum_mb x_mb dL_mb` with `sum_b x_mb = 1` and a mean of at most `mean_bits` bits, where
    `dL_mb` is the change of the loss if only matrix `m` is rounded, to `b` bits. Source: the
    integer program of AdaQuant (arXiv:2006.10518).

    Args:
      loss: of the model with some other parameters.
      matrices: before rounding, [..., I, O], by path.
      packed: the rounded parameters, by path and bits.
      mean_bits: the largest mean.
    """
    unrounded, places, measured = loss({}), [], []
    for path, weights in packed.items():
        whole = list(matrices[path].reshape(-1, *matrices[path].shape[-2:]))
        for i, weights_IO in enumerate(whole):
            losses = {}
            for bits, weight in weights.items():
                stack = [*whole[:i], weight.matrices[i].values(), *whole[i + 1 :]]
                losses[bits] = loss({path: weight.assemble(stack)}) - unrounded
            places.append(path)
            measured.append((weights_IO.size, losses))
    chosen: dict[str, list[int]] = {}
    for path, bits in zip(places, allocate_bits(measured, mean_bits), strict=True):
        chosen.setdefault(path, []).append(bits)
    return {
        path: dataclasses.replace(
            next(iter(packed[path].values())),
            matrices=[packed[path][bits].matrices[i] for i, bits in enumerate(stack_bits)],
        )
        for path, stack_bits in chosen.items()
    }


def allocate_bits(
    matrices: Sequence[tuple[int, Mapping[int, float]]], mean_bits: float
) -> list[int]:
    """Returns the bits of each matrix with the smallest sum of losses.

    Args:
      matrices: (weights, {bits: loss}) of each.
      mean_bits: the largest mean over all weights.
    """
    from scipy import optimize, sparse  # takes 0.3 s

    losses, costs, rows, choices = [], [], [], []
    for row, (size, by_bits) in enumerate(matrices):
        for bits, loss in by_bits.items():
            losses.append(loss)
            costs.append(size * bits)
            rows.append(row)
            choices.append(bits)
    n, n_weights = len(losses), sum(size for size, _ in matrices)
    one_each = sparse.csr_array((np.ones(n), (rows, range(n))))
    program = optimize.milp(
        losses,
        integrality=np.ones(n),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(np.array(costs)[None] / n_weights, ub=mean_bits),
        ],
    )
    return [bits for bits, is_chosen in zip(choices, np.round(program.x), strict=True) if is_chosen]


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
