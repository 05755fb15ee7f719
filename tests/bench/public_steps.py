"""Plans beside training steps that others measured and published: a table of tpu/PLANS.md.

    uv run python -m tests.bench.public_steps [--rows=v6e] [--programs=FOLDER] [--write]
    uv run python -m tests.bench.public_steps --stored

Each step is planned as `tpu.plan` does it: compiled for the chips that it ran on, some minutes
each. --programs keeps the compiled programs in a folder, and estimates those in it without a
compiler. --write puts the rows into tpu/measured_steps.json, which a plan's `predicted` is based
on. --stored prints the tables of that file, without a compiler: the steps, and by kind of chip the
ratios, their errors for steps that they do not know, and the best step.

A plan is of this project's program, not of the measured one: same shapes, rows and mesh, but its
own kernels, optimizer in float32, and the nearest rematerialization that it has. The first of a
row's policies that fits is estimated.
"""

from tpu.environment import prepare_environment

if __name__ == '__main__':
    prepare_environment()

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from configs import llama_8b
from lm.config.fields import Config
from lm.config.resolve import resolve, update_recipe
from lm.model.check import check
from lm.training.flops import attention_flops
from tpu.chips import Topology, open_topology
from tpu.compiled_step import (
    CompiledStep,
    DoesNotFit,
    StepEstimate,
    build_blueprint,
    compile_step,
    device_memory,
    estimate_step,
    format_gib,
    peak_bytes,
)
from tpu.measured import FILE, held_out_errors, load_ratios


def shape(
    d_model: int,
    d_ff: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int = 8,
    head_dim: int | None = None,
) -> dict:
    names = ('d_model', 'd_ff', 'n_layers', 'n_heads', 'n_kv_heads', 'head_dim')
    sizes = (d_model, d_ff, n_layers, n_heads, n_kv_heads, head_dim or d_model // n_heads)
    return {f'model.{name}': size for name, size in zip(names, sizes, strict=True)}


# Shapes, as changes to configs/llama_8b.py. Those of MaxText are of its commit 76bd53b, with which
# its tables of TPU v4, v5e and v5p came: two matrices in an MLP, heads of 256, and 32 of them at
# a width of 10,240, where a head here is the width over their number: 40.
MAXTEXT = {'data.tokenizer': 'bpe:32768', 'model.activation': 'relu'}
MPT = {'data.tokenizer': 'bpe:50368', 'model.activation': 'gelu', 'model.norm': 'layernorm'}
MPT |= {'model.position': 'learned', 'model.tie_embeddings': True}
# Every sixth layer of Gemma 3 has no window.
GEMMA = {'data.tokenizer': 'bpe:262144', 'model.activation': 'geglu', 'model.placement': 'peri'}
GEMMA |= {'model.tie_embeddings': True, 'model.qk_norm': 'rmsnorm', 'attention.window': 1024}
GEMMA |= {'attention.full_every': 6}
LLAMA_70B = shape(8192, 28_672, 80, 64)
FLOAT8 = {'kernels.matmul': 'fp8_tensorwise', 'kernels.real_products': True}
BFLOAT16_FIELDS = ('weight_dtype', 'momentum_dtype', 'second_moment_dtype')
BFLOAT16 = {f'optim.{name}': 'bfloat16' for name in BFLOAT16_FIELDS}
MODELS = {
    'Llama 3 8B': {},
    'Llama 3 70B': LLAMA_70B,
    'Llama 3 70B, state in bfloat16': LLAMA_70B | BFLOAT16,
    'Llama 3 70B, products in float8': LLAMA_70B | FLOAT8,
    'Llama 2 70B': LLAMA_70B | {'data.tokenizer': 'bpe:32000'},
    'Gemma 3 12B': shape(3840, 15_360, 48, 16, 8, 256) | GEMMA,
    'Llama 3 405B': shape(16_384, 53_248, 126, 128),
    'Llama 2 7B': shape(4096, 11_008, 32, 32, 32) | {'data.tokenizer': 'bpe:32000'},
    'Mistral 7B': {'data.tokenizer': 'bpe:32000'},
    'MPT 125M': shape(768, 3072, 12, 12, 12) | MPT,
    'MPT 1B': shape(2048, 8192, 24, 16, 16) | MPT,
    'MPT 7B': shape(4096, 16_384, 32, 32, 32) | MPT,
    'MaxText 22B': shape(6144, 24_576, 48, 24, 24) | MAXTEXT,
    'MaxText 32B': shape(10_240, 32_768, 32, 40, 40) | MAXTEXT,
    'MaxText 64B': shape(10_240, 32_768, 64, 40, 40) | MAXTEXT,
}


class Source(NamedTuple):
    """A publication of a measured step."""

    name: str
    url: str


def recipe(name: str, folder: str) -> Source:
    root = 'https://github.com/AI-Hypercomputer/tpu-recipes/blob/c8cfe2f/training'
    return Source(f'tpu-recipes, {name}', f'{root}/{folder}')


def maxtext(chip: str) -> Source:
    root = 'https://github.com/AI-Hypercomputer/maxtext/blob/76bd53b/MaxText/configs'
    return Source(f'MaxText, {chip}', f'{root}/{chip}/README.md')


IRONWOOD = recipe('ironwood', 'ironwood/README.md')
TORCHPRIME = Source('torchprime#16', 'https://github.com/AI-Hypercomputer/torchprime/issues/16')
TOOLBOX = Source(
    'JAX-Toolbox',
    'https://github.com/NVIDIA/JAX-Toolbox/blob/bcbbfa5/docs/frameworks/maxtext/README.md',
)
TORCHTITAN = Source(
    'torchtitan',
    'https://github.com/pytorch/torchtitan/blob/b5bcd76/benchmarks/llama3_h100_202412_torchtitan.md',
)
FOUNDRY = Source(
    'llm-foundry',
    'https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md',
)
A3 = Source(
    'MaxText, A3',
    'https://github.com/AI-Hypercomputer/maxtext/blob/e591f30/src/maxtext/configs/gpu/a3/llama_2_7b/README.md',
)


class Measured(NamedTuple):
    """A published step.

    seconds: of a step; or tflops: TFLOP/s of a chip, which `seconds_at` converts to seconds.
    """

    source: Source
    seconds: float | None = None
    tflops: float | None = None


class PlannedStep(NamedTuple):
    """A step to plan.

    chips, rows: of all slices. remat: policies to try, in this order. theirs: the measured
    counterpart of the policy. config_changes: other changes to the config.
    """

    name: str
    model: str
    topology: str
    rows: int
    seq_len: int
    mesh: Mapping[str, int]
    remat: tuple[str, ...]
    theirs: str
    measured: Measured
    slices: int = 1
    config_changes: Mapping[str, Any] = {}

    @property
    def chip(self) -> str:
        return self.topology.partition(':')[0]

    def changes(self, remat: str) -> dict[str, Any]:
        """Returns the changes to configs/llama_8b.py: text without documents, as measured."""
        data_fields = {'data.seq_len': self.seq_len, 'data.batch_size': self.rows}
        mesh = {f'mesh.{axis}': n for axis, n in ({'data': -1} | dict(self.mesh)).items()}
        other_fields = {'data.mask_documents': False, 'model.remat': remat}
        return MODELS[self.model] | data_fields | mesh | other_fields | dict(self.config_changes)


def mpt(
    chip: str, size: str, rows: int, seq_len: int, microbatches: int, remat: str, rate: int
) -> PlannedStep:
    """Makes a row of llm-foundry's table. rate: tokens per second of eight GPUs.

    Where it names no policy it keeps all activations, which would here need 145 GiB of an H100 for
    7 billion parameters, and 119 of an A100 for one billion: `dots` is the nearest that fits.
    """
    return PlannedStep(
        *(f'{chip}-8-mpt{size.lower()}-{seq_len // 1024}k', f'MPT {size}', f'{chip}:8', rows),
        *(seq_len, {'fsdp': 8}, ('dots' if remat == 'none' else remat,)),
        *(f'{remat}, {microbatches} microbatches', Measured(FOUNDRY, rows * seq_len / rate)),
        config_changes={'train.microbatches': microbatches},
    )


def trillium(
    size: str, chips: int, topology: str, rows: int, seconds: float, microbatches: int = 1
) -> PlannedStep:
    """Makes a row of the recipes for Llama 3.1 on v6e.

    The recipe with 70 billion parameters for 32 chips has weights in bfloat16, and so are the
    optimizer's moments.
    """
    model = f'Llama 3 {size}' + ', state in bfloat16' * ((size, chips) == ('70B', 32))
    readme = f'trillium/Llama3.1-{size}-MaxText/v6e-{chips}/README.md'
    return PlannedStep(
        *(f'v6e-{chips}-{size.lower()}', model, f'v6e:{topology}', rows, 8192, {'fsdp': chips}),
        ('offload', 'full') if size == '8B' else ('full',),
        OFFLOADED.format(', o' * (size == '8B')),
        Measured(recipe('v6e', readme), seconds),
        config_changes={'train.microbatches': microbatches} if microbatches > 1 else {},
    )


OFFLOADED = 'input, q, k, v{} on the host'
ON_DEVICE = 'input, attention, q, k, v'
# (chips, slice, rows, seconds) of a step.
TRILLIUM_8B = (
    (8, '2x4', 24, 3.443),
    (16, '4x4', 48, 3.393),
    (32, '4x8', 96, 3.495),
    (64, '8x8', 320, 5.652),
    (128, '8x16', 512, 4.602),
    (256, '16x16', 1024, 4.546),
)
# The same, with microbatches so that the inputs of blocks may fit the device; not compiled yet.
TRILLIUM_70B = (
    (32, '4x8', 64, 17.790, 2),
    (64, '8x8', 128, 18.688, 2),
    (128, '8x16', 512, 34.786, 4),
    (256, '16x16', 1280, 42.656, 5),
)
TWO_DIMENSIONS = {'fsdp': 16, 'tensor': 4}
ROWS = [
    PlannedStep(
        *('v5e-256-32b', 'MaxText 32B', 'v5e:16x16', 1024, 2048, {'fsdp': 256}),
        *(('full',), 'full', Measured(maxtext('v5e'), tflops=132)),
    ),
    PlannedStep(
        *('v5e-256-64b', 'MaxText 64B', 'v5e:16x16', 512, 2048, {'fsdp': 256}),
        *(('full',), 'full', Measured(maxtext('v5e'), tflops=118)),
    ),
    PlannedStep(
        *('v4-64-22b', 'MaxText 22B', 'v4:4x4x4', 1024, 2048, {'fsdp': 64}),
        *(('full',), 'full', Measured(maxtext('v4'), tflops=156)),
    ),
    PlannedStep(
        *('v5p-64-32b', 'MaxText 32B', 'v5p:4x4x4', 512, 2048, TWO_DIMENSIONS),
        *(('dots', 'mlp'), 'products', Measured(maxtext('v5p'), tflops=328)),
        config_changes={'train.microbatches': 2},
    ),
    PlannedStep(
        *('v5p-64-64b', 'MaxText 64B', 'v5p:4x4x4', 256, 2048, TWO_DIMENSIONS),
        *(('dots',), 'products', Measured(maxtext('v5p'), tflops=323)),
        config_changes={'train.microbatches': 4},
    ),
    PlannedStep(
        *('v5p-512-405b', 'Llama 3 405B', 'v5p:8x8x8', 1024, 8192, {'fsdp': 512}),
        *(('attended', 'full'), 'attention and half of the MLP on the host'),
        Measured(recipe('v5p', 'v5p/Llama3.1-405B-MaxText/README.md'), 131.474),
    ),
    *(trillium('8B', *step) for step in TRILLIUM_8B),
    PlannedStep(
        *('v6e-8-7b', 'Mistral 7B', 'v6e:2x4', 48, 8192, {'fsdp': 8}, ('full',)),
        OFFLOADED.format(', o'),
        Measured(recipe('v6e', 'trillium/Mistral-7B-MaxText/README.md'), 6.320),
        config_changes={'train.microbatches': 2},
    ),
    PlannedStep(
        *('v6e-256-8b-1', 'Llama 3 8B', 'v6e:16x16', 256, 8192, {'fsdp': 256}, ('full',)),
        *('full', Measured(TORCHPRIME, 1.625)),
    ),
    PlannedStep(
        *('v6e-256-8b-2', 'Llama 3 8B', 'v6e:16x16', 512, 8192, {'fsdp': 256}, ('full',)),
        *('full', Measured(TORCHPRIME, 2.991)),
    ),
    PlannedStep(
        *('v6e-256-70b-4k', 'Llama 3 70B', 'v6e:16x16', 512, 4096, {'fsdp': 256}, ('full',)),
        *('full', Measured(TORCHPRIME, 9.480)),
    ),
    # The log has 8,192 tokens per chip, 905.021 of them per second; its recipe has three rows.
    PlannedStep(
        *('v6e-256-70b-llama2', 'Llama 2 70B', 'v6e:16x16', 512, 4096, {'fsdp': 256}, ('full',)),
        'q, k, v on the host',
        Measured(recipe('v6e', 'trillium/Llama2-70B-MaxText/README.md'), 9.052),
    ),
    *(trillium('70B', *step) for step in TRILLIUM_70B),
    PlannedStep(
        *('v6e-256-12b', 'Gemma 3 12B', 'v6e:16x16', 256, 32_768, {'fsdp': 256}, ('full',)),
        'input',
        Measured(recipe('v6e', 'trillium/Gemma3-12B-MaxText/v6e-256/README.md'), 7.318),
    ),
    PlannedStep(
        *('v6e-512-405b', 'Llama 3 405B', 'v6e:16x16', 512, 8192, {'fsdp': 256}, ('full',)),
        'input on the host',
        Measured(recipe('v6e', 'trillium/Llama3.1-405B-MaxText/README.md'), 54.803),
        slices=2,
    ),
    PlannedStep(
        *('tpu7x-64-70b', 'Llama 3 70B', 'tpu7x:4x4x4', 256, 8192, {'fsdp': 128}),
        *(('attended', 'full'), ON_DEVICE, Measured(IRONWOOD, 12.20)),
    ),
    PlannedStep(
        *('tpu7x-64-70b-fp8', 'Llama 3 70B, products in float8', 'tpu7x:4x4x4', 256, 8192),
        *({'fsdp': 128}, ('attended', 'full'), ON_DEVICE, Measured(IRONWOOD, 7.93)),
    ),
    PlannedStep(
        *('tpu7x-256-70b', 'Llama 3 70B', 'tpu7x:4x8x8', 1024, 8192, {'fsdp': 512}),
        *(('attended', 'full'), ON_DEVICE, Measured(IRONWOOD, 12.27)),
    ),
    PlannedStep(
        *('tpu7x-256-405b', 'Llama 3 405B', 'tpu7x:4x8x8', 1536, 8192, {'fsdp': 512}, ('full',)),
        *('k, v; input and half of the MLP on the host', Measured(IRONWOOD, 98.34)),
    ),
    PlannedStep(
        *('h100-8-7b', 'Llama 2 7B', 'h100:8', 16, 4096, {'fsdp': 8}, ('dots',)),
        *('products and attention', Measured(TOOLBOX, 0.721)),
    ),
    PlannedStep(
        *('h100-8-8b', 'Llama 3 8B', 'h100:8', 16, 8192, {'fsdp': 8}, ('attention',)),
        *('half of the products, and attention', Measured(TORCHTITAN, 2 * 8192 / 6667)),
    ),
    PlannedStep(
        *('h100-8-7b-a3', 'Llama 2 7B', 'h100:8', 32, 4096, {'fsdp': 8}, ('dots',)),
        *('products and attention', Measured(A3, tflops=492)),
    ),
    mpt('h100', '1B', 112, 2048, 1, 'none', 363_645),
    mpt('h100', '7B', 48, 2048, 1, 'none', 85_144),
    mpt('h100', '7B', 256, 4096, 2, 'full', 68_893),
    mpt('a100', '125M', 512, 2048, 2, 'none', 1_133_901),
    mpt('a100', '1B', 448, 2048, 4, 'none', 164_109),
    mpt('a100', '7B', 96, 2048, 2, 'none', 37_130),
    mpt('a100', '7B', 256, 4096, 2, 'full', 29_472),
]


class StoredProgram(NamedTuple):
    """A compiled program as stored in a file, for `tpu.compiled_step.estimate_step`."""

    text: str
    memory: Mapping[str, int]

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> SimpleNamespace:
        return SimpleNamespace(**self.memory)


class PlannedRow(NamedTuple):
    """The plan of a row: the policy, bytes per device, and the estimate if it fits."""

    remat: str
    needed: int
    available: int
    estimate: StepEstimate | None


def plan_row(row: PlannedStep, base: Config, programs: Path | None) -> list[PlannedRow]:
    """Plans a row with each of its policies, up to the first that fits."""
    topology, plans = open_topology(row.topology, row.slices), []
    for remat in row.remat:
        plans.append(_plan_policy(row, remat, base, topology, programs))
        if plans[-1].estimate is not None:
            break
    return plans


def _plan_policy(
    row: PlannedStep, remat: str, base: Config, topology: Topology, programs: Path | None
) -> PlannedRow:
    config = update_recipe(base, row.changes(remat))
    check(config)
    blueprint = build_blueprint(config, topology, lambda _: None)
    file = programs and programs / f'{row.name}-{remat}.json'
    stored = json.loads(file.read_text()) if file and file.exists() else None
    if stored is None:
        try:
            step = compile_step(blueprint, topology)
        except DoesNotFit as error:
            stored = {'needed': error.needed, 'there': error.available}
        else:
            stored = keep(step, topology)
            if file:
                with gzip.open(file.with_suffix('.hlo.gz'), 'wt') as archive:
                    archive.write(step.executable.as_text())
        if file:
            file.write_text(json.dumps(stored))
    elif 'memory' in stored:
        with gzip.open(file.with_suffix('.hlo.gz'), 'rt') as text:
            step = CompiledStep(
                blueprint, StoredProgram(text.read(), stored['memory']), 1, stored['seconds']
            )
    fits = stored['needed'] <= stored['there']
    estimate = estimate_step(step, topology) if fits else None
    return PlannedRow(remat, stored['needed'], stored['there'], estimate)


def keep(step: CompiledStep, topology: Topology) -> dict[str, Any]:
    """Returns the data of a compiled step that `StoredProgram` and the table need, without its
    text.
    """
    report = step.executable.memory_analysis()
    memory = {name: getattr(report, name) for name in dir(report) if name.endswith('_in_bytes')}
    needed, available = peak_bytes(step.executable, topology), device_memory(topology)
    return {'memory': memory, 'seconds': step.seconds, 'needed': needed, 'there': available}


def seconds_at(tflops: float, tokens: float, parameters: int, attention: float) -> float:
    """Returns the seconds of a step that a source reports in TFLOP/s of a chip.

    MaxText counts 6 P + A operations per token, forward and backward: `tokens * (6 P + A) / rate`,
    with all parameters P and A of causal attention (MaxText 76bd53b, MaxText/train.py).

    Args:
      tflops: 1e12 operations per second of one chip.
      tokens: of one chip in a step.
      parameters: as the source counts them.
      attention: operations of attention per token.
    """
    return tokens * (6 * parameters + attention) / (1e12 * tflops)


def measured_seconds(row: PlannedStep, estimate: StepEstimate, base: Config) -> float:
    if row.measured.seconds is not None:
        return row.measured.seconds
    attention = attention_flops(update_recipe(base, row.changes(row.remat[0])))
    tokens = estimate.tokens / estimate.chips
    return seconds_at(row.measured.tflops, tokens, estimate.parameters, attention)


def record(row: PlannedStep, tried: list[PlannedRow], base: Config) -> dict[str, Any]:
    """Returns a row of tpu/measured_steps.json."""
    *_, last = tried
    estimate = last.estimate
    times = dict.fromkeys(('bound', 'estimate', 'exposed', 'measured', 'mfu'))
    times['measured'] = row.measured.seconds
    if estimate is not None:
        seconds = measured_seconds(row, estimate, base)
        times = {
            'bound': estimate.bound_seconds,
            'estimate': estimate.step_seconds,
            'exposed': estimate.step_seconds_exposed,
            'measured': seconds,
            'mfu': estimate.mfu * estimate.step_seconds / seconds,
        }
    memory = {plan.remat: [plan.needed, plan.available] for plan in tried}
    return {'name': row.name, 'chip': row.chip, 'source': row.measured.source.url} | {
        'memory': memory,
        **times,
    }


COLUMNS = (
    'chips',
    'model',
    'rows',
    'mesh',
    'measured remat',
    'planned remat, GiB',
    'bound, s',
    'estimate, s',
    'none hidden, s',
    'measured, s',
    'mfu',
    'measured / bound',
    'measured / estimate',
    'source',
)


def cells(row: PlannedStep, stored_row: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table, from its record."""
    chips = f'{row.slices} x {row.topology}' if row.slices > 1 else row.topology
    mesh = ' '.join(f'{axis}={n}' for axis, n in row.mesh.items())
    microbatches = row.config_changes.get('train.microbatches', 1)
    suffix = f', {microbatches} microbatches:' if microbatches > 1 else ''
    memory = '; '.join(
        f'{name}{suffix} {format_gib(needed)} of {format_gib(available)}'
        for name, (needed, available) in stored_row['memory'].items()
    )
    source = row.measured.source
    head = [chips, row.model, f'{row.rows:,} of {row.seq_len:,}', mesh, row.theirs, memory]
    tail = [f'[{source.name}]({source.url})']
    seconds = stored_row['measured']
    if stored_row['estimate'] is None:
        measured = '-' if seconds is None else f'{seconds:.2f}'
        return [*head, 'does not fit', '-', '-', measured, '-', '-', '-', *tail]
    times = [f'{stored_row[name]:.2f}' for name in ('bound', 'estimate', 'exposed', 'measured')]
    ratios = [f'{seconds / stored_row[name]:.2f}' for name in ('bound', 'estimate')]
    return [*head, *times, f'{stored_row["mfu"]:.1%}', *ratios, *tail]


def lines(records: list[dict[str, Any]]) -> Iterator[str]:
    by_name = {row.name: row for row in ROWS}
    yield f'| {" | ".join(COLUMNS)} |'
    yield f'|{"---|" * len(COLUMNS)}'
    for stored_row in records:
        yield f'| {" | ".join(cells(by_name[stored_row["name"]], stored_row))} |'


CHIP_COLUMNS = (
    'chip',
    'steps',
    'measured / estimate, median',
    'least to most',
    'error without the step, median',
    'largest',
    'best measured step',
    'mfu',
    'mfu of its plan',
)


def chip_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the table of kinds of chips, from all rows of tpu/measured_steps.json.

    The best measured step of a chip has the highest utilisation.
    """
    by_name = {row.name: row for row in ROWS}
    yield f'| {" | ".join(CHIP_COLUMNS)} |'
    yield f'|{"---|" * len(CHIP_COLUMNS)}'
    for chip, ratios in load_ratios().items():
        errors = held_out_errors(ratios)
        error_cells = [f'{statistics.median(errors):.0%}', f'{max(errors):.0%}'] if errors else '--'
        fitting = (row for row in records if row['chip'] == chip and row['estimate'] is not None)
        best = max(fitting, key=lambda row: row['mfu'])
        step = by_name[best['name']]
        name = f'{step.model} on {step.topology}'
        shares = [best['mfu'], best['mfu'] * best['measured'] / best['estimate']]
        spread = [f'{statistics.median(ratios):.2f}', f'{min(ratios):.2f} to {max(ratios):.2f}']
        row = [chip, f'{len(ratios)}', *spread, *error_cells, name, *(f'{x:.1%}' for x in shares)]
        yield f'| {" | ".join(row)} |'
    errors = [error for ratios in load_ratios().values() for error in held_out_errors(ratios)]
    yield (
        f'{len(errors)} steps have others on their kind of chip. Predicted from those, they are '
        f'off by {statistics.median(errors):.0%} at the median and by {max(errors):.0%} at most.'
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rows', default='', help='names of rows or parts of them, with commas')
    parser.add_argument('--programs', type=Path, help='folder of compiled programs')
    parser.add_argument('--write', action='store_true', help=f'put the rows into {FILE.name}')
    parser.add_argument('--stored', action='store_true', help=f'print the tables of {FILE.name}')
    arguments = parser.parse_args()
    if arguments.stored:
        steps = json.loads(FILE.read_text())['steps']
        print('\n'.join([*lines(steps), '', *chip_lines(steps)]))
        return
    base, records = resolve(llama_8b.get_config()), {}
    names = {row.name for row in ROWS}
    for row in ROWS:
        parts = arguments.rows.split(',')
        if row.name in parts or any(part in row.name for part in parts if part not in names):
            records[row.name] = record(row, plan_row(row, base, arguments.programs), base)
    print('\n'.join(lines(list(records.values()))))
    if arguments.write:
        stored = {step['name']: step for step in json.loads(FILE.read_text())['steps']} | records
        steps = [stored[row.name] for row in ROWS if row.name in stored]
        FILE.write_text(json.dumps({'steps': steps}, indent=1) + '\n')


if __name__ == '__main__':
    main()
