"""A compiled program, read from its text: instructions, how often they run, and their arrays.

The compiler's own sums (`Compiled.cost_analysis`) count the body of a loop once; here it counts as
often as the loop runs.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tpu.integers import INDEX, LOOP, IntegerEvaluator, UnknownInteger, find_root, skip_opcode

BITS = re.compile(r'\d+')
ARRAY = re.compile(r'\b(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?')
HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
NAMES = re.compile(r'%([\w.\-]+)')
# The layout of an array that lies in a TPU's own fast memory has S(1) in it.
FAST = re.compile(r'S\([1-9]\d*\)')
CALLS = re.compile(r'(?:calls|to_apply)=%?([\w.\-]+)')
BRANCHES = re.compile(r'(?:branch_computations=\{.*?\}|(?:true|false)_computation=%[\w.\-]+)')
INTEGER = re.compile(r'[su](32|64)\[\]')
INSTRUCTION_START = re.compile(r'\s+(?:ROOT )?%[\w.\-]+ = ')
# [ROOT] %name = type opcode(argument), attributes
INSTRUCTION = re.compile(r'\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)')
TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    layout: str = ''

    @property
    def is_fast(self) -> bool:
        """Whether the array lies in a TPU's fast memory."""
        return FAST.search(self.layout) is not None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = BITS.search('u8' if self.dtype == 'pred' else self.dtype)  # a token has none
        return self.size * int(bits[0]) // 8 if bits else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program. argument: the text in parentheses, of a constant its value.
    attributes: the text behind it. arrays: the results. operands: their names, in order.
    """

    is_root: bool
    name: str
    type: str
    opcode: str
    argument: str
    attributes: str

    @functools.cached_property
    def arrays(self) -> list[Array]:
        return [
            Array(dtype, tuple(int(n) for n in shape.split(',') if n), layout)
            for dtype, shape, layout in ARRAY.findall(self.type)
        ]

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(NAMES.findall(self.argument))

    @functools.cached_property
    def callee(self) -> str | None:
        found = CALLS.search(self.attributes)
        return found and found[1]


Computation = dict[str, Instruction]


class Module:
    """A program. rounds: how often a step runs each computation that is not a part of a fusion; of
    the branches of a conditional only the one with the largest results, and of a loop whose rounds
    the loop around it sets their mean. unknown: loops without a known number of rounds, which count
    once.
    """

    def __init__(self, text: str):
        self.computations, self.entry = _parse_computations(text)
        self.unknown_loops: list[str] = []
        found = self._count_rounds(self.entry, IntegerEvaluator(self.computations, self.entry))
        self.rounds = {name: round(times) for name, times in found.items()}

    def _count_rounds(
        self,
        name: str,
        integers: IntegerEvaluator,
        rounds: Callable[[], Sequence[IntegerEvaluator]] = tuple,
    ) -> collections.Counter[str]:
        """Counts the runs of each computation in one run of `name`, itself included; if that is the
        body of a loop in all its `rounds`, the mean over them.
        """
        found = collections.Counter({name: 1})
        for one in self.computations[name].values():
            if one.opcode == 'while':
                condition, body = LOOP.search(one.attributes).groups()
                trips = self._find_trip_count(self.computations[name], one, condition, body)
                if trips is None:
                    trips = self._mean_trip_count(one, rounds() or [integers])
                inside, each = (
                    integers.enter_loop(one),
                    functools.partial(_loop_rounds, integers, one),
                )
                for inner, times in self._count_rounds(body, inside, each).items():
                    found[inner] += trips * times
            elif one.opcode in ('call', 'async-start') and one.callee in self.computations:
                found += self._count_rounds(
                    one.callee, IntegerEvaluator(self.computations, one.callee)
                )
            elif one.opcode == 'conditional':
                branches = NAMES.findall(' '.join(BRANCHES.findall(one.attributes)))
                runs = [
                    self._count_rounds(b, IntegerEvaluator(self.computations, b)) for b in branches
                ]
                found += max(runs, key=self._result_bytes)
        return found

    def _mean_trip_count(self, loop: Instruction, rounds: Sequence[IntegerEvaluator]) -> float:
        """Returns the mean rounds of a loop over those of the loop around it; 1 if unknown."""
        try:
            return sum(values.loop_count(loop).rounds for values in rounds) / len(rounds)
        except UnknownInteger:
            self.unknown_loops.append(loop.name)
            return 1

    def _result_bytes(self, rounds: Mapping[str, int]) -> int:
        return sum(
            times * sum(array.bytes for array in one.arrays)
            for name, times in rounds.items()
            for one in self.computations[name].values()
            if one.opcode not in ('parameter', 'tuple', 'get-tuple-element', 'bitcast')
        )

    def _find_trip_count(
        self, parent: Computation, loop: Instruction, condition: str, body: str
    ) -> int | None:
        """Returns the rounds of a loop: stated by the compiler, or by the limit, start and step of
        its count. The compiler starts at 1 where it has moved the first round out of the loop, and
        adds 2 where it has put two rounds into one. None: they are no constant.
        """
        if known := TRIP_COUNT.search(loop.attributes):
            return int(known[1])
        asked, computed = self.computations[condition], self.computations[body]
        count, limit = _match_constant(asked, find_root(asked), 'compare')
        if place := count and INDEX.search(count.attributes):
            carried = computed[find_root(computed).operands[int(place[1])]]
            _, added = _match_constant(computed, carried, 'add')
            if added:
                return math.ceil((limit - _loop_start(parent, loop, int(place[1]))) / added)
        return None

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """Yields (computation, instruction, rounds) of what is scheduled: fusions as one."""
        for name, times in self.rounds.items():
            for one in self.computations[name].values():
                yield name, one, times

    def fused_instructions(self, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the instructions of a fusion, nested ones included, each with its computation."""
        inner = self.computations.get(fusion.callee)
        for part in inner.values() if inner else ():
            if part.opcode == 'fusion':
                yield from self.fused_instructions(part)
            else:
                yield inner, part


def _loop_rounds(integers: IntegerEvaluator, loop: Instruction) -> list[IntegerEvaluator]:
    """Returns the integers of a loop's body in each of its rounds; none if those are unknown."""
    try:
        return integers.enter_rounds(loop)
    except UnknownInteger:
        return []


def _loop_start(computation: Computation, loop: Instruction, place: int) -> int:
    """Returns the start of a loop's count; 0, which JAX uses, where it is no constant."""
    given = computation[loop.operands[0]]
    if given.opcode != 'tuple':
        return 0
    one = skip_opcode(computation, computation[given.operands[place]], 'copy')
    return int(one.argument) if one.opcode == 'constant' else 0


def _match_constant(
    computation: Computation, instruction: Instruction, opcode: str
) -> tuple[Instruction | None, int]:
    """Returns (first operand, integer) of an `opcode` with a constant integer, else (None, 0)."""
    if instruction.opcode == opcode:
        other, second = (computation[name] for name in instruction.operands)
        if second.opcode == 'constant' and INTEGER.match(second.type):
            return other, int(second.argument)
    return None, 0


def _parse_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Returns (computations by name, the name of the entry)."""
    computations, entry, current = {}, '', None
    for line in _join_lines(text):
        if header := HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif current is not None and (found := INSTRUCTION.match(line)):
            root, name, *texts = found.groups()
            current[name] = Instruction(root is not None, name, *texts)
    return computations, entry


def _join_lines(text: str) -> Iterator[str]:
    """Joins lines of one instruction: a kernel's description may have line breaks in it."""
    pending = ''
    for line in text.splitlines():
        if pending and not (INSTRUCTION_START.match(line) or HEADER.match(line) or line == '}'):
            pending += line
        else:
            yield pending
            pending = line
    yield pending
