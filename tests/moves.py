"""What a compiled program moves through the chip's large memory, read from its text."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

SMALL = 2**20  # bytes: less than this is not counted
ITEM_BYTES = {'bf16': 2, 'f32': 4, 's32': 4, 'u32': 4, 's8': 1, 'u8': 1, 'pred': 1, 'f16': 2}
ARRAY = re.compile(r'\b(\w+)\[([\d,]*)\](?:\{([^}]*)\})?')
COMPUTATION = re.compile(r'^(ENTRY )?(%[\w.-]+) \([^\n]*\{\n(.*?)^\}', re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r'\s*(?:ROOT )?(%[\w.-]+) = (.*?) ([\w-]+)\((.*?)\)(.*)')
MOVES_NOTHING = ('parameter', 'get-tuple-element', 'bitcast', 'tuple', 'constant')
PARTS = ('slice', 'dynamic-slice')  # they read as much as they return
UPDATE = 'dynamic-update-slice'  # of its first operand, in place, by its second


class Move(NamedTuple):
    """What one instruction reads and writes in the chip's large memory, in bytes; all rounds of a
    loop together.
    """

    name: str
    operation: str
    bytes: int


class _Instruction(NamedTuple):
    name: str
    result: str
    operation: str
    given: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r'%[\w.-]+', self.given)

    def called(self, role: str) -> str:
        return re.search(rf'\b{role}=(%[\w.-]+)', self.rest)[1]


Computations = dict[str, list[_Instruction]]


def moves(program: jax.stages.Compiled) -> list[Move]:
    """Of the instructions that the program runs in order: arrays of SMALL bytes and more, where
    they do not stay in a TPU's fast memory, which layouts call S(1).

    Each operand and each result counts once. A product reads its operands more often than that
    where no cache holds them, and what a GPU's cache holds until the next instruction is not moved.
    """
    computations, entry = {}, None
    for is_entry, name, body in COMPUTATION.findall(program.as_text()):
        lines = [INSTRUCTION.match(line) for line in body.splitlines()]
        computations[name] = [_Instruction(*line.groups()) for line in lines if line]
        entry = name if is_entry else entry
    return list(_moves(entry, computations))


def _moves(name: str, computations: Computations) -> Iterator[Move]:
    sizes = {}
    for one in computations[name]:
        # A product of cuBLAS also returns the memory that it may work in.
        result = one.result.split(', s8[')[0] if '"__cublas$' in one.rest else one.result
        sizes[one.name] = _bytes(result)
        if one.operation == 'while':
            rounds = _rounds(one, computations)
            for move in _moves(one.called('body'), computations):
                yield move._replace(bytes=rounds * move.bytes)
        elif one.operation == 'call':
            yield from _moves(one.called('to_apply'), computations)
        elif one.operation not in MOVES_NOTHING and not one.operation.endswith('-done'):
            read = [sizes.get(operand, 0) for operand in one.operands]
            if moved := _moved(one, read, sizes[one.name], computations):
                yield Move(one.name, one.operation, moved)


def _rounds(loop: _Instruction, computations: Computations) -> int:
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    constants = [c for c in computations[loop.called('condition')] if c.operation == 'constant']
    return max(int(constant.given) for constant in constants)


def _moved(one: _Instruction, read: list[int], written: int, computations: Computations) -> int:
    if one.operation.endswith(('-start', '-update')):  # their results have the operands, too
        return written
    if one.operation in PARTS:
        return 2 * written
    if one.operation == UPDATE:
        return 2 * read[1]
    if one.operation == 'fusion':
        read, written = _with_parts(computations[one.called('calls')], read, written)
    return sum(read) + written


def _with_parts(inside: list[_Instruction], read: list[int], written: int) -> tuple[list[int], int]:
    """The same of a fusion with these instructions, where it reads parts of arrays alone, or writes
    parts of one in place.
    """
    by_name = {one.name: one for one in inside}
    uses = {}  # number of the operand: the instructions that take it, and as which of theirs
    for one in inside:
        for place, operand in enumerate(one.operands if one.operation != 'bitcast' else ()):
            source = by_name[operand]
            while source.operation == 'bitcast':
                source = by_name[source.operands[0]]
            if source.operation == 'parameter':
                uses.setdefault(int(source.given), []).append((one, place))
    for number, users in uses.items():
        if all(one.operation in PARTS and place == 0 for one, place in users):
            read[number] = min(read[number], sum(_bytes(one.result, True) for one, _ in users))
        elif written and all(one.operation == UPDATE and place == 0 for one, place in users):
            read[number] = 0
            for one, _ in users:
                part = _bytes(by_name[one.operands[1]].result, True)
                written = max(written - _bytes(one.result, True), 0) + part
    return read, written


def _bytes(text: str, of_fast_memory: bool = False) -> int:
    """Of the arrays of a type; where layouts have tiles, of whole ones."""
    total = 0
    for kind, dimensions, layout in ARRAY.findall(text):
        lengths = [int(n) for n in dimensions.split(',') if n]
        order = [int(n) for n in layout.split(':')[0].split(',') if n]
        tile = re.search(r'T\(([\d,]+)\)', layout)
        for axis, length in zip(order, reversed(tile[1].split(',')) if tile else (), strict=False):
            lengths[axis] = math.ceil(lengths[axis] / int(length)) * int(length)
        size = math.prod(lengths) * ITEM_BYTES.get(kind, 0)
        if size >= SMALL and (of_fast_memory or 'S(1)' not in layout):
            total += size
    return total
