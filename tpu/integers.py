"""Integers of a compiled program, computed from its text, for loops whose limit is no constant: the
loop around them may count it, as tiles of keys before a tile of queries.
"""

import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_ELEMENTS = 4096  # elements of an array that is computed
UNSET = -(2**62)
INDEX = re.compile(r'index=(\d+)')
LOOP = re.compile(r'condition=%?([\w.\-]+), body=%?([\w.\-]+)')
DIRECTION = re.compile(r'direction=(\w+)')
INTEGERS = re.compile(r'-?\d+|true|false')
BOOLEANS = {'true': 1, 'false': 0}
COMPARISONS = {'LT': np.less, 'LE': np.less_equal, 'EQ': np.equal}
COMPARISONS |= {'GT': np.greater, 'GE': np.greater_equal, 'NE': np.not_equal}
OPERATIONS = {
    'add': np.add,
    'subtract': np.subtract,
    'multiply': np.multiply,
    'divide': lambda a, b: np.trunc(a / b).astype(int),
    'remainder': np.fmod,
    'maximum': np.maximum,
    'minimum': np.minimum,
    'negate': np.negative,
    'sign': np.sign,
    'and': np.bitwise_and,
    'or': np.bitwise_or,
    'shift-left': np.left_shift,
    'shift-right-arithmetic': np.right_shift,
    'shift-right-logical': lambda a, b: (a & 0xFFFFFFFF) >> b,
    'select': lambda which, a, b: np.where(which != 0, a, b),
    'clamp': lambda low, x, high: np.clip(x, low, high),
}
IDENTITY_OPCODES = (
    'copy',
    'bitcast',
    'reshape',
    'convert',
    'broadcast',
    'fusion-done',
    'copy-done',
)


class UnknownInteger(ValueError):
    """The number follows from no constants."""


class LoopCount(NamedTuple):
    """A loop's count: its place in what the loop carries, its start and step, and the rounds."""

    place: int
    start: int
    step: int
    rounds: int


class IntegerEvaluator:
    """Results of a computation's instructions, where they are integers.

    parameters: the values of a fusion's parameters, computed when asked for. loop, around: the loop
    or call that runs this, and the results where that stands. carried: what the loop carries into
    one round, by place, as far as it is known.
    """

    def __init__(
        self,
        computations: Mapping[str, Any],
        name: str,
        parameters: Sequence[Callable[[], np.ndarray]] = (),
        loop: Any = None,
        parent: 'IntegerEvaluator | None' = None,
        carry: Mapping[int, np.ndarray] = types.MappingProxyType({}),
    ):
        self.computations, self.instructions, self.parameters = (
            computations,
            computations[name],
            parameters,
        )
        self.loop, self.parent, self.carry = loop, parent, carry
        self._loop_values = {}  # {(loop, place): what it returns there}

    def evaluate(self, name: str) -> np.ndarray:
        """Computes the result of an instruction. Raises UnknownInteger."""
        one = self.instructions[name]
        if one.opcode == 'get-tuple-element':
            return self.evaluate_element(
                self.instructions[one.operands[0]], int(INDEX.search(one.attributes)[1])
            )
        if one.opcode == 'parameter' and self.parameters:
            return self.parameters[int(one.argument)]()
        if one.opcode in ('fusion', 'fusion-start'):
            inner = self.enter_fusion(one)
            return inner.evaluate(find_root(inner.instructions).name)
        if not one.arrays or one.arrays[0].size > MAX_ELEMENTS:
            raise UnknownInteger(name)
        shape = one.arrays[0].shape
        if one.opcode == 'constant' and one.arrays[0].dtype[0] in 'sup':  # no float
            found = INTEGERS.findall(one.argument)
            return np.array([int(BOOLEANS.get(word, word)) for word in found]).reshape(shape)
        if one.opcode == 'iota' and len(shape) == 1:
            return np.arange(*shape)
        given = [self.evaluate(operand) for operand in one.operands]
        if one.opcode in IDENTITY_OPCODES:
            return given[0].reshape(shape) if given[0].size > 1 else np.full(shape, given[0].item())
        if one.opcode == 'dynamic-slice' and len(shape) == 1:
            start = int(np.clip(given[1], 0, len(given[0]) - shape[0]))
            return given[0][start : start + shape[0]]
        if one.opcode == 'dynamic-update-slice' and len(shape) == 1:
            start = int(np.clip(given[2], 0, shape[0] - len(given[1])))
            return np.concatenate([given[0][:start], given[1], given[0][start + len(given[1]) :]])
        if one.opcode == 'compare':
            return COMPARISONS[DIRECTION.search(one.attributes)[1]](*given).astype(int)
        if one.opcode not in OPERATIONS:
            raise UnknownInteger(name)
        return OPERATIONS[one.opcode](*given)

    def evaluate_element(self, source: Any, place: int) -> np.ndarray:
        """Computes what a tuple, or a loop's, has at `place`. Raises UnknownInteger."""
        if source.opcode == 'tuple':
            return self.evaluate(source.operands[place])
        if source.opcode == 'while':
            if (source.name, place) not in self._loop_values:
                self._loop_values[source.name, place] = self._evaluate_loop(source, place)
            return self._loop_values[source.name, place]
        if source.opcode == 'call':
            inner = IntegerEvaluator(self.computations, source.callee, (), source, self)
            return inner.evaluate_root(place)
        if source.opcode == 'parameter' and self.loop is not None:
            if place in self.carry:
                return self.carry[place]
            if self.loop.opcode == 'call' or self._is_invariant(self.loop, place):
                return self.parent.evaluate_element(
                    self.parent.instructions[self.loop.operands[0]], place
                )
        raise UnknownInteger(source.name)

    def _evaluate_loop(self, loop: Any, place: int) -> np.ndarray:
        """Computes what a loop returns at `place`: what it was given, or a list that it fills."""
        given = self.instructions[loop.operands[0]]
        if self._is_invariant(loop, place):
            return self.evaluate_element(given, place)
        array = loop.arrays[place]
        if array.size > MAX_ELEMENTS:
            raise UnknownInteger(loop.name)
        made = np.full(array.shape, UNSET)
        for one_round in self.enter_rounds(loop):
            one_round.carry = {**one_round.carry, place: made}
            made = one_round.evaluate_root(place)
        if np.any(made == UNSET):
            raise UnknownInteger(loop.name)
        return made

    def evaluate_root(self, place: int) -> np.ndarray:
        """Computes what a loop's body, or what is called, returns at `place`."""
        return self.evaluate_element(find_root(self.instructions), place)

    def _is_invariant(self, loop: Any, place: int) -> bool:
        """Whether a loop's body returns what it was given at `place`."""
        body = self.computations[LOOP.search(loop.attributes)[2]]
        root = find_root(body)
        if root.opcode != 'tuple':
            return root.opcode == 'parameter'
        last = skip_opcode(body, body[root.operands[place]], 'copy')
        return last.opcode == 'get-tuple-element' and int(INDEX.search(last.attributes)[1]) == place

    def loop_count(self, loop: Any) -> LoopCount:
        """Computes the count of a loop that stands here. Raises UnknownInteger."""
        condition, body = LOOP.search(loop.attributes).groups()
        asked = IntegerEvaluator(self.computations, condition, (), loop, self)
        root = find_root(asked.instructions)
        count, limit = (
            asked if root.opcode == 'compare' else asked.enter_fusion(root)
        ).parse_condition()
        if count not in asked.instructions:
            inside = self.computations[root.callee][count]
            if inside.opcode != 'parameter':
                raise UnknownInteger(loop.name)
            count = root.operands[int(inside.argument)]
        if asked.instructions[count].opcode != 'get-tuple-element':
            raise UnknownInteger(loop.name)
        place = int(INDEX.search(asked.instructions[count].attributes)[1])
        start = int(self.evaluate_element(self.instructions[loop.operands[0]], place))
        first = IntegerEvaluator(self.computations, body, (), loop, self, {place: np.array(start)})
        step = int(first.evaluate_root(place)) - start
        if step < 1:
            raise UnknownInteger(loop.name)
        return LoopCount(place, start, step, max(0, math.ceil((limit - start) / step)))

    def parse_condition(self) -> tuple[str, int]:
        """Returns (name of the count, limit) of a condition, count < limit."""
        root = find_root(self.instructions)
        if root.opcode != 'compare' or DIRECTION.search(root.attributes)[1] != 'LT':
            raise UnknownInteger(root.name)
        return root.operands[0], int(self.evaluate(root.operands[1]))

    def enter_fusion(self, fusion: Any) -> 'IntegerEvaluator':
        """Returns the results inside a fusion."""
        if fusion.opcode not in ('fusion', 'fusion-start'):
            raise UnknownInteger(fusion.name)
        given = [lambda name=name: self.evaluate(name) for name in fusion.operands]
        return IntegerEvaluator(self.computations, fusion.callee, given)

    def enter_rounds(self, loop: Any) -> list['IntegerEvaluator']:
        """Returns the results of a loop's body in each of its rounds. Raises UnknownInteger."""
        place, start, step, rounds = self.loop_count(loop)
        body = LOOP.search(loop.attributes)[2]
        counts = range(start, start + step * rounds, step)
        given = (self.computations, body, (), loop, self)
        return [IntegerEvaluator(*given, {place: np.array(count)}) for count in counts]

    def enter_loop(self, loop: Any) -> 'IntegerEvaluator':
        """Returns what holds in a loop's body in any of its rounds."""
        return IntegerEvaluator(self.computations, LOOP.search(loop.attributes)[2], (), loop, self)


def find_root(computation: Mapping[str, Any]) -> Any:
    return next(one for one in computation.values() if one.is_root)


def skip_opcode(computation: Mapping[str, Any], instruction: Any, opcode: str) -> Any:
    """Returns the source of an instruction, behind any number of `opcode`s with one operand."""
    while instruction.opcode == opcode:
        instruction = computation[instruction.operands[0]]
    return instruction
