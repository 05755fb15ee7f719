"""kill -9 at random moments: the same command resumes, and no number changes.

Three kills per trial, one in each third of a run; a sweep of two groups in this process, and on
Ray, whose workers outlive the driver; ten kills of a tuned sweep, in any wave.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lm.storage.files import read_json
from tests.commands import (
    LONG,
    LONGER,
    OF_240_STEPS,
    PATIENCE_SEC,
    SWEEP,
    count_recorded,
    log_path,
    start_run,
    start_sweep,
    wait_for_command,
    wait_for_rows,
    wait_for_step,
)
from tests.sweep_helpers import base, curves, table, timeless
from train import DONE, train_sweep

OF_ENGINE = {'local': (3, 3, {}), 'ray': (1, 2, LONG)}  # kills, in how many parts, changes


@pytest.mark.full
@pytest.mark.trials(short=1, long=7)
def test_killed_run_resumes(trial, whole_run, corpus, tmp_path):
    rng = random.Random(trial)
    for third in range(3):
        process = start_run(tmp_path, corpus, **OF_240_STEPS)
        wait_for_step(tmp_path, 80 * third + rng.randrange(5, 70), process)
        process.kill()
        assert wait_for_command(process)[0] == -signal.SIGKILL
    code, stdout = wait_for_command(start_run(tmp_path, corpus, **OF_240_STEPS))
    assert code == DONE and 'resuming after step' in stdout
    assert timeless(tmp_path) == whole_run


@pytest.fixture(scope='module')
def whole_sweep(corpus, tmp_path_factory):
    """build_workdir(engine): an undisturbed sweep of that engine's length."""
    folder, workdirs = tmp_path_factory.mktemp('whole_sweeps'), {}

    def build_workdir(engine):
        if engine not in workdirs:
            _, _, changes = OF_ENGINE[engine]
            workdirs[engine] = folder / engine
            assert train_sweep(base(corpus, **LONGER | changes), SWEEP, workdirs[engine]) == DONE
        return workdirs[engine]

    return build_workdir


@pytest.mark.full
@pytest.mark.parametrize('engine', OF_ENGINE)
@pytest.mark.trials(short=1, long=7)
def test_killed_sweep_resumes(engine, trial, whole_sweep, corpus, tmp_path):
    """One kill in each of the first parts of the record, and the same command again at once, while
    Ray's workers may still run. No kill in the last part, which the workers could finish first.
    """
    kills, parts, changes = OF_ENGINE[engine]
    rng, workdir, whole = random.Random(trial), tmp_path / 'sweep', whole_sweep(engine)
    for part in range(kills):
        process = start_sweep(workdir, corpus, engine=engine, **changes)
        share = (part + rng.uniform(0.1, 0.9)) / parts
        wait_for_rows(workdir, int(share * count_recorded(whole)), process)
        process.kill()
        assert process.wait(timeout=PATIENCE_SEC) == -signal.SIGKILL
    process = start_sweep(workdir, corpus, engine=engine, **changes)
    code, stdout = process.wait(timeout=PATIENCE_SEC), log_path(workdir).read_text()
    assert code == DONE and 'resuming after step' in stdout, stdout
    assert '4 cells, 2 programs' in stdout and f'4 of 4 done; {workdir}/cells.parquet' in stdout
    cells = [(row['log_every'], row['lr'], row['group']) for row in table(workdir)]
    assert cells == [(1, 0.003, 0), (1, 0.01, 0), (2, 0.003, 1), (2, 0.01, 1)]
    assert table(workdir) == table(whole)
    assert curves(workdir) == curves(whole)


TUNE = {'optim.lr': 0.01, 'seeds': 3, 'budget': 13}
ARMS = {'optim.b1': (0.9, 0.8)}
BRIEF = {'train_steps': 12, 'train_eval_every': 12, 'train_checkpoint_every': 4}


def train_tuned(workdir: Path, corpus: dict) -> None:
    """Trains a tuned sweep in a separate process."""
    with workdir.with_suffix('.log').open('a') as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os._exit(train_sweep(base(corpus, **BRIEF), ARMS, workdir, tune=TUNE))


@pytest.fixture(scope='module')
def whole_tuned(corpus, tmp_path_factory):
    """The workdir of an undisturbed tuned sweep."""
    workdir = tmp_path_factory.mktemp('tuned') / 'sweep'
    assert train_sweep(base(corpus, **BRIEF), ARMS, workdir, tune=TUNE) == DONE
    return workdir


@pytest.mark.full
@pytest.mark.timeout(1800)  # eleven processes at length
@pytest.mark.trials(short=1, long=4)
def test_killed_tuned_sweep_resumes(trial, is_long, whole_tuned, corpus, tmp_path):
    """Two kills, ten in the long form, spread over the record: the same runs, in the same waves,
    with the same numbers.
    """
    context = multiprocessing.get_context('spawn')
    rng, workdir, rows = random.Random(trial), tmp_path / 'sweep', count_recorded(whole_tuned)
    kills = 10 if is_long else 2
    for kill in range(kills):
        process = context.Process(target=train_tuned, args=(workdir, corpus))
        process.start()
        n_rows = int((kill + rng.uniform(0.1, 0.9)) / kills * rows)
        while process.is_alive() and not (
            (workdir / 'sweep.json').exists() and count_recorded(workdir) >= n_rows
        ):
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, log_path(workdir).read_text()
    process = context.Process(target=train_tuned, args=(workdir, corpus))
    process.start()
    process.join(PATIENCE_SEC)
    stdout = log_path(workdir).read_text()
    assert process.exitcode == DONE and 'resuming after step' in stdout, stdout
    assert stdout.count('wave 1, scan') >= 1 and 'look 1' in stdout
    ledgers = [read_json(sweep_folder / 'sweep.json') for sweep_folder in (workdir, whole_tuned)]
    assert ledgers[0] == ledgers[1]
    assert table(workdir) == table(whole_tuned)
    assert curves(workdir) == curves(whole_tuned)
