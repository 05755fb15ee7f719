"""Reads two things from a compiled program: its traffic in the chip's large memory, and the
computations of a GPU while its devices exchange arrays.
"""

import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

from tpu.collectives import OPCODE
from tpu.hlo import Array, Computation, Instruction, Module, skip_opcode

SMALL = 2**20  # bytes: less than this is not counted
MOVES_NOTHING = ('parameter', 'get-tuple-element', 'bitcast', 'tuple', 'constant')
CALLERS = ('while', 'call', 'conditional', 'async-start')  # their computations are counted
PARTS = ('slice', 'dynamic-slice')  # they read as much as they return
UPDATE = 'dynamic-update-slice'  # writes its second operand into its first, in place


class Move(NamedTuple):
    """Bytes that an instruction reads and writes in the chip's large memory, in all iterations of a
    loop together.
    """

    name: str
    operation: str
    bytes: int


def moves(program: jax.stages.Compiled) -> list[Move]:
    """Returns the moves of the scheduled instructions: arrays of SMALL bytes and more outside a
    TPU's fast memory.

    Each operand and each result counts once. A product reads its operands more often if no cache
    holds them, and arrays that a GPU's cache holds until the next instruction do not move.
    """
    module = Module(program.as_text())
    assert not module.unknown_loops, module.unknown_loops
    transfers = []
    for name, instruction, times in module.instructions():
        if instruction.opcode not in MOVES_NOTHING + CALLERS and not instruction.opcode.endswith(
            '-done'
        ):
            moved = _count_bytes(module, module.computations[name], instruction)
            transfers.append(Move(instruction.name, instruction.opcode, times * moved))
    return [move for move in transfers if move.bytes]


def _count_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    written = _bytes(_results(instruction))
    if instruction.opcode.endswith(('-start', '-update')):  # their results include the operands
        return written
    if instruction.opcode in PARTS:
        return 2 * written
    operand_bytes = [_bytes(_results(computation[operand])) for operand in instruction.operands]
    if instruction.opcode == UPDATE:
        return 2 * operand_bytes[1]
    if instruction.opcode == 'fusion':
        operand_bytes, written = _with_parts(
            module.computations[instruction.callee], operand_bytes, written
        )
    return sum(operand_bytes) + written


def _with_parts(
    inside: Computation, operand_bytes: list[int], written: int
) -> tuple[list[int], int]:
    """Returns the bytes that a fusion of these instructions reads and writes.

    The fusion may read only parts of arrays, or write only parts of an array in place.
    """
    uses = {}  # number of the operand: the instructions that take it, and as which of theirs
    for instruction in inside.values():
        for place, operand in enumerate(
            instruction.operands if instruction.opcode != 'bitcast' else ()
        ):
            source = skip_opcode(inside, inside[operand], 'bitcast')
            if source.opcode == 'parameter':
                uses.setdefault(int(source.argument), []).append((instruction, place))
    for number, users in uses.items():
        if all(instruction.opcode in PARTS and place == 0 for instruction, place in users):
            operand_bytes[number] = min(
                operand_bytes[number],
                sum(_bytes(instruction.arrays, True) for instruction, _ in users),
            )
        elif written and all(
            instruction.opcode == UPDATE and place == 0 for instruction, place in users
        ):
            operand_bytes[number] = 0
            for instruction, _ in users:
                part = _bytes(inside[instruction.operands[1]].arrays, True)
                written = max(written - _bytes(instruction.arrays, True), 0) + part
    return operand_bytes, written


def _results(instruction: Instruction) -> Iterable[Array]:
    """Returns the results, without the workspace that a product of cuBLAS also returns."""
    if '"__cublas$' not in instruction.attributes:
        return instruction.arrays
    return itertools.takewhile(lambda array: array.dtype != 's8', instruction.arrays)


def _bytes(arrays: Iterable[Array], of_fast_memory: bool = False) -> int:
    """Returns the bytes of arrays; with a tiled layout, of whole tiles."""
    total = 0
    for array in arrays:
        lengths = list(array.shape)
        order = [int(n) for n in array.layout.split(':')[0].split(',') if n]
        tile = re.search(r'T\(([\d,]+)\)', array.layout)
        for axis, length in zip(order, reversed(tile[1].split(',')) if tile else (), strict=False):
            lengths[axis] = math.ceil(lengths[axis] / int(length)) * int(length)
        size = array._replace(shape=tuple(lengths)).bytes
        if size >= SMALL and (of_fast_memory or not array.is_fast):
            total += size
    return total


def hidden(program: jax.stages.Compiled) -> list[tuple[str, int]]:
    """Returns (kind, computations that a GPU starts during it) for each collective, in scheduled
    order; 0 if everything waits for it.
    """
    intervals = []
    for computation in Module(program.as_text()).computations.values():
        order = list(computation.values())
        for start, instruction in enumerate(order):
            kind = OPCODE.match(instruction.opcode)
            if not kind:
                continue
            ends = [i for i, later in enumerate(order) if _ends(later, instruction.name)]
            between = order[start + 1 : ends[0]] if ends else []
            work = sum(later.opcode in ('fusion', 'custom-call', 'while') for later in between)
            intervals.append((kind[1], work))
    return intervals


def _ends(instruction: Instruction, name: str) -> bool:
    return instruction.opcode.endswith('-done') and name in instruction.operands
