"""The training step of a config, compiled for a topology."""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from lm.blueprint import Blueprint
from lm.check_mesh import check_devices
from lm.data import tokenizers
from lm.many import SINGLE
from lm.mesh import refuse_idle
from lm.objectives import n_marks
from lm.recipe import Recipe
from lm.record.host import device_memory_bytes
from lm.run.program import Program
from lm.sections import AUTO
from tpu.topology import Topology

GIB = 2**30
UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
TOO_MUCH = re.compile(r'([\d.]+)([KMGT]?)\)? exceeds available \w+ \(([\d.]+)([KMGT]?)\)')
USED = re.compile(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm')


class DoesNotFit(ValueError):
    """needed, there: bytes a device."""

    def __init__(self, needed: int, there: int):
        self.needed, self.there = needed, there
        super().__init__(
            f'needs {needed / GIB:.2f} GiB a device, and there are {there / GIB:.2f}: '
            f'{(needed - there) / GIB:.2f} GiB too many'
        )


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step. seconds: that compiling took; said: what was said of the mesh."""

    blueprint: Blueprint
    executable: Any
    runs: int
    seconds: float
    said: tuple[str, ...] = ()


def blueprint_of(
    recipe: Recipe, topology: Topology, say: Callable[[str], None], runs: int = 1
) -> Blueprint:
    """What is to be compiled, without any text: a bpe:SIZE is taken to have that many tokens.

    Raises ValueError where the mesh does not fill the topology, or cuts the config unevenly.
    """
    devices, (vocab_size, bos_id) = topology.devices, vocabulary_of(recipe)
    made = Blueprint(recipe, vocab_size, bos_id, devices, lambda: memory_of(topology), say, runs)
    if recipe.mesh.axes != AUTO:
        if runs == 1:
            refuse_idle(recipe.mesh, made.mesh, len(devices))
        check_devices(recipe, made.mesh)
    return made


def vocabulary_of(recipe: Recipe) -> tuple[int, int]:
    """(its size, a BOS), without the text: whichever BOS is, the program is the same."""
    of_tokenizer = tokenizers.vocab_size(recipe.data.tokenizer)
    return of_tokenizer + n_marks(recipe), of_tokenizer - 2


def memory_of(topology: Topology) -> int:
    """Bytes that a program may have of a device."""
    if topology.chip is not None:
        return topology.chip.memory
    on_cpu = topology.devices[0].platform == 'cpu'
    return device_memory_bytes() // (len(topology.devices) if on_cpu else 1)


def compile_step(made: Blueprint, topology: Topology, how: str = SINGLE, runs: int = 1) -> Step:
    """The program that `train.py` runs, or with `how` and `runs` a sweep's.

    Raises DoesNotFit where a device has too little memory for it.
    """
    start = time.perf_counter()
    try:
        executable = Program(made, how).compiled(runs)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise DoesNotFit(*_needed(str(error))) from error
    step = Step(made, executable, runs, time.perf_counter() - start)
    needed, there = peak_bytes(executable, topology), memory_of(topology)
    if needed > there:  # GPUs' and CPUs' compilers let it pass
        raise DoesNotFit(needed, there)
    return step


def _needed(text: str) -> tuple[int, int]:
    found = TOO_MUCH.search(text) or USED.search(text)
    if found is None:
        raise ValueError(f'memory does not suffice, and by how much is not said: {text}')
    needed, unit, there, unit_there = found.groups()
    return int(float(needed) * UNITS[unit]), int(float(there) * UNITS[unit_there])


def peak_bytes(executable: Any, topology: Topology) -> int:
    """Of a device at once, by the compiler's report."""
    report = executable.memory_analysis()
    if topology.chip is not None and topology.chip.platform == 'tpu':
        # The sum of kinds counts what is donated twice, and temporaries not at all (libtpu 0.0.51).
        return report.peak_memory_in_bytes + report.generated_code_size_in_bytes
    return (
        report.argument_size_in_bytes
        + report.output_size_in_bytes
        - report.alias_size_in_bytes
        + report.temp_size_in_bytes
    )
