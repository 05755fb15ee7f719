"""The training step of a config, compiled for a topology, with its memory, collectives and time.

The time follows a roofline. Operations run one after another. Each takes the longer of two times:
its products at their share of the published peak (`tpu.rates`), and its bytes at the published
bandwidth of memory. Links transfer the bytes of collectives in rings.
`step_seconds` is the sum of all operations and of the waits for collectives in the order of the
compiled program (`tpu.schedule`). Two further numbers bracket it: in `step_seconds_hidden` links
and operations overlap completely, in `step_seconds_exposed` not at all. `bound_seconds` is a lower
bound: all products at the peak, all links hidden. NOT_MODELLED lists the effects that none of these
numbers includes.
"""

import collections
import copy
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
from lm.config.resolve import update_recipe
from lm.data import tokenizers
from lm.data.progress import report_periodically
from lm.devices.blueprint import Blueprint
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import check_idle_devices, format_mesh
from lm.devices.run_axis import SINGLE
from lm.launch.before_jax import default_dtype
from lm.model.kernels import format_kernels, list_kernels
from lm.model.objectives import count_marks
from lm.record.machine import device_memory_bytes
from lm.run.describe import bytes_per_device
from lm.run.program import Program
from lm.run.tables import parameter_count
from lm.training.flops import flops_in_full, flops_per_token
from lm.training.peaks import peak_flops
from modules.attention.softmax import is_full
from modules.kernels.attention.splash import AUTO_SIZES, BlockSizes, computed_share
from tpu.chips import GIB, Topology
from tpu.collectives import collective_seconds, count_by_kind, list_collectives
from tpu.cost import count_launches, estimate_cost, operation_cost
from tpu.hlo import Module
from tpu.measured import Ratio, nearest_ratio
from tpu.schedule import waiting_seconds

NOT_MODELLED = (
    'arithmetic other than matmuls',
    'latency of operations and collectives, which dominates small ones',
    'shared links and hosts, throttled clocks, stragglers',
    'compilation, evaluation, checkpoints, waiting for text',
)
LIMITS = {'links': 'communication', 'products': 'matmuls', 'memory': 'memory bandwidth'}
Say = Callable[[str], None]  # shows a message
UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
# How the compilers for TPUs and for GPUs state the memory that a program needs.
MEMORY_EXCEEDED = re.compile(r'([\d.]+)([KMGT]?)\)? exceeds available \w+ \(([\d.]+)([KMGT]?)\)')
MEMORY_USED = re.compile(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm')


class DoesNotFit(ValueError):
    """A step needs more memory than a device has. needed, available: bytes per device."""

    def __init__(self, needed: int, available: int):
        self.needed, self.available = needed, available
        super().__init__(
            f'needs {needed / GIB:.2f} GiB per device, {(needed - available) / GIB:.2f} GiB more '
            f'than the {available / GIB:.2f} GiB available'
        )


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step, for `runs` runs. seconds: compile time."""

    blueprint: Blueprint
    executable: Any
    runs: int
    seconds: float


def build_blueprint(recipe: Recipe, topology: Topology, say: Say, runs: int = 1) -> Blueprint:
    """Builds the blueprint of a step, without any text: bpe:SIZE is assumed to have SIZE tokens.

    Args:
      recipe: the checked recipe.
      topology: the devices.
      say: receives messages.
      runs: runs that a device trains at once.

    Returns:
      The blueprint.

    Raises:
      ValueError: if the mesh does not fill the topology, or does not divide the config.
    """
    devices, (vocab_size, bos_id) = topology.devices, nominal_vocabulary(recipe)
    blueprint = Blueprint(
        recipe, vocab_size, bos_id, devices, lambda: device_memory(topology), say, runs
    )
    if recipe.mesh.axes != AUTO:
        if runs == 1:
            check_idle_devices(recipe.mesh, blueprint.mesh, len(devices))
        check_devices(recipe, blueprint.mesh)
    return blueprint


def split_stages(blueprint: Blueprint) -> list[Blueprint]:
    """Returns a blueprint for each stage of the run, with its steps; without stages, it alone."""
    recipe, stages = blueprint.recipe, []
    for stage, stage_recipe in zip(recipe.stages, recipe.stage_recipes, strict=True):
        stages.append(stage_blueprint := copy.copy(blueprint))
        if stage_recipe is not recipe:
            steps = {'train.steps': stage.stop - stage.start}
            stage_blueprint.recipe = update_recipe(stage_recipe, steps)
            stage_blueprint.learner = dataclasses.replace(
                blueprint.learner, recipe=stage_blueprint.recipe
            )
    return stages


def nominal_vocabulary(recipe: Recipe) -> tuple[int, int]:
    """Returns (vocabulary size, BOS) without the text; the program does not depend on the BOS."""
    # Any id serves as BOS: it is a value, not a shape, so the compiled program is the same.
    n_tokens = tokenizers.vocab_size(recipe.data.tokenizer)
    return n_tokens + count_marks(recipe), n_tokens - 2


def device_memory(topology: Topology) -> int:
    """Returns the bytes of a device that a program may use."""
    if topology.chip is not None:
        return topology.chip.memory
    # XLA's devices of one CPU share the machine's memory; each GPU or TPU has its own.
    is_cpu = topology.devices[0].platform == 'cpu'
    return device_memory_bytes() // (len(topology.devices) if is_cpu else 1)


def compile_step(
    blueprint: Blueprint,
    topology: Topology,
    run_axis: str = SINGLE,
    runs: int = 1,
    program: str = '',
) -> CompiledStep:
    """Compiles the program that `train.py` runs. Prints what it compiles if that takes long.

    Args:
      blueprint: the blueprint of the step.
      topology: the devices.
      run_axis: how a device trains several runs (`lm.devices.run_axis`).
      runs: number of runs, for a sweep.
      program: the program in words, such as '2 of 9, fsdp=16 remat=dots', for progress.

    Returns:
      The compiled step.

    Raises:
      DoesNotFit: if a device has too little memory.
    """
    start = time.perf_counter()

    def progress_text() -> str:
        text = f'compiling for {topology.label}, {time.perf_counter() - start:.0f} s'
        return f'{text}: {program}' if program else text

    try:
        with report_periodically(progress_text):
            executable = Program(blueprint, run_axis).compile_step(runs)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise DoesNotFit(*_parse_memory_error(str(error))) from error
    step = CompiledStep(blueprint, executable, runs, time.perf_counter() - start)
    needed, available = peak_bytes(executable, topology), device_memory(topology)
    if needed > available:  # only the compiler for TPUs checks it
        raise DoesNotFit(needed, available)
    return step


def _parse_memory_error(text: str) -> tuple[int, int]:
    """Parses (bytes needed, bytes available) from a compiler's error."""
    match = MEMORY_EXCEEDED.search(text) or MEMORY_USED.search(text)
    if match is None:
        raise ValueError(f'the step needs more memory than a device has; the compiler: {text}')
    needed, unit, available, available_unit = match.groups()
    return int(float(needed) * UNITS[unit]), int(float(available) * UNITS[available_unit])


def peak_bytes(executable: Any, topology: Topology) -> int:
    """Returns the peak memory of a device in bytes, by the compiler's report."""
    report = executable.memory_analysis()
    if topology.chip is not None and topology.chip.platform == 'tpu':
        # The sum over kinds counts donated arrays twice, and omits temporaries (libtpu 0.0.51).
        return report.peak_memory_in_bytes + report.generated_code_size_in_bytes
    # Donated arguments are also outputs: `alias` counts them once.
    arguments = report.argument_size_in_bytes - report.alias_size_in_bytes
    return arguments + report.output_size_in_bytes + report.temp_size_in_bytes


class Rates(NamedTuple):
    """Rates of one device.

    flops: peak flop/s of products. bytes: bytes per second of its memory. source: origin of the
    numbers. kind: device kind, which determines the share of the peak that products reach.
    """

    flops: float
    bytes: float
    source: str
    kind: str = ''


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """An estimate of one step.

    bytes, flops: per device. bound_*: with all products at the peak and all links hidden; other
    times have products at their share of the peak. waiting_seconds: waits for links in the order of
    the program. mfu: share of the peak used for 6 N and attention's operations
    (`lm.training.flops`). mfu_in_full: the same with all pairs of tokens, also masked pairs.
    kernels: by operation. dtype: of matmuls.
    mfu_hidden, mfu_exposed: if operations hide all links, or none. mfu_bound: upper bound of mfu.
    price: of a chip-hour. are_links_known: False for the local devices, whose links take no time.
    """

    topology: str
    mesh: str
    kernels: dict[str, str]
    dtype: str
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
    are_links_known: bool = True

    @property
    def step_seconds(self) -> float:
        """Returns the estimated seconds of a step."""
        return self.operation_seconds + self.waiting_seconds

    @property
    def step_seconds_hidden(self) -> float:
        """Returns the seconds if operations hide all links."""
        return max(self.operation_seconds, self.link_seconds)

    @property
    def step_seconds_exposed(self) -> float:
        """Returns the seconds if operations hide no links."""
        return self.operation_seconds + self.link_seconds

    @property
    def bound_seconds(self) -> float:
        """Returns a lower bound of the seconds."""
        return max(self.bound_operation_seconds, self.link_seconds)

    @property
    def predicted_seconds(self) -> float | None:
        """Returns the seconds scaled by the ratio of measured steps, if there are any."""
        return self.ratio and self.ratio.value * self.step_seconds

    @property
    def mfu(self) -> float:
        """Returns the model FLOP utilisation of `step_seconds`."""
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
        """Returns the resource that takes most of the time: links, products or memory."""
        if self.waiting_seconds > self.operation_seconds:
            return 'links'
        return 'products' if self.compute_seconds > self.memory_seconds else 'memory'

    @property
    def limit(self) -> str:
        """Returns the same for people."""
        return LIMITS[self.bound_by]

    @property
    def tokens_a_day(self) -> float:
        """Returns the tokens of a day of steps."""
        return self.tokens / self.step_seconds * 86400.0

    @property
    def chip_hours(self) -> float:
        """Returns the chip-hours of all steps."""
        return self.steps * self.step_seconds * self.chips / 3600

    def record(self) -> dict[str, Any]:
        """Returns the fields and the derived numbers, for JSON."""
        derived = ('step_seconds', 'step_seconds_hidden', 'step_seconds_exposed', 'bound_seconds')
        derived += ('predicted_seconds', 'mfu', 'mfu_in_full', 'mfu_hidden', 'mfu_exposed')
        derived += ('mfu_bound', 'bound_by', 'tokens_a_day', 'chip_hours')
        fields = dataclasses.asdict(self) | {'rates': self.rates._asdict()}
        fields['ratio'] = self.ratio and self.ratio._asdict()
        fields |= {name: getattr(self, name) for name in derived}
        return fields | {'cost': self.price and self.price * self.chip_hours}

    def format_lines(self) -> Iterator[str]:
        """Yields the lines of a plan."""
        unit = 'chip' if self.are_links_known else 'device'
        yield (
            f'{self.topology}: {self.chips:,} {unit}{"s" * (self.chips > 1)}, mesh {self.mesh}; '
            f'compiled in {self.compile_seconds:.0f} s'
        )
        yield f'model: {self.parameters:,} parameters; {self.tokens:,} tokens per step'
        yield self.format_kernels()
        kinds = [f'{kind} {format_gib(size)}' for kind, size in self.memory.items() if size > 1e6]
        yield (
            f'memory per device: {format_gib(self.memory_needed)} of '
            f'{format_gib(self.memory_there)} GiB'
        )
        yield f'  {", ".join(kinds)}'
        yield (
            f'matmuls: {self.flops / 1e12:,.2f} TFLOP per device; '
            f'{format_ms(self.compute_seconds)} ms at achievable speed, '
            f'{format_ms(self.flops / self.rates.flops)} ms at peak'
        )
        yield (
            f'memory traffic: {self.bytes / 1e9:,.2f} GB per device, '
            f'{format_ms(self.memory_seconds)} ms'
        )
        for collective in self.collectives:
            yield (
                f'{collective["kind"]}: {collective["number"]:,} per step, '
                f'{collective["bytes"] / 1e9:,.3f} GB per device; '
                f'{format_ms(collective["seconds"])} ms on links, '
                f'{format_ms(collective["waiting"])} ms waiting'
            )
        if self.launches is not None:
            yield f'launches: {self.launches:,} kernels, copies and library calls per step'
        yield (
            f'step: about {format_ms(self.step_seconds)} ms, limited by {self.limit}: operations '
            f'{format_ms(self.operation_seconds)}, waiting {format_ms(self.waiting_seconds)}'
        )
        yield f'  MFU {self.mfu:.1%}; {self.mfu_in_full:.1%} if masked token pairs count'
        yield (
            f'  communication fully hidden: {format_ms(self.step_seconds_hidden)} ms, '
            f'MFU {self.mfu_hidden:.1%}'
        )
        yield (
            f'  communication not hidden: {format_ms(self.step_seconds_exposed)} ms, '
            f'MFU {self.mfu_exposed:.1%}'
        )
        yield (
            f'  lower bound: {format_ms(self.bound_seconds)} ms, MFU {self.mfu_bound:.1%} '
            '(matmuls at peak, communication hidden)'
        )
        if self.ratio is not None and self.predicted_seconds is not None:
            hours = self.chip_hours * self.predicted_seconds / self.step_seconds
            yield (
                f'  predicted: {format_ms(self.predicted_seconds)} ms, '
                f'{self._format_hours(self.predicted_seconds)}, {hours:,.0f} {unit}-hours'
                f'{format_cost(self.price, hours)} for all steps'
            )
            yield f'    {self.ratio.description}'
        yield (
            f'run: {self.steps:,} steps, {self._format_hours(self.step_seconds)}, '
            f'{self.chip_hours:,.0f} {unit}-hours{format_cost(self.price, self.chip_hours)}; '
            f'{self.tokens_a_day / 1e9:,.1f} billion tokens per day'
        )
        yield f'rates: {self.rates.source}'
        if self.unknown:
            yield f'NOTE: operations of unknown size count as 0: {", ".join(self.unknown)}'
        if self.collectives and not self.are_links_known:
            yield 'NOTE: the links between these devices have no known speed; they count as 0 ms'
        yield 'assumed: each conditional takes its most expensive branch'
        yield f'not included: {"; ".join(NOT_MODELLED)}'

    def format_kernels(self) -> str:
        """Returns the line with the kernels, as chosen by `auto` or named, and the dtype."""
        return f'kernels: {format_kernels(self.kernels)}; {self.dtype} matmuls'

    def _format_hours(self, step_seconds: float) -> str:
        return f'{self.steps * step_seconds / 3600:,.1f} hours'


def format_ms(seconds: float) -> str:
    """Formats seconds as milliseconds."""
    return f'{1e3 * seconds:,.1f}'


def format_gib(n_bytes: float) -> str:
    """Formats bytes as GiB."""
    return f'{n_bytes / GIB:.2f}'


def format_summary(estimate: StepEstimate) -> str:
    """Formats memory, step time and utilisation in one line."""
    return (
        f'{format_gib(estimate.memory_needed)} of {format_gib(estimate.memory_there)} GiB per '
        f'device, about {format_ms(estimate.step_seconds)} ms per step '
        f'(at least {format_ms(estimate.bound_seconds)}), '
        f'MFU {estimate.mfu:.1%} (at most {estimate.mfu_bound:.1%})'
    )


def format_cost(price: float | None, chip_hours: float) -> str:
    """Returns ', cost 1,234', or '' without a price per chip-hour."""
    return '' if price is None else f', cost {price * chip_hours:,.0f}'


def estimate_step(
    step: CompiledStep, topology: Topology, price: float | None = None
) -> StepEstimate:
    """Estimates a compiled step.

    Args:
      step: the compiled step.
      topology: its devices.
      price: price of a chip-hour, in any currency.

    Returns:
      The estimate.
    """
    blueprint, recipe = step.blueprint, step.blueprint.recipe
    module = Module(step.executable.as_text())
    rates, sends = device_rates(topology), list_collectives(module)
    pair_share = computed_pair_share(recipe, blueprint.mesh.shape['context'])
    cost_args = rates.flops, rates.bytes, pair_share, rates.kind
    cost = estimate_cost(module, *cost_args)
    devices = list(blueprint.mesh.devices.flat)
    link = functools.partial(collective_seconds, topology=topology, devices=devices)
    seconds = [collective.rounds * link(collective) for collective in sends]

    def operation_seconds(computation, instruction):
        return operation_cost(module, computation, instruction, *cost_args).seconds

    waits = waiting_seconds(module, operation_seconds, link)
    seconds_by_kind = collections.defaultdict(list)
    for collective, sec in zip(sends, seconds, strict=True):
        seconds_by_kind[collective.kind].append(sec)
    tokens = recipe.data.batch_size * recipe.data.seq_len * step.runs
    return StepEstimate(
        topology=topology.label,
        mesh=format_mesh(blueprint.mesh),
        kernels=list_kernels(recipe, blueprint.learner.model.kernels),
        dtype=recipe.model.dtype,
        chips=max(
            1, blueprint.mesh.size // (topology.chip.devices_per_chip if topology.chip else 1)
        ),
        devices=blueprint.mesh.size,
        runs=step.runs,
        parameters=parameter_count(blueprint.learner),
        tokens=tokens,
        steps=recipe.train.steps,
        memory=memory_by_kind(step, topology),
        memory_needed=peak_bytes(step.executable, topology),
        memory_there=device_memory(topology),
        collectives=[
            {'kind': kind, 'number': number, 'bytes': n_bytes}
            | {'seconds': sum(seconds_by_kind[kind]), 'waiting': waits[kind]}
            for kind, number, n_bytes in count_by_kind(sends)
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
        model_flops=flops_per_token(blueprint.learner) * tokens,
        model_flops_in_full=flops_in_full(blueprint.learner) * tokens,
        compile_seconds=step.seconds,
        unknown=cost.unknown,
        launches=count_launches(module) if topology.devices[0].platform == 'gpu' else None,
        price=price,
        ratio=nearest_ratio(topology.name.partition(':')[0]) if topology.chip else None,
        are_links_known=topology.chip is not None,
    )


def memory_by_kind(step: CompiledStep, topology: Topology) -> dict[str, int]:
    """Returns the bytes of each kind on a device at the peak.

    Bytes that are neither state nor text belong to the activations, gradients and buffers of the
    step.
    """
    shapes, recipe = step.blueprint.state_shapes, step.blueprint.recipe
    axis_sizes = step.blueprint.mesh.shape
    runs = step.runs / axis_sizes['run']
    rows = recipe.data.batch_size / (axis_sizes['data'] * axis_sizes['fsdp'] * axis_sizes['expert'])
    bytes_by_kind = {
        'parameters': bytes_per_device(shapes.params),
        'optimizer state': bytes_per_device(shapes.opt_state),
        'average': bytes_per_device(shapes.average),
        'carried by layers and reparametrisations': bytes_per_device(
            (shapes.stats, shapes.reparam)
        ),
        'text': int(rows * (recipe.data.seq_len + 1) * 4),  # int32; inputs and targets overlap
    }
    bytes_by_kind = {kind: int(runs * size) for kind, size in bytes_by_kind.items() if size}
    program = step.executable.memory_analysis().generated_code_size_in_bytes
    # The compiler reports one peak, not its parts; the remainder cannot be split further.
    remainder = peak_bytes(step.executable, topology) - sum(bytes_by_kind.values()) - program
    return bytes_by_kind | {'program': program, 'activations, gradients and buffers': remainder}


def computed_pair_share(recipe: Recipe, parts: int = 1) -> float:
    """Returns the share of all pairs of tokens in the blocks that splash attention computes.

    The share is the mean over layers. parts: number of devices that share the tokens of a row.
    """
    kernel = recipe.kernels.get('attention')
    blocks = BlockSizes(**kernel.options) if kernel and kernel.name == 'splash' else AUTO_SIZES
    shares = []
    for block, kind in enumerate(recipe.layers, 1):
        options = kind.attention.options
        if kind.attention.row.has_scores:
            window = None if is_full(block, **options) else options.get('window')
            shares.append(computed_share(recipe.data.seq_len, window, parts, blocks))
    return sum(shares) / len(shares) if shares else 0.0


def device_rates(topology: Topology) -> Rates:
    """Returns the published rates of the chip, or measured rates of the local devices."""
    if chip := topology.chip:
        return Rates(chip.peak, 1e9 * chip.gb_per_second, f'published for {chip.kind}', chip.kind)
    return _measure_rates(len(topology.devices))


@functools.cache
def _measure_rates(n: int) -> Rates:
    """Returns measured rates of one of n devices."""
    flops, source = peak_flops(n, default_dtype())
    source += f'; memory: measured, copy of {COPY_BYTES >> 20} MiB'
    return Rates(flops / n, measure_bandwidth(), source, jax.devices()[0].device_kind)


COPY_BYTES = 1 << 28  # bytes


def measure_bandwidth(repeats: int = 5) -> float:
    """Measures the bytes per second that the first device reads and writes.

    The result is the best of `repeats` rounds.
    """
    x = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    # In place: without donation every round would also allocate its result.
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    best = math.inf
    for _ in range(repeats + 1):  # the first round touches the pages
        start = time.perf_counter()
        x = add(x)
        x.block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * COPY_BYTES / best
