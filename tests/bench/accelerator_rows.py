"""The rows of `tests.bench.accelerator`: the measurements of each group.

`tiny`: sizes that a CPU runs in seconds, with Pallas kernels for TPUs in their interpreter.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from configs import default
from lm.config.recipe import Recipe
from lm.config.resolve import resolve, update_recipe
from lm.devices.run_axis import SINGLE
from lm.devices.shardings import jit_init
from lm.record.machine import peak_memory_bytes
from lm.training.flops import flops_per_token
from lm.training.peaks import peak_flops
from lm.training.state import make_hyper
from modules.kernels.attention import ATTENTION_KERNELS, Scores, attend
from modules.kernels.attention.base import attend_at_positions
from modules.kernels.cross_entropy import tpu
from modules.numerics import REMAT_POLICIES
from tests.bench import row_kernels
from tests.bench.plan import measure_step
from tests.bench.row_kernels import NORM_CASES, ROW_CASES, TOLERANCES, distance, time_calls
from tests.bench.step import evenkeel_step, plain_step
from tests.bench.sweep import SHAPE
from tpu.chips import CHIPS, Topology, count_chips, list_shapes, open_topology
from tpu.compiled_step import CompiledStep, build_blueprint, compile_step, estimate_step
from tpu.environment import HERE

PLATFORM = jax.default_backend()
SUPPORTED = {
    name: row
    for name, row in ATTENTION_KERNELS.items()
    if row.platforms is None or PLATFORM in row.platforms
}
LENGTHS = (2048, 8192, 32_768)
DENSE = 8192  # tokens of the longest row whose scores are materialized
PIECE = 512  # queries whose exact scores are computed at a time
HEADS = (4, 2, 128)  # query heads, key heads and their width
ASKED = ({'window': 100}, {'softcap': 30.0}, {'sinks': True}, {'slopes': True}, {'key_bias': True})
MODELS = {'llama_124m': 4, 'llama_1b': 2}  # rows of 8,192 tokens a device
TINY_MODEL = {
    'model.d_model': 32,
    'model.n_heads': 2,
    'model.n_kv_heads': 1,
    'model.n_layers': 2,
    'model.d_ff': 64,
    'data.tokenizer': 'bpe:512',
    'data.seq_len': 128,
}
PEER = (768, 12, 12, 3072, 1024, 50_304, 16)  # as `tests.bench.step.SHAPES`
TINY_PEER = (32, 2, 1, 64, 64, 512, 2)
BY_HEADS = ((32, 64), (16, 128), (8, 256))  # of attention alone, 2 rows of 8,192
STEPS = 10


class BenchmarkRow(NamedTuple):
    name: str
    measure: Callable[[], dict[str, Any]]


def list_rows(group: str, tiny: bool) -> Iterator[BenchmarkRow]:
    """Yields the rows of one of GROUPS, in the order of measurement."""
    if tiny:
        row_kernels.BEYOND_CACHE, row_kernels.COPIED = 1e4, 2**22
    return GROUPS[group](tiny)


def attention_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    """Each kernel against float64: lengths and documents, other options, odd sizes, types."""
    lengths = (128, 256) if tiny else LENGTHS
    default = {'length': lengths[0], 'heads': HEADS, 'dtype': 'bfloat16', 'documents': True}
    changes = [{'length': n, 'documents': d} for n in lengths for d in (False, True)]
    changes += [{'asked': asked, 'documents': d} for asked in ASKED for d in (False, True)]
    changes += [{'length': lengths[0] - 1}, {'dtype': 'float32'}]
    changes += [{'heads': heads} for heads in ((3, 1, 80), (4, 4, 64), (2, 1, 256))]
    for name, kernel in SUPPORTED.items():
        for change in changes:
            is_supported = kernel.supports >= change.get('asked', {}).keys()
            if is_supported and not (kernel.holds_scores and change.get('length', 0) > DENSE):
                title = f'{name}: {format_changes(change)}'
                yield BenchmarkRow(title, functools.partial(attention, name, **default | change))
    for name in ATTENTION_KERNELS.keys() - SUPPORTED.keys():
        yield BenchmarkRow(name, functools.partial(refuse_platform, name))


def refuse_platform(name: str) -> dict[str, Any]:
    raise NotImplementedError(f'for {ATTENTION_KERNELS[name].platforms}, and this is {PLATFORM}')


def format_changes(changes: dict[str, Any]) -> str:
    return ', '.join(f'{key}={value}' for key, value in changes.items())


def attention(name, length, heads, dtype, documents, asked=None) -> dict[str, Any]:
    n, k, width = heads
    scores, random = Scores(**asked or {}), np.random.default_rng(0)
    shapes = [(1, n, length, width), *[(1, k, length, width)] * 2, (1, n, length, width)]
    q, k, v, g = (jnp.asarray(random.standard_normal(s), dtype) for s in shapes)
    segments = None
    if documents:
        segments = np.cumsum(random.random((1, length)) < 8 / length, 1).astype(np.int32)
    head_numbers = random.standard_normal(heads[0]).astype(np.float32)
    arrays = {'sinks_N': head_numbers, 'slopes_N': np.abs(head_numbers)}
    arrays['key_bias_BKS'] = random.standard_normal(k.shape[:3]).astype(np.float32)
    arrays = {
        key: x for key, x in arrays.items() if key.rpartition('_')[0] in scores.changed_fields()
    }

    def compute(q, k, v):
        return attend(name, q, k, v, scores, segments, **arrays)

    actual = jax.jit(both(compute))(q, k, v, g)
    # TPUs have no float64, so the host's CPU computes it there.
    device = jax.devices('cpu')[0] if PLATFORM == 'tpu' else None
    with jax.enable_x64(True), jax.default_device(device):
        exact = functools.partial(attention_in_pieces, scores, segments, arrays)
        arrays64 = (jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, g))
        expected = jax.jit(both(exact))(*arrays64)
    errors = [distance(a, b) for a, b in zip(actual, expected, strict=True)]
    # By default a GPU computes float32 products in TF32, and a TPU in bfloat16.
    bound = TOLERANCES['bfloat16' if PLATFORM != 'cpu' else dtype]
    by_gradient = dict(zip(('of out', 'of dq', 'of dk', 'of dv'), errors, strict=True))
    return agreement(max(errors), bound) | by_gradient


def attention_in_pieces(scores, segments, arrays, q, k, v):
    """Computes the reference, PIECE queries at a time, which the backward pass recomputes."""
    length, size = q.shape[2], min(PIECE, q.shape[2] // 2)
    count = -(-length // size)
    n_padding = count * size - length
    positions = jnp.arange(count * size)[None]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, n_padding), (0, 0)))

    @jax.checkpoint
    def piece(i):
        def slice_piece(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)

        same = None
        if segments is not None:
            padded = jnp.pad(segments, ((0, 0), (0, n_padding)), mode='edge')
            same = slice_piece(padded, 1)[..., None] == segments[:, None]
        return attend_at_positions(
            slice_piece(q, 2), k, v, scores, slice_piece(positions, 1), same, **arrays
        )

    pieces = jax.lax.map(piece, jnp.arange(count))
    return jnp.moveaxis(pieces, 0, 2).reshape(q.shape)[:, :, :length]


def both(compute: Callable) -> Callable:
    """Returns (q, k, v, g) -> the output, and the gradients for the output's gradient g."""

    def run(q, k, v, g):
        y, pull = jax.vjp(compute, q, k, v)
        return y, *pull(g)

    return run


def agreement(error: float, bound: float) -> dict[str, Any]:
    return {'error': error, 'bound': bound, 'agrees': bool(error < bound)}


def row_agreement_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    """RMSNorm, softmax and loss over rows of usual and odd sizes."""
    shapes = [(16, 128), (5, 131)] if tiny else [(64, 4096), (67, 1000), (33, 50_257)]
    for case in (*NORM_CASES[1:], *ROW_CASES[1::2]):
        for shape in shapes[:2] if case in NORM_CASES else shapes:
            for name in case.kernels:
                for dtype in row_kernels.TYPES:
                    title = f'{case.name}, {name}: {shape[0]} x {shape[1]:,}, {dtype}'
                    yield BenchmarkRow(
                        title, functools.partial(row_agreement, case, name, shape, dtype)
                    )


def row_agreement(case, name, shape, dtype) -> dict[str, Any]:
    with kernels_here() as platform:
        error = row_kernels.compute_error(case, name, shape, dtype, platform)
    return agreement(error, TOLERANCES[dtype])


@contextlib.contextmanager
def kernels_here() -> Iterator[str]:
    """Yields the platform whose kernels run here: on a CPU a TPU's, interpreted."""
    if PLATFORM != 'cpu':
        yield PLATFORM
        return
    # The interpreter cannot write in place if blocks do not divide an array.
    with pltpu.force_tpu_interpret_mode(), mock.patch.object(tpu, 'ALIASES', {}):
        yield 'tpu'


def config_fields(name: str) -> dict[str, Any]:
    """Returns this command's changes to a config, for any number and kind of devices."""
    fields = {'data.batch_size': MODELS.get(name, 8) * len(jax.devices())}
    fields |= {'mesh.data': -1, 'mesh.fsdp': 1, 'model.dtype': 'bfloat16'}
    return fields | {'kernels.implementation': 'auto'}


def build_recipe(name: str, tiny: bool, **changes: Any) -> Recipe:
    config = importlib.import_module(f'configs.{name}').get_config()
    fields = config_fields(name) | (TINY_MODEL if tiny else {}) | changes
    config.update_from_flattened_dict(fields)
    return resolve(config)


def compile_here(recipe: Recipe) -> CompiledStep:
    """Compiles the step for the devices here."""
    topology = open_topology(HERE)
    return compile_step(build_blueprint(recipe, topology, print), topology)


def step_against_cpu_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    yield BenchmarkRow(
        'default', functools.partial(step_against_cpu, build_recipe('default', tiny))
    )


def step_against_cpu(recipe: Recipe) -> dict[str, Any]:
    """Compares one step of gradient descent in bfloat16, from the same parameters and tokens."""
    recipe = update_recipe(recipe, {'optim.name': 'sgd', 'optim.warmup_steps': 0})
    shape, outcomes, start = (recipe.data.batch_size, recipe.data.seq_len + 1), [], None
    tokens = np.random.default_rng(0).integers(0, 256, shape, np.int32)
    batch, active = {'tokens': tokens, 'segments': np.ones_like(tokens)}, np.array([True])
    for device in (jax.devices()[0], jax.devices('cpu')[-1]):
        with jax.default_device(device):
            topology = Topology(HERE, None, [device])
            blueprint, hyper = build_blueprint(recipe, topology, print), make_hyper(recipe)
            step = compile_step(blueprint, topology)
            state = jit_init(blueprint.learner, blueprint.mesh)(jax.random.key(0), hyper)
            start = start or jax.device_get(state)
            put = lambda host, shard: jax.device_put(host, shard.sharding)  # noqa: E731
            state = jax.tree.map(put, start, state)
            state, metrics = step.executable(active, state, batch, hyper)
        update = jax.tree.map(np.subtract, jax.device_get(state.params), start.params)
        update = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(update)])
        outcomes.append((float(metrics['loss']), float(metrics['grad_norm']), update))
    (loss, norm, actual), (loss_cpu, norm_cpu, expected) = outcomes
    metrics_by_device = {
        'loss': loss,
        'on CPU': loss_cpu,
        'gradient norm': norm,
        'norm on CPU': norm_cpu,
    }
    # Two orders of sums in bfloat16 give different gradients.
    return (
        agreement(max(distance(actual, expected), abs(loss / loss_cpu - 1)), 5e-2)
        | metrics_by_device
    )


def step_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    """Each model unchanged, and with one choice changed."""
    changes: list[dict[str, Any]] = [{}]
    for name in SUPPORTED:
        changes += [{'kernels.attention': name, 'data.mask_documents': d} for d in (True, False)]
    changes += [{'model.remat': name} for name in REMAT_POLICIES]
    changes += [{f'kernels.{op}': 'pallas'} for op in ('cross_entropy', 'rms_norm')]
    changes += [{'loss.chunk': 0}, {'model.scan_layers': False}]
    for model in ['llama_124m'] if tiny else MODELS:
        for change in changes:
            name = f'{model}: {format_changes(change) or "as it is"}'
            yield BenchmarkRow(name, functools.partial(train, model, tiny, change))


def train(model: str, tiny: bool, changes: dict[str, Any]) -> dict[str, Any]:
    step = compile_here(build_recipe(model, tiny, **changes))
    seconds, metrics = measure_step(step)
    return rates(step, seconds) | {
        'loss': float(metrics['loss']),
        'peak GB': peak_memory_bytes() / 1e9,
        'compile s': step.seconds,
    }


def rates(step: CompiledStep, seconds: float) -> dict[str, float]:
    recipe = step.blueprint.recipe
    tokens = step.runs * recipe.data.batch_size * recipe.data.seq_len / seconds
    peak, _ = peak_flops(step.blueprint.mesh.size, recipe.model.dtype)
    utilisation = tokens * flops_per_token(step.blueprint.learner) / peak
    return {'ms': 1e3 * seconds, 'tokens/s': tokens, 'MFU': utilisation}


def copy_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    """Kernels over rows, and the same left to XLA."""
    small = [(case, (16, 128), 'bfloat16') for case in (*NORM_CASES, *ROW_CASES)]
    for case, shape, dtype in small if tiny else row_kernels.cases():
        for name in case.kernels:
            title = f'{case.name}, {name}: {shape[0]:,} x {shape[1]:,}, {dtype}'
            yield BenchmarkRow(title, functools.partial(copy_share, case, shape, dtype, name))


def copy_share(case, shape, dtype, name) -> dict[str, float]:
    with kernels_here() as platform:
        time_sets = functools.partial(row_kernels.time_kernel, case, name, shape, dtype, platform)
        return row_kernels.copy_share(case, shape, dtype, time_sets)


def sweep_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    runs = 4 if tiny else 16
    for dtype in ('bfloat16', 'float32'):
        for title, run_axis, n in (('a single run', SINGLE, 1), ('vmap', 'vmap', runs)):
            name = f'{title}, {n} run{"s" * (n > 1)}, {dtype}'
            yield BenchmarkRow(name, functools.partial(sweep, tiny, run_axis, n, dtype))


def sweep(tiny: bool, run_axis: str, runs: int, dtype: str) -> dict[str, float]:
    config, topology = default.get_config(), open_topology(HERE)
    small = TINY_MODEL | {'data.batch_size': 2} if tiny else {}
    config.update_from_flattened_dict(SHAPE | {'model.dtype': dtype} | small)
    topology = dataclasses.replace(topology, devices=topology.devices[:1])
    step = compile_step(
        build_blueprint(resolve(config), topology, print, runs), topology, run_axis, runs
    )
    return rates(step, measure_step(step, run_axis)[0])


def plan_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    for name in ('default', *MODELS):
        yield BenchmarkRow(name, functools.partial(plan, name, tiny))


def plan(name: str, tiny: bool) -> dict[str, Any]:
    """Compares tpu.plan's step for this chip, by its compiler, with the step measured here."""
    step, devices = compile_here(build_recipe(name, tiny)), jax.devices()
    seconds, _ = measure_step(step)
    chip = next((key for key, row in CHIPS.items() if row.kind == devices[0].device_kind), None)
    if chip is None:
        planned_seconds, source = (
            estimate_step(step, open_topology(HERE)).step_seconds,
            'rates measured here',
        )
    else:
        n = len(devices) // CHIPS[chip].devices_per_chip
        shape = next(shape for shape in list_shapes(CHIPS[chip]) if count_chips(shape) == n)
        planned_seconds, source = plan_seconds(name, f'{chip}:{shape}'), f'{chip}:{shape}'
    return {
        'ms': 1e3 * seconds,
        'planned ms': 1e3 * planned_seconds,
        'ratio': seconds / planned_seconds,
        'of': source,
    }


def plan_seconds(name: str, topology: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, 'plan.json')
        command = [sys.executable, '-m', 'tpu.plan', f'--config=configs/{name}.py']
        command += [f'--topology={topology}', f'--out={file}']
        command += [f'--config.{key}={value}' for key, value in config_fields(name).items()]
        process = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            raise RuntimeError(
                f'tpu.plan: {(process.stderr.strip() or "nothing").splitlines()[-1]}'
            )
        return json.loads(file.read_text())['step_seconds']


def decoder_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    """A plain decoder of three frameworks."""
    shape = TINY_PEER if tiny else PEER
    ours = functools.partial(evenkeel_step, changes={'model.dtype': 'bfloat16'})
    plain = functools.partial(plain_step, dtype=jnp.bfloat16)
    yield BenchmarkRow(f'{shape}: evenkeel', functools.partial(decoder, ours, shape))
    yield BenchmarkRow(f'{shape}: plain Flax', functools.partial(decoder, plain, shape))
    yield BenchmarkRow(f'{shape}: PyTorch', functools.partial(torch_decoder, shape))


def peer_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    """Attention alone, and kernels over rows, beside other libraries."""
    rows, length = (1, 128) if tiny else (2, 8192)
    for n, width in BY_HEADS[:1] if tiny else BY_HEADS:
        q_shape = (rows, n, length, width)
        for name in [*SUPPORTED, 'tokamax', 'PyTorch']:
            if name != 'reference':
                measure = functools.partial(attention_alone, name, q_shape)
                yield BenchmarkRow(f'attention {q_shape}, forward and backward: {name}', measure)
    shapes = [(16, 128)] * 2 if tiny else [(8192, 4096), (16_384, 50_257)]
    for cases, shape in zip((NORM_CASES, ROW_CASES), shapes, strict=True):
        for case in cases:
            for name in ('pallas', 'reference', 'PyTorch', 'Liger', 'tokamax'):
                measure = functools.partial(row_peer, case, shape, name)
                yield BenchmarkRow(f'{case.name}, {shape[0]:,} x {shape[1]:,}: {name}', measure)


def decoder(make, shape) -> dict[str, float]:
    state, step, compile_sec = make(shape)
    milliseconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, metrics = step(state)
        jax.block_until_ready((state, metrics))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    peak = peak_memory_bytes() / 1e9
    return decoder_rates(shape, milliseconds) | {'peak GB': peak, 'compile s': compile_sec}


def decoder_rates(shape, milliseconds: list[float]) -> dict[str, float]:
    ms = statistics.median(milliseconds[3:])
    return {'ms': ms, 'tokens/s': 1e3 * shape[4] * shape[6] / ms}


def torch_decoder(shape) -> dict[str, float]:
    importlib.import_module('torch')  # so that a missing PyTorch is named in the error
    script = str(Path(__file__).with_name('torch_decoder.py'))
    command = [sys.executable, script, *map(str, shape), str(STEPS)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f'PyTorch: {process.stderr.strip().splitlines()[-1]}')
    report = json.loads(process.stdout.splitlines()[-1])
    return decoder_rates(shape, report['ms']) | {'peak GB': report['peak_gb']}


def attention_alone(name: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Causal attention, forward and backward, in bfloat16."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    if name == 'PyTorch':
        from tests.bench import torch_rows

        return {'ms': 1e3 * torch_rows.time_attention(shape)}
    if name == 'tokamax':
        import tokamax

        q, k, v, g = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, g))
        attend_by = functools.partial(tokamax.dot_product_attention, is_causal=True)
    else:
        attend_by = functools.partial(attend, name, scores=Scores())

    return {'ms': 1e3 * time_calls(both(attend_by), [(q, k, v, g)])}


def row_peer(case, shape, name) -> dict[str, float]:
    if name in case.kernels:
        return copy_share(case, shape, 'bfloat16', name)
    seconds = row_kernels.peer(name)
    time_sets = functools.partial(seconds, case.name, shape, 'bfloat16')
    return row_kernels.copy_share(case, shape, 'bfloat16', time_sets)


def profile_rows(tiny: bool) -> Iterator[BenchmarkRow]:
    for model in MODELS:
        yield BenchmarkRow(model, functools.partial(profile, model, tiny))


def profile(model: str, tiny: bool) -> dict[str, Any]:
    """Returns the operations that take most of the device's time, over two measured steps and
    warm-up.
    """
    step = compile_here(build_recipe(model, tiny))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds, _ = measure_step(step, steps=2)
        (file, *_) = Path(folder).rglob('*.xplane.pb')
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        spent, counts = Counter(), Counter()
        for name, nanoseconds in operations(planes):
            spent[name] += nanoseconds
            counts[name] += 1
    total = sum(spent.values())
    top = [
        {'operation': name, 'share': ns / total, 'ms': ns / 1e6, 'calls': counts[name]}
        for name, ns in spent.most_common(15)
    ]
    return {'ms': 1e3 * seconds, 'all operations ms': total / 1e6, 'top': top}


def operations(planes: Any) -> Iterator[tuple[str, float]]:
    """Yields (name without its number, nanoseconds) of each operation of the first device."""
    planes = list(planes)
    device = next((plane for plane in planes if plane.name.startswith('/device:')), None)
    for plane in [device] if device else planes:
        lines = list(plane.lines)
        op_lines = [line for line in lines if line.name == 'XLA Ops'] or [
            line for line in lines if device is None or 'Stream' in line.name
        ]
        for line in op_lines:
            for event in line.events:
                name = re.sub(r'[.\d]+$', '', event.name.split(' = ')[0]).lstrip('%')
                holds_others = re.match(r'while|conditional|call\b', name)
                if holds_others or (device is None and 'hlo_op' not in dict(event.stats)):
                    continue
                yield name[:60], event.duration_ns


GROUPS = {
    'attention against float64': attention_rows,
    'norms, softmax and loss against float64': row_agreement_rows,
    'a step in bfloat16 against the CPU': step_against_cpu_rows,
    'steps': step_rows,
    'share of a copy': copy_rows,
    'sweep': sweep_rows,
    'plan': plan_rows,
    'decoders': decoder_rows,
    'peers': peer_rows,
    'profile': profile_rows,
}
