"""The time that a device waits for collectives, by the order of a compiled program."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tpu.collectives import BETWEEN_SLICES, Collective, Exchange, list_exchanges
from tpu.hlo import NAMES, Computation, Instruction, Module

CALLERS = ('while', 'call', 'conditional', 'async-start')  # they run other computations
Operation = Callable[[Computation, Instruction], float]  # returns the seconds of an instruction
Link = Callable[[Collective], float]  # returns the seconds of one round on links of its own


class ComputationRun(NamedTuple):
    """One run of a computation. seconds: of operations and waits. sent: seconds of collectives, by
    whether they go between slices. Both include what it calls. waits: its own, by kind.
    """

    seconds: float
    link_seconds: Counter[bool]
    waits: Counter[str]


@dataclasses.dataclass
class Transfer:
    """A collective on the links. between: whether they are those between slices. end: in seconds of
    the computation.
    """

    exchange: Exchange
    is_between_slices: bool
    end_time: float


def waiting_seconds(module: Module, operation: Operation, link: Link) -> Counter[str]:
    """Returns the seconds of a step that a device waits for collectives, by their kind.

    A compiled program for TPUs or GPUs is scheduled: a device runs its instructions in the order in
    which they stand. An asynchronous collective runs from its start on beside them, and its end
    waits for what is left of it; one without a start of its own is waited for whole. A fused one
    starts in its first fusion and ends in its last. Collectives within a slice share its links, and
    those between slices the network: each begins when the one before has ended, and those of a loop
    go before one that runs beside the loop. What a kind waits for may be another that is before it.
    """
    return _Schedule(module, operation, link).total_waits()


class _Schedule:
    def __init__(self, module: Module, operation: Operation, link: Link):
        self.module, self.operation, self.link = module, operation, link
        self.exchanges = list_exchanges(module)
        self.runs: dict[str, ComputationRun] = {}

    def total_waits(self) -> Counter[str]:
        total = Counter()
        for name, times in self.module.rounds.items():
            for kind, seconds in self.simulate(name).waits.items():
                total[kind] += times * seconds
        return total

    def simulate(self, name: str) -> ComputationRun:
        if name not in self.runs:
            self.runs[name] = self._simulate(name)
        return self.runs[name]

    def _simulate(self, name: str) -> ComputationRun:
        starting = defaultdict(list)
        for one in self.exchanges.get(name, ()):
            starting[one.start].append(one)
        computation, sending = self.module.computations[name], []
        now, sent, waits = 0.0, Counter(), Counter()
        for one in computation.values():
            now = _wait(one, sending, now, waits)
            begun = now
            now += self.operation(computation, one)
            for inner, times in self._callees(name, one):
                now += times * inner.seconds
                for between, seconds in inner.link_seconds.items():
                    sent[between] += times * seconds
                    for other in sending:
                        if other.is_between_slices == between and other.end_time > begun:
                            other.end_time += times * seconds
            for other in starting[one.name]:
                between, seconds = (
                    other.collective.kind.endswith(BETWEEN_SLICES),
                    self.link(other.collective),
                )
                sent[between] += seconds
                before = (
                    earlier.end_time for earlier in sending if earlier.is_between_slices == between
                )
                sending.append(Transfer(other, between, max(now, *before, 0.0) + seconds))
            now = _wait(one, sending, now, waits)  # for what has no start of its own
        return ComputationRun(now, sent, waits)

    def _callees(
        self, name: str, instruction: Instruction
    ) -> Iterator[tuple[ComputationRun, float]]:
        """Yields the computations that an instruction runs, each with its rounds."""
        rounds = self.module.rounds
        for inner in NAMES.findall(instruction.attributes) if instruction.opcode in CALLERS else ():
            if rounds.get(inner) and rounds[name]:
                yield self.simulate(inner), rounds[inner] / rounds[name]


def _wait(
    instruction: Instruction, transfers: list[Transfer], clock: float, waits: Counter[str]
) -> float:
    """Counts the wait of an instruction for what it is the end of, and returns when it is over."""
    for other in transfers:
        if other.exchange.done == instruction.name and other.end_time > clock:
            waits[other.exchange.collective.kind] += other.end_time - clock
            clock = other.end_time
    return clock
