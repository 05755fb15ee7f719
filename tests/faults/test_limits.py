"""Too little disk, too few files, and impatience: a run ends with one line, and can go on."""

import random
import resource
import signal
import time

import psutil
import pytest

from lm.sweep.group import MOST_RUNS, OTHER_FILES
from tests.commands import finished, log_of, start_run, start_sweep
from tests.sweep_helpers import statuses, write_corpus
from train import BAD_INPUT, DONE, SIGNALLED

FILE_BYTES = 200_000  # more than any file of a checkpoint here, less than 2,000 rows


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.mark.full
def test_a_full_disk_ends_a_run_with_what_it_has_saved(corpus, tmp_path):
    """A limit of the size of files raises as a full disk does, wherever a file reaches it."""
    changes = {'train_steps': 2000, 'train_checkpoint_every': 100, 'train_eval_every': 0}
    limit = (resource.RLIMIT_FSIZE, FILE_BYTES)
    code, output = finished(start_run(tmp_path / 'run', corpus, limit=limit, **changes))
    *_, last = output.strip().splitlines()
    assert code == BAD_INPUT and 'Traceback' not in output, output
    assert last.startswith('error: a file in ') and '/checkpoints/' in last
    code, output = finished(start_run(tmp_path / 'run', corpus, **changes))
    assert code == DONE and 'resuming after step' in output and 'lacks' not in output, output


@pytest.mark.full
@pytest.mark.trials(short=1, long=10)
def test_ctrl_c_before_training_is_one_line_and_the_same_command_goes_on(trial, corpus, tmp_path):
    process = start_run(
        tmp_path / 'run', corpus, data_tokenizer='bpe:300', train_steps=10**6, data_epochs=10**6
    )
    time.sleep(random.Random(trial).uniform(0.5, 10))
    process.send_signal(signal.SIGINT)
    code, output = finished(process)
    assert code == SIGNALLED + signal.SIGINT and 'Traceback' not in output, output
    *_, last = output.strip().splitlines()
    assert last.startswith('SIGINT: '), output


@pytest.mark.full
def test_files_and_threads_are_bounded_whatever_the_number_of_cells(is_long, corpus, tmp_path):
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
    while process.poll() is None:
        try:
            seen = psutil.Process(process.pid)
            most_files = max(most_files, seen.num_fds())
            most_threads = max(most_threads, seen.num_threads())
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    assert process.returncode == DONE, log_of(workdir).read_text()
    assert statuses(workdir) == ['done'] * cells
    assert 0 < most_files <= min(allowed, MOST_RUNS + OTHER_FILES)
    assert 0 < most_threads < 200
