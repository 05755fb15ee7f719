"""What a step costs a device, from its compiled program: operations, and bytes of its memory."""

import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu.hlo import Array, Computation, Instruction, Module

# They compute nothing, and move nothing in a device's memory.
FREE = (
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call'),
    *('conditional', 'after-all', 'partition-id', 'replica-id', 'opt-barrier', 'domain'),
    *('copy-done', 'slice-done', 'async-start', 'async-update', 'async-done', 'send', 'recv'),
    *('send-done', 'recv-done', 'all-gather-done', 'all-reduce-done', 'collective-permute-done'),
)
FREE_CALLS = ('AllocateBuffer', 'AsyncCollectiveDone', 'ConcatBitcast', 'ShardBarrier')
# These read of their first operand as much as they give.
SLICES = ('slice', 'dynamic-slice', 'gather')
KERNELS = ('tpu_custom_call', 'mosaic_gpu', '__gpu$xla.gpu.triton', '__cudnn$fmhaSoftmax')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
DIMS = re.compile(r'(\w+)_dims={([\d,]*)}')
LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
WINDOW = re.compile(r'window={([^}]*)}')
ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
SPLASH = re.compile(r'splash_m[hq]a_(fwd|dq|dkv)')
# Products of queries and keys, each 2 operations, that splash attention's kernels make.
SPLASH_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}


class Cost(NamedTuple):
    """flops: of products; bytes: read from and written to the device's memory; seconds: of all
    operations, each as long as its flops or its bytes take.
    """

    flops: float
    bytes: float
    seconds: float
    unknown: tuple[str, ...]  # kernels whose operations nobody says, loops whose rounds


def cost_of(module: Module, rate: float, bandwidth: float, pairs_seen: float = 0.5) -> Cost:
    """Of one step on one device, which does `rate` flop/s and moves `bandwidth` bytes a second.

    pairs_seen: the share of all pairs of tokens that attention kernels compute which do not say.
    """
    flops = n_bytes = seconds = 0.0
    unknown = set(module.unknown)
    for name, one, times in module.instructions():
        own_flops = _flops(module, module.computations[name], one, pairs_seen)
        if own_flops is None:
            unknown.add(one.name)
        own_bytes = _bytes(module, module.computations[name], one)
        flops += times * (own_flops or 0.0)
        n_bytes += times * own_bytes
        seconds += times * max((own_flops or 0.0) / rate, own_bytes / bandwidth)
    return Cost(flops, n_bytes, seconds, tuple(sorted(unknown)))


def _flops(
    module: Module, computation: Computation, one: Instruction, pairs_seen: float
) -> float | None:
    """2 for each product and sum; None where an instruction does not say how many it makes."""
    if one.opcode == 'custom-call':
        return _kernel_flops(computation, one, pairs_seen)
    total = 0.0
    parts = module.inside(one) if one.opcode == 'fusion' else [(computation, one)]
    for inner, part in parts:
        if part.opcode == 'dot':
            total += _dot_flops(inner, part)
        elif part.opcode == 'convolution':
            total += _convolution_flops(inner, part)
    return total


def _first(computation: Computation, one: Instruction, operand: int) -> Array:
    return computation[one.operands[operand]].arrays[0]


def _dot_flops(computation: Computation, one: Instruction) -> float:
    dims = {name: value for name, value in DIMS.findall(one.attributes)}
    contracted = [int(n) for n in dims['lhs_contracting'].split(',') if n]
    shape = _first(computation, one, 0).shape
    return 2.0 * one.arrays[0].size * math.prod(shape[i] for i in contracted)


def _convolution_flops(computation: Computation, one: Instruction) -> float:
    """TPUs have products as convolutions; of a window only what lies on an element counts."""
    of_input, of_kernel, of_output = LABELS.search(one.attributes).groups()
    lengths = dict(zip(of_kernel, _first(computation, one, 1).shape, strict=True))
    found = dict(zip(of_output, one.arrays[0].shape, strict=True))
    given = dict(zip(of_input, _first(computation, one, 0).shape, strict=True))
    window = WINDOW.search(one.attributes)
    fields = dict(part.split('=') for part in window[1].split()) if window else {}
    groups = re.search(r'batch_group_count=(\d+)', one.attributes)
    total = 2.0 * found['b'] * found['f'] * lengths['i'] / (int(groups[1]) if groups else 1)
    for i, axis in enumerate(sorted(set(of_output) - set('bf'))):
        total *= _on_elements(found[axis], given[axis], fields, i)
    return total


def _on_elements(n_out: int, n_in: int, fields: dict[str, str], axis: int) -> int:
    """Of all places of a window along one axis, how many of its elements meet one of the input."""

    def of(name, default):
        return fields[name].split('x')[axis] if name in fields else default

    size, stride = int(of('size', 1)), int(of('stride', 1))
    inside, apart = int(of('lhs_dilate', 1)), int(of('rhs_dilate', 1))
    before = int(str(of('pad', '0_0')).split('_')[0])
    places = (np.arange(n_out) * stride - before)[:, None] + (np.arange(size) * apart)[None, :]
    whole, rest = np.divmod(places, inside)
    return int(np.sum((rest == 0) & (whole >= 0) & (whole < n_in)))


def _kernel_flops(computation: Computation, one: Instruction, pairs_seen: float) -> float | None:
    target = TARGET.search(one.attributes)
    if said := ESTIMATE.search(one.attributes):
        return float(json.loads(said[1])['flops'])
    if kernel := SPLASH.match(one.name):
        queries, keys = _rows(computation, one)
        products = 2 * SPLASH_PRODUCTS[kernel[1]]
        return products * math.prod(queries) * keys[-2] * pairs_seen
    name = target[1] if target else ''
    if 'gemm' in name or 'matmul' in name:
        return _library_flops(computation, one)
    return None if name in KERNELS else 0.0


def _rows(computation: Computation, one: Instruction) -> list[tuple[int, ...]]:
    """The shapes [.., N, T, H] of queries and keys: the kernel's first operands of floats."""
    arrays = [computation[name].arrays[0] for name in one.operands]
    return [array.shape for array in arrays if array.dtype in ('bf16', 'f32')][:2]


def _library_flops(computation: Computation, one: Instruction) -> float:
    """A product by a library: its dimensions are those of a dot, in JSON."""
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.attributes)
    contracted = [int(n) for n in re.findall(r'\d+', found[1])] if found else [-1]
    shape = _first(computation, one, 0).shape
    return 2.0 * one.arrays[0].size * math.prod(shape[i] for i in contracted)


def _bytes(module: Module, computation: Computation, one: Instruction) -> int:
    """What an instruction reads from memory and writes to it; what a TPU holds in its own fast
    memory counts where it is copied there.
    """
    target = TARGET.search(one.attributes) if one.opcode == 'custom-call' else None
    if one.opcode in FREE or (target and target[1] in FREE_CALLS):
        return 0
    if one.opcode in ('copy-start', 'slice-start'):
        results = [a for a in one.arrays if a.shape][:2]  # there and here
        return sum(min(a.bytes for a in results) for one in results if not one.fast)
    written = _sum(one.arrays)
    if one.opcode in SLICES:
        return 2 * written
    if one.opcode == 'dynamic-update-slice':
        return 2 * _sum(computation[one.operands[1]].arrays)
    inner = module.computations.get(one.called) if one.opcode == 'fusion' else None
    if inner is None:
        return written + sum(_sum(computation[name].arrays) for name in one.operands)
    return _read(module, computation, one, inner) + _written(inner, written)


def _sum(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if not array.fast)


def _read(module: Module, computation: Computation, one: Instruction, inner: Computation) -> int:
    """By a fusion, of each of its operands: all of it, or the slices that it takes."""
    by_number = {int(p.argument): p for p in inner.values() if p.opcode == 'parameter'}
    total = 0
    for number, name in enumerate(one.operands):
        whole = _sum(computation[name].arrays)
        if whole and number in by_number:
            total += min(whole, _taken(module, inner, by_number[number].name))
    return total


def _taken(module: Module, inner: Computation, name: str) -> float:
    """Bytes that a fusion reads of its parameter `name`; inf for all."""
    total = 0.0
    for user in (one for one in inner.values() if name in one.operands):
        if user.opcode in SLICES and user.operands[0] == name:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == 'dynamic-update-slice' and user.operands[0] == name:
            total += 0  # written in place; the update is read by itself
        elif user.opcode in ('bitcast', 'get-tuple-element'):
            total += _taken(module, inner, user.name)
        elif user.opcode == 'fusion' and (nested := module.computations.get(user.called)):
            for number, operand in enumerate(user.operands):
                if operand == name:
                    own = next(
                        p.name
                        for p in nested.values()
                        if p.opcode == 'parameter' and int(p.argument) == number
                    )
                    total += _taken(module, nested, own)
        else:
            return math.inf
    return total


def _written(inner: Computation, whole: int) -> int:
    """By a fusion: its results, or what it updates of arrays that it writes in place."""
    root = next(one for one in inner.values() if one.is_root)
    ends = [inner[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    lasts = [_behind_bitcasts(inner, end) for end in ends]
    if whole == 0 or not any(last.opcode == 'dynamic-update-slice' for last in lasts):
        return whole
    total = 0
    for last in lasts:
        updated = last.opcode == 'dynamic-update-slice'
        total += _sum(inner[last.operands[1]].arrays if updated else last.arrays)
    return total


def _behind_bitcasts(inner: Computation, one: Instruction) -> Instruction:
    while one.opcode == 'bitcast':
        one = inner[one.operands[0]]
    return one
