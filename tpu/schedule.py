"""The time that a device waits for collectives, by the order of a compiled program."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tpu.collectives import BETWEEN_SLICES, Collective, Exchange, list_exchanges
from tpu.hlo import NAMES, Computation, Instruction, Module

# Counters hold seconds here; their stubs, which allow only integers, are overruled where needed.
CALLERS = ('while', 'call', 'conditional', 'async-start')  # opcodes that run other computations
Operation = Callable[[Computation, Instruction], float]  # returns the seconds of an instruction
Link = Callable[[Collective], float]  # returns the seconds of one round on idle links


class ComputationRun(NamedTuple):
    """One run of a computation.

    seconds: operations and waits, including called computations. link_seconds: seconds of
    collectives by whether they are between slices, including called computations. waits: waits of
    this computation alone, by kind of collective.
    """

    seconds: float
    link_seconds: Counter[bool]
    waits: Counter[str]


@dataclasses.dataclass
class Transfer:
    """A collective that occupies the links.

    is_between_slices: whether it uses the network instead of the links within a slice. end_time: in
    seconds since the start of the computation.
    """

    exchange: Exchange
    is_between_slices: bool
    end_time: float


def waiting_seconds(module: Module, operation: Operation, link: Link) -> Counter[str]:
    """Returns the seconds of a step that a device waits for collectives, by their kind.

    A compiled program for TPUs or GPUs is scheduled: a device runs its instructions in the order of
    the text. An asynchronous collective runs beside them from its start on, and its end waits for
    the remainder. A collective without a separate start is waited for in full. A fused collective
    starts in its first fusion and ends in its last.

    Collectives within a slice share its links, and collectives between slices share the network.
    Each queue is first in, first out. Collectives inside a loop precede a collective that runs
    beside the loop. A wait counts for the kind of the awaited collective, even if a collective of
    another kind, earlier in the queue, causes the wait.

    Args:
      module: the compiled program.
      operation: returns the seconds of an instruction.
      link: returns the seconds of one round of a collective.

    Returns:
      Seconds by kind.
    """
    return _Schedule(module, operation, link).total_waits()


class _Schedule:
    """Simulates the computations of a program, each once."""

    def __init__(self, module: Module, operation: Operation, link: Link):
        self.module, self.operation, self.link = module, operation, link
        self.exchanges = list_exchanges(module)
        self.runs: dict[str, ComputationRun] = {}

    def total_waits(self) -> Counter[str]:
        """Returns the waits of all computations in a step."""
        # `ComputationRun.waits` excludes callees, so that each wait counts once, by its own rounds.
        total = Counter()
        for name, rounds in self.module.rounds.items():
            for kind, seconds in self.simulate(name).waits.items():
                total[kind] += rounds * seconds
        return total

    def simulate(self, name: str) -> ComputationRun:
        """Returns the run of a computation, from the cache if it was simulated before."""
        if name not in self.runs:
            self.runs[name] = self._simulate(name)
        return self.runs[name]

    def _simulate(self, name: str) -> ComputationRun:
        exchanges_by_start = defaultdict(list)
        for exchange in self.exchanges.get(name, ()):
            exchanges_by_start[exchange.start].append(exchange)
        computation, transfers = self.module.computations[name], []
        clock, link_seconds, waits = 0.0, Counter(), Counter()
        for instruction in computation.values():
            clock = _wait(instruction, transfers, clock, waits)
            start_time = clock
            clock += self.operation(computation, instruction)
            for inner, rounds in self._callees(name, instruction):
                clock += rounds * inner.seconds
                for is_between, seconds in inner.link_seconds.items():
                    link_seconds[is_between] += rounds * seconds  # ty: ignore[invalid-assignment]
                    # Collectives of the loop delay those that run beside it on the same links.
                    for transfer in transfers:
                        if (
                            transfer.is_between_slices == is_between
                            and transfer.end_time > start_time
                        ):
                            transfer.end_time += rounds * seconds
            for exchange in exchanges_by_start[instruction.name]:
                collective = exchange.collective
                is_between = collective.kind.endswith(BETWEEN_SLICES)
                seconds = self.link(collective)
                link_seconds[is_between] += seconds  # ty: ignore[invalid-assignment]
                end_times = (
                    transfer.end_time
                    for transfer in transfers
                    if transfer.is_between_slices == is_between
                )
                # Starts now, or when the last transfer on the same links has ended.
                end_time = max(clock, *end_times, 0.0) + seconds
                transfers.append(Transfer(exchange, is_between, end_time))
            # A collective without a separate start ends in the same instruction.
            clock = _wait(instruction, transfers, clock, waits)
        return ComputationRun(clock, link_seconds, waits)

    def _callees(
        self, name: str, instruction: Instruction
    ) -> Iterator[tuple[ComputationRun, float]]:
        """Yields (run, rounds) of the computations that an instruction runs."""
        rounds = self.module.rounds
        for inner in NAMES.findall(instruction.attributes) if instruction.opcode in CALLERS else ():
            if rounds.get(inner) and rounds[name]:
                yield self.simulate(inner), rounds[inner] / rounds[name]


def _wait(
    instruction: Instruction, transfers: list[Transfer], clock: float, waits: Counter[str]
) -> float:
    """Counts the waits of an instruction that ends transfers, and returns the time after them."""
    for transfer in transfers:
        if transfer.exchange.done == instruction.name and transfer.end_time > clock:
            kind = transfer.exchange.collective.kind
            waits[kind] += transfer.end_time - clock  # ty: ignore[invalid-assignment]
            clock = transfer.end_time
    return clock
