"""Accuracy of a plan: the step that `tpu.plan --topology=here` predicts, beside the measured step.

    uv run python -m tests.bench.plan

For each config, in one process: the step is compiled and read as the planner reads it, with rates
of products and of memory measured right before, and then run on random tokens. `ratio` is measured
over predicted: a roofline is a lower bound, so it should be at least 1.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()

import statistics
import time

import jax
import numpy as np

from configs import default
from lm.config.resolve import resolve, update_recipe
from lm.devices.run_axis import SINGLE
from lm.devices.shardings import jit_init
from lm.run.program import Program
from lm.training.state import make_hyper
from tpu.chips import open_topology
from tpu.compiled_step import CompiledStep, build_blueprint, compile_step, estimate_step
from tpu.environment import HERE

STEPS, WARMUP_STEPS = 10, 3
DOCUMENT = 1024  # tokens, on average
WIDE = {'model.d_model': 512, 'model.d_ff': 2048, 'model.n_heads': 8, 'model.n_kv_heads': 8}
LLAMA = {
    'model.n_kv_heads': 2,
    'model.activation': 'swiglu',
    'model.d_ff': 704,
    'model.n_layers': 6,
    'model.scan_layers': True,
    'model.remat': 'full',
    'data.seq_len': 512,
}
CONFIGS = {
    'default': {},
    'width 512, 6 layers': WIDE | {'model.n_layers': 6, 'data.batch_size': 4},
    'llama-like, 6 layers in a loop, remat': LLAMA,
}


def measure_step(
    step: CompiledStep, run_axis: str = SINGLE, steps: int = STEPS
) -> tuple[float, dict]:
    """Returns (median seconds of a step on random documents; its last metrics)."""
    blueprint, runs, program = step.blueprint, range(step.runs), Program(step.blueprint, run_axis)
    recipe, random = blueprint.recipe, np.random.default_rng(0)
    shape = recipe.data.batch_size, recipe.data.seq_len + 1
    tokens = random.integers(0, blueprint.vocab_size - 2, shape, np.int32)
    segments = np.cumsum(random.random(shape) < 1 / DOCUMENT, 1, np.int32) + 1
    batch = program.stack_batches([{'tokens': tokens, 'segments': segments}] * step.runs)
    init, states = jit_init(blueprint.learner, blueprint.mesh), program.make_buffer(step.runs)
    for run in runs:
        state = init(jax.random.key(run), make_hyper(recipe))
        states = program.put(states, state, run)
    hypers, active = program.stack_hypers([recipe for _ in runs]), np.ones(step.runs, bool)
    seconds = []
    for _ in range(WARMUP_STEPS + steps):
        start = time.perf_counter()
        states, metrics = step.executable(active, states, batch, hypers)
        jax.block_until_ready((states, metrics))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARMUP_STEPS:]), metrics


def main() -> None:
    topology = open_topology(HERE)
    print('| config | parameters | predicted, ms | bound by | measured, ms | ratio |')
    print('|---|---|---|---|---|---|')
    for name, changes in CONFIGS.items():
        config = update_recipe(resolve(default.get_config()), changes)
        blueprint = build_blueprint(config, topology, print)
        step = compile_step(blueprint, topology)
        estimate = estimate_step(step, topology)
        seconds, _ = measure_step(step)
        print(
            f'| {name} | {estimate.parameters:,} | {1e3 * estimate.step_seconds:,.1f} '
            f'| {estimate.bound_by} | {1e3 * seconds:,.1f} '
            f'| {seconds / estimate.step_seconds:.2f} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
