"""What is to be expected of a compiled step: memory, collectives, and how long it takes at least.

The time is a roofline's. Every operation takes as long as its products take at the published peak,
or its bytes at the published bandwidth of memory, whichever is longer, one operation after another;
the links take as long as their bytes take in rings. `step_seconds` has the links work meanwhile,
`step_seconds_exposed` has them wait. Neither knows what LEFT_OUT names.
"""

import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.flops import flops_per_token, peak_flops
from lm.mesh import mesh_words
from lm.recipe import Recipe
from lm.run.describe import bytes_a_device
from lm.run.table import parameter_count
from modules.kernels.attention.splash import share_computed
from tpu.compiled import Step, memory_of, peak_bytes
from tpu.cost import cost_of
from tpu.hlo import Module
from tpu.topology import Topology
from tpu.wire import by_kind, collectives, seconds_of

LEFT_OUT = (
    'vector operations that are no product, and tiles that shapes do not fill',
    'the latency of operations and of collectives, which small ones consist of',
    'that conditionals may take a cheaper branch than their dearest, as optimizers at most steps',
    'links and hosts that others use, throttled clocks, stragglers',
    'evaluation, checkpoints, and waiting for text',
)
DAY = 86400.0


class Rates(NamedTuple):
    """Of one device: flop/s of products, bytes a second of its memory, and where that is from."""

    flops: float
    bytes: float
    source: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes are of one device, seconds of one step, and so are flops, of products on one device.

    mfu: the most that 6 N and attention's operations (`lm.flops`) can be of the peak;
    mfu_exposed: where nothing hides the links. price: of a chip-hour.
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
    link_seconds: float
    model_flops: float
    compile_seconds: float
    unknown: tuple[str, ...]
    price: float | None = None

    @property
    def step_seconds(self) -> float:
        return max(self.operation_seconds, self.link_seconds)

    @property
    def step_seconds_exposed(self) -> float:
        return self.operation_seconds + self.link_seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / self.devices / self.rates.flops / self.step_seconds

    @property
    def mfu_exposed(self) -> float:
        return self.mfu * self.step_seconds / self.step_seconds_exposed

    @property
    def bound_by(self) -> str:
        if self.link_seconds > self.operation_seconds:
            return 'links'
        return 'products' if self.compute_seconds > self.memory_seconds else 'memory'

    @property
    def tokens_a_day(self) -> float:
        return self.tokens / self.step_seconds * DAY

    @property
    def chip_hours(self) -> float:
        """Of all steps."""
        return self.steps * self.step_seconds * self.chips / 3600

    def record(self) -> dict[str, Any]:
        """What JSON can hold: the fields, and what follows from them."""
        follow = ('step_seconds', 'step_seconds_exposed', 'mfu', 'mfu_exposed', 'bound_by')
        follow += ('tokens_a_day', 'chip_hours')
        found = dataclasses.asdict(self) | {'rates': self.rates._asdict()}
        found |= {name: getattr(self, name) for name in follow}
        return found | {'cost': self.price and self.price * self.chip_hours}


def estimate(step: Step, topology: Topology, price: float | None = None) -> Estimate:
    """Of a compiled step."""
    made, recipe = step.blueprint, step.blueprint.recipe
    module = Module(step.executable.as_text())
    rates = rates_of(topology)
    pairs = pairs_computed(recipe, made.mesh.shape['context'])
    cost = cost_of(module, rates.flops, rates.bytes, pairs)
    devices = list(made.mesh.devices.flat)
    sent = collectives(module)
    seconds = [one.times * seconds_of(one, topology, devices) for one in sent]
    tokens = recipe.data.batch_size * recipe.data.seq_len * step.runs
    return Estimate(
        topology=topology.words,
        mesh=mesh_words(made.mesh),
        chips=max(1, made.mesh.size // (topology.chip.devices_a_chip if topology.chip else 1)),
        devices=made.mesh.size,
        runs=step.runs,
        parameters=parameter_count(made.learner),
        tokens=tokens,
        steps=recipe.train.steps,
        memory=memory_by_kind(step, topology),
        memory_needed=peak_bytes(step.executable, topology),
        memory_there=memory_of(topology),
        collectives=[
            {
                'kind': kind,
                'number': number,
                'bytes': n_bytes,
                'seconds': sum(s for one, s in zip(sent, seconds, strict=True) if one.kind == kind),
            }
            for kind, number, n_bytes in by_kind(sent)
        ],
        flops=cost.flops,
        bytes=cost.bytes,
        rates=rates,
        compute_seconds=cost.flops / rates.flops,
        memory_seconds=cost.bytes / rates.bytes,
        operation_seconds=cost.seconds,
        link_seconds=sum(seconds),
        model_flops=flops_per_token(made.learner) * tokens,
        compile_seconds=step.seconds,
        unknown=cost.unknown,
        price=price,
    )


def memory_by_kind(step: Step, topology: Topology) -> dict[str, int]:
    """Bytes of a device when it holds most; what is not state or text is the step's own."""
    shapes, recipe = step.blueprint.state_shapes, step.blueprint.recipe
    runs = step.runs / step.blueprint.mesh.shape['run']
    n = step.blueprint.mesh.shape
    rows = recipe.data.batch_size / (n['data'] * n['fsdp'] * n['expert'])
    found = {
        'parameters': bytes_a_device(shapes.params),
        'optimizer state': bytes_a_device(shapes.opt_state),
        'average': bytes_a_device(shapes.average),
        'carried by layers and reparametrisations': bytes_a_device((shapes.stats, shapes.reparam)),
        'text': int(rows * (recipe.data.seq_len + 1) * 4),
    }
    found = {kind: int(runs * size) for kind, size in found.items() if size}
    program = step.executable.memory_analysis().generated_code_size_in_bytes
    rest = peak_bytes(step.executable, topology) - sum(found.values()) - program
    return found | {'program': program, 'activations, gradients and buffers': rest}


def pairs_computed(recipe: Recipe, parts: int = 1) -> float:
    """The share of all pairs of tokens whose blocks splash attention computes, over the layers.
    parts: how many devices the tokens of a row are cut over.
    """
    given = recipe.attention.options
    window, every = given.get('window'), given.get('full_every')
    total = 0.0
    for block in range(1, recipe.model.n_layers + 1):
        full = window is None or (every and block % every == 0)
        total += share_computed(recipe.data.seq_len, None if full else window, parts)
    return total / recipe.model.n_layers


def rates_of(topology: Topology) -> Rates:
    """As published of the chip, or as measured of the devices at hand."""
    if chip := topology.chip:
        return Rates(chip.peak, 1e9 * chip.gb_per_second, f'published of {chip.kind}')
    return _measured(len(topology.devices))


@functools.cache
def _measured(n: int) -> Rates:
    flops, source = peak_flops(n)
    return Rates(flops / n, bandwidth(), f'{source}; memory: measured copy of {COPIED >> 20} MiB')


COPIED = 1 << 28  # bytes


def bandwidth(repeats: int = 5) -> float:
    """Bytes a second that the first device reads and writes, in the best of several rounds."""
    x = jnp.zeros(COPIED // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    best = math.inf
    for _ in range(repeats + 1):  # the first one touches the pages
        start = time.perf_counter()
        x = add(x)
        x.block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED / best
