"""Speed of a step with long rows, beside PyTorch's, and the cost of each option.

    uv run python -m tests.bench.attention [--rounds=3] [--torch=PYTHON]

Long rows: 4,096 tokens a step in rows of 1,024, 2,048 and 4,096, width 256, four layers. Each case
runs in its own processes, in turn, with equal malloc settings; `--torch` names an interpreter with
PyTorch (tests/bench/torch_decoder.py). Options: steps of the second shape of `tests.bench.step`,
all compiled in one process and run in turn. `--parts` does the same for
streams, values of other layers, experts and several next tokens, `--few_bits` for products of few
bits. `--recurrences` compares kinds of attention in rows of 256 and 1,024 tokens, at equal widths
and so at different numbers of parameters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lm.launch.before_jax import has_accelerator
from tests.bench.step import KEEPING, SHAPES, evenkeel_step

LONG = {length: (256, 4, 4, 1024, length, 1024, 4096 // length) for length in (1024, 2048, 4096)}
OPTIONS = {
    'nothing': {},
    'reparam=sigma': {'model.reparam': 'sigma'},
    'qk_norm=rmsnorm': {'model.qk_norm': 'rmsnorm'},
    'gate=headwise': {'attention.gate': 'headwise'},
    'gate=elementwise': {'attention.gate': 'elementwise'},
    'softcap=50': {'attention.softcap': 50.0},
    'sinks=learned': {'attention.sinks': 'learned'},
    'affine_scaled': {'attention.affine_scaled': True},
    'window=64': {'attention.window': 64},
    'attention=l2': {'model.attention': 'l2'},
    'attention=linear': {'model.attention': 'linear'},
    'attention=nala': {'model.attention': 'nala'},
}
PARTS = {
    'nothing': {},
    'stream=x0_scalars': {'model.stream': 'x0_scalars'},
    'stream=dense_former': {'model.stream': 'dense_former'},
    'stream=attention_residual': {'model.stream': 'attention_residual'},
    'stream=attention_residual, 8 sums': {
        'model.stream': 'attention_residual',
        'model.depth_sums': 8,
    },
    'stream=hyper_connections': {'model.stream': 'hyper_connections'},
    'stream=mhc': {'model.stream': 'mhc'},
    'value_residual=learned': {'attention.value_residual': 'learned'},
    'value_embeddings': {'attention.value_embeddings': True},
    'two next tokens': {'loss.token_weights': '1 0.5'},
    'four experts of full width, two per token': {'model.mlp': 'moe'},
}
RECIPES = (
    'fp8_tensorwise',
    'fp8_rowwise',
    'fp8_rowwise_gw_hp',
    'deepseek_fp8',
    'mxfp8',
    'nvfp4',
    'int8',
    'int6',
    'bitnet',
)
FEW_BITS = {'nothing': {}, **{name: {'kernels.matmul': name} for name in RECIPES}}
KINDS = ('softmax', 'linear', 'gla', 'gated_delta')
STEPS, WARMUP_STEPS = 8, 3


def measure(length: int) -> dict:
    """Runs Evenkeel's steps in this process."""
    import jax

    from lm.record.machine import peak_memory_bytes

    state, step, _ = evenkeel_step(LONG[length])
    milliseconds = []
    for _ in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        state, metrics = step(state)
        jax.block_until_ready((state, metrics))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return {'ms': milliseconds, 'peak_gb': peak_memory_bytes() / 1e9}


def in_process(command: list[str]) -> tuple[float, float]:
    """Returns (milliseconds of a step, peak GB)."""
    child = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'} | KEEPING
    process = subprocess.run(command, env=child, check=True, capture_output=True, text=True)
    report = json.loads(process.stdout.splitlines()[-1])
    return statistics.median(report['ms'][WARMUP_STEPS:]), report['peak_gb']


def long_rows(rounds: int, torch: str | None) -> None:
    print('| row | case | step ms | tokens/s | peak GB |\n|---|---|---|---|---|')
    ratios = {}
    for length, shape in LONG.items():
        commands = {
            'evenkeel': [sys.executable, '-m', 'tests.bench.attention', f'--measure={length}']
        }
        if torch:
            script = str(Path(__file__).with_name('torch_decoder.py'))
            commands['torch'] = [torch, script, *map(str, shape), str(WARMUP_STEPS + STEPS)]
        runs = {case: [] for case in commands}
        for _ in range(rounds):
            for case, command in commands.items():
                runs[case].append(in_process(command))
        for case, samples in runs.items():
            ms, peak = (statistics.median(column) for column in zip(*samples, strict=True))
            print(f'| {length} | {case} | {ms:.0f} | {4096e3 / ms:,.0f} | {peak:.2f} |', flush=True)
        if torch:
            ratios_by_round = [
                b[0] / a[0] for a, b in zip(runs['evenkeel'], runs['torch'], strict=True)
            ]
            span = f'{min(ratios_by_round):.2f} to {max(ratios_by_round):.2f}'
            ratios[length] = f'{statistics.median(ratios_by_round):.2f} times PyTorch ({span})'
    print("\nEvenkeel's tokens/s:", *(f'- {n}: {text}' for n, text in ratios.items()), sep='\n')


def time_options(rounds: int, options: dict[str, dict] = OPTIONS) -> None:
    import jax

    steps = {name: evenkeel_step(SHAPES['medium'], changes) for name, changes in options.items()}
    states = {name: state for name, (state, _, _) in steps.items()}
    milliseconds = {name: [] for name in steps}
    for _ in range(WARMUP_STEPS + STEPS * rounds):
        for name, (_, step, _) in steps.items():
            start = time.perf_counter()
            states[name], metrics = step(states[name])
            jax.block_until_ready((states[name], metrics))
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    measured = {name: ms[WARMUP_STEPS:] for name, ms in milliseconds.items()}
    print('\n| option | step ms | against nothing |\n|---|---|---|')
    for name, ms in measured.items():
        ratios = [a / b for a, b in zip(ms, measured['nothing'], strict=True)]
        print(f'| {name} | {statistics.median(ms):.0f} | {statistics.median(ratios):.3f} |')


def recurrences(rounds: int) -> None:
    """Times steps of 2,048 tokens with each kind of attention, in turn: width 128, four layers.

    The recurrences have neither positions nor norms of queries and keys, as published.
    """
    import jax

    print('| row | attention | parameters | step ms | tokens/s | against softmax |')
    print('|---|---|---|---|---|---|')
    for length in (256, 1024):
        shape = (128, 2, 4, 512, length, 1024, 2048 // length)
        published = {'model.position': 'none', 'model.qk_norm': 'none'}
        changes = {
            kind: {'model.attention': kind} | (published if kind in KINDS[2:] else {})
            for kind in KINDS
        }
        steps = {kind: evenkeel_step(shape, changes[kind]) for kind in KINDS}
        states = {kind: state for kind, (state, _, _) in steps.items()}
        sizes = {
            kind: sum(leaf.size for leaf in jax.tree.leaves(state.params))
            for kind, state in states.items()
        }
        milliseconds = {kind: [] for kind in KINDS}
        for _ in range(WARMUP_STEPS + STEPS * rounds):
            for kind, (_, step, _) in steps.items():
                start = time.perf_counter()
                states[kind], metrics = step(states[kind])
                jax.block_until_ready((states[kind], metrics))
                milliseconds[kind].append(1e3 * (time.perf_counter() - start))
        measured = {kind: ms[WARMUP_STEPS:] for kind, ms in milliseconds.items()}
        for kind, ms in measured.items():
            ratio = statistics.median(a / b for a, b in zip(ms, measured['softmax'], strict=True))
            step_ms = statistics.median(ms)
            columns = f'{sizes[kind]:,} | {step_ms:.0f} | {2048e3 / step_ms:,.0f} | {ratio:.2f}'
            print(f'| {length} | {kind} | {columns} |', flush=True)


def compile_attention(rows: int, length: int, name: str):
    """Returns (program, arrays): attention forward and backward, with 4 heads of 64 features."""
    import jax

    from modules.kernels.attention import Scores, attend

    keys = jax.random.split(jax.random.key(0), 4)
    arrays = tuple(jax.random.normal(key, (rows, 4, length, 64)) for key in keys)

    def run(q, k, v, grad):
        y, pull = jax.vjp(lambda *a: attend(name, *a, Scores()), q, k, v)
        return y, pull(grad)

    return jax.jit(run).lower(*arrays).compile(), arrays


def fastest_ms(program, arrays) -> float:
    import jax

    milliseconds = []
    for _ in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return min(milliseconds[WARMUP_STEPS:])


def kernel() -> None:
    """Times attention only, forward and backward, with each kernel that runs on a CPU."""
    from modules.kernels.attention import ATTENTION_KERNELS

    print('| rows x heads | tokens | kernel | ms | temporaries, MB |\n|---|---|---|---|---|')
    for rows, length in ((16, 256), (4, 1024), (2, 2048), (1, 4096)):
        for name in sorted(n for n, row in ATTENTION_KERNELS.items() if not row.platforms):
            program, arrays = compile_attention(rows, length, name)
            temporary_mb = program.memory_analysis().temp_size_in_bytes / 1e6
            columns = f'{name} | {fastest_ms(program, arrays):.1f} | {temporary_mb:.0f}'
            print(f'| {rows} x 4 | {length} | {columns} |', flush=True)


def tiles() -> None:
    """Times attention only, forward and backward, by the side of the tiles of `blocked`."""
    from modules.kernels.attention import blocked

    print('| rows x heads, tokens | 128 | 256 | 512 | 1,024 |\n|---|---|---|---|---|')
    for rows, length in ((16, 256), (8, 512), (4, 1024), (2, 2048), (1, 4096)):
        columns = []
        for side in (128, 256, 512, 1024):
            if side > length:
                columns.append('')
                continue
            blocked.MIN_TILE = blocked.MAX_TILE = side
            columns.append(f'{fastest_ms(*compile_attention(rows, length, "blocked")):.1f}')
        print(f'| {rows} x 4, {length:,} | {" | ".join(columns)} |', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--torch', help='an interpreter that has PyTorch')
    parser.add_argument('--measure', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--kernel', action='store_true', help='attention alone')
    parser.add_argument('--tiles', action='store_true', help='attention alone, by tiles')
    parser.add_argument('--recurrences', action='store_true', help='kinds of attention')
    parser.add_argument('--parts', action='store_true', help='streams, values, experts and losses')
    parser.add_argument('--few_bits', action='store_true', help='simulated products of few bits')
    flags = parser.parse_args()
    if flags.few_bits:
        in_kept_memory(f'time_options({flags.rounds}, attention.FEW_BITS)')
        return
    if flags.parts:
        in_kept_memory(f'time_options({flags.rounds}, attention.PARTS)')
        return
    if flags.recurrences:
        recurrences(flags.rounds)
        return
    if flags.kernel or flags.tiles:
        kernel() if flags.kernel else tiles()
        return
    if flags.measure:
        print(json.dumps(measure(flags.measure)))
        return
    long_rows(flags.rounds, flags.torch)
    in_kept_memory(f'time_options({flags.rounds})')


def in_kept_memory(call: str) -> None:
    """Calls a function of this module in a process with the malloc settings of `train.py`."""
    program = [sys.executable, '-c', f'from tests.bench import attention; attention.{call}']
    subprocess.run(program, env=os.environ | KEEPING, check=True)


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
