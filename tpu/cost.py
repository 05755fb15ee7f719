"""The cost of a step on one device, from its compiled program: operations, and bytes of memory."""

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from modules.kernels.attention.splash import computed_share
from tpu.hlo import Array, Computation, Instruction, Module
from tpu.integers import find_root, skip_opcode
from tpu.rates import CAUSAL, LENGTH, attention_share, few_bits_factor, tile_fill_share

# Opcodes that neither compute nor move memory; the same holds for all that end in -done.
FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call', 'send')
FREE += ('conditional', 'after-all', 'partition-id', 'replica-id', 'opt-barrier', 'domain', 'recv')
FREE += ('async-start', 'async-update', 'custom-call-start', 'custom-call-update')
# Custom calls of TPU programs that only mark buffers or wait.
FREE_CALLS = ('AllocateBuffer', 'AsyncCollectiveDone', 'ConcatBitcast', 'ShardBarrier')
SLICES = ('slice', 'dynamic-slice', 'gather')  # these read as much as they return
UPDATE = 'dynamic-update-slice'  # writes its second operand into its first, in place
FUSIONS = ('fusion', 'fusion-start')  # on GPUs the second runs beside other work
KERNELS = ('tpu_custom_call', 'mosaic_gpu', '__gpu$xla.gpu.triton')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
BATCH = re.compile(r'lhs_batch_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
WINDOW = re.compile(r'window={([^}]*)}')
ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
SPLASH = re.compile(r'splash_m[hq]a_(fwd|dq|dkv)')
# Products of queries and keys in splash attention's kernels, each 2 operations. dkv has one more if
# it also computes dq, its third result.
SPLASH_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}
CUDNN = '__cudnn$fmha'  # prefix of the names of cuDNN's attention kernels
CUDNN_SIZES = re.compile(r'"dimensions": ?\[((?:"\d+"(?:, ?)?){4})\]')  # B, N, T, S of the scores
CUDNN_MASK = re.compile(r'"mask_type": ?"(\w+)"')
CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')


class Cost(NamedTuple):
    """Cost of a step or of an instruction.

    flops: operations of products. bytes: read from and written to memory. seconds: all operations
    in sequence; each takes the longer of its products and its bytes. unknown: kernels with an
    unknown number of operations, and loops with an unknown number of rounds. flops_at_peak: the
    flops that a device at its peak computes in the time of the products. bound: seconds if all
    products ran at the peak.
    """

    flops: float
    bytes: float
    seconds: float
    unknown: tuple[str, ...]
    flops_at_peak: float
    bound: float


def estimate_cost(
    module: Module, rate: float, bandwidth: float, pair_share: float = 0.5, kind: str = ''
) -> Cost:
    """Estimates the cost of one step on one device.

    Args:
      module: the compiled program.
      rate: peak flop/s of the device.
      bandwidth: bytes per second of its memory.
      pair_share: share of all pairs of tokens that splash attention's kernels compute.
      kind: kind of the device, for the share of the peak that products reach (`tpu.rates`); '' for
        all of it.

    Returns:
      The cost.
    """
    flops = n_bytes = seconds = flops_at_peak = bound = 0.0
    unknown = set(module.unknown_loops)
    for name, instruction, rounds in module.instructions():
        computation = module.computations[name]
        cost = operation_cost(module, computation, instruction, rate, bandwidth, pair_share, kind)
        flops += rounds * cost.flops
        n_bytes += rounds * cost.bytes
        seconds += rounds * cost.seconds
        flops_at_peak += rounds * cost.flops_at_peak
        bound += rounds * cost.bound
        unknown.update(cost.unknown)
    return Cost(flops, n_bytes, seconds, tuple(sorted(unknown)), flops_at_peak, bound)


def operation_cost(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    rate: float,
    bandwidth: float,
    pair_share: float = 0.5,
    kind: str = '',
) -> Cost:
    """Estimates the cost of one instruction, run once.

    Args:
      module: the compiled program.
      computation: holds the instruction.
      instruction: the instruction.
      rate: peak flop/s of the device.
      bandwidth: bytes per second of its memory.
      pair_share: as in `estimate_cost`.
      kind: as in `estimate_cost`.

    Returns:
      The cost.
    """
    known_flops = _count_flops(module, computation, instruction, pair_share)
    # A kernel of unknown flops still counts by its bytes, so that it costs some time.
    flops, n_bytes = known_flops or 0.0, _count_bytes(module, computation, instruction)
    flops_at_peak, flops_in_full_tiles = _flops_at_peak(
        module, computation, instruction, flops, kind
    )
    # Roofline: reads and writes of an operation overlap with its products.
    seconds, bound = (
        max(n / rate, n_bytes / bandwidth) for n in (flops_at_peak, flops_in_full_tiles)
    )
    unknown = () if known_flops is not None else (instruction.name,)
    return Cost(flops, n_bytes, seconds, unknown, flops_at_peak, bound)


def _count_flops(
    module: Module, computation: Computation, instruction: Instruction, pair_share: float
) -> float | None:
    """Counts 2 for each product and sum; None if the number is unknown."""
    if instruction.opcode == 'custom-call':
        return _kernel_flops(computation, instruction, pair_share)
    return sum(product.flops for product in _products(module, computation, instruction))


class _Product(NamedTuple):
    """A product of matrices in a compiled program.

    contracted: the length of the sums. columns: elements of the narrower operand without batch and
    contracted dimensions. dtypes: of both operands.
    """

    flops: float
    contracted: float
    columns: float
    dtypes: tuple[str, str]


def _products(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[_Product]:
    """Yields the product of an instruction, for a fusion all inside it."""
    parts = (
        module.fused_instructions(instruction)
        if instruction.opcode in FUSIONS
        else [(computation, instruction)]
    )
    for inner, part in parts:
        if part.opcode == 'dot':
            flops, batch = _dot_flops(inner, part), _dot_batch(inner, part)
        elif part.opcode == 'convolution':
            flops, batch = _convolution_flops(inner, part), _convolution_batch(inner, part)
        else:
            continue
        # Each element of the result sums `contracted` products, 2 flops each. This holds for
        # convolutions too, and leaves out their padding.
        contracted = flops / 2 / part.arrays[0].size
        narrower = min(math.prod(_operand_shape(inner, part, operand)) for operand in (0, 1))
        first, second = (inner[part.operands[i]].arrays[0].dtype for i in (0, 1))
        yield _Product(flops, contracted, narrower / contracted / batch, (first, second))


def _flops_at_peak(
    module: Module, computation: Computation, instruction: Instruction, flops: float, kind: str
) -> tuple[float, float]:
    """Returns the bfloat16 flops that a device at its peak computes in the time of an instruction's
    `flops`, and in the least time, with full tiles.
    """
    if instruction.opcode == 'custom-call':
        share_args = _match_attention(computation, instruction)
        return flops / attention_share(kind, *share_args) if share_args else flops, flops
    at_peak = in_full_tiles = 0.0
    for product in _products(module, computation, instruction):
        wide_flops = product.flops / few_bits_factor(kind, product.dtypes)
        at_peak += wide_flops / tile_fill_share(kind, product.contracted, product.columns)
        in_full_tiles += wide_flops
    return at_peak, in_full_tiles


def _match_attention(
    computation: Computation, instruction: Instruction
) -> tuple[int, str, float] | None:
    """Returns the last three arguments of `attention_share` for an attention kernel, else None.

    Operations of splash attention are counted by blocks.
    """
    if kernel := SPLASH.match(instruction.name):
        queries, _ = _query_key_shapes(computation, instruction)
        phase = 'forward' if kernel[1] == 'fwd' else 'backward'
        return queries[-1], phase, computed_share(LENGTH, None)
    target = TARGET.search(instruction.attributes)
    if target and target[1].startswith(CUDNN):
        phase = 'backward' if 'Backward' in target[1] else 'forward'
        return _operand_shape(computation, instruction, 0)[-1], phase, CAUSAL
    return None


def _operand_shape(
    computation: Computation, instruction: Instruction, operand: int
) -> tuple[int, ...]:
    """Returns the shape of an operand."""
    return computation[instruction.operands[operand]].arrays[0].shape


def _dot_flops(computation: Computation, instruction: Instruction) -> float:
    """Counts the flops of a dot, or of a library call, which gives its dimensions in JSON."""
    match = CONTRACTED.search(instruction.attributes)
    # Without the attribute the last axis of the first operand is contracted, as in a plain matmul.
    contracted = [int(n) for n in re.findall(r'\d+', match[1])] if match else [-1]
    shape = _operand_shape(computation, instruction, 0)
    return 2.0 * instruction.arrays[0].size * math.prod(shape[i] for i in contracted)


def _dot_batch(computation: Computation, instruction: Instruction) -> int:
    """Returns the number of matrix products in a batched dot."""
    match = BATCH.search(instruction.attributes)
    shape = _operand_shape(computation, instruction, 0)
    return math.prod(shape[int(n)] for n in re.findall(r'\d+', match[1])) if match else 1


def _convolution_batch(computation: Computation, instruction: Instruction) -> int:
    """Returns the number of matrix products in a batched convolution.

    Batch axes have the same length in both operands and in the result.
    """
    shapes = (
        _operand_shape(computation, instruction, 0),
        _operand_shape(computation, instruction, 1),
        instruction.arrays[0].shape,
    )
    labels = _dim_labels(instruction)
    lengths = [
        dict(zip(axes, shape, strict=True)) for axes, shape in zip(labels, shapes, strict=True)
    ]
    spatial = set(labels[2]) - set('bf')
    by_axis = [{by_label[axis] for by_label in lengths} for axis in spatial]
    return math.prod(distinct.pop() for distinct in by_axis if len(distinct) == 1)


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """Counts the flops of a convolution on elements of the input.

    The compiler for TPUs turns matrix products into convolutions.
    """
    input_labels, kernel_labels, output_labels = _dim_labels(instruction)
    kernel_lengths = dict(
        zip(kernel_labels, _operand_shape(computation, instruction, 1), strict=True)
    )
    output_lengths = dict(zip(output_labels, instruction.arrays[0].shape, strict=True))
    input_lengths = dict(
        zip(input_labels, _operand_shape(computation, instruction, 0), strict=True)
    )
    window = WINDOW.search(instruction.attributes)
    fields = dict(part.split('=') for part in window[1].split()) if window else {}
    groups = re.search(r'batch_group_count=(\d+)', instruction.attributes)
    total = (
        2.0
        * output_lengths['b']
        * output_lengths['f']
        * kernel_lengths['i']
        / (int(groups[1]) if groups else 1)
    )
    # Spatial axes are the digits 0, 1, ...; the window's fields list them in this order.
    for i, axis in enumerate(sorted(set(output_labels) - set('bf'))):
        total *= _count_valid_taps(output_lengths[axis], input_lengths[axis], fields, i)
    return total


def _dim_labels(instruction: Instruction) -> tuple[str, str, str]:
    """Returns the axis labels of a convolution's input, kernel and output."""
    match = LABELS.search(instruction.attributes)
    assert match is not None
    return match[1], match[2], match[3]


def _count_valid_taps(n_out: int, n_in: int, fields: dict[str, str], axis: int) -> int:
    """Counts pairs of a window element and an input element that meet, over the window's positions.

    Padding, and the zeros that a dilation inserts, do not count.
    """

    def window_field(name, default):
        return fields[name].split('x')[axis] if name in fields else default

    size, stride = int(window_field('size', 1)), int(window_field('stride', 1))
    input_dilation, window_dilation = (
        int(window_field('lhs_dilate', 1)),
        int(window_field('rhs_dilate', 1)),
    )
    padding = int(str(window_field('pad', '0_0')).split('_')[0])
    positions = (np.arange(n_out) * stride - padding)[:, None] + (
        np.arange(size) * window_dilation
    )[None, :]
    index, remainder = np.divmod(positions, input_dilation)
    return int(np.sum((remainder == 0) & (index >= 0) & (index < n_in)))


def _kernel_flops(
    computation: Computation, instruction: Instruction, pair_share: float
) -> float | None:
    """Counts the flops of a kernel or a library call; None if they are unknown."""
    # A Pallas kernel may state its flops; this comes before all guesses from its name.
    if match := ESTIMATE.search(instruction.attributes):
        return float(json.loads(match[1])['flops'])
    if kernel := SPLASH.match(instruction.name):
        queries, keys = _query_key_shapes(computation, instruction)
        products = SPLASH_PRODUCTS[kernel[1]] + (kernel[1] == 'dkv' and len(instruction.arrays) > 2)
        return 2 * products * math.prod(queries) * keys[-2] * pair_share
    target = TARGET.search(instruction.attributes)
    name = target[1] if target else ''
    if name.startswith(CUDNN):
        return _cudnn_flops(computation, instruction, 'Backward' in name)
    if 'gemm' in name or 'matmul' in name:
        return _dot_flops(computation, instruction)
    # Only KERNELS may hide products; other custom calls have none.
    return None if name in KERNELS else 0.0


def _query_key_shapes(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    """Returns the shapes [.., N, T, H] of splash attention's first two operands of floats."""
    arrays = [computation[name].arrays[0] for name in instruction.operands]
    return [array.shape for array in arrays if array.dtype in ('bf16', 'f32')][:2]


def _cudnn_flops(
    computation: Computation, instruction: Instruction, is_backward: bool
) -> float | None:
    """Counts the products of cuDNN's attention over the pairs that its mask and window leave.

    Forward has 2 products of queries and keys, backward 5. Documents would leave fewer pairs, but
    the program does not tell them.
    """
    sizes, mask = (
        CUDNN_SIZES.search(instruction.attributes),
        CUDNN_MASK.search(instruction.attributes),
    )
    if not sizes or not mask:
        return None
    *rows, queries, keys = (int(n) for n in re.findall(r'\d+', sizes[1]))
    pairs = queries * keys
    if 'CAUSAL' in mask[1]:
        # The first queries see fewer than n_attended keys: the triangle that is subtracted.
        window = CUDNN_WINDOW.search(instruction.attributes)
        n_attended = min(int(window[1]) or keys, keys) if window else keys
        pairs = queries * n_attended - n_attended * (n_attended - 1) / 2
    head_dim = _operand_shape(computation, instruction, 0)[-1]
    return 2.0 * (5 if is_backward else 2) * math.prod(rows) * pairs * head_dim


def count_launches(module: Module) -> int:
    """Counts the kernels, copies and library calls that a step starts on a GPU."""
    return sum(
        rounds
        for _, instruction, rounds in module.instructions()
        if instruction.opcode not in FREE and not instruction.opcode.endswith('-done')
    )


def _count_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Counts the bytes that an instruction reads from memory and writes to it.

    Arrays in a TPU's fast memory count when they are copied to it.
    """
    target = TARGET.search(instruction.attributes) if instruction.opcode == 'custom-call' else None
    if (
        instruction.opcode.endswith('-done')
        or instruction.opcode in FREE
        or (target and target[1] in FREE_CALLS)
    ):
        return 0
    if instruction.opcode in ('copy-start', 'slice-start'):
        # The results are both sides, then a context. A slice moves only the bytes of the smaller
        # side; a side in fast memory costs no bandwidth.
        sides = [array for array in instruction.arrays if array.shape][:2]
        return sum(min(array.bytes for array in sides) for side in sides if not side.is_fast)
    written = _slow_bytes(instruction.arrays)
    if instruction.opcode in SLICES:
        return 2 * written  # the operand is not read in full
    if instruction.opcode == UPDATE:
        return 2 * _slow_bytes(computation[instruction.operands[1]].arrays)
    inner = module.computations.get(instruction.callee) if instruction.opcode in FUSIONS else None
    if instruction.opcode == 'fusion-start' and inner is not None:
        # Its results include its operands.
        written = _slow_bytes(find_root(inner).arrays)
    if inner is None:
        return written + sum(_slow_bytes(computation[name].arrays) for name in instruction.operands)
    return _bytes_read(module, computation, instruction, inner) + _bytes_written(inner, written)


def _slow_bytes(arrays: Sequence[Array]) -> int:
    """Returns the bytes of the arrays outside fast memory."""
    return sum(array.bytes for array in arrays if not array.is_fast)


def _bytes_read(
    module: Module, computation: Computation, instruction: Instruction, inner: Computation
) -> float:
    """Counts the bytes that a fusion reads of its operands, in full or only in slices."""
    total = 0
    for number, name in enumerate(instruction.operands):
        whole, parameter = _slow_bytes(computation[name].arrays), _find_parameter(inner, number)
        if whole and parameter is not None:
            # Several slices of an operand may overlap; nothing is read more than once.
            total += min(whole, _parameter_bytes_read(module, inner, parameter.name))
    return total


def _parameter_bytes_read(
    module: Module,
    inner: Computation,
    name: str,
    count_returned: Callable[[], float] = lambda: math.inf,
) -> float:
    """Counts the bytes that a fusion reads of its parameter `name`; inf if it reads all of it.

    count_returned: counts the bytes read if the fusion returns the parameter, as a nested fusion
    does that only changes its shape.
    """
    total = count_returned() if inner[name].is_root else 0.0
    for user in (instruction for instruction in inner.values() if name in instruction.operands):
        if user.opcode in SLICES and user.operands[0] == name:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == UPDATE and user.operands[0] == name:
            continue  # written in place; the update is read by itself
        elif user.opcode in ('bitcast', 'get-tuple-element'):
            total += _parameter_bytes_read(module, inner, user.name, count_returned)
        elif user.opcode == 'fusion' and (nested := module.computations.get(user.callee)):
            count_nested = functools.partial(
                _parameter_bytes_read, module, inner, user.name, count_returned
            )
            for number, operand in enumerate(user.operands):
                if operand == name:
                    parameter = _find_parameter(nested, number)
                    assert parameter is not None  # a fusion has a parameter for each operand
                    total += _parameter_bytes_read(module, nested, parameter.name, count_nested)
        else:
            return math.inf
    return total


def _bytes_written(inner: Computation, whole: int) -> int:
    """Counts the results of a fusion, or only the updates to arrays that it writes in place."""
    root = find_root(inner)
    returned = [inner[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    sources = [skip_opcode(inner, value, 'bitcast') for value in returned]
    if whole == 0 or not any(source.opcode == UPDATE for source in sources):
        return whole
    updates = [
        inner[source.operands[1]] if source.opcode == UPDATE else source for source in sources
    ]
    return sum(_slow_bytes(update.arrays) for update in updates)


def _find_parameter(inner: Computation, number: int) -> Instruction | None:
    """Returns the parameter with a number, or None."""
    parameters = (parameter for parameter in inner.values() if parameter.opcode == 'parameter')
    return next((parameter for parameter in parameters if int(parameter.argument) == number), None)
