"""Validation loss over seconds, beside nanoGPT's own program on its recipe for CPUs.

    uv run python -m tests.bench.nanogpt --checkout=NANOGPT --python=PYTHON [--seeds=3] [--out=DIR]

NANOGPT is a clone of https://github.com/karpathy/nanoGPT and PYTHON an interpreter with PyTorch
and NumPy. Three programs train on the same bytes, the sources of Python's standard library, for
2,000 steps of 12 rows of 64 bytes, with 4 layers of width 128:

    nanoGPT            its train.py with the flags that its README gives for a CPU
    same recipe        train.py of this project with nanoGPT's model, initialization and optimizer
    default recipe     train.py of this project with the size and the text changed, nothing else

Seconds run from a command to its end: start, compilation, evaluations and checkpoints included.
Every program evaluates each 250 steps. The curve of nanoGPT has the values that it prints, means
over 20 random batches; the final losses of all three cover the validation text once, in rows of
64 bytes. With --out, also writes the runs (nanogpt.json) and the picture of the README
(nanogpt.svg).
"""

import argparse
import dataclasses
import json
import pickle
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import altair as alt
import numpy as np

from eval.charts import save_chart

TEXT_BYTES = 1_115_394  # the size of tiny Shakespeare
VALIDATION_SHARE = 0.1
STEPS, EVAL_EVERY = 2000, 250
NANOGPT = 'nanoGPT'
NANOGPT_FLAGS = (
    'config/train_shakespeare_char.py',
    '--device=cpu',
    '--compile=False',
    '--eval_iters=20',
    '--log_interval=1',
    '--block_size=64',
    '--batch_size=12',
    '--n_layer=4',
    '--n_head=4',
    '--n_embd=128',
    f'--max_iters={STEPS}',
    f'--lr_decay_iters={STEPS}',
    '--dropout=0.0',
    '--always_save_checkpoint=True',  # the final weights are scored
)
SIZE = {
    'model.d_model': 128,
    'model.n_heads': 4,
    'model.n_layers': 4,
    'model.d_ff': 512,
    'data.tokenizer': 'byte',
    'data.seq_len': 64,
    'data.batch_size': 12,
    'data.epochs': 2,
    'train.steps': STEPS,
    'train.eval_every': EVAL_EVERY,
}
# {program: (config, settings)}.
RECIPES = {
    'same recipe': ('configs/nanogpt.py', {}),
    'default recipe': ('configs/default.py', SIZE),
}
# nanoGPT seeds PyTorch with 1337 and has no flag for another seed.
RESEED = """
import runpy, sys, torch
seed, sys.argv = int(sys.argv[1]), ['train.py', *sys.argv[2:]]
torch.manual_seed = lambda _, set_seed=torch.manual_seed: set_seed(seed)
runpy.run_path('train.py', run_name='__main__')
"""
SCORE = """
import sys, numpy, torch
from model import GPT, GPTConfig
checkpoint = torch.load(sys.argv[1], map_location='cpu', weights_only=False)
model = GPT(GPTConfig(**checkpoint['model_args'])).eval()
model.load_state_dict(checkpoint['model'])
tokens = torch.from_numpy(numpy.fromfile(sys.argv[2], numpy.uint16).astype(numpy.int64))
length = checkpoint['model_args']['block_size']
rows = (len(tokens) - 1) // length
inputs, targets = (tokens[i : i + rows * length].view(rows, length) for i in (0, 1))
with torch.no_grad():
    sums = [model(x, y)[1].item() * len(x) for x, y in zip(inputs.split(64), targets.split(64))]
print('LOSS', sum(sums) / rows)
"""
NANOGPT_LOSS = re.compile(r'^step (\d+): .*val loss ([\d.]+)')
EVENKEEL_LOSS = re.compile(r'^step +([\d,]+) +validation loss ([\d.]+)')


@dataclasses.dataclass
class BenchRun:
    """One training run. seconds: from its start to its end; curve: (seconds, step, nats)."""

    program: str
    seed: int
    seconds: float
    loss: float
    curve: list[tuple[float, int, float]]


def write_texts(folder: Path, checkout: Path) -> tuple[Path, Path]:
    """Writes the texts for both programs. Returns those for training and validation."""
    modules = sorted(Path(sysconfig.get_path('stdlib')).glob('*.py'))
    random.Random(0).shuffle(modules)
    text = b''.join(path.read_bytes() for path in modules)[:TEXT_BYTES]
    if len(text) < TEXT_BYTES:
        raise SystemExit(f'needs {TEXT_BYTES:,} bytes of Python sources; got {len(text):,}')
    split = int(len(text) * (1 - VALIDATION_SHARE))
    token_folder = checkout / 'data' / 'evenkeel_bench'
    token_folder.mkdir(exist_ok=True)
    (token_folder / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 256}))
    paths = folder / 'train.txt', folder / 'val.txt'
    for path, part in zip(paths, (text[:split], text[split:]), strict=True):
        path.write_bytes(part)
        np.frombuffer(part, np.uint8).astype(np.uint16).tofile(token_folder / f'{path.stem}.bin')
    return paths


def run_timed(command: list[str], pattern: re.Pattern, cwd: Path | None = None):
    """Runs a command that prints evaluations.

    Args:
      command: the program and its flags.
      pattern: matches the line of an evaluation, with its step and loss as groups.
      cwd: the folder to run in.

    Returns:
      (seconds, curve): the wall time, and (seconds, step, loss) of each evaluation.
    """
    start, curve = time.perf_counter(), []
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if match := pattern.match(line):
                step = int(match[1].replace(',', ''))
                curve.append((time.perf_counter() - start, step, float(match[2])))
    if process.returncode:
        raise SystemExit(f'{" ".join(command)} failed:\n{"".join(lines[-20:])}')
    return time.perf_counter() - start, curve


def run_nanogpt(checkout: Path, python: str, seed: int, folder: Path) -> BenchRun:
    # -u: its lines are timed as they are printed
    command = [python, '-u', '-c', RESEED, str(1337 + seed), *NANOGPT_FLAGS]
    command += [f'--out_dir={folder}', '--dataset=evenkeel_bench']
    seconds, curve = run_timed(command, NANOGPT_LOSS, checkout)
    score = [python, '-c', SCORE, str(folder / 'ckpt.pt'), 'data/evenkeel_bench/val.bin']
    scored = subprocess.run(score, cwd=checkout, check=True, capture_output=True, text=True)
    loss = float(scored.stdout.split('LOSS')[1])
    return BenchRun(NANOGPT, seed, seconds, loss, curve)


def run_evenkeel(program: str, texts: tuple[Path, Path], seed: int, folder: Path) -> BenchRun:
    """Trains with this project.

    Args:
      program: a key of RECIPES.
      texts: the files for training and validation.
      seed: of the parameters and of the order of rows.
      folder: the workdir.
    """
    train_text, validation_text = texts
    config, size = RECIPES[program]
    settings = size | {'data.source': f'text:{train_text}', 'data.seed': seed, 'train.seed': seed}
    settings |= {'data.validation_source': f'text:{validation_text}'}
    flags = [f'--config.{path}={value}' for path, value in settings.items()]
    command = [sys.executable, 'train.py', f'--config={config}', *flags]
    seconds, curve = run_timed([*command, f'--workdir={folder}'], EVENKEEL_LOSS)
    loss = json.loads((folder / 'summary.json').read_text())['validation_ce']
    return BenchRun(program, seed, seconds, loss, curve)


def print_table(runs: list[BenchRun]) -> None:
    print('\n| program | validation loss, nats per byte (seeds) | seconds (seeds) |')
    print('|---|---|---|')
    programs = list(dict.fromkeys(run.program for run in runs))
    means = {}
    for program in programs:
        losses = [run.loss for run in runs if run.program == program]
        seconds = [run.seconds for run in runs if run.program == program]
        means[program] = statistics.mean(losses), statistics.mean(seconds)
        cells = (f'{x:.3f}' for x in losses), (f'{x:.0f}' for x in seconds)
        print(
            f'| {program} | {means[program][0]:.3f} ({", ".join(cells[0])}) '
            f'| {means[program][1]:.0f} ({", ".join(cells[1])}) |'
        )
    target = means[NANOGPT][0]
    for program in programs[1:]:
        passed = [
            next(((step, sec) for sec, step, loss in run.curve if loss <= target), None)
            for run in runs
            if run.program == program
        ]
        if all(passed):
            steps, seconds = zip(*passed, strict=True)
            print(
                f'\n{program}: at or below {target:.3f} by step {max(steps):,} at the latest, '
                f'after {statistics.mean(seconds):.0f} s (mean over seeds)'
            )
        else:
            print(
                f'\n{program}: {passed.count(None)} of {len(passed)} seeds end above {target:.3f}'
            )


def draw(runs: list[BenchRun]) -> alt.TopLevelMixin:
    """Draws validation loss over seconds, a line per run; readable when shown 400 px wide."""
    names = {NANOGPT: 'nanoGPT', 'same recipe': 'Evenkeel, same recipe'}
    names['default recipe'] = 'Evenkeel, default recipe'
    rows = [
        {'program': names[run.program], 'seed': run.seed, 'seconds': seconds, 'loss': loss}
        for run in runs
        for seconds, step, loss in run.curve
        if step
    ]
    text = {'labelFontSize': 15, 'titleFontSize': 15}
    legend = alt.Legend(orient='top-right', title=None, labelFontSize=16, symbolStrokeWidth=3)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True, strokeWidth=2)
        .encode(
            x=alt.X('seconds:Q', title='seconds since the command', axis=alt.Axis(**text)),
            y=alt.Y(
                'loss:Q',
                title='validation loss (nats per byte)',
                scale=alt.Scale(zero=False),
                axis=alt.Axis(**text),
            ),
            color=alt.Color('program:N', sort=[*names.values()], legend=legend),
            detail='seed:N',
        )
        .properties(width=480, height=300)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--checkout', type=Path, required=True, help='a clone of nanoGPT')
    parser.add_argument('--python', required=True, help='an interpreter with PyTorch')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--out', type=Path, help='folder for nanogpt.json and nanogpt.svg')
    arguments = parser.parse_args()
    checkout, runs = arguments.checkout.resolve(), []
    with tempfile.TemporaryDirectory() as name:
        texts = write_texts(Path(name), checkout)
        for seed in range(arguments.seeds):
            folders = {program: Path(name) / f'{program}-{seed}' for program in RECIPES}
            runs.append(run_nanogpt(checkout, arguments.python, seed, Path(name) / f'out{seed}'))
            runs += [run_evenkeel(p, texts, seed, folder) for p, folder in folders.items()]
            for run in runs[-3:]:
                print(
                    f'seed {seed} {run.program}: {run.loss:.4f} in {run.seconds:.1f} s', flush=True
                )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps([dataclasses.asdict(run) for run in runs], indent=1)
        (arguments.out / 'nanogpt.json').write_text(text)
        save_chart(draw(runs), arguments.out / 'nanogpt.svg')
    print_table(runs)


if __name__ == '__main__':
    main()
