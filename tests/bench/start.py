"""Seconds from a command to its purpose: help, the first step, the first token, a report.

    uv run python -m tests.bench.start [--rounds=3] [--folder=DIR] [--parts]

Each case is a process of its own, and the cases run in turn: `train.py --help` and `eval.report` to
their end, training to the line of its first step, `eval.generate` to its first character, and
`load` to its return. The config is configs/default.py, and its text has been prepared. In a cold
start nothing is compiled yet; a warm one follows it. `--folder` keeps the checkpoint and the sweep
that the cases read, for another call. `--parts` prints where the time to the first step goes: the
imports, the text, tracing and lowering, XLA (to compile, or to read a stored program), and all
after these, from the opening of records to the first step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

STEPS = ('--config.train.steps=2', '--config.train.log_every=1', '--config.train.eval_batches=1')
TINY = ('d_model=32', 'n_layers=1', 'd_ff=64')
LOAD = 'import sys; from eval.load import load; load(sys.argv[1]); print("loaded")'
PARTS = ('imports', 'text', 'tracing', 'XLA', 'first step', 'everything')


def train_flags(folder: Path, workdir: Path) -> list[str]:
    """Returns the flags of a run of two steps on the text in `folder`, which is prepared once."""
    cache_flag = f'--config.data.cache_dir={folder / "data"}'
    return ['--config=configs/default.py', *STEPS, cache_flag, f'--workdir={workdir}']


def prepare(folder: Path) -> None:
    """Trains the checkpoint `run` and the sweep `sweep` that the cases read."""
    tiny = [f'--config.model.{field}' for field in TINY]
    sweep = "--config.sweep={'train.seed': (0, 1), 'optim.lr': (1e-3, 3e-3)}"
    for name, flags in {'run': [], 'sweep': [*tiny, sweep]}.items():
        if not (folder / name / 'report.html').exists():
            command = [sys.executable, 'train.py', *train_flags(folder, folder / name), *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            make_report(folder / name)


def make_report(workdir: Path) -> None:
    command = [sys.executable, '-m', 'eval.report', f'--workdir={workdir}']
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def wait_for(command: list[str], cache: Path, is_there: Callable[[bytes], bool] | None) -> float:
    """Returns the seconds until a command has printed something, or to its end.

    Args:
      command: the command.
      cache: folder of the user's cache.
      is_there: tells it from the text printed so far; None: wait for the end.
    """
    environment = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
    environment |= {'XDG_CACHE_HOME': str(cache)}
    start, printed = time.perf_counter(), b''
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while is_there is None or not is_there(printed):
            piece = os.read(process.stdout.fileno(), 4096)
            printed += piece
            if not piece:
                break
        seconds = time.perf_counter() - start
        while os.read(process.stdout.fileno(), 4096):
            pass
    if process.returncode or (is_there is not None and not is_there(printed)):
        raise RuntimeError(f'{command} printed {printed!r}')
    return seconds


def has_step(printed: bytes) -> bool:
    """Whether the line of the first step is among the printed ones."""
    return any(line.split()[:2] == [b'step', b'1'] for line in printed.splitlines()[:-1])


def measure_round(folder: Path) -> dict[str, float]:
    """Returns the seconds of each case, once."""
    python, seconds = sys.executable, {}
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        checkpoint = f'--checkpoint={folder / "run"}'
        generate = [python, '-m', 'eval.generate', checkpoint, '--tokens=8']
        seconds['`train.py --help`'] = wait_for([python, 'train.py', '--help'], cache, None)
        for state in ('cold', 'warm'):
            train = [python, 'train.py', *train_flags(folder, cache / state)]
            seconds[f'first step, {state}'] = wait_for(train, cache, has_step)
        for state in ('cold', 'warm'):
            seconds[f'first token, {state}'] = wait_for(generate, cache, bool)
        load = [python, '-c', LOAD, str(folder / 'run')]
        seconds['`load`'] = wait_for(load, cache, lambda printed: b'loaded' in printed)
        report = [python, '-m', 'eval.report', f'--workdir={folder / "sweep"}']
        seconds['`eval.report`'] = wait_for(report, cache, None)
    return seconds


def cover(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds that at least one of the intervals covers; they may be nested."""
    total, end = 0.0, 0.0
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def trace(flags: list[str]) -> None:
    """Trains in this process, and prints the seconds of PARTS as JSON in the last line."""
    from lm.launch.before_jax import prepare_process

    prepare_process()
    import jax
    from absl import app

    import train
    from lm.launch import command
    from lm.record.time_use import process_start
    from lm.run.wave import Wave

    events: dict[str, list[tuple[float, float]]] = {'tracing': [], 'XLA': []}
    marks = {'start': process_start(), 'imports': time.time()}

    def listen(event: str, duration_secs: float, **_) -> None:
        kinds = {'/jaxpr': 'tracing', '/backend_compile': 'XLA'}
        for word, kind in kinds.items():
            if '/compile' in event and word in event and 'first step' not in marks:
                events[kind].append((time.time() - duration_secs, time.time()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    open_text, train_wave, dispatch = train.open_text, Wave.train, Wave.dispatch

    def timed_text(*arguments):
        start = time.time()
        try:
            return open_text(*arguments)
        finally:
            marks['text'] = time.time() - start

    def timed_train(wave, *arguments):
        marks['train'] = time.time()
        train_wave(wave, *arguments)

    def timed_dispatch(wave):
        dispatch(wave)  # the second one records the first step
        if wave.slots[0].journal.step == 2:
            marks['first step'] = time.time()

    train.open_text, Wave.train, Wave.dispatch = timed_text, timed_train, timed_dispatch
    sys.argv = ['train.py', *flags]
    try:
        app.run(command.run_trainer(train.main), flags_parser=command.parse_flags)
    finally:
        seconds = {kind: cover(intervals) for kind, intervals in events.items()} | {
            'imports': marks['imports'] - marks['start'],
            'text': marks['text'],
            'first step': marks['first step'] - marks['train'],
            'everything': marks['first step'] - marks['start'],
        }
        print(json.dumps(seconds))


def measure_parts(folder: Path) -> dict[str, dict[str, float]]:
    """Returns the seconds of PARTS of a cold start and of a warm one, once."""
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        for state in ('cold', 'warm'):
            flags = train_flags(folder, Path(name, state))
            done = subprocess.run(
                [sys.executable, '-m', 'tests.bench.start', '--trace', *flags],
                env={**os.environ, 'XDG_CACHE_HOME': name},
                check=True,
                stdout=subprocess.PIPE,
            )
            seconds[state] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def take_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {case: statistics.median(r[case] for r in rounds) for case in rounds[0]}


def main() -> None:
    if '--trace' in sys.argv[1:2]:
        trace(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--folder', type=Path)
    parser.add_argument('--parts', action='store_true')
    flags = parser.parse_args()
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # or each start compiles what it imports
    with tempfile.TemporaryDirectory() as name:
        folder = (flags.folder or Path(name)).absolute()
        prepare(folder)
        if flags.parts:
            rounds = [measure_parts(folder) for _ in range(flags.rounds)]
            print(f'| start | {" | ".join(PARTS)} |\n|---|' + '---|' * len(PARTS))
            for state in rounds[0]:
                medians = take_medians([r[state] for r in rounds])
                print(f'| {state} | ' + ' | '.join(f'{medians[part]:.1f}' for part in PARTS) + ' |')
            return
        medians = take_medians([measure_round(folder) for _ in range(flags.rounds)])
        print('| from the command to | seconds |\n|---|---|')
        for case, seconds in medians.items():
            print(f'| {case} | {seconds:.2f} |')


if __name__ == '__main__':
    main()
