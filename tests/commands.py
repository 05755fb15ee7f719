"""The commands as separate processes: a run, a sweep, and waiting for their records."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lm.config.fields import Config
from lm.config.resolve import resolve
from lm.record.metrics import read_rows
from tests import sweep_helpers
from tests.sweep_helpers import curves, settings
from tests.xla import ONE_DEVICE

ROOT = Path(__file__).parent.parent
PATIENCE_SEC = 600  # with what may hang: far more than it takes where nothing else runs
TWELVE = {
    'train_steps': 12,
    'optim_warmup_steps': 5,
    'data_prefetch': 2,
    'data_validation_fraction': 0.2,
}


def tiny(corpus: dict, **changes) -> Config:
    """Returns the config of a run of `TWELVE` steps; changes are given as train_steps=12."""
    return resolve(sweep_helpers.base(corpus, **TWELVE | changes))


def command(workdir: Path, corpus: dict, *flags: str, **changes) -> list[str]:
    settings = sweep_helpers.settings(corpus, **TWELVE | changes)
    overrides = [f'--config.{k}={v}' for k, v in settings.items()]
    program = [sys.executable, 'train.py', '--config=configs/default.py', f'--workdir={workdir}']
    return [*program, *overrides, *flags]


KILLED = """
import json, os, signal, sys
from pathlib import Path
from lm.run.wave import Wave
from tests.commands import tiny
from train import train

def killing(wave):
    if wave.slots[0].journal.step == step - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dispatch(wave)

step, workdir, corpus, changes = map(json.loads, sys.argv[1:])
dispatch, Wave.dispatch = Wave.dispatch, killing
train(tiny(corpus, **changes), Path(workdir))
"""


def train_until_sigkill(step: int, corpus: dict, workdir: Path, **changes) -> None:
    """Trains `tiny(corpus, **changes)` in a process that SIGKILL ends before it makes the step."""
    arguments = map(json.dumps, (step, str(workdir), corpus, changes))
    done = subprocess.run(
        [sys.executable, '-c', KILLED, *arguments], cwd=ROOT, timeout=PATIENCE_SEC
    )
    assert done.returncode == -signal.SIGKILL


def start_run(
    workdir: Path,
    corpus: dict,
    *flags: str,
    limit: tuple[int, int] | None = None,
    prelude: Sequence[str] = (),
    before_start: Callable[[], None] | None = None,
    **changes,
) -> subprocess.Popen:
    """Starts the command of a run; `wait_for_command` returns its output.

    Args:
      workdir: folder of the run.
      corpus: settings of its text.
      flags: further flags.
      limit: (resource, value) of `resource`, for the process.
      prelude: arguments of Python before the name of the program, such as ('-c', CODE).
      before_start: function to call in the process first.
      changes: settings, as train_steps=12.
    """
    python, *arguments = command(workdir, corpus, *flags, **changes)
    environment = {**os.environ, 'XLA_FLAGS': ONE_DEVICE, 'JAX_PLATFORMS': 'cpu'}
    environment.pop('NPROC', None)  # threads for the devices of the tests' own process

    def prepare():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests under nohup ignore
        if limit:
            resource.setrlimit(limit[0], (limit[1], limit[1]))
        if before_start:
            before_start()

    return subprocess.Popen(
        [python, *prelude, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare,
    )


def wait_for_command(process: subprocess.Popen) -> tuple[int, str]:
    stdout, _ = process.communicate(timeout=PATIENCE_SEC)
    return process.returncode, stdout


def wait_for_step(workdir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline and process.poll() is None:
        rows = read_rows(workdir / 'metrics.jsonl')
        if rows and rows[-1]['step'] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f'ended before step {step}: {wait_for_command(process)}')


SWEEP = {'train.log_every': (1, 2), 'optim.lr': (0.003, 0.01)}
LONGER = {'train_steps': 60, 'train_eval_every': 20, 'train_checkpoint_every': 10}
OF_240_STEPS = {'train_steps': 240, 'train_checkpoint_every': 20, 'train_eval_every': 60}
LONG = {'train_steps': 600, 'train_eval_every': 300, 'train_checkpoint_every': 50}


def start_sweep(
    workdir: Path,
    corpus: dict,
    sweep: dict = SWEEP,
    engine: str = 'local',
    limit: tuple[int, int] | None = None,
    **changes,
) -> subprocess.Popen:
    """Starts the command of a sweep; its output goes to `log_of(workdir)`.

    limit: (resource, value) of `resource`, for the process.
    """
    overrides = [f'--config.{k}={v}' for k, v in settings(corpus, **LONGER | changes).items()]
    program = [sys.executable, 'train.py', '--config=configs/default.py', *overrides]
    with log_path(workdir).open('a') as log:  # not a pipe, which would end with Ray's processes
        return subprocess.Popen(
            [*program, f'--workdir={workdir}', f'--config.sweep={sweep}', f'--engine={engine}'],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=limit and (lambda: resource.setrlimit(limit[0], (limit[1], limit[1]))),
        )


def log_path(workdir: Path) -> Path:
    return workdir.with_suffix('.log')


def wait_for_rows(workdir: Path, rows: int, process: subprocess.Popen) -> None:
    """Waits until the cells have recorded a number of rows, together."""
    deadline = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline and process.poll() is None:
        if (workdir / 'sweep.json').exists() and count_recorded(workdir) >= rows:
            return
        time.sleep(0.01)
    raise AssertionError(f'no {rows} rows: {log_path(workdir).read_text()}')


def count_recorded(workdir: Path) -> int:
    return sum(len(rows) for rows in curves(workdir).values())
