"""Damage of the record of a run: intact rows stay, gaps are reported, training continues."""

import os
import random
import shutil

import pytest

from lm.config.resolve import resolve
from lm.record.metrics import read_rows
from tests.commands import TWELVE
from tests.faults.test_checkpoints import cut, delete, flip
from tests.sweep_helpers import (
    base,
    before_step,
    cell_folders,
    curves,
    statuses,
    terminate_at,
    timeless,
    write_corpus,
)
from train import DONE, train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

SWEEP = ({'optim.lr': 0.01}, {'train.seed': 1}, {'data.seed': 1})


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    return base(write_corpus(tmp_path_factory.mktemp('corpus')), **TWELVE)


@pytest.fixture(scope='module')
def stopped_run(tree, tmp_path_factory):
    """A run that was stopped at step 8 of 12."""
    workdir = tmp_path_factory.mktemp('stopped') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(8))
        train(resolve(tree), workdir)
    return workdir


@pytest.fixture(scope='module')
def whole(tree, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('whole') / 'run'
    assert train(resolve(tree), workdir) == DONE
    return timeless(workdir)


def intact_lines(path, before):
    """Returns the lines of `before` that are still complete in the file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [line for line in lines if line in before]


@pytest.mark.full
@pytest.mark.parametrize('damage', [flip, cut, delete], ids=lambda damage: damage.__name__)
@pytest.mark.trials(short=1, long=20)
def test_intact_rows_stay_and_gaps_are_reported(
    damage, trial, tree, stopped_run, whole, tmp_path, capsys
):
    workdir = shutil.copytree(stopped_run, tmp_path / 'run')
    path = workdir / 'metrics.jsonl'
    before = path.read_bytes().splitlines()
    damage(path, random.Random(trial))
    intact = intact_lines(path, before)
    assert train(resolve(tree), workdir) == DONE
    after = path.read_bytes().splitlines()
    assert [line for line in after if line in before] == intact
    printed = capsys.readouterr().out
    assert ('lacks' in printed) == (len(read_rows(path)) < len(whole))
    assert len(read_rows(path)) >= len(whole) - len(before) + len(intact)
    assert timeless(workdir)[-1] == whole[-1]


@pytest.mark.full
@pytest.mark.parametrize('name', ['config.json', 'summary.json'])
@pytest.mark.parametrize('damage', [flip, cut], ids=lambda damage: damage.__name__)
@pytest.mark.trials(short=1, long=10)
def test_run_continues_with_damaged_file(damage, name, trial, tree, stopped_run, whole, tmp_path):
    """Or it is refused, with the file or a field: a flipped bit can make a different config."""
    workdir = shutil.copytree(stopped_run, tmp_path / 'run')
    damage(workdir / name, random.Random(trial))
    try:
        assert train(resolve(tree), workdir) == DONE
    except ValueError as error:
        assert damage is flip and name == 'config.json'
        assert 'config.json' in str(error) or str(workdir) in str(error), error
        return
    assert timeless(workdir) == whole


@pytest.fixture(scope='module')
def finished_sweep(tree, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('swept') / 'sweep'
    assert train_sweep(tree, SWEEP, workdir) == DONE
    return workdir


@pytest.mark.full
@pytest.mark.parametrize('name', ['config.json', 'summary.json', 'sweep.json'])
@pytest.mark.trials(short=1, long=10)
def test_damaged_file_leaves_other_cells(name, trial, tree, finished_sweep, tmp_path):
    rng, workdir = random.Random(trial), shutil.copytree(finished_sweep, tmp_path / 'sweep')
    folder = workdir if name == 'sweep.json' else rng.choice(list(cell_folders(workdir).values()))
    os.truncate(folder / name, rng.randrange((folder / name).stat().st_size))
    assert train_sweep(tree, SWEEP, workdir) == DONE
    assert statuses(workdir) == ['done'] * 3 and curves(workdir) == curves(finished_sweep)
