"""Programs compiled for chips that are not here, by their own compilers: libtpu's, and XLA's for
GPUs with Mosaic's for kernels and NVIDIA's assembler.

A process that compiles has to be one of its own (`printed_by`): libtpu is loaded once, and Mosaic
compiles for one kind of GPU in a process.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests import ROOT
from tpu.chips import CHIPS
from tpu.environment import COMPILE_ONLY_ENV

# Packages that the extras `tpu` and `cuda-compiler` have.
COMPILERS = {'tpu': 'libtpu', 'gpu': 'jax_cuda13_plugin'}
DUMPED = 'MOSAIC_GPU_DUMP_TO'
ENVIRONMENT = COMPILE_ONLY_ENV | {'MOSAIC_GPU_DUMP_PTXAS': '1', 'XLA_FLAGS': ''}


def printed_by(module: str, *arguments: str, seconds: float = 300) -> list[Any]:
    """The lines of JSON that a module prints which compiles for chips, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, '-m', module, *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {'PYTHONPATH': str(ROOT), DUMPED: folder},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@dataclasses.dataclass(frozen=True)
class _Device(jax.sharding.AbstractDevice):
    """With what Mosaic asks a GPU for; without it, it takes each for a Hopper."""

    compute_capability: str = '9.0'


def compiled(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    chip: str,
    donated: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`function` for one device of `chip`, of arrays of these shapes and types; matrices and what
    has more axes come and go by rows, as they lie inside a model. donated: arguments whose memory
    the program may write to. options: the compiler's.
    """
    device = CHIPS[chip].make_host_devices()[0]
    mesh = Mesh(np.array([device]), ('data',))
    described = mesh.abstract_mesh
    if CHIPS[chip].platform == 'gpu':
        fields = dataclasses.asdict(described.abstract_device)
        fields |= {'compute_capability': device.compute_capability}
        described = described.update(abstract_device=_Device(**fields))

    def placed(shape):
        whole = NamedSharding(mesh, PartitionSpec())
        return Format(Layout(tuple(range(len(shape)))), whole) if len(shape) > 1 else whole

    arguments = [jax.ShapeDtypeStruct(s, jnp.dtype(t), sharding=placed(s)) for s, t in shapes]
    with jax.sharding.use_abstract_mesh(described):
        shardings = jax.tree.map(
            lambda leaf: placed(leaf.shape), jax.eval_shape(function, *arguments)
        )
        program = jax.jit(function, out_shardings=shardings, donate_argnums=donated)
        return program.lower(*arguments).compile(compiler_options=dict(options or {}))


class Resources(NamedTuple):
    """What one thread of a GPU kernel takes: registers, and bytes of local memory, which lies in
    the device's: its stack, and what is written to and read from where registers did not do.
    """

    kernel: str
    registers: int
    stack: int
    spilled: int


def kernels_compiled() -> list[Resources]:
    """Of the Mosaic kernels that this process has compiled for GPUs since it was last asked, as the
    assembler says. One that it had compiled before, for whatever program, is not compiled again.
    """
    kernels = []
    for path in sorted(Path(os.environ[DUMPED]).glob('*.ptxas')):
        text = path.read_text()
        registers = re.search(r'[Uu]sed (\d+) registers', text)
        memory = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)', text)
        stack, stores, loads = (int(n) for n in memory.groups())
        kernels.append(Resources(path.stem, int(registers[1]), stack, stores + loads))
        path.unlink()
    return kernels
