"""The tables of tpu/PLANS.md, by the TPU compiler (extra `tpu`): minutes each.

    uv run python -m tests.bench.pods --table=models [--only=llama_8b]
    uv run python -m tests.bench.pods --table=scaling

Every row is a command, `python -m tpu.plan --config=configs/MODEL.py --topology=... FLAGS`, with
the given number of rows of text per chip.
"""

from tpu.environment import prepare_environment

if __name__ == '__main__':
    prepare_environment()

import argparse
import importlib

from lm.config.fields import Config
from lm.config.resolve import resolve, update_recipe
from tpu.chips import Topology, open_topology
from tpu.trials import Trial, run_trial

GIB = 2**30
# (model, topology, slices, rows per chip, the mesh by hand and other changes)
MODELS = [
    ('llama_124m', 'v5e:4x4', 1, 4, {}),
    ('llama_124m', 'v5p:4x4x4', 1, 4, {}),
    ('llama_124m', 'v6e:16x16', 1, 4, {}),
    ('llama_1b', 'v5e:4x4', 1, 2, {'mesh.fsdp': 4}),
    ('llama_1b', 'v5p:4x4x4', 1, 2, {'mesh.fsdp': 4}),
    ('llama_1b', 'v6e:16x16', 1, 2, {'mesh.fsdp': 16}),
    ('llama_8b', 'v5e:4x4', 1, 1, {'mesh.fsdp': 16}),
    ('llama_8b', 'v5p:4x4x4', 1, 2, {'mesh.fsdp': 16}),
    ('llama_8b', 'v6e:16x16', 1, 2, {'mesh.fsdp': 16}),
    ('llama_8b', 'v6e:16x16', 2, 2, {'mesh.fsdp': 16}),
]
SCALING = [
    ('llama_8b', 'v6e:4x4', 1, 2, {'mesh.fsdp': 8}),
    ('llama_8b', 'v6e:8x8', 1, 2, {'mesh.fsdp': 8}),
    ('llama_8b', 'v6e:16x16', 1, 2, {'mesh.fsdp': 16}),
    ('llama_8b', 'v6e:16x16', 4, 2, {'mesh.fsdp': 16}),
    ('llama_8b', 'v6e:16x16', 16, 2, {'mesh.fsdp': 16}),
]
TABLES = {'models': MODELS, 'scaling': SCALING}
COLUMNS = (
    'model',
    'topology',
    'rows',
    'mesh',
    'memory, GiB',
    'matmuls, ms',
    'operations, ms',
    'communication, ms',
    'waits, ms',
    'step, ms',
    'all hidden, ms',
    'none hidden, ms',
    'bound, ms',
    'mfu',
    'mfu in full',
    'mfu bound',
    'billion tokens per day',
    'compile time, s',
)


def plan_row(
    model: str, name: str, slices: int, rows: int, changes: dict
) -> tuple[Topology, Trial]:
    topology = open_topology(name, slices)
    config: Config = resolve(importlib.import_module(f'configs.{model}').get_config())
    changes = {'data.batch_size': rows * topology.chips, 'mesh.data': -1} | changes
    return topology, run_trial(update_recipe(config, changes), changes, topology)


def row(model: str, topology: Topology, trial: Trial) -> list[str]:
    head = [model, topology.label, f'{trial.changes["data.batch_size"]:,}']
    if trial.estimate is None:
        reason = (
            trial.refusal
            or f'does not fit: {trial.needed / GIB:.2f} of {trial.available / GIB:.2f}'
        )
        return [*head, trial.label, reason, *['-'] * (len(COLUMNS) - 5)]
    estimate = trial.estimate
    memory = f'{estimate.memory_needed / GIB:.2f} of {estimate.memory_there / GIB:.2f}'
    times = (
        estimate.compute_seconds,
        estimate.operation_seconds,
        estimate.link_seconds,
        estimate.waiting_seconds,
        estimate.step_seconds,
        estimate.step_seconds_hidden,
        estimate.step_seconds_exposed,
        estimate.bound_seconds,
    )
    shares = [f'{share:.1%}' for share in (estimate.mfu, estimate.mfu_in_full, estimate.mfu_bound)]
    tail = [*shares, f'{estimate.tokens_a_day / 1e9:,.1f}', f'{estimate.compile_seconds:.0f}']
    return [*head, estimate.mesh, memory, *(f'{1e3 * sec:,.0f}' for sec in times), *tail]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--table', choices=TABLES, required=True)
    parser.add_argument('--only', default='', help='a model')
    arguments = parser.parse_args()
    print(f'| {" | ".join(COLUMNS)} |\n|{"---|" * len(COLUMNS)}', flush=True)
    for model, *settings in TABLES[arguments.table]:
        if arguments.only in model:
            print(f'| {" | ".join(row(model, *plan_row(model, *settings)))} |', flush=True)


if __name__ == '__main__':
    main()
