"""A compiled program, read from its text: what is computed, how often, on arrays of which sizes.

The compiler's own sums (`Compiled.cost_analysis`) count the body of a loop once, whatever its
rounds; here it is multiplied by them.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ITEM_BITS = {
    **dict.fromkeys(('f64', 's64', 'u64', 'c64'), 64),
    **dict.fromkeys(('f32', 's32', 'u32'), 32),
    **dict.fromkeys(('bf16', 'f16', 's16', 'u16'), 16),
    **dict.fromkeys(('s8', 'u8', 'pred', 'f8e4m3fn', 'f8e5m2'), 8),
    **dict.fromkeys(('s4', 'u4'), 4),
    's2': 2,
}
ARRAY = re.compile(r'\b(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?')
HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
NAMES = re.compile(r'%([\w.\-]+)')
# A layout says `S(1)` of an array that lies in a TPU's own fast memory.
FAST = re.compile(r'S\([1-9]\d*\)')
CALLS = re.compile(r'(?:calls|to_apply)=%?([\w.\-]+)')
BRANCHES = re.compile(r'(?:branch_computations=\{(.*?)\}|(?:true|false)_computation=%?([\w.\-]+))')
LOOP = re.compile(r'condition=%?([\w.\-]+), body=%?([\w.\-]+)')
INDEX = re.compile(r'index=(\d+)')
INTEGER = re.compile(r'[su](32|64)\[\]')
BEGUN = re.compile(r'\s+(?:ROOT )?%[\w.\-]+ = ')
PARENTHESES = re.compile(r'[()]')
KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    fast: bool

    @property
    def size(self) -> int:
        n = 1
        for length in self.shape:
            n *= length
        return n

    @property
    def bytes(self) -> int:
        return self.size * ITEM_BITS.get(self.dtype, 0) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """argument: the text in its parentheses, of a constant its value. attributes: that behind."""

    name: str
    type: str
    opcode: str
    argument: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """Its results."""
        return [
            Array(dtype, tuple(int(n) for n in shape.split(',') if n), bool(FAST.search(layout)))
            for dtype, shape, layout in ARRAY.findall(self.type)
        ]

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(NAMES.findall(self.argument))

    @functools.cached_property
    def called(self) -> str | None:
        found = CALLS.search(self.attributes)
        return found and found[1]


Computation = dict[str, Instruction]


class Module:
    """computations: by name. rounds: how often a step runs each of them that is not a part of a
    fusion; of the branches of a conditional, the one that makes most. unknown: loops whose rounds
    the text does not say; they are counted once.
    """

    def __init__(self, text: str):
        self.computations, self.entry = _computations(text)
        self.unknown: list[str] = []
        self.rounds = dict(self._rounds_of(self.entry))

    def _rounds_of(self, name: str) -> collections.Counter[str]:
        """How often a computation runs itself, 1, and those that it calls."""
        found = collections.Counter({name: 1})
        for one in self.computations[name].values():
            if one.opcode == 'while':
                condition, body = LOOP.search(one.attributes).groups()
                trips = self._trips(self.computations[name], one, condition, body)
                for inner, times in self._rounds_of(body).items():
                    found[inner] += trips * times
            elif one.opcode in ('call', 'async-start') and one.called in self.computations:
                found += self._rounds_of(one.called)
            elif one.opcode == 'conditional':
                named = BRANCHES.findall(one.attributes)
                branches = [
                    b for several, single in named for b in NAMES.findall(several) or [single]
                ]
                found += max(map(self._rounds_of, branches), key=self._bytes_made)
        return found

    def _bytes_made(self, rounds: Mapping[str, int]) -> int:
        """Of all results, by which branches of a conditional are compared."""
        return sum(
            times * sum(array.bytes for array in one.arrays)
            for name, times in rounds.items()
            for one in self.computations[name].values()
            if one.opcode not in ('parameter', 'tuple', 'get-tuple-element', 'bitcast')
        )

    def _trips(self, around: Computation, loop: Instruction, condition: str, body: str) -> int:
        """The rounds of a loop: as the compiler says, or by the constant below which its count is
        to be, where it begins, and what a round adds to it. The compiler begins at 1 where it has
        taken the first round out, and adds 2 where it has put two into one.
        """
        if known := KNOWN.search(loop.attributes):
            return int(known[1])
        asked, computed = self.computations[condition], self.computations[body]
        count, limit = _beside_constant(asked, _root(asked), 'compare')
        if place := count and INDEX.search(count.attributes):
            carried = computed[_root(computed).operands[int(place[1])]]
            _, added = _beside_constant(computed, carried, 'add')
            if added:
                return math.ceil((limit - _begins(around, loop, int(place[1]))) / added)
        self.unknown.append(loop.name)
        return 1

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, rounds) of what is scheduled: fusions as one."""
        for name, times in self.rounds.items():
            for one in self.computations[name].values():
                yield name, one, times

    def inside(self, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """What a fusion is made of, nested ones included, each with the computation that its
        operands are of.
        """
        inner = self.computations.get(one.called)
        for part in inner.values() if inner else ():
            if part.opcode == 'fusion':
                yield from self.inside(part)
            else:
                yield inner, part


def _root(computation: Computation) -> Instruction:
    return next(one for one in computation.values() if one.is_root)


def _begins(computation: Computation, loop: Instruction, place: int) -> int:
    """What a loop is given for its count; 0, as JAX has it, where that is no constant."""
    given = computation[loop.operands[0]]
    if given.opcode != 'tuple':
        return 0
    one = computation[given.operands[place]]
    while one.opcode == 'copy':
        one = computation[one.operands[0]]
    return int(one.argument) if one.opcode == 'constant' else 0


def _beside_constant(
    computation: Computation, one: Instruction, opcode: str
) -> tuple[Instruction | None, int]:
    """(the other operand, the constant) of an `opcode` whose second is an integer; or (None, 0)."""
    if one.opcode == opcode:
        other, second = (computation[name] for name in one.operands)
        if second.opcode == 'constant' and INTEGER.match(second.type):
            return other, int(second.argument)
    return None, 0


def _computations(text: str) -> tuple[dict[str, Computation], str]:
    found, entry, current = {}, '', None
    for line in _whole_lines(text):
        if header := HEADER.match(line):
            current = found[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif current is not None and BEGUN.match(line):
            one = _instruction(line)
            current[one.name] = one
    return found, entry


def _whole_lines(text: str) -> Iterator[str]:
    """What a kernel says of itself may have line breaks in it."""
    pending = ''
    for line in text.splitlines():
        if pending and not (BEGUN.match(line) or HEADER.match(line) or line == '}'):
            pending += line
        else:
            yield pending
            pending = line
    yield pending


def _instruction(line: str) -> Instruction:
    """`[ROOT] %name = type opcode(argument), attributes`; a type may be a tuple."""
    left, _, right = line.strip().partition(' = ')
    end = _closed(right, 0) if right.startswith('(') else right.index(' ')
    kind, rest = right[:end], right[end:].lstrip()
    opened = rest.index('(')
    closed = _closed(rest, opened)
    return Instruction(
        name=left.removeprefix('ROOT ').lstrip('%'),
        type=kind,
        opcode=rest[:opened],
        argument=rest[opened + 1 : closed - 1],
        attributes=rest[closed:],
        is_root=left.startswith('ROOT '),
    )


def _closed(text: str, opened: int) -> int:
    """Behind the parenthesis that closes the one at `opened`."""
    depth = 0
    for place in PARENTHESES.finditer(text, opened):
        depth += 1 if place[0] == '(' else -1
        if not depth:
            return place.end()
    raise ValueError(f'an instruction is cut: {text[:200]}')
