"""Followers and trainers as processes, which are killed."""

import os
import signal
import subprocess
import sys
import time

from tests import ROOT

WAIT_SEC = 500.0


def start(*arguments, **env):
    """Starts a process of this checkout, and captures its output."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_when(process, is_time):
    """Kills the process as soon as `is_time()` holds."""
    deadline = time.monotonic() + WAIT_SEC
    while not is_time():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def finish(process):
    """Returns the output of a process, once it has ended without an error."""
    stdout, _ = process.communicate(timeout=WAIT_SEC)
    assert process.returncode == 0, stdout
    return stdout


TRAIN = (
    'train.py',
    '--config=configs/default.py',
    *('--config.model.d_model=16', '--config.model.n_layers=1', '--config.model.n_heads=2'),
    *('--config.model.d_ff=32', '--config.model.n_kv_heads=2', '--config.data.seq_len=32'),
    *('--config.data.source=synthetic:markov', '--config.data.tokenizer=byte'),
    *('--config.data.batch_size=8', '--config.train.log_every=1', '--config.train.eval_every=25'),
    *('--config.train.diagnose_every=20', '--config.train.checkpoint_every=20'),
)
