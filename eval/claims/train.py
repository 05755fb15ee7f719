"""Trains the studies that open claims wait for, each by the command of its page."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eval.claims.decide import OPEN, Decided, Study
from lm.launch.exit_status import DONE

TRAIN = Path('train.py')
GRACE_SEC = 120.0  # for the checkpoints of runs that are stopped


def command(study: Study) -> list[str]:
    """Returns the arguments of train.py."""
    return [f'--config={study.config}', f'--workdir={study.folder}']


def cost(study: Study) -> float:
    """Returns about the operations that a study takes: 6 a token and weight of its blocks."""
    found = 0.0
    for cell in study.arms.first:
        model, data = cell.recipe.model, cell.recipe.data
        weights = 12 * model.n_layers * model.d_model**2
        found += 6 * weights * cell.recipe.train.steps * data.batch_size * data.seq_len
    return found * study.arms.tune.usual_runs


def train_open(found: Sequence[Decided], hours: float | None = None) -> None:
    """Trains studies of OPEN claims, cheapest first, until `hours` are over: the one that trains is
    stopped then, with what it has, and goes on with the next call.

    Raises ValueError where train.py is not in the folder of the command, and where it fails.
    """
    if not TRAIN.exists():
        raise ValueError('train.py is not here: run this in the folder of the project')
    until = None if hours is None else time.monotonic() + 3600 * hours
    waiting = {
        study.config: study
        for one in found
        if one.verdict == OPEN
        for study in one.studies.values()
        if study.state == OPEN
    }
    for study in sorted(waiting.values(), key=cost):
        if until is not None and time.monotonic() >= until:
            print(f'out of time before {study.config}: the same command goes on', file=sys.stderr)
            return
        status = _train(study, until)
        if status not in (DONE, None):
            raise ValueError(f'train.py {" ".join(command(study))} ended with status {status}')


def _train(study: Study, until: float | None) -> int | None:
    """Runs train.py; the exit status, None where its time was over."""
    line = [sys.executable, str(TRAIN), *command(study)]
    print(' '.join(['train.py', *command(study)]), file=sys.stderr, flush=True)
    with subprocess.Popen(line) as process:
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
