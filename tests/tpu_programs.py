"""Programs compiled for TPUs that are not here, by libtpu's own compiler, and what they move.

A process that compiles has to be one of its own (`printed_by`): libtpu is loaded once.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.test_layering import ROOT

ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',  # no TPU is looked for
    'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',  # nor held, so that others may compile meanwhile
    'XLA_FLAGS': '',
}


def printed_by(module: str) -> list[dict[str, Any]]:
    """The lines of JSON that a module prints which compiles for TPUs, in a process of its own."""
    done = subprocess.run(
        [sys.executable, '-m', module],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Chip(NamedTuple):
    """gb_per_second: of one device's memory, 1e9 bytes, as published a chip."""

    topology: str
    gb_per_second: float


CHIPS = {
    'v5e': Chip('v5e:2x2', 819),
    'v5p': Chip('v5p:2x2x1', 2765),
    'v6e': Chip('v6e:2x2', 1638),
    'tpu7x': Chip('tpu7x:2x2x1', 3700),  # half a chip's: it has two devices
}
SMALL = 2**20  # bytes: less than this is not counted
ITEM_BYTES = {'bf16': 2, 'f32': 4, 's32': 4, 'u32': 4, 's8': 1, 'u8': 1, 'pred': 1, 'f16': 2}
SHAPE = re.compile(r'\b(\w+)\[([\d,]*)\](\{[^}]*\})?')


class Move(NamedTuple):
    """What one instruction reads and writes in the chip's large memory, in bytes."""

    operation: str
    bytes: int


def compiled(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    chip: str,
    donated: tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """`function` for one device of `chip`, of arrays of these shapes and types; matrices and what
    has more axes come and go by rows, as they lie inside a model. donated: arguments whose memory
    the program may write to.
    """
    device = topologies.get_topology_desc(CHIPS[chip].topology, platform='tpu').devices[0]
    mesh = Mesh(np.array([device]), ('data',))

    def placed(shape):
        whole = NamedSharding(mesh, PartitionSpec())
        return Format(Layout(tuple(range(len(shape)))), whole) if len(shape) > 1 else whole

    given = [jax.ShapeDtypeStruct(s, jnp.dtype(t), sharding=placed(s)) for s, t in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        made = jax.tree.map(lambda one: placed(one.shape), jax.eval_shape(function, *given))
        program = jax.jit(function, out_shardings=made, donate_argnums=donated)
        return program.lower(*given).compile()


def moves(program: jax.stages.Compiled) -> list[Move]:
    """Of the instructions that the program runs in order: arrays of SMALL bytes and more, where
    they do not stay in the fast memory, which layouts call S(1).
    """
    text = program.as_text()
    entry = text[text.index('\nENTRY') :]
    size, found = {}, []
    for line in entry[: entry.index('\n}')].splitlines():
        match = re.match(r'\s*(?:ROOT )?(%[\w.-]+) = (.*?) ([\w-]+)\((.*)', line)
        if match is None:
            continue
        name, result, operation, rest = match.groups()
        size[name] = _large_bytes(result)
        if operation in ('parameter', 'get-tuple-element', 'bitcast', 'tuple', 'constant'):
            continue
        operands = rest[: rest.index(')')].split(', ')
        moved = size[name] + sum(size.get(operand, 0) for operand in operands)
        if moved and not operation.endswith('-done'):
            found.append(Move(operation, moved))
    return found


def _large_bytes(text: str) -> int:
    total = 0
    for kind, dimensions, layout in SHAPE.findall(text):
        count = math.prod(int(n) for n in dimensions.split(',') if n)
        size = count * ITEM_BYTES.get(kind, 0)
        total += size if size >= SMALL and 'S(1)' not in layout else 0
    return total
