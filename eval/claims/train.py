"""Trains the studies that open claims wait for, each by the command of its page; those that are out
of reach are planned.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eval.claims.decide import WITHDRAWN, Decision
from eval.claims.evidence import OPEN, OUT_OF_REACH
from lm.launch.exit_status import DONE

TRAIN = Path('train.py')
GRACE_SEC = 120.0  # for the checkpoints of runs that are stopped


def train_open_claims(decisions: Sequence[Decision], hours: float | None = None) -> None:
    """Trains studies of OPEN claims, cheapest first, until `hours` are over: the one that trains is
    stopped then, with what it has, and goes on with the next call. Studies that are OUT_OF_REACH
    get the plan that they have none of. Claims that are WITHDRAWN wait for nothing.

    Raises ValueError where train.py is not in the folder of the command, and where it fails.
    """
    if not TRAIN.exists():
        raise ValueError('train.py is not here: run this in the folder of the project')
    until = None if hours is None else time.monotonic() + 3600 * hours
    waits = [one for one in decisions if one.verdict != WITHDRAWN]
    every = [own for one in waits for own in one.evidence.values()]
    waiting = {own.name: own for own in every if own.state == OPEN}
    for own in sorted(waiting.values(), key=lambda own: own.cost):
        if until is not None and time.monotonic() >= until:
            print(f'out of time before {own.name}: the same command goes on', file=sys.stderr)
            return
        _run_command(own.command, until)
    far = {own.name: own for own in every if own.state == OUT_OF_REACH and not own.plan.exists()}
    for own in far.values():
        own.plan.parent.mkdir(parents=True, exist_ok=True)
        _run_command(own.plan_command, until)


def _run_command(command: Sequence[str], until: float | None) -> None:
    """Runs a command, and stops it where its time is over. Raises ValueError where it fails."""
    line = f'python {shlex.join(command)}'
    print(line, file=sys.stderr, flush=True)
    to_stderr = {'stdout': sys.stderr}  # what is printed is the board
    with subprocess.Popen([sys.executable, *command], **to_stderr) as process:
        try:
            status = process.wait(None if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SEC)
            return
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SEC)
            raise
    if status != DONE:
        raise ValueError(f'{line} ended with status {status}')
