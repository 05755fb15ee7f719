"""What a GPU computes while its devices exchange arrays, read from a compiled program."""

import jax

from tpu.hlo import Module
from tpu.wire import OPCODE


def hidden(program: jax.stages.Compiled) -> list[tuple[str, int]]:
    """(kind, how many computations a GPU starts while it goes on) of each collective, in the order
    of the program, which is that of its schedule; 0 where all wait for it.
    """
    found = []
    for computation in Module(program.as_text()).computations.values():
        order = list(computation.values())
        for start, one in enumerate(order):
            kind = OPCODE.match(one.opcode)
            if not kind:
                continue
            ends = [i for i, other in enumerate(order) if _ends(other, one.name)]
            between = order[start + 1 : ends[0]] if ends else []
            work = sum(other.opcode in ('fusion', 'custom-call', 'while') for other in between)
            found.append((kind[1], work))
    return found


def _ends(other, name: str) -> bool:
    return other.opcode.endswith('-done') and name in other.operands
