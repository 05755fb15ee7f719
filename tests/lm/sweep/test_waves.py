"""Tuned sweeps in this process: waves that follow from the folder alone, whatever comes between.

Equivalence: a tuned sweep that was interrupted = one that was not; cells, table and sweep.json.
"""

import collections
import signal

import pytest

from lm.storage.files import read_json
from tests.sweep_helpers import base, before_step, curves, table, terminate_at
from train import DONE, SIGNALLED, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

SWEEP = {'optim.b1': (0.9, 0.8)}  # two arms of one program
TUNE = {'optim.lr': 0.01, 'seeds': 3, 'budget': 13}
SHORT = {'train_steps': 3, 'train_eval_every': 3, 'train_checkpoint_every': 2}


def steps_made(monkeypatch) -> collections.Counter:
    """Counts the steps of each cell, by its folder."""
    made = collections.Counter()
    before_step(
        monkeypatch,
        lambda wave: made.update(wave.slots[i].journal.workdir.name for i in wave.active),
    )
    return made


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """The workdir of a tuned sweep that nothing disturbed, and the steps of each of its cells."""
    workdir = tmp_path_factory.mktemp('whole') / 'tuned'
    with pytest.MonkeyPatch.context() as patch:
        made = steps_made(patch)
        assert train_sweep(base(corpus, **SHORT), SWEEP, workdir, tune=TUNE) == DONE
    return workdir, made


def test_no_cell_is_trained_twice(whole):
    workdir, made = whole
    cells = read_json(workdir / 'sweep.json')['cells']
    assert {cell['cell'] for cell in cells} == made.keys() and {*made.values()} == {3}
    of_arm = collections.Counter(cell['tuned']['arm'] for cell in cells)
    assert of_arm[0] == of_arm[1] == 13
