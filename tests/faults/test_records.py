"""Damage of what a run has recorded: intact rows stay, gaps are said, training goes on."""

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
def stopped(tree, tmp_path_factory):
    """A run that was asked to stop at step 8 of 12."""
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
    """Those of `before` that are still whole lines of the file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [line for line in lines if line in before]


@pytest.mark.full
@pytest.mark.parametrize('damage', [flip, cut, delete], ids=lambda damage: damage.__name__)
@pytest.mark.trials(short=1, long=20)
def test_no_intact_row_is_lost_and_a_gap_is_said(
    damage, trial, tree, stopped, whole, tmp_path, capsys
):
    workdir = shutil.copytree(stopped, tmp_path / 'run')
    path = workdir / 'metrics.jsonl'
    before = path.read_bytes().splitlines()
    damage(path, random.Random(trial))
    left = intact_lines(path, before)
    assert train(resolve(tree), workdir) == DONE
    after = path.read_bytes().splitlines()
    assert [line for line in after if line in before] == left
    said = capsys.readouterr().out
    assert ('lacks' in said) == (len(read_rows(path)) < len(whole))
    assert len(read_rows(path)) >= len(whole) - len(before) + len(left)
    assert timeless(workdir)[-1] == whole[-1]


@pytest.mark.full
@pytest.mark.parametrize('name', ['config.json', 'summary.json'])
@pytest.mark.parametrize('damage', [flip, cut], ids=lambda damage: damage.__name__)
@pytest.mark.trials(short=1, long=10)
def test_a_damaged_file_of_a_run_is_no_reason_to_stop(
    damage, name, trial, tree, stopped, whole, tmp_path
):
    """Or it is refused, naming the file or a field: a flipped bit can make another config of it."""
    workdir = shutil.copytree(stopped, tmp_path / 'run')
    damage(workdir / name, random.Random(trial))
    try:
        assert train(resolve(tree), workdir) == DONE
    except ValueError as error:
        assert damage is flip and name == 'config.json'
        assert 'config.json' in str(error) or str(workdir) in str(error), error
        return
    assert timeless(workdir) == whole


@pytest.fixture(scope='module')
def swept(tree, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('swept') / 'sweep'
    assert train_sweep(tree, SWEEP, workdir) == DONE
    return workdir


@pytest.mark.full
@pytest.mark.parametrize('name', ['config.json', 'summary.json', 'sweep.json'])
@pytest.mark.trials(short=1, long=10)
def test_a_damaged_file_of_a_sweep_leaves_the_other_cells(name, trial, tree, swept, tmp_path):
    rng, workdir = random.Random(trial), shutil.copytree(swept, tmp_path / 'sweep')
    folder = workdir if name == 'sweep.json' else rng.choice(list(cell_folders(workdir).values()))
    os.truncate(folder / name, rng.randrange((folder / name).stat().st_size))
    assert train_sweep(tree, SWEEP, workdir) == DONE
    assert statuses(workdir) == ['done'] * 3 and curves(workdir) == curves(swept)
