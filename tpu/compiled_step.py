"""The training step of a config, compiled for a topology, and its memory, collectives and time.

The time is a roofline's. Every operation takes as long as its products take at what they reach of
the published peak (`tpu.rates`), or its bytes at the published bandwidth of memory, whichever is
longer, one operation after another; the links take as long as their bytes take in rings.
`step_seconds` are those of the operations and of what the device waits for collectives in the order
of the compiled program (`tpu.schedule`). In `step_seconds_hidden` links and operations work at the
same time, in `step_seconds_exposed` one after the other: the step is between them. `bound_seconds`
has all products at the peak and all links hidden: no step is faster. None counts what LEFT_OUT
names.
"""

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.config.fields import AUTO
from lm.config.recipe import Recipe
from lm.data import tokenizers
from lm.data.progress import report_periodically
from lm.devices.blueprint import Blueprint
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import check_idle_devices, format_mesh
from lm.devices.run_axis import SINGLE
from lm.model.objectives import count_marks
from lm.record.machine import device_memory_bytes
from lm.run.describe import bytes_per_device
from lm.run.program import Program
from lm.run.tables import parameter_count
from lm.training.flops import flops_in_full, flops_per_token, peak_flops
from modules.kernels.attention.splash import AUTO_SIZES, BlockSizes, computed_share
from tpu.chips import GIB, Topology
from tpu.collectives import collective_seconds, count_by_kind, list_collectives
from tpu.cost import count_launches, estimate_cost, operation_cost
from tpu.hlo import Module
from tpu.measured import Ratio, nearest_ratio
from tpu.schedule import waiting_seconds

NOT_MODELLED = (
    'vector operations that are no product',
    'the latency of operations and of collectives, which small ones consist of',
    'that conditionals may take a cheaper branch than their dearest, as optimizers at most steps',
    'links and hosts that others use, throttled clocks, stragglers',
    'evaluation, checkpoints, and waiting for text',
)
Say = Callable[[str], None]  # passes a message on
UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
MEMORY_EXCEEDED = re.compile(r'([\d.]+)([KMGT]?)\)? exceeds available \w+ \(([\d.]+)([KMGT]?)\)')
MEMORY_USED = re.compile(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm')


class DoesNotFit(ValueError):
    """A step needs more memory than a device has. needed, there: bytes a device."""

    def __init__(self, needed: int, available: int):
        self.needed, self.available = needed, available
        super().__init__(
            f'needs {needed / GIB:.2f} GiB a device, and there are {available / GIB:.2f}: '
            f'{(needed - available) / GIB:.2f} GiB too many'
        )


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step. seconds: compile time."""

    blueprint: Blueprint
    executable: Any
    runs: int
    seconds: float


def build_blueprint(recipe: Recipe, topology: Topology, say: Say, runs: int = 1) -> Blueprint:
    """Returns the blueprint of a step, without any text: bpe:SIZE is taken to have SIZE tokens.
    Raises ValueError where the mesh does not fill the topology, or does not divide the config.
    """
    devices, (vocab_size, bos_id) = topology.devices, nominal_vocabulary(recipe)
    made = Blueprint(
        recipe, vocab_size, bos_id, devices, lambda: device_memory(topology), say, runs
    )
    if recipe.mesh.axes != AUTO:
        if runs == 1:
            check_idle_devices(recipe.mesh, made.mesh, len(devices))
        check_devices(recipe, made.mesh)
    return made


def nominal_vocabulary(recipe: Recipe) -> tuple[int, int]:
    """Returns (vocabulary size, a BOS) without the text; any BOS gives the same program."""
    of_tokenizer = tokenizers.vocab_size(recipe.data.tokenizer)
    return of_tokenizer + count_marks(recipe), of_tokenizer - 2


def device_memory(topology: Topology) -> int:
    """Returns the bytes of a device that a program may use."""
    if topology.chip is not None:
        return topology.chip.memory
    on_cpu = topology.devices[0].platform == 'cpu'
    return device_memory_bytes() // (len(topology.devices) if on_cpu else 1)


def compile_step(
    blueprint: Blueprint, topology: Topology, run_axis: str = SINGLE, runs: int = 1
) -> CompiledStep:
    """Compiles the program that `train.py` runs; with `how` and `runs`, that of a sweep. Raises
    DoesNotFit where a device has too little memory for it.
    """
    start = time.perf_counter()

    def progress_text() -> str:
        return f'compiling for {topology.label}, {time.perf_counter() - start:.0f} s'

    try:
        with report_periodically(progress_text):
            executable = Program(blueprint, run_axis).compile_step(runs)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise DoesNotFit(*_parse_memory_error(str(error))) from error
    step = CompiledStep(blueprint, executable, runs, time.perf_counter() - start)
    needed, there = peak_bytes(executable, topology), device_memory(topology)
    if needed > there:  # the compilers for GPUs and CPUs do not check
        raise DoesNotFit(needed, there)
    return step


def _parse_memory_error(text: str) -> tuple[int, int]:
    """Parses (bytes needed, bytes there) from a compiler's error."""
    found = MEMORY_EXCEEDED.search(text) or MEMORY_USED.search(text)
    if found is None:
        raise ValueError(f'memory does not suffice, and by how much is not said: {text}')
    needed, unit, there, unit_there = found.groups()
    return int(float(needed) * UNITS[unit]), int(float(there) * UNITS[unit_there])


def peak_bytes(executable: Any, topology: Topology) -> int:
    """Returns the most bytes of a device in use at once, by the compiler's report."""
    report = executable.memory_analysis()
    if topology.chip is not None and topology.chip.platform == 'tpu':
        # The sum of kinds counts what is donated twice, and temporaries not at all (libtpu 0.0.51).
        return report.peak_memory_in_bytes + report.generated_code_size_in_bytes
    arguments = report.argument_size_in_bytes - report.alias_size_in_bytes
    return arguments + report.output_size_in_bytes + report.temp_size_in_bytes


class Rates(NamedTuple):
    """Rates of one device: peak flop/s of products, bytes a second of its memory, their source, and
    the kind of the device, by which products reach a share of the peak.
    """

    flops: float
    bytes: float
    source: str
    kind: str = ''


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """An estimate of one step: bytes, and flops of products, are those of one device. bound: the
    least that it can be, with all products at the peak and the links hidden; the others have
    products at what they reach of it. waiting_seconds: what a device waits for links in the order
    of the program. mfu: the share of the peak that 6 N and attention's operations
    (`lm.training.flops`) reach; mfu_in_full: with all pairs of tokens, also those that masks leave
    out; mfu_hidden, mfu_exposed: where operations hide all of the links, and nothing hides them;
    mfu_bound: the most that it can be. price: of a chip-hour.
    """

    topology: str
    mesh: str
    chips: int
    devices: int
    runs: int
    parameters: int
    tokens: int  # of all runs
    steps: int
    memory: dict[str, int]
    memory_needed: int
    memory_there: int
    collectives: list[dict[str, Any]]
    flops: float
    bytes: float
    rates: Rates
    compute_seconds: float
    memory_seconds: float
    operation_seconds: float
    bound_operation_seconds: float
    link_seconds: float
    waiting_seconds: float
    model_flops: float
    model_flops_in_full: float
    compile_seconds: float
    unknown: tuple[str, ...]
    launches: int | None = None  # of a GPU
    price: float | None = None
    ratio: Ratio | None = None  # of measured steps to their estimates

    @property
    def step_seconds(self) -> float:
        return self.operation_seconds + self.waiting_seconds

    @property
    def step_seconds_hidden(self) -> float:
        return max(self.operation_seconds, self.link_seconds)

    @property
    def step_seconds_exposed(self) -> float:
        return self.operation_seconds + self.link_seconds

    @property
    def bound_seconds(self) -> float:
        return max(self.bound_operation_seconds, self.link_seconds)

    @property
    def predicted_seconds(self) -> float | None:
        """Seconds of a step where it takes as much longer than estimated as measured ones did."""
        return self.ratio and self.ratio.value * self.step_seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / self.devices / self.rates.flops / self.step_seconds

    @property
    def mfu_in_full(self) -> float:
        return self.mfu * self.model_flops_in_full / self.model_flops

    @property
    def mfu_hidden(self) -> float:
        return self.mfu * self.step_seconds / self.step_seconds_hidden

    @property
    def mfu_exposed(self) -> float:
        return self.mfu * self.step_seconds / self.step_seconds_exposed

    @property
    def mfu_bound(self) -> float:
        return self.mfu * self.step_seconds / self.bound_seconds

    @property
    def bound_by(self) -> str:
        if self.waiting_seconds > self.operation_seconds:
            return 'links'
        return 'products' if self.compute_seconds > self.memory_seconds else 'memory'

    @property
    def tokens_a_day(self) -> float:
        return self.tokens / self.step_seconds * 86400.0

    @property
    def chip_hours(self) -> float:
        """Chip-hours of all steps."""
        return self.steps * self.step_seconds * self.chips / 3600

    def record(self) -> dict[str, Any]:
        """Returns the fields, and what follows from them, for JSON."""
        follow = ('step_seconds', 'step_seconds_hidden', 'step_seconds_exposed', 'bound_seconds')
        follow += ('predicted_seconds', 'mfu', 'mfu_in_full', 'mfu_hidden', 'mfu_exposed')
        follow += ('mfu_bound', 'bound_by', 'tokens_a_day', 'chip_hours')
        found = dataclasses.asdict(self) | {'rates': self.rates._asdict()}
        found['ratio'] = self.ratio and self.ratio._asdict()
        found |= {name: getattr(self, name) for name in follow}
        return found | {'cost': self.price and self.price * self.chip_hours}

    def format_lines(self) -> Iterator[str]:
        yield (
            f'{self.topology}: {self.chips:,} chips, mesh {self.mesh}; {self.parameters:,} '
            f'parameters, {self.tokens:,} tokens a step; compiled in {self.compile_seconds:.0f} s'
        )
        kinds = [f'{kind} {format_gib(size)}' for kind, size in self.memory.items() if size > 1e6]
        there = f'{format_gib(self.memory_needed)} of {format_gib(self.memory_there)} GiB a device'
        yield f'memory: {there}: {", ".join(kinds)}'
        for sent in self.collectives:
            yield (
                f'{sent["kind"]}: {sent["number"]:,} a step, {sent["bytes"] / 1e9:,.3f} GB of '
                f'results a device, {format_ms(sent["seconds"])} ms of its links, '
                f'{format_ms(sent["waiting"])} ms of waiting'
            )
        yield (
            f'products: {self.flops / 1e12:,.2f} TFLOP a device, {format_ms(self.compute_seconds)} ms at '
            f'what they reach of the peak, {format_ms(self.flops / self.rates.flops)} ms at all of it; '
            f'memory: {self.bytes / 1e9:,.2f} GB, {format_ms(self.memory_seconds)} ms; all operations in '
            f'sequence {format_ms(self.operation_seconds)} ms; links {format_ms(self.link_seconds)} ms, of which '
            f'{format_ms(self.waiting_seconds)} are waited for ({self.rates.source})'
        )
        if self.launches is not None:
            yield f'launches: {self.launches:,} kernels, copies and calls of libraries a step'
        yield (
            f'a step takes about {format_ms(self.step_seconds)} ms, bound by {self.bound_by}: model FLOP '
            f'utilisation {self.mfu:.1%} ({self.mfu_in_full:.1%} with all pairs of tokens)'
        )
        yield (
            f'if operations hid all of the links {format_ms(self.step_seconds_hidden)} ms '
            f'({self.mfu_hidden:.1%}), and if nothing hid them {format_ms(self.step_seconds_exposed)} ms '
            f'({self.mfu_exposed:.1%})'
        )
        yield (
            f'the bound, with all products at the peak and all links hidden: '
            f'{format_ms(self.bound_seconds)} ms, model FLOP utilisation at most {self.mfu_bound:.1%}'
        )
        if self.ratio is not None:
            hours = self.steps * self.predicted_seconds / 3600
            yield (
                f'predicted: {format_ms(self.predicted_seconds)} ms, {self.ratio.description}; all steps '
                f'{hours:,.1f} hours'
            )
        yield (
            f'{self.tokens_a_day / 1e9:,.1f} billion tokens a day; {self.steps:,} steps take '
            f'{self.steps * self.step_seconds / 3600:,.1f} hours, {self.chip_hours:,.0f} chip-hours'
            f'{format_cost(self.price, self.chip_hours)}'
        )
        if self.unknown:
            yield f'NOTE: the number of operations of these is unknown: {", ".join(self.unknown)}'
        yield f'left out: {"; ".join(NOT_MODELLED)}'


def format_ms(seconds: float) -> str:
    return f'{1e3 * seconds:,.1f}'


def format_gib(n_bytes: float) -> str:
    return f'{n_bytes / GIB:.2f}'


def format_summary(found: StepEstimate) -> str:
    return (
        f'{format_gib(found.memory_needed)} of {format_gib(found.memory_there)} GiB; a step takes about '
        f'{format_ms(found.step_seconds)} ms, no less than {format_ms(found.bound_seconds)}: utilisation '
        f'{found.mfu:.1%}, at most {found.mfu_bound:.1%}'
    )


def format_cost(price: float | None, chip_hours: float) -> str:
    """Returns ', 1,234 at its price', or '' without a price of a chip-hour."""
    return '' if price is None else f', {price * chip_hours:,.0f} at its price'


def estimate_step(
    step: CompiledStep, topology: Topology, price: float | None = None
) -> StepEstimate:
    made, recipe = step.blueprint, step.blueprint.recipe
    module = Module(step.executable.as_text())
    rates, sent = device_rates(topology), list_collectives(module)
    pairs = computed_pair_share(recipe, made.mesh.shape['context'])
    given = rates.flops, rates.bytes, pairs, rates.kind
    cost = estimate_cost(module, *given)
    devices = list(made.mesh.devices.flat)
    link = functools.partial(collective_seconds, topology=topology, devices=devices)
    seconds = [one.rounds * link(one) for one in sent]

    def operation_seconds(computation, instruction):
        return operation_cost(module, computation, instruction, *given).seconds

    waits = waiting_seconds(module, operation_seconds, link)
    of_kind = collections.defaultdict(list)
    for one, sec in zip(sent, seconds, strict=True):
        of_kind[one.kind].append(sec)
    tokens = recipe.data.batch_size * recipe.data.seq_len * step.runs
    return StepEstimate(
        topology=topology.label,
        mesh=format_mesh(made.mesh),
        chips=max(1, made.mesh.size // (topology.chip.devices_a_chip if topology.chip else 1)),
        devices=made.mesh.size,
        runs=step.runs,
        parameters=parameter_count(made.learner),
        tokens=tokens,
        steps=recipe.train.steps,
        memory=memory_by_kind(step, topology),
        memory_needed=peak_bytes(step.executable, topology),
        memory_there=device_memory(topology),
        collectives=[
            {'kind': kind, 'number': number, 'bytes': n_bytes}
            | {'seconds': sum(of_kind[kind]), 'waiting': waits[kind]}
            for kind, number, n_bytes in count_by_kind(sent)
        ],
        flops=cost.flops,
        bytes=cost.bytes,
        rates=rates,
        compute_seconds=cost.flops_at_peak / rates.flops,
        memory_seconds=cost.bytes / rates.bytes,
        operation_seconds=cost.seconds,
        bound_operation_seconds=cost.bound,
        link_seconds=sum(seconds),
        waiting_seconds=sum(waits.values()),
        model_flops=flops_per_token(made.learner) * tokens,
        model_flops_in_full=flops_in_full(made.learner) * tokens,
        compile_seconds=step.seconds,
        unknown=cost.unknown,
        launches=count_launches(module) if topology.devices[0].platform == 'gpu' else None,
        price=price,
        ratio=nearest_ratio(topology.name.partition(':')[0]) if topology.chip else None,
    )


def memory_by_kind(step: CompiledStep, topology: Topology) -> dict[str, int]:
    """Returns the bytes of each kind on a device when it holds most. Those that are neither state
    nor text belong to the step.
    """
    shapes, recipe = step.blueprint.state_shapes, step.blueprint.recipe
    n = step.blueprint.mesh.shape
    runs = step.runs / n['run']
    rows = recipe.data.batch_size / (n['data'] * n['fsdp'] * n['expert'])
    found = {
        'parameters': bytes_per_device(shapes.params),
        'optimizer state': bytes_per_device(shapes.opt_state),
        'average': bytes_per_device(shapes.average),
        'carried by layers and reparametrisations': bytes_per_device(
            (shapes.stats, shapes.reparam)
        ),
        'text': int(rows * (recipe.data.seq_len + 1) * 4),
    }
    found = {kind: int(runs * size) for kind, size in found.items() if size}
    program = step.executable.memory_analysis().generated_code_size_in_bytes
    rest = peak_bytes(step.executable, topology) - sum(found.values()) - program
    return found | {'program': program, 'activations, gradients and buffers': rest}


def computed_pair_share(recipe: Recipe, parts: int = 1) -> float:
    """Returns the share of all pairs of tokens whose blocks splash attention computes, averaged
    over the layers. parts: number of devices that share the tokens of a row.
    """
    given = recipe.attention.options
    window, every = given.get('window'), given.get('full_every')
    named = recipe.kernels.get('attention')
    blocks = BlockSizes(**named.options) if named and named.name == 'splash' else AUTO_SIZES
    total = 0.0
    for block in range(1, recipe.model.n_layers + 1):
        full = window is None or (every and block % every == 0)
        total += computed_share(recipe.data.seq_len, None if full else window, parts, blocks)
    return total / recipe.model.n_layers


def device_rates(topology: Topology) -> Rates:
    """Returns the published rates of the chip, or measured rates of the devices at hand."""
    if chip := topology.chip:
        return Rates(chip.peak, 1e9 * chip.gb_per_second, f'published of {chip.kind}', chip.kind)
    return _measure_rates(len(topology.devices))


@functools.cache
def _measure_rates(n: int) -> Rates:
    flops, source = peak_flops(n)
    source += f'; memory: measured copy of {COPY_BYTES >> 20} MiB'
    return Rates(flops / n, measure_bandwidth(), source, jax.devices()[0].device_kind)


COPY_BYTES = 1 << 28  # bytes


def measure_bandwidth(repeats: int = 5) -> float:
    """Measures the bytes a second that the first device reads and writes: the best of `repeats`."""
    x = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    best = math.inf
    for _ in range(repeats + 1):  # the first one touches the pages
        start = time.perf_counter()
        x = add(x)
        x.block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * COPY_BYTES / best
