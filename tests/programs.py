"""Programs compiled for absent chips by their own compilers: libtpu's, and XLA's for GPUs with
Mosaic's for kernels and NVIDIA's assembler.

Each compilation needs a separate process (`printed_by`): libtpu is loaded once, and Mosaic compiles
for one kind of GPU in a process.
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
    """Returns the JSON lines that a module prints which compiles for chips, in a separate
    process.
    """
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
    """A device with the attributes that Mosaic reads from a GPU; without them it assumes a
    Hopper.
    """

    compute_capability: str = '9.0'


def compile_for_chip(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    chip: str,
    donated: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `function` for one device of `chip`, for arrays of these shapes and types.

    Matrices and larger arrays enter and leave in row-major order, as they lie inside a model.
    donated: arguments with memory that the program may overwrite. options: the compiler's.
    """
    device = CHIPS[chip].make_host_devices()[0]
    mesh = Mesh(np.array([device]), ('data',))
    described = mesh.abstract_mesh
    if CHIPS[chip].platform == 'gpu':
        fields = dataclasses.asdict(described.abstract_device)
        fields |= {'compute_capability': device.compute_capability}
        described = described.update(abstract_device=_Device(**fields))

    def place_on_mesh(shape):
        whole = NamedSharding(mesh, PartitionSpec())
        return Format(Layout(tuple(range(len(shape)))), whole) if len(shape) > 1 else whole

    arguments = [
        jax.ShapeDtypeStruct(s, jnp.dtype(t), sharding=place_on_mesh(s)) for s, t in shapes
    ]
    with jax.sharding.use_abstract_mesh(described):
        shardings = jax.tree.map(
            lambda leaf: place_on_mesh(leaf.shape), jax.eval_shape(function, *arguments)
        )
        program = jax.jit(function, out_shardings=shardings, donate_argnums=donated)
        return program.lower(*arguments).compile(compiler_options=dict(options or {}))


class Resources(NamedTuple):
    """Resources of one thread of a GPU kernel: registers, and bytes of local memory, which is in
    device memory: its stack, and spilled registers written and read.
    """

    kernel: str
    registers: int
    stack: int
    spilled: int


def kernels_compiled() -> list[Resources]:
    """Returns the assembler's numbers for the Mosaic kernels that this process has compiled since
    the last call.

    A kernel that any program had compiled before is not compiled again.
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
