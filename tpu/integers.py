"""Evaluates integers of a compiled program from its text, for loops with a variable limit.

The limit may depend on the counter of an outer loop, for example the tiles of keys up to a tile of
queries.
"""

import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tpu.hlo import Computation, Instruction

MAX_ELEMENTS = 4096  # larger arrays are not evaluated
UNSET = -(2**62)  # marks elements of an array that a loop has not written
INDEX = re.compile(r'index=(\d+)')
LOOP = re.compile(r'condition=%?([\w.\-]+), body=%?([\w.\-]+)')
DIRECTION = re.compile(r'direction=(\w+)')
INTEGERS = re.compile(r'-?\d+|true|false')
BOOLEANS = {'true': 1, 'false': 0}
COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    'LT': np.less,
    'LE': np.less_equal,
    'EQ': np.equal,
}
COMPARISONS |= {'GT': np.greater, 'GE': np.greater_equal, 'NE': np.not_equal}
OPERATIONS = {
    'add': np.add,
    'subtract': np.subtract,
    'multiply': np.multiply,
    'divide': lambda a, b: np.trunc(a / b).astype(int),  # toward 0, unlike Python's //
    'remainder': np.fmod,
    'maximum': np.maximum,
    'minimum': np.minimum,
    'negate': np.negative,
    'sign': np.sign,
    'and': np.bitwise_and,
    'or': np.bitwise_or,
    'shift-left': np.left_shift,
    'shift-right-arithmetic': np.right_shift,
    'shift-right-logical': lambda a, b: (a & 0xFFFFFFFF) >> b,  # of 32-bit integers
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
    """An integer that does not follow from constants."""


class LoopCount(NamedTuple):
    """The counter of a loop.

    place: its index in the carry. start, step: its first value and increment. rounds: their number.
    """

    place: int
    start: int
    step: int
    rounds: int


class IntegerEvaluator:
    """Evaluates the integer results of a computation's instructions.

    parameters: functions that evaluate a fusion's parameters. loop, parent: the loop or call that
    runs this computation, and the evaluator of the computation around it. carry: known elements of
    the loop's carry at the start of a round, by index.
    """

    def __init__(
        self,
        computations: Mapping[str, 'Computation'],
        name: str,
        parameters: Sequence[Callable[[], np.ndarray]] = (),
        loop: 'Instruction | None' = None,
        parent: 'IntegerEvaluator | None' = None,
        carry: Mapping[int, np.ndarray] = types.MappingProxyType({}),
    ):
        self.computations, self.instructions, self.parameters = (
            computations,
            computations[name],
            parameters,
        )
        self.loop, self.parent, self.carry = loop, parent, carry
        self._loop_values = {}  # {(loop, index): the value that it returns}

    def evaluate(self, name: str) -> np.ndarray:
        """Evaluates the result of an instruction. Raises UnknownInteger."""
        instruction = self.instructions[name]
        if instruction.opcode == 'get-tuple-element':
            source = self.instructions[instruction.operands[0]]
            return self.evaluate_element(source, parse_index(instruction))
        if instruction.opcode == 'parameter' and self.parameters:
            return self.parameters[int(instruction.argument)]()
        if instruction.opcode in ('fusion', 'fusion-start'):
            inner = self.enter_fusion(instruction)
            return inner.evaluate(find_root(inner.instructions).name)
        if not instruction.arrays or instruction.arrays[0].size > MAX_ELEMENTS:
            raise UnknownInteger(name)
        shape = instruction.arrays[0].shape
        if (
            instruction.opcode == 'constant' and instruction.arrays[0].dtype[0] in 'sup'
        ):  # not a float
            words = INTEGERS.findall(instruction.argument)
            return np.array([int(BOOLEANS.get(word, word)) for word in words]).reshape(shape)
        if instruction.opcode == 'iota' and len(shape) == 1:
            return np.arange(*shape)
        values = [self.evaluate(operand) for operand in instruction.operands]
        if instruction.opcode in IDENTITY_OPCODES:
            return (
                values[0].reshape(shape) if values[0].size > 1 else np.full(shape, values[0].item())
            )
        if instruction.opcode == 'dynamic-slice' and len(shape) == 1:
            # XLA clamps the start of a slice so that the slice stays within the array.
            start = int(np.clip(values[1], 0, len(values[0]) - shape[0]))
            return values[0][start : start + shape[0]]
        if instruction.opcode == 'dynamic-update-slice' and len(shape) == 1:
            start = int(np.clip(values[2], 0, shape[0] - len(values[1])))
            return np.concatenate(
                [values[0][:start], values[1], values[0][start + len(values[1]) :]]
            )
        if instruction.opcode == 'compare':
            return COMPARISONS[parse_direction(instruction)](*values).astype(int)
        if instruction.opcode not in OPERATIONS:
            raise UnknownInteger(name)
        return OPERATIONS[instruction.opcode](*values)

    def evaluate_element(self, source: 'Instruction', index: int) -> np.ndarray:
        """Evaluates element `index` of a tuple, or of the tuple that a loop or call returns.

        Raises UnknownInteger.
        """
        if source.opcode == 'tuple':
            return self.evaluate(source.operands[index])
        if source.opcode == 'while':
            if (source.name, index) not in self._loop_values:
                self._loop_values[source.name, index] = self._evaluate_loop(source, index)
            return self._loop_values[source.name, index]
        if source.opcode == 'call':
            inner = IntegerEvaluator(self.computations, source.callee, (), source, self)
            return inner.evaluate_root(index)
        if source.opcode == 'parameter' and self.loop is not None:
            if index in self.carry:
                return self.carry[index]
            if self.loop.opcode == 'call' or self._is_invariant(self.loop, index):
                assert self.parent is not None  # given together with the loop
                return self.parent.evaluate_element(
                    self.parent.instructions[self.loop.operands[0]], index
                )
        raise UnknownInteger(source.name)

    def _evaluate_loop(self, loop: 'Instruction', index: int) -> np.ndarray:
        """Evaluates an element of a loop's result: an unchanged element, or an array it fills."""
        start = self.instructions[loop.operands[0]]
        if self._is_invariant(loop, index):
            return self.evaluate_element(start, index)
        array_type = loop.arrays[index]
        if array_type.size > MAX_ELEMENTS:
            raise UnknownInteger(loop.name)
        # UNSET in place of the initial values shows whether the loop writes every element.
        array_value = np.full(array_type.shape, UNSET)
        for evaluator in self.enter_rounds(loop):
            evaluator.carry = {**evaluator.carry, index: array_value}
            array_value = evaluator.evaluate_root(index)
        if np.any(array_value == UNSET):
            raise UnknownInteger(loop.name)
        return array_value

    def evaluate_root(self, index: int) -> np.ndarray:
        """Evaluates element `index` of the result of a loop's body, or of a called computation."""
        return self.evaluate_element(find_root(self.instructions), index)

    def _is_invariant(self, loop: 'Instruction', index: int) -> bool:
        """Whether a loop's body returns an element of the carry unchanged."""
        body = self.computations[parse_loop(loop)[1]]
        root = find_root(body)
        if root.opcode != 'tuple':
            return root.opcode == 'parameter'
        source = skip_opcode(body, body[root.operands[index]], 'copy')
        return source.opcode == 'get-tuple-element' and parse_index(source) == index

    def loop_count(self, loop: 'Instruction') -> LoopCount:
        """Evaluates the counter of a loop in this computation. Raises UnknownInteger."""
        condition, body = parse_loop(loop)
        evaluator = IntegerEvaluator(self.computations, condition, (), loop, self)
        root = find_root(evaluator.instructions)
        counter_name, limit = (
            evaluator if root.opcode == 'compare' else evaluator.enter_fusion(root)
        ).parse_condition()
        if counter_name not in evaluator.instructions:
            # The comparison is in a fusion, where the counter is a parameter.
            counter = self.computations[root.callee][counter_name]
            if counter.opcode != 'parameter':
                raise UnknownInteger(loop.name)
            counter_name = root.operands[int(counter.argument)]
        if evaluator.instructions[counter_name].opcode != 'get-tuple-element':
            raise UnknownInteger(loop.name)
        index = parse_index(evaluator.instructions[counter_name])
        start = int(self.evaluate_element(self.instructions[loop.operands[0]], index))
        first_round = IntegerEvaluator(
            self.computations, body, (), loop, self, {index: np.array(start)}
        )
        step = int(first_round.evaluate_root(index)) - start
        if step < 1:
            raise UnknownInteger(loop.name)
        return LoopCount(index, start, step, max(0, math.ceil((limit - start) / step)))

    def parse_condition(self) -> tuple[str, int]:
        """Returns (name of the counter, limit) of a condition, counter < limit."""
        root = find_root(self.instructions)
        if root.opcode != 'compare' or parse_direction(root) != 'LT':
            raise UnknownInteger(root.name)
        return root.operands[0], int(self.evaluate(root.operands[1]))

    def enter_fusion(self, fusion: 'Instruction') -> 'IntegerEvaluator':
        """Returns an evaluator for the instructions inside a fusion."""
        if fusion.opcode not in ('fusion', 'fusion-start'):
            raise UnknownInteger(fusion.name)
        parameters = [lambda name=name: self.evaluate(name) for name in fusion.operands]
        return IntegerEvaluator(self.computations, fusion.callee, parameters)

    def enter_rounds(self, loop: 'Instruction') -> list['IntegerEvaluator']:
        """Returns an evaluator for each round of a loop's body. Raises UnknownInteger."""
        index, start, step, rounds = self.loop_count(loop)
        _, body = parse_loop(loop)
        counts = range(start, start + step * rounds, step)
        args = (self.computations, body, (), loop, self)
        return [IntegerEvaluator(*args, {index: np.array(count)}) for count in counts]

    def enter_loop(self, loop: 'Instruction') -> 'IntegerEvaluator':
        """Returns an evaluator for a loop's body, valid in every round."""
        return IntegerEvaluator(self.computations, parse_loop(loop)[1], (), loop, self)


def parse_index(instruction: 'Instruction') -> int:
    """Returns the index of a get-tuple-element."""
    match = INDEX.search(instruction.attributes)
    assert match is not None
    return int(match[1])


def parse_loop(instruction: 'Instruction') -> tuple[str, str]:
    """Returns the names of a loop's computations (condition, body)."""
    match = LOOP.search(instruction.attributes)
    assert match is not None
    return match[1], match[2]


def parse_direction(instruction: 'Instruction') -> str:
    """Returns the relation of a comparison, such as 'LT'."""
    match = DIRECTION.search(instruction.attributes)
    assert match is not None
    return match[1]


def find_root(computation: 'Computation') -> 'Instruction':
    """Returns the root of a computation, the instruction that gives its result."""
    return next(instruction for instruction in computation.values() if instruction.is_root)


def skip_opcode(
    computation: 'Computation', instruction: 'Instruction', opcode: str
) -> 'Instruction':
    """Follows the first operand of an instruction through any number of instructions of one opcode.

    Args:
      computation: holds the instructions.
      instruction: where to begin.
      opcode: an opcode with one operand, such as 'copy'.

    Returns:
      The first instruction with another opcode.
    """
    while instruction.opcode == opcode:
        instruction = computation[instruction.operands[0]]
    return instruction
