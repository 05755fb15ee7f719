"""Too little disk, too few files, impatience, and a terminal that hangs up.

A run ends with one line, or continues, and can be resumed.
"""

import fcntl
import os
import random
import resource
import select
import signal
import statistics
import subprocess
import termios
import time

import psutil
import pytest

from eval import runs
from lm.record.metrics import read_rows
from lm.storage.files import read_json
from lm.study.train.groups import MAX_RUNS, OTHER_FILES
from tests.commands import (
    PATIENCE_SEC,
    ROOT,
    command,
    log_path,
    start_run,
    start_sweep,
    wait_for_command,
)
from tests.sweep_helpers import statuses, write_corpus
from tests.xla import ONE_DEVICE
from train import BAD_INPUT, DONE, SIGNALLED

QUERY_EVERY_SEC = 2.0
FILE_BYTES = 200_000  # more than any file of a checkpoint here, less than 2,000 rows


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.mark.full
def test_full_disk_ends_run_with_saved_steps(corpus, tmp_path):
    """A limit on the size of files raises as a full disk does, in any file that reaches it."""
    changes = {'train_steps': 2000, 'train_checkpoint_every': 100, 'train_eval_every': 0}
    limit = (resource.RLIMIT_FSIZE, FILE_BYTES)
    code, stdout = wait_for_command(start_run(tmp_path / 'run', corpus, limit=limit, **changes))
    *_, last = stdout.strip().splitlines()
    assert code == BAD_INPUT and 'Traceback' not in stdout, stdout
    assert last.startswith('error: a file in ') and '/checkpoints/' in last
    code, stdout = wait_for_command(start_run(tmp_path / 'run', corpus, **changes))
    assert code == DONE and 'resuming after step' in stdout and 'lacks' not in stdout, stdout


@pytest.mark.full
@pytest.mark.trials(short=1, long=10)
def test_ctrl_c_before_training(trial, corpus, tmp_path):
    process = start_run(
        tmp_path / 'run', corpus, data_tokenizer='bpe:300', train_steps=10**6, data_epochs=10**6
    )
    time.sleep(random.Random(trial).uniform(0.5, 10))
    process.send_signal(signal.SIGINT)
    code, stdout = wait_for_command(process)
    assert code == SIGNALLED + signal.SIGINT and 'Traceback' not in stdout, stdout
    *_, last = stdout.strip().splitlines()
    assert last.startswith('SIGINT: '), stdout


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_cells_stay_within_limits_and_answer_queries(is_long, corpus, tmp_path, monkeypatch):
    """Files and threads are bounded, and a query during training returns every cell."""
    # As a user has it: each virtual device of the tests' own process would add 16 threads.
    monkeypatch.setenv('XLA_FLAGS', ONE_DEVICE)
    monkeypatch.delenv('NPROC', raising=False)
    cells, allowed = (2000, 256) if is_long else (40, OTHER_FILES + 16)
    workdir = tmp_path / 'sweep'
    process = start_sweep(
        workdir,
        corpus,
        {'train.seed': tuple(range(cells))},
        limit=(resource.RLIMIT_NOFILE, allowed),
        model_n_layers=1,
        train_steps=4,
        train_eval_every=4,
    )
    most_files = most_threads = 0
    query_sec, next_query = [], time.monotonic()
    while process.poll() is None:
        try:
            process_info = psutil.Process(process.pid)
            most_files = max(most_files, process_info.num_fds())
            most_threads = max(most_threads, process_info.num_threads())
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
        if time.monotonic() > next_query and (workdir / 'sweep.json').exists():
            start = time.monotonic()
            table = runs.query('select status, count(*) as n from runs group by status', workdir)
            query_sec.append(time.monotonic() - start)
            assert sum(table['n'].to_pylist()) == cells
            next_query = time.monotonic() + QUERY_EVERY_SEC
    assert process.returncode == DONE, log_path(workdir).read_text()
    assert query_sec
    print(
        f'{cells} cells: at most {most_files} files and {most_threads} threads; {len(query_sec)} '
        f'queries, {statistics.median(query_sec):.2f} s each, at most {max(query_sec):.2f}'
    )
    assert statuses(workdir) == ['done'] * cells
    assert 0 < most_files <= min(allowed, MAX_RUNS + OTHER_FILES)
    assert 0 < most_threads < 200


@pytest.mark.full
def test_run_survives_closed_log_reader(corpus, tmp_path):
    changes = {'train_steps': 40, 'train_eval_every': 0}
    process = start_run(tmp_path / 'run', corpus, **changes)
    while 'step ' not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    assert process.wait(PATIENCE_SEC) == DONE
    summary = read_json(tmp_path / 'run' / 'summary.json')
    assert (summary['status'], summary['step']) == ('done', 40)
    assert [event['kind'] for event in summary['events']] == ['output_lost']


@pytest.mark.full
def test_hangup_stops_run_with_checkpoint(corpus, tmp_path):
    """Its own terminal: the kernel sends SIGHUP, and later output fails."""
    ours, terminal = os.openpty()
    changes = {'train_steps': 10**6, 'data_epochs': 10**6, 'train_checkpoint_every': 0}

    def take_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command(tmp_path / 'run', corpus, **changes),
        cwd=ROOT,
        env={**os.environ, 'XLA_FLAGS': ONE_DEVICE, 'JAX_PLATFORMS': 'cpu'},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    try:
        os.close(terminal)
        while not read_rows(tmp_path / 'run' / 'metrics.jsonl'):
            assert process.poll() is None
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 1 << 16)  # it would wait for a terminal that nobody reads
        os.close(ours)
        assert process.wait(PATIENCE_SEC) == SIGNALLED + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    summary = read_json(tmp_path / 'run' / 'summary.json')
    assert summary['status'] == 'stopped' and summary['step'] >= 1
    assert [p.name for p in (tmp_path / 'run' / 'checkpoints').iterdir()] == [str(summary['step'])]
