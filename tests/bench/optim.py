"""Cost of each optimizer: the time of a step beside AdamW's, and the bytes of its state.

    uv run python -m tests.bench.optim [--rounds=1] [--shapes=medium,large]

Steps of the second and third shape of `tests.bench.step`, or of the model of the study of
optimizers (`--shapes=study --rounds=5`), with each optimizer for the hidden matrices beside AdamW
for the rest; compiled in one process and run in turn. Work that an optimizer does only every so
many steps is in the mean if it falls into these steps, and not in the median. Optimizers for small
models and those that need the reference kernel are left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from lm.launch.before_jax import has_accelerator
from tests.bench.step import KEEPING, SHAPES, evenkeel_step

STEPS, WARMUP_STEPS = 4, 2
STUDY = (64, 4, 4, 256, 128, 512, 8)


def state_bytes(state) -> tuple[int, int]:
    """Returns (bytes of the optimizer's state, the number of parameters)."""
    import jax

    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    return n_bytes, sum(leaf.size for leaf in jax.tree.leaves(state.params))


def changes(row: str, name: str) -> dict:
    seldom = row == 'shampoo' and name == 'study'  # as the study has it
    extra = {'optim.shampoo_every': 10} if seldom else {}
    return {'optim.name': row, 'model.scan_layers': True, **extra}


def measure(name: str, rounds: int) -> None:
    import jax

    from modules.optim import OPTIMIZERS

    steps = {
        row: evenkeel_step((SHAPES | {'study': STUDY})[name], changes(row, name))
        for row, part in OPTIMIZERS.items()
        if part.needs.max_parameters is None and part.needs.forward_mode != 'logits'
    }
    states = {row: state for row, (state, _, _) in steps.items()}
    milliseconds = {row: [] for row in steps}
    for _ in range(WARMUP_STEPS + STEPS * rounds):
        for row, (_, step, _) in steps.items():
            start = time.perf_counter()
            states[row], metrics = step(states[row])
            jax.block_until_ready((states[row], metrics))
            milliseconds[row].append(1e3 * (time.perf_counter() - start))
    print(
        f'\n| {name} | step ms, median | mean | against adamw, medians | state bytes a parameter |'
    )
    print('|---|---|---|---|---|')
    measured = {row: ms[WARMUP_STEPS:] for row, ms in milliseconds.items()}
    for row, ms in measured.items():
        ratios = [a / b for a, b in zip(ms, measured['adamw'], strict=True)]
        n_bytes, parameters = state_bytes(states[row])
        print(
            f'| `{row}` | {statistics.median(ms):.1f} | {statistics.mean(ms):.1f} | '
            f'{statistics.median(ratios):.2f} | '
            f'{n_bytes / parameters:.2f} |',
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--shapes', default='medium,large')
    flags = parser.parse_args()
    for name in flags.shapes.split(','):
        code = f'from tests.bench import optim; optim.measure({name!r}, {flags.rounds})'
        subprocess.run([sys.executable, '-c', code], env=os.environ | KEEPING, check=True)


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
