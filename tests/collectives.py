"""What devices send each other in a compiled program, read from its text."""

import math
import re
from typing import NamedTuple

import jax

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')
ITEM_BYTES = {'bf16': 2, 'f16': 2, 'f32': 4, 's32': 4, 'u32': 4, 's8': 1, 'u8': 1, 'pred': 1}
COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) \(.*?\) -> .*?\{\n(.*?)^\}', re.M | re.S)
COLLECTIVE = re.compile(
    r'^\s*(?:ROOT\s+)?%?[\w.\-]+ = (.*?) ((?:ragged-)?(?:'
    + '|'.join(KINDS)
    + r'))(-start|-done)?\(',
    re.M,
)
CALLED = re.compile(r'(?:calls|to_apply|body|condition)=%?([\w.\-]+)')
LOOP = re.compile(r' while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)(.*)')


class Collective(NamedTuple):
    """One operation on each device. bytes: of its result there, the largest array of a combined
    one apart; times: rounds of the loops around it.
    """

    kind: str
    bytes: int
    largest: int
    times: int


def collectives(program: jax.stages.Compiled, trips: int) -> list[Collective]:
    """Those of a program for TPUs, GPUs or CPUs; `trips`: rounds of a loop whose text does not say.

    A TPU's reduce-scatter is an all-reduce in a computation of its own, whose caller has the part
    of the device as its result.
    """
    bodies = dict(COMPUTATION.findall(program.as_text()))
    rounds = _rounds(bodies, trips)
    found, by_channel = [], {}
    for name, body in bodies.items():
        if name.startswith('all-reduce-scatter'):
            continue
        for line in body.splitlines():
            if call := re.search(r' = (.*?) fusion\(.*calls=%?(all-reduce-scatter[\w.\-]*)', line):
                found.append(_collective('reduce-scatter', call[1], rounds.get(name, 1)))
                continue
            one = COLLECTIVE.match(line)
            if not one or one[3] == '-done':
                continue
            result = one[1]
            if one[3] == '-start' and one[2] != 'all-reduce':  # (operands, results, ...)
                result = result[len(result) // 2 :]
            channel = re.search(r'channel_id=(\d+)', line)
            key = one[2], channel and channel[1], result
            of_computation = by_channel.setdefault(key, {}).setdefault(name, [])
            of_computation.append(_collective(one[2], result, rounds.get(name, 1)))
    # One that is fused with others, to run meanwhile, stands in several computations.
    for of_computations in by_channel.values():
        found += max(of_computations.values(), key=len)
    return found


def hidden(program: jax.stages.Compiled) -> list[tuple[str, int]]:
    """(kind, how many computations a GPU starts while it goes on) of each collective, in the order
    of the program, which is that of its schedule; 0 where all wait for it.
    """
    found = []
    for _, body in COMPUTATION.findall(program.as_text()):
        lines = body.splitlines()
        for start, line in enumerate(lines):
            one = COLLECTIVE.match(line)
            if not one or one[3] == '-done':
                continue
            name = re.match(r'\s*(?:ROOT\s+)?%?([\w.\-]+)', line)[1]
            ends = [i for i, other in enumerate(lines) if f'-done(%{name})' in other]
            between = lines[start + 1 : ends[0]] if ends else []
            work = sum(
                bool(re.search(r' (fusion|custom-call|while)\(', other)) for other in between
            )
            found.append((one[2], work))
    return found


def _collective(kind: str, result: str, times: int) -> Collective:
    sizes = [
        ITEM_BYTES.get(dtype, 0) * math.prod(int(n) for n in shape.split(',') if n)
        for dtype, shape in re.findall(r'\b(\w+)\[([\d,]*)\]', result)
    ]
    return Collective(kind, sum(sizes), max(sizes, default=0), times)


def _rounds(bodies: dict[str, str], trips: int) -> dict[str, int]:
    """How often each computation runs, those called in loops included."""
    loops = {}
    for body in bodies.values():
        for _, called, rest in LOOP.findall(body):
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
            loops[called] = int(known[1]) if known else trips
    found = {}

    def visit(name, times):
        if found.get(name, 0) >= times:
            return
        found[name] = times
        for called in CALLED.findall(bodies[name]):
            if called in bodies:
                visit(called, times * loops.get(called, 1))

    called = {
        c
        for b in bodies.values()
        for c in re.findall(r'(?:calls|to_apply|body|condition)=%?([\w.\-]+)', b)
    }
    for name in bodies:
        if name not in called:
            visit(name, 1)
    return found
