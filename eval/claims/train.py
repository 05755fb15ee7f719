"""Trains the studies of untested claims; estimates the cost of studies that need more hardware."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.claims.decide import WITHDRAWN, Decision
from eval.claims.evidence import OPEN, OUT_OF_REACH
from lm.launch.exit_status import DONE

TRAIN = Path('train.py')
GRACE_SEC = 120.0  # a stopped run writes a checkpoint first


def train_open_claims(decisions: Sequence[Decision], hours: float | None = None) -> None:
    """Trains the studies of OPEN claims, cheapest first.

    After `hours` the current study is stopped; it keeps its checkpoints, and the next call resumes
    it. OUT_OF_REACH studies without a plan are planned. WITHDRAWN claims are skipped.

    Raises:
      ValueError: if train.py is not in the current folder, or if a command fails.
    """
    if not TRAIN.exists():
        raise ValueError(
            'The current folder must be the root of the project, but it has no train.py. '
            'Change to the folder that contains train.py and run the command again.'
        )
    deadline = None if hours is None else time.monotonic() + 3600 * hours
    standing = [decision for decision in decisions if decision.verdict != WITHDRAWN]
    studies: list[Any] = [study for decision in standing for study in decision.evidence.values()]
    open_studies = {study.name: study for study in studies if study.state == OPEN}
    for study in sorted(open_studies.values(), key=lambda study: study.cost):
        if deadline is not None and time.monotonic() >= deadline:
            print(
                f'stopped after --hours={hours:g}, before {study.name}; '
                'run the same command to resume',
                file=sys.stderr,
            )
            return
        _run_command(study.command, deadline)
    unplanned = {
        study.name: study
        for study in studies
        if study.state == OUT_OF_REACH and not study.plan.exists()
    }
    for study in unplanned.values():
        study.plan.parent.mkdir(parents=True, exist_ok=True)
        _run_command(study.plan_command, deadline)


def _run_command(command: Sequence[str], deadline: float | None) -> None:
    """Runs a command, and stops it at the deadline. Raises ValueError if it fails."""
    line = f'python {shlex.join(command)}'
    print(line, file=sys.stderr, flush=True)
    to_stderr: dict[str, Any] = {'stdout': sys.stderr}  # stdout is for the board alone
    with subprocess.Popen([sys.executable, *command], **to_stderr) as process:
        try:
            status = process.wait(
                None if deadline is None else max(0.0, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SEC)
            return
        except BaseException:  # Ctrl-C too: otherwise the training would outlive this program
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SEC)
            raise
    if status != DONE:
        raise ValueError(
            f'{line} must exit with status {DONE}, but exited with status {status}. '
            'Its messages are above.'
        )
