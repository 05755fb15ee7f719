"""Speed of a training step, beside a plain Linen decoder's, on this machine and in one run.

    uv run python -m tests.bench.step [--rounds=3]
    uv run python -m tests.bench.step --field=loss.chunk=0,256,512   # Evenkeel only, by a field

For each shape, several rounds, each in separate processes so that memory is separate too:
Evenkeel's step as train.py runs it; the plain decoder as anybody would run it; and the plain
decoder with the malloc settings of train.py (lm/launch/before_jax.py). `share` is model FLOP/s
(lm/training/flops.py) over the float32 2048^3 product, measured in the same process right before
and after. Medians over rounds are printed. Last, the program itself: how long it waits for data.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm.launch.before_jax import TUNABLES, has_accelerator

SHAPES = {
    'small': (128, 4, 4, 512, 256, 1024, 16),
    'medium': (256, 4, 4, 1024, 256, 1024, 16),
    'large': (512, 8, 6, 2048, 512, 8192, 4),
}
KEEPING = {'GLIBC_TUNABLES': ':'.join(TUNABLES)}
CASES = {
    'evenkeel': ('evenkeel', KEEPING),
    'plain': ('plain', {}),
    'plain, memory kept': ('plain', KEEPING),
}
STEPS, WARMUP_STEPS = 8, 3


def evenkeel_step(shape, changes=None):
    """Returns (state, step(state) -> state, seconds of compilation) of the framework's own step."""
    import jax
    import numpy as np

    from lm.devices.mesh import make_mesh, put_batch
    from lm.devices.shardings import abstract_state, jit_init
    from lm.training.state import make_hyper
    from tests.helpers import jit_train_step

    learner, vocab = bench_learner(shape, changes), shape[5]
    hyper, mesh = make_hyper(learner.recipe), make_mesh(learner.recipe.mesh)
    tokens = np.random.default_rng(0).integers(0, vocab, (shape[6], shape[4] + 1), np.int32)
    batch = put_batch(mesh, {'tokens': tokens, 'segments': np.ones_like(tokens)})
    state = jit_init(learner, mesh)(jax.random.key(0), hyper)
    start = time.perf_counter()
    step = jit_train_step(learner, mesh)
    step = step.lower(abstract_state(learner, mesh), batch, hyper).compile()
    return state, lambda state: step(state, batch, hyper), time.perf_counter() - start


def plain_step(shape, dtype=None):
    import jax

    from tests.bench.plain_decoder import PlainDecoder, make_step

    d_model, n_heads, n_layers, d_ff, length, vocab, batch = shape
    init, step = make_step(PlainDecoder(d_model, n_heads, n_layers, d_ff, vocab, dtype), lr=1e-3)
    tokens = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, vocab)
    state = jax.jit(init)(jax.random.key(0), tokens)
    start = time.perf_counter()
    step = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
    return state, lambda state: step(state, tokens), time.perf_counter() - start


def bench_learner(shape, changes=None):
    import jax

    from configs import default
    from lm.config.resolve import resolve
    from lm.training.state import build_learner

    config = default.get_config()
    names = ('model.d_model', 'model.n_heads', 'model.n_layers', 'model.d_ff', 'data.seq_len')
    settings = dict(zip(names, shape[:5], strict=True))
    settings |= {
        'model.n_kv_heads': shape[1],
        'model.norm': 'layernorm',
        'model.qk_norm': 'none',
        'model.tie_embeddings': False,
        'model.position': 'learned',
        'model.activation': 'gelu',
        'data.batch_size': shape[6],
    }
    config.update_from_flattened_dict(settings | (changes or {}))
    return build_learner(resolve(config), shape[5], -1, jax.devices()[0].platform)


def measure(case: str, name: str, changes: dict | None = None) -> dict[str, float]:
    """Measures a case in this process."""
    import jax

    from lm.record.machine import peak_memory_bytes
    from lm.training.flops import flops_per_token
    from lm.training.peaks import GEMM_SIZES, measure_gemm_flops

    shape = SHAPES[name]
    built = evenkeel_step(shape, changes) if case == 'evenkeel' else plain_step(shape)
    state, step, compile_sec = built
    gemm = [measure_gemm_flops(GEMM_SIZES['cpu'], 'float32')]
    seconds = []
    for _ in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        state, metrics = step(state)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    gemm.append(measure_gemm_flops(GEMM_SIZES['cpu'], 'float32'))
    tokens = shape[4] * shape[6]
    sec = statistics.median(seconds[WARMUP_STEPS:])
    rate = tokens / sec
    return {
        'step_ms': 1e3 * sec,
        'tokens_per_sec': rate,
        'share': rate * flops_per_token(bench_learner(shape)) / statistics.mean(gemm),
        'gemm_gflops': statistics.mean(gemm) / 1e9,
        'compile_sec': compile_sec,
        'peak_gb': peak_memory_bytes() / 1e9,
    }


def in_process(case: str, name: str, changes: dict | None = None) -> dict[str, float]:
    """Runs `measure` in its own process."""
    kind, environment = CASES[case]
    child = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'} | environment
    command = [sys.executable, '-m', 'tests.bench.step', f'--measure={kind},{name}']
    command += [f'--changes={json.dumps(changes or {})}']
    process = subprocess.run(command, env=child, check=True, capture_output=True, text=True)
    return json.loads(process.stdout.splitlines()[-1])


def compare(rounds: int) -> None:
    header = ('shape', 'case', 'step ms', 'tokens/s', 'share', 'GEMM GF/s', 'compile s', 'peak GB')
    print('| ' + ' | '.join(header) + ' |\n' + '|---' * len(header) + '|')
    faster = []
    for name, shape in SHAPES.items():
        measured = {case: [] for case in CASES}
        for _ in range(rounds):
            for case in CASES:
                measured[case].append(in_process(case, name))
        for case, runs in measured.items():
            median = {k: statistics.median(run[k] for run in runs) for k in runs[0]}
            cells = (
                f'{median["step_ms"]:.0f}',
                f'{median["tokens_per_sec"]:,.0f}',
                f'{median["share"]:.1%}',
                f'{median["gemm_gflops"]:.0f}',
                f'{median["compile_sec"]:.1f}',
                f'{median["peak_gb"]:.2f}',
            )
            print(f'| {shape} | {case} | ' + ' | '.join(cells) + ' |', flush=True)
        for peer in ('plain', 'plain, memory kept'):
            ratios = [
                a['tokens_per_sec'] / b['tokens_per_sec']
                for a, b in zip(measured['evenkeel'], measured[peer], strict=True)
            ]
            span = f'{min(ratios):.2f} to {max(ratios):.2f}'
            faster.append(f'- {shape}: {statistics.median(ratios):.2f} times {peer} ({span})')
    print("\nEvenkeel's tokens/s:", *faster, sep='\n')


def by_field(field: str, values: list, rounds: int) -> None:
    """Compares Evenkeel's step over the values of a field, in turn, with the first value."""
    print(f'| shape | {field} | step ms | against the first | peak GB |')
    print('|---|---|---|---|---|')
    for name, shape in SHAPES.items():
        runs = [[in_process('evenkeel', name, {field: v}) for v in values] for _ in range(rounds)]
        for i, value in enumerate(values):
            ms = statistics.median(run[i]['step_ms'] for run in runs)
            ratios = [run[i]['step_ms'] / run[0]['step_ms'] for run in runs]
            span = f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
            peak = statistics.median(run[i]['peak_gb'] for run in runs)
            print(f'| {shape} | {value} | {ms:.0f} | {span} | {peak:.2f} |', flush=True)


def program() -> None:
    """Start to first step of the default run, and its waiting for data, over 40 steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, 'train.py', '--config=configs/default.py', f'--workdir={folder}']
        command += ['--config.train.steps=40', '--config.optim.warmup_steps=10']
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if re.match(r'step +1 ', line):
                    print(f'\nfirst logged step after {time.perf_counter() - start:.1f} s')
        summary = json.loads((Path(folder) / 'summary.json').read_text())
        print(f'waiting for data: {summary["data_wait_fraction"]:.2%} of training time')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--field', help='PATH=VALUE,VALUE: values are Python literals')
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    parser.add_argument('--changes', default='{}', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure.split(','), json.loads(options.changes))))
        return
    if options.field:
        field, _, values = options.field.partition('=')
        by_field(field, [ast.literal_eval(value) for value in values.split(',')], options.rounds)
        return
    compare(options.rounds)
    program()


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
