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
from tpu.rates import CAUSAL, LENGTH, attention_share, tile_fill_share

# Opcodes that compute nothing, and move nothing in a device's memory; so do all that end in -done.
FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call', 'send')
FREE += ('conditional', 'after-all', 'partition-id', 'replica-id', 'opt-barrier', 'domain', 'recv')
FREE += ('async-start', 'async-update', 'custom-call-start', 'custom-call-update')
FREE_CALLS = ('AllocateBuffer', 'AsyncCollectiveDone', 'ConcatBitcast', 'ShardBarrier')
SLICES = ('slice', 'dynamic-slice', 'gather')  # they read as much as they return
UPDATE = 'dynamic-update-slice'  # writes its second operand into its first, in place
FUSIONS = ('fusion', 'fusion-start')  # on GPUs the second runs beside others
KERNELS = ('tpu_custom_call', 'mosaic_gpu', '__gpu$xla.gpu.triton')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
BATCH = re.compile(r'lhs_batch_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
WINDOW = re.compile(r'window={([^}]*)}')
ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
SPLASH = re.compile(r'splash_m[hq]a_(fwd|dq|dkv)')
# Products of queries and keys in splash attention's kernels, each 2 operations; dkv has one more
# where it makes dq too, its third result.
SPLASH_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}
CUDNN = '__cudnn$fmha'  # begins the names of all kernels of attention that cuDNN has
CUDNN_SIZES = re.compile(r'"dimensions": ?\[((?:"\d+"(?:, ?)?){4})\]')  # B, N, T, S of the scores
CUDNN_MASK = re.compile(r'"mask_type": ?"(\w+)"')
CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')


class Cost(NamedTuple):
    """Cost of a step or an instruction. flops: of products. bytes: read from and written to memory.
    seconds: of all operations in sequence, each as long as its products or its bytes take. unknown:
    kernels and loops whose operations or rounds are unknown. at_peak: the flops that a device at
    its peak does in the time of the products. bound: the seconds if all products were at the peak.
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
    """Returns the cost of one step on one device of `rate` flop/s and `bandwidth` bytes a second.
    pairs_seen: the share of all pairs of tokens that splash attention's kernels compute. kind: of
    the device, whose products reach what `tpu.rates` says of it; '' has all of them at the peak.
    """
    flops = n_bytes = seconds = at_peak = bound = 0.0
    unknown = set(module.unknown_loops)
    for name, one, times in module.instructions():
        computation = module.computations[name]
        own = operation_cost(module, computation, one, rate, bandwidth, pair_share, kind)
        flops += times * own.flops
        n_bytes += times * own.bytes
        seconds += times * own.seconds
        at_peak += times * own.flops_at_peak
        bound += times * own.bound
        unknown.update(own.unknown)
    return Cost(flops, n_bytes, seconds, tuple(sorted(unknown)), at_peak, bound)


def operation_cost(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    rate: float,
    bandwidth: float,
    pair_share: float = 0.5,
    kind: str = '',
) -> Cost:
    """Returns the cost of one instruction, run once, with the arguments of `estimate_cost`."""
    found = _count_flops(module, computation, instruction, pair_share)
    flops, n_bytes = found or 0.0, _count_bytes(module, computation, instruction)
    at_peak = _flops_at_peak(module, computation, instruction, flops, kind)
    seconds, bound = (max(n / rate, n_bytes / bandwidth) for n in (at_peak, flops))
    unknown = () if found is not None else (instruction.name,)
    return Cost(flops, n_bytes, seconds, unknown, at_peak, bound)


def _count_flops(
    module: Module, computation: Computation, instruction: Instruction, pair_share: float
) -> float | None:
    """Counts 2 for each product and sum; None where an instruction's number is unknown."""
    if instruction.opcode == 'custom-call':
        return _kernel_flops(computation, instruction, pair_share)
    return sum(flops for flops, *_ in _products(module, computation, instruction))


def _products(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[float, float, float]]:
    """Yields of each product, of a fusion all that are in it, the flops, the products summed for
    each result, and the columns of the narrower operand: all but its batch and what is contracted.
    """
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
        contracted = flops / 2 / part.arrays[0].size
        narrower = min(math.prod(_operand_shape(inner, part, operand)) for operand in (0, 1))
        yield flops, contracted, narrower / contracted / batch


def _flops_at_peak(
    module: Module, computation: Computation, instruction: Instruction, flops: float, kind: str
) -> float:
    """Counts the flops that a device at its peak does in the time of an instruction's `flops`."""
    if instruction.opcode == 'custom-call':
        found = _match_attention(computation, instruction)
        return flops / attention_share(kind, *found) if found else flops
    return float(
        sum(
            own / tile_fill_share(kind, contracted, columns)
            for own, contracted, columns in _products(module, computation, instruction)
        )
    )


def _match_attention(
    computation: Computation, instruction: Instruction
) -> tuple[int, str, float] | None:
    """Returns the last three arguments of `attention_share` for a kernel of attention, else None.
    Splash attention's operations are counted by blocks.
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
    return computation[instruction.operands[operand]].arrays[0].shape


def _dot_flops(computation: Computation, instruction: Instruction) -> float:
    """Counts the flops of a dot, or of a library's product, which has its dimensions in JSON."""
    found = CONTRACTED.search(instruction.attributes)
    contracted = [int(n) for n in re.findall(r'\d+', found[1])] if found else [-1]
    shape = _operand_shape(computation, instruction, 0)
    return 2.0 * instruction.arrays[0].size * math.prod(shape[i] for i in contracted)


def _dot_batch(computation: Computation, instruction: Instruction) -> int:
    """Counts the matrices that a dot multiplies one after the other."""
    found = BATCH.search(instruction.attributes)
    shape = _operand_shape(computation, instruction, 0)
    return math.prod(shape[int(n)] for n in re.findall(r'\d+', found[1])) if found else 1


def _convolution_batch(computation: Computation, instruction: Instruction) -> int:
    """Counts them for a convolution: along axes that its operands and its result share."""
    shapes = (
        _operand_shape(computation, instruction, 0),
        _operand_shape(computation, instruction, 1),
        instruction.arrays[0].shape,
    )
    labels = LABELS.search(instruction.attributes).groups()
    lengths = [
        dict(zip(own, shape, strict=True)) for own, shape in zip(labels, shapes, strict=True)
    ]
    axes = set(labels[2]) - set('bf')
    shared = [{own[axis] for own in lengths} for axis in axes]
    return math.prod(own.pop() for own in shared if len(own) == 1)


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """Counts the flops of a convolution, which TPUs use for products, on elements of the input."""
    of_input, of_kernel, of_output = LABELS.search(instruction.attributes).groups()
    lengths = dict(zip(of_kernel, _operand_shape(computation, instruction, 1), strict=True))
    found = dict(zip(of_output, instruction.arrays[0].shape, strict=True))
    given = dict(zip(of_input, _operand_shape(computation, instruction, 0), strict=True))
    window = WINDOW.search(instruction.attributes)
    fields = dict(part.split('=') for part in window[1].split()) if window else {}
    groups = re.search(r'batch_group_count=(\d+)', instruction.attributes)
    total = 2.0 * found['b'] * found['f'] * lengths['i'] / (int(groups[1]) if groups else 1)
    for i, axis in enumerate(sorted(set(of_output) - set('bf'))):
        total *= _count_valid_taps(found[axis], given[axis], fields, i)
    return total


def _count_valid_taps(n_out: int, n_in: int, fields: dict[str, str], axis: int) -> int:
    """Counts the elements of a window, over its places on an axis, that meet one of the input."""

    def window_field(name, default):
        return fields[name].split('x')[axis] if name in fields else default

    size, stride = int(window_field('size', 1)), int(window_field('stride', 1))
    inside, apart = int(window_field('lhs_dilate', 1)), int(window_field('rhs_dilate', 1))
    before = int(str(window_field('pad', '0_0')).split('_')[0])
    places = (np.arange(n_out) * stride - before)[:, None] + (np.arange(size) * apart)[None, :]
    whole, rest = np.divmod(places, inside)
    return int(np.sum((rest == 0) & (whole >= 0) & (whole < n_in)))


def _kernel_flops(
    computation: Computation, instruction: Instruction, pair_share: float
) -> float | None:
    if said := ESTIMATE.search(instruction.attributes):
        return float(json.loads(said[1])['flops'])
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
    return None if name in KERNELS else 0.0


def _query_key_shapes(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    """Returns the shapes [.., N, T, H] of splash attention's first operands of floats."""
    arrays = [computation[name].arrays[0] for name in instruction.operands]
    return [one.shape for one in arrays if one.dtype in ('bf16', 'f32')][:2]


def _cudnn_flops(
    computation: Computation, instruction: Instruction, is_backward: bool
) -> float | None:
    """Counts the products of cuDNN's attention: forward 2, backward 5 of queries and keys, over the
    pairs of tokens that its mask and window leave. Documents, which leave fewer, are not known.
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
        window = CUDNN_WINDOW.search(instruction.attributes)
        seen = min(int(window[1]) or keys, keys) if window else keys
        pairs = queries * seen - seen * (seen - 1) / 2
    head_dim = _operand_shape(computation, instruction, 0)[-1]
    return 2.0 * (5 if is_backward else 2) * math.prod(rows) * pairs * head_dim


def count_launches(module: Module) -> int:
    """Counts the kernels, copies and library calls that a step starts on a GPU."""
    return sum(
        times
        for _, one, times in module.instructions()
        if one.opcode not in FREE and not one.opcode.endswith('-done')
    )


def _count_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Counts what an instruction reads from memory and writes to it. Arrays in a TPU's own fast
    memory count where they are copied to it.
    """
    target = TARGET.search(instruction.attributes) if instruction.opcode == 'custom-call' else None
    if (
        instruction.opcode.endswith('-done')
        or instruction.opcode in FREE
        or (target and target[1] in FREE_CALLS)
    ):
        return 0
    if instruction.opcode in ('copy-start', 'slice-start'):
        ends = [array for array in instruction.arrays if array.shape][:2]
        return sum(min(array.bytes for array in ends) for end in ends if not end.is_fast)
    written = _slow_bytes(instruction.arrays)
    if instruction.opcode in SLICES:
        return 2 * written
    if instruction.opcode == UPDATE:
        return 2 * _slow_bytes(computation[instruction.operands[1]].arrays)
    inner = module.computations.get(instruction.callee) if instruction.opcode in FUSIONS else None
    if (
        instruction.opcode == 'fusion-start' and inner is not None
    ):  # its results hold its operands too
        written = _slow_bytes(find_root(inner).arrays)
    if inner is None:
        return written + sum(_slow_bytes(computation[name].arrays) for name in instruction.operands)
    return _bytes_read(module, computation, instruction, inner) + _bytes_written(inner, written)


def _slow_bytes(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if not array.is_fast)


def _bytes_read(
    module: Module, computation: Computation, instruction: Instruction, inner: Computation
) -> int:
    """Counts what a fusion reads of each operand: all of it, or the slices that it takes."""
    total = 0
    for number, name in enumerate(instruction.operands):
        whole, own = _slow_bytes(computation[name].arrays), _find_parameter(inner, number)
        if whole and own is not None:
            total += min(whole, _parameter_bytes_read(module, inner, own.name))
    return total


def _parameter_bytes_read(
    module: Module,
    inner: Computation,
    name: str,
    count_returned: Callable[[], float] = lambda: math.inf,
) -> float:
    """Counts what a fusion reads of its parameter `name`; inf for all of it. beyond: counts what is
    read of it where the fusion returns it, as a nested one does that changes its shape alone.
    """
    total = count_returned() if inner[name].is_root else 0.0
    for user in (one for one in inner.values() if name in one.operands):
        if user.opcode in SLICES and user.operands[0] == name:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == UPDATE and user.operands[0] == name:
            continue  # written in place; the update is read by itself
        elif user.opcode in ('bitcast', 'get-tuple-element'):
            total += _parameter_bytes_read(module, inner, user.name, count_returned)
        elif user.opcode == 'fusion' and (nested := module.computations.get(user.callee)):
            after = functools.partial(
                _parameter_bytes_read, module, inner, user.name, count_returned
            )
            for number, operand in enumerate(user.operands):
                if operand == name:
                    total += _parameter_bytes_read(
                        module, nested, _find_parameter(nested, number).name, after
                    )
        else:
            return math.inf
    return total


def _bytes_written(inner: Computation, whole: int) -> int:
    """Counts the results of a fusion, or only the updates of arrays that it writes in place."""
    root = find_root(inner)
    ends = [inner[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    lasts = [skip_opcode(inner, end, 'bitcast') for end in ends]
    if whole == 0 or not any(last.opcode == UPDATE for last in lasts):
        return whole
    updates = [inner[last.operands[1]] if last.opcode == UPDATE else last for last in lasts]
    return sum(_slow_bytes(one.arrays) for one in updates)


def _find_parameter(inner: Computation, number: int) -> Instruction | None:
    parameters = (one for one in inner.values() if one.opcode == 'parameter')
    return next((one for one in parameters if int(one.argument) == number), None)
