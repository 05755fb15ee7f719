"""Parses a compiled program: its instructions, how often they run, and their arrays.

The compiler's own sums (`Compiled.cost_analysis`) count the body of a loop once; here it counts for
every round.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tpu.integers import (
    INDEX,
    IntegerEvaluator,
    UnknownInteger,
    find_root,
    parse_loop,
    skip_opcode,
)

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
    """The type of an array: element type, shape and layout."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ''

    @property
    def is_fast(self) -> bool:
        """Whether the array is in a TPU's fast memory."""
        return FAST.search(self.layout) is not None

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Returns the size in bytes."""
        bits = BITS.search('u8' if self.dtype == 'pred' else self.dtype)  # a token has no size
        return self.size * int(bits[0]) // 8 if bits else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    argument: the text in parentheses; for a constant, its value. attributes: the text after it.
    """

    is_root: bool
    name: str
    type: str
    opcode: str
    argument: str
    attributes: str

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """Returns the types of the results."""
        return [
            Array(dtype, tuple(int(n) for n in shape.split(',') if n), layout)
            for dtype, shape, layout in ARRAY.findall(self.type)
        ]

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Returns the names of the operands, in order."""
        return tuple(NAMES.findall(self.argument))

    @functools.cached_property
    def callee(self) -> str:
        """Returns the name of the computation that the instruction calls, or ''."""
        match = CALLS.search(self.attributes)
        return match[1] if match else ''


Computation = dict[str, Instruction]


class Module:
    """A program.

    rounds: how often a step runs each computation that is not part of a fusion. A conditional
    counts as its branch with the largest results. If the rounds of a loop depend on the loop around
    it, their mean counts. unknown_loops: loops with an unknown number of rounds, counted once.
    """

    def __init__(self, text: str):
        self.computations, self.entry = _parse_computations(text)
        self.unknown_loops: list[str] = []
        rounds = self._count_rounds(self.entry, IntegerEvaluator(self.computations, self.entry))
        self.rounds = {name: round(n) for name, n in rounds.items()}

    def _count_rounds(
        self,
        name: str,
        integers: IntegerEvaluator,
        rounds: Callable[[], Sequence[IntegerEvaluator]] = tuple,
    ) -> collections.Counter[str]:
        """Counts the runs of each computation in one run of `name`, including `name` itself.

        If `name` is the body of a loop, `rounds` gives its evaluators in all rounds, and the counts
        of inner loops are means over them.
        """
        totals = collections.Counter({name: 1})
        for instruction in self.computations[name].values():
            if instruction.opcode == 'while':
                condition, body = parse_loop(instruction)
                trips = self._find_trip_count(self.computations[name], instruction, condition, body)
                if trips is None:
                    # The limit may depend on the loop around it, as tiles of keys under a causal
                    # mask depend on the tile of queries: the mean over all its rounds.
                    trips = self._mean_trip_count(instruction, rounds() or [integers])
                evaluator, loop_rounds = (
                    integers.enter_loop(instruction),
                    functools.partial(_loop_rounds, integers, instruction),
                )
                for inner, inner_rounds in self._count_rounds(body, evaluator, loop_rounds).items():
                    totals[inner] += trips * inner_rounds  # ty: ignore[invalid-assignment]
            elif (
                instruction.opcode in ('call', 'async-start')
                and instruction.callee in self.computations
            ):
                totals += self._count_rounds(
                    instruction.callee, IntegerEvaluator(self.computations, instruction.callee)
                )
            elif instruction.opcode == 'conditional':
                branches = NAMES.findall(' '.join(BRANCHES.findall(instruction.attributes)))
                runs = [
                    self._count_rounds(branch, IntegerEvaluator(self.computations, branch))
                    for branch in branches
                ]
                # The dearest branch, by the bytes it writes: an upper bound of the conditional.
                totals += max(runs, key=self._result_bytes)
        return totals

    def _mean_trip_count(self, loop: Instruction, rounds: Sequence[IntegerEvaluator]) -> float:
        """Returns the mean rounds of a loop over the rounds of the loop around it; 1 if unknown."""
        try:
            return sum(evaluator.loop_count(loop).rounds for evaluator in rounds) / len(rounds)
        except UnknownInteger:
            self.unknown_loops.append(loop.name)
            return 1

    def _result_bytes(self, rounds: Mapping[str, int]) -> int:
        """Returns the bytes of all results, for the branch of a conditional."""
        return sum(
            n * sum(array.bytes for array in instruction.arrays)
            for name, n in rounds.items()
            for instruction in self.computations[name].values()
            if instruction.opcode not in ('parameter', 'tuple', 'get-tuple-element', 'bitcast')
        )

    def _find_trip_count(
        self, parent: Computation, loop: Instruction, condition: str, body: str
    ) -> int | None:
        """Returns the rounds of a loop, stated by the compiler or from its counter, else None.

        The counter's limit, start and step must be constants. The compiler lets it start at 1 if it
        moves the first round out of the loop, and steps by 2 if it merges two rounds.
        """
        if match := TRIP_COUNT.search(loop.attributes):
            return int(match[1])
        condition_computation, body_computation = (
            self.computations[condition],
            self.computations[body],
        )
        counter, limit = _match_constant(
            condition_computation, find_root(condition_computation), 'compare'
        )
        if counter is not None and (index := INDEX.search(counter.attributes)):
            next_value = body_computation[find_root(body_computation).operands[int(index[1])]]
            _, step = _match_constant(body_computation, next_value, 'add')
            if step:
                return math.ceil((limit - _loop_start(parent, loop, int(index[1]))) / step)
        return None

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """Yields (computation, instruction, rounds) for scheduled instructions.

        A fusion counts as a single instruction.
        """
        for name, n in self.rounds.items():
            for instruction in self.computations[name].values():
                yield name, instruction, n

    def fused_instructions(self, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the instructions of a fusion with their computations, including nested fusions."""
        inner = self.computations.get(fusion.callee)
        if inner is None:
            return
        for part in inner.values():
            if part.opcode == 'fusion':
                yield from self.fused_instructions(part)
            else:
                yield inner, part


def _loop_rounds(integers: IntegerEvaluator, loop: Instruction) -> list[IntegerEvaluator]:
    """Returns the evaluators of a loop's body in each round; none if the rounds are unknown."""
    try:
        return integers.enter_rounds(loop)
    except UnknownInteger:
        return []


def _loop_start(computation: Computation, loop: Instruction, index: int) -> int:
    """Returns the start of a loop's counter; 0, which JAX uses, if it is not a constant."""
    initial = computation[loop.operands[0]]
    if initial.opcode != 'tuple':
        return 0
    start = skip_opcode(computation, computation[initial.operands[index]], 'copy')
    return int(start.argument) if start.opcode == 'constant' else 0


def _match_constant(
    computation: Computation, instruction: Instruction, opcode: str
) -> tuple[Instruction | None, int]:
    """Returns (first operand, integer) of an `opcode` with a constant integer, else (None, 0)."""
    if instruction.opcode == opcode:
        first, second = (computation[name] for name in instruction.operands)
        if second.opcode == 'constant' and INTEGER.match(second.type):
            return first, int(second.argument)
    return None, 0


def _parse_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Returns (computations by name, name of the entry)."""
    computations, entry, current = {}, '', None
    for line in _join_lines(text):
        if header := HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif current is not None and (match := INSTRUCTION.match(line)):
            root, name, *texts = match.groups()
            current[name] = Instruction(root is not None, name, *texts)
    return computations, entry


def _join_lines(text: str) -> Iterator[str]:
    """Joins the lines of an instruction: the description of a kernel may contain line breaks."""
    pending = ''
    for line in text.splitlines():
        if pending and not (INSTRUCTION_START.match(line) or HEADER.match(line) or line == '}'):
            pending += line
        else:
            yield pending
            pending = line
    yield pending
