"""Sixteen runs as one program, as sixteen processes, and as a loop in one process.

    uv run python -m tests.bench.sweep [--rounds=1] [--steps=200]

8 learning rates x 2 seeds of a model of width 128 (SHAPE), on real text, compile time and all else
included: the time from a command to its end. Each way is the project's own command, or its own
train() called in a loop. The text is prepared beforehand. Medians over rounds are printed, then
where the time of the sweep goes, and the tokens a second of the sweep beside those of a single
run, with the malloc settings that train.py starts itself with (lm/launch/before_jax.py) and
without them.
"""

import sys

from lm.launch.before_jax import prepare_process

if __name__ == '__main__' and any(argument.startswith('--loop') for argument in sys.argv):
    prepare_process()  # as train.py does

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from configs import default
from lm.config.resolve import resolve
from lm.study.plan.cells import expand_sweep

RATES = tuple(10 ** (-4 + i / 3) for i in range(8))
SEEDS = (0, 1)
SHAPE = {
    'model.d_model': 128,
    'model.n_heads': 4,
    'model.n_kv_heads': 4,
    'model.n_layers': 4,
    'model.d_ff': 512,
    'data.seq_len': 256,
    'data.tokenizer': 'bpe:1024',
    'data.batch_size': 8,
    'train.eval_every': 0,
    'train.checkpoint_every': 0,
}
SWEEP = {'optim.lr': RATES, 'train.seed': SEEDS}


def flags(settings: dict) -> list[str]:
    return [f'--config.{path}={value}' for path, value in settings.items()]


def run(workdir: Path, settings: dict, env: dict | None = None) -> float:
    """Seconds that the training command takes."""
    command = [sys.executable, 'train.py', '--config=configs/default.py', f'--workdir={workdir}']
    start = time.perf_counter()
    subprocess.run(
        command + flags(settings),
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | (env or {}),
    )
    return time.perf_counter() - start


def one_program(folder: Path, settings: dict) -> float:
    return run(folder, settings | {'sweep': repr(SWEEP)})


def processes(folder: Path, settings: dict) -> float:
    pairs = [(lr, seed) for lr in RATES for seed in SEEDS]
    return sum(
        run(folder / str(i), settings | {'optim.lr': lr, 'train.seed': seed})
        for i, (lr, seed) in enumerate(pairs)
    )


def loop(folder: Path, settings: dict) -> float:
    """This file again, in a process of its own, as train.py would start it."""
    command = [sys.executable, '-m', 'tests.bench.sweep', f'--loop={folder}']
    start = time.perf_counter()
    subprocess.run(
        [*command, f'--steps={settings["train.steps"]}'], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def loop_here(folder: Path, settings: dict) -> None:
    from train import train

    base = default.get_config()
    base.update_from_flattened_dict(settings)
    tree = base.to_dict()
    tree.pop('sweep')
    for cell in expand_sweep(tree, SWEEP):
        train(cell.recipe, folder / cell.name)


def summaries(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob('*/summary.json'))]


def report(seconds: dict[str, list[float]], folder: Path, settings: dict) -> None:
    print(f'\n{len(RATES) * len(SEEDS)} runs of {settings["train.steps"]} steps\n')
    print('| way | seconds, median | of each round | against one program |')
    print('|---|---|---|---|')
    base = statistics.median(seconds['one program'])
    for way, samples in seconds.items():
        median = statistics.median(samples)
        rounds = ', '.join(f'{t:.0f}' for t in samples)
        print(f'| {way} | {median:.0f} | {rounds} | {median / base:.2f} |')
    together = summaries(folder / 'one program')
    training = statistics.median(s['tokens'] / s['tokens_per_sec_mean'] for s in together)
    compile_sec = together[0]['compile_sec']
    wall = statistics.median(s['wall_sec'] for s in together)
    print(
        f'\nOf the last sweep: {training:.0f} s training steps, {compile_sec:.1f} s compiling the'
    )
    print(
        f'step, {wall - training:.1f} s evaluating, saving and opening runs, the rest starting up.'
    )
    total = sum(s['tokens_per_sec_mean'] for s in together)
    single = statistics.median(s['tokens_per_sec_mean'] for s in summaries(folder / 'processes'))
    plain = folder / 'plain' / 'run'
    run(plain, settings, {'GLIBC_TUNABLES': ''})
    unprepared = json.loads((plain / 'summary.json').read_text())['tokens_per_sec_mean']
    print(f'tokens/s: sweep {total:,.0f}, single run {single:,.0f} (x {total / single:.2f}),')
    print(f'single run without malloc settings {unprepared:,.0f} (x {total / unprepared:.2f})')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--loop', type=Path)
    arguments = parser.parse_args()
    settings = SHAPE | {'train.steps': arguments.steps}
    if arguments.loop:
        loop_here(arguments.loop, settings)
        return
    ways = {'one program': one_program, 'loop': loop, 'processes': processes}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        run(Path(name) / 'prepare', settings | {'train.steps': 1})
        for round_number in range(arguments.rounds):
            folder = Path(name) / str(round_number)
            for way, measure in ways.items():
                seconds[way].append(measure(folder / way, settings))
                print(f'{way}: {seconds[way][-1]:.1f} s', flush=True)
        report(seconds, folder, settings)


if __name__ == '__main__':
    resolve(default.get_config())  # a mistake here would cost minutes
    main()
