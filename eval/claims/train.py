"""Trains the studies that open claims wait for, each by the command of its page."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eval.claims.decide import Decided
from eval.claims.evidence import OPEN, Evidence
from lm.launch.exit_status import DONE

TRAIN = Path('train.py')
GRACE_SEC = 120.0  # for the checkpoints of runs that are stopped


def train_open(found: Sequence[Decided], hours: float | None = None) -> None:
    """Trains studies of OPEN claims, cheapest first, until `hours` are over: the one that trains is
    stopped then, with what it has, and goes on with the next call.

    Raises ValueError where train.py is not in the folder of the command, and where it fails.
    """
    if not TRAIN.exists():
        raise ValueError('train.py is not here: run this in the folder of the project')
    until = None if hours is None else time.monotonic() + 3600 * hours
    waiting = {
        own.name: own
        for one in found
        if one.verdict == OPEN
        for own in one.evidence.values()
        if own.state == OPEN
    }
    for own in sorted(waiting.values(), key=lambda own: own.cost):
        if until is not None and time.monotonic() >= until:
            print(f'out of time before {own.name}: the same command goes on', file=sys.stderr)
            return
        status = _run(own, until)
        if status not in (DONE, None):
            raise ValueError(f'python {shlex.join(own.command)} ended with status {status}')


def _run(own: Evidence, until: float | None) -> int | None:
    """Runs the command; the exit status, None where its time was over."""
    line = [sys.executable, *own.command]
    print(f'python {shlex.join(own.command)}', file=sys.stderr, flush=True)
    with subprocess.Popen(line, stdout=sys.stderr) as process:  # what is printed is the board
        try:
            return process.wait(None if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SEC)
            return None
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SEC)
            raise
