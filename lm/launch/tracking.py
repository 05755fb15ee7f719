"""The followers that a run starts: processes that send its rows to trackers (`eval.sync`).

Training starts one for each tracker, and waits for it at the end, for some seconds. It reads what
is on disk, and ends when its standard input does, whatever ended training. Nothing that happens to
it reaches a step.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import flags

from modules.choices import choose

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

# Trackers, with what has to be installed; the extra of a tracker has its name.
PACKAGES = {'mlflow': ('mlflow', 'sqlalchemy', 'alembic'), 'wandb': ('wandb',)}
LAST_SEC = 20.0  # for the rows that are left at the end
ROOT = Path(__file__).parents[2]


def define_flags() -> None:
    flags.DEFINE_list('track', [], 'Trackers that get the rows: mlflow, wandb.')


def read_track_flag() -> list[str]:
    """Returns the trackers that --track names. Raises ValueError for one that there is not."""
    for name in flags.FLAGS.track:
        choose(PACKAGES, name, '--track')
    return flags.FLAGS.track


@contextlib.contextmanager
def send_to_trackers(
    workdir: Path, trackers: Sequence[str], say: Callable[[str], None]
) -> Iterator[None]:
    """Sends rows of the folder, a run or a sweep, to these trackers meanwhile. To be called by all
    processes of a job; process 0 does it. What does not work is said in one line each.
    """
    from lm.launch.distributed import is_first  # it brings JAX, which followers do without

    with contextlib.ExitStack() as running:
        for name in dict.fromkeys(trackers) if is_first() else ():
            running.enter_context(_run_follower(workdir, name, say))
        yield


@contextlib.contextmanager
def _run_follower(workdir: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    rest = f'python -m eval.sync --workdir={workdir} --to={name}'
    lacking = [one for one in PACKAGES[name] if importlib.util.find_spec(one) is None]
    try:
        if lacking:
            raise OSError(f'{" and ".join(lacking)} not installed (uv sync --extra {name})')
        process = _start_follower(workdir, name)
    except OSError as error:
        say(f'{name}: nothing is sent: {error}. {rest} sends it later')
        yield
        return
    relay = threading.Thread(target=_relay, args=(process, say), daemon=True)
    relay.start()
    try:
        yield
    finally:
        process.stdin.close()
        try:
            status = process.wait(LAST_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        relay.join(1.0)
        if status != 0:
            say(f'{name}: not all rows were sent; {rest} sends the rest')


def _start_follower(workdir: Path, name: str) -> subprocess.Popen:
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
    for line in process.stdout:
        say(line.rstrip())
