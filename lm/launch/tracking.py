"""Starts the followers of a run: processes that send its rows to trackers (`eval.sync`).

Training starts a follower for each tracker, and waits for it at the end, for some seconds. A
follower reads the files of the run, and ends when its standard input ends, whether or not training
succeeded. Its failures do not affect training.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from absl import flags

from modules.choices import choose

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

# Trackers, with what has to be installed; the extra of a tracker has its name.
PACKAGES = {'mlflow': ('mlflow', 'sqlalchemy', 'alembic'), 'wandb': ('wandb',)}
LAST_SEC = 20.0  # for the rows that are left at the end
ROOT = Path(__file__).parents[2]


def define_flags() -> None:
    """Defines --track."""
    flags.DEFINE_list('track', [], 'Trackers that receive the metrics: mlflow, wandb.')


def read_track_flag() -> list[str]:
    """Returns the trackers that --track names. Raises ValueError for an unknown tracker."""
    for name in flags.FLAGS.track:
        choose(PACKAGES, name, '--track')
    return flags.FLAGS.track


@contextlib.contextmanager
def send_to_trackers(
    workdir: Path, trackers: Sequence[str], say: Callable[[str], None]
) -> Generator[None]:
    """Sends rows of a run or a sweep to trackers during the block.

    All processes of a job must call it; process 0 sends the rows. Each failure is reported in one
    line.

    Args:
      workdir: folder of the run or the sweep.
      trackers: names of the trackers.
      say: prints a line.
    """
    from lm.launch.distributed import is_first  # it brings JAX, which followers do without

    with contextlib.ExitStack() as running:
        for name in dict.fromkeys(trackers) if is_first() else ():
            running.enter_context(_run_follower(workdir, name, say))
        yield


@contextlib.contextmanager
def _run_follower(workdir: Path, name: str, say: Callable[[str], None]) -> Generator[None]:
    """Runs the follower of one tracker during the block."""
    command = f'python -m eval.sync --workdir={workdir} --to={name}'
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    try:
        if missing:
            raise OSError(f'{" and ".join(missing)} not installed (uv sync --extra {name})')
        process = _start_follower(workdir, name)
    except OSError as error:
        say(f'{name}: nothing is sent: {error}. To send the rows later, run {command}')
        yield
        return
    relay = threading.Thread(target=_relay, args=(process, say), daemon=True)
    relay.start()
    try:
        yield
    finally:
        assert process.stdin is not None  # a pipe
        process.stdin.close()  # the end of its input asks the follower to finish
        try:
            status = process.wait(LAST_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        relay.join(1.0)
        if status != 0:
            say(f'{name}: not all rows were sent. To send the rest, run {command}')


def _start_follower(workdir: Path, name: str) -> subprocess.Popen:
    """Starts the follower of one tracker."""
    command = [sys.executable, '-m', 'eval.sync', f'--workdir={workdir}', f'--to={name}']
    paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    return subprocess.Popen(
        [*command, '--until_eof'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # libraries
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
        text=True,
        start_new_session=True,  # signals of the terminal are for training
    )


def _relay(process: subprocess.Popen, say: Callable[[str], None]) -> None:
    """Prints the lines of a follower."""
    assert process.stdout is not None  # a pipe
    for line in process.stdout:
        say(line.rstrip())
