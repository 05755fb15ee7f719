"""Spikes of whole runs, which are recorded or skipped, or end the run. Equivalence: a run that is
resumed, or trains beside others, counts and skips as one that is alone.
"""

import jax
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.launch.exit_status import DIVERGED, DONE, SIGNALLED
from lm.storage.files import read_json
from tests.sweep_helpers import (
    base,
    before_step,
    cell_config,
    curves,
    summary,
    terminate_at,
    timeless,
    write_corpus,
)
from train import train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

SPIKE = 24  # the step with the planted loss
LIMITS = {'train_spike_window': 16, 'train_spike_from': 8, 'train_steps': 30}
TEXTS = {'train_eval_every': 0, 'train_checkpoint_every': 0, 'loss_z_loss': 1e-4}


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


def plant_at(step: int, slot: int = 0):
    """Makes the loss of one run large at one step, for `before_step`. Returns the function, and the
    states before that step and the next.
    """
    states = []

    def act(wave):
        recipes = [run_slot.recipe for run_slot in wave.slots]
        at = wave.slots[slot].journal.step if slot < len(wave.slots) else -1
        if at == step - 1:
            recipes[slot] = update_recipe(recipes[slot], {'loss.z_loss': 10.0})
        if at in (step - 1, step):
            states.append(jax.device_get(wave.take_state(slot)))
        wave.hypers = wave.program.stack_hypers(recipes)

    return act, states


def tree(corpus, **changes):
    return base(corpus, **TEXTS, **LIMITS, **changes)


def test_spike_is_recorded(corpus, tmp_path, monkeypatch):
    """By default it is counted, and nothing else happens. Rows of some steps only have the score of
    all steps.
    """
    act, (*_,) = plant_at(SPIKE)
    before_step(monkeypatch, act)
    assert train(cell_config(tree(corpus, train_log_every=10), {}), tmp_path) == DONE
    rows = timeless(tmp_path)
    scores = {row['step']: row.get('spike_score') for row in rows if 'loss' in row}
    assert scores == {1: None, 10: 0.0, 20: 0.0, 30: 1 / 22}
    record = read_json(tmp_path / 'summary.json')
    assert (record['spikes'], record['skipped_steps'], record['events']) == (1, 0, [])
    assert record['spike_score'] == 1 / 22


@pytest.mark.full
def test_spike_is_skipped_and_resumed(corpus, tmp_path, monkeypatch):
    """The state but its step and window keeps every bit; a run that is ended just behind the spike
    goes on bitwise, and does not count it twice.
    """
    recipe = cell_config(tree(corpus, train_on_spike='skip'), {})
    act, states = plant_at(SPIKE)
    with monkeypatch.context() as patch:
        before_step(patch, act)
        assert train(recipe, tmp_path / 'whole') == DONE
    before, after = states
    assert int(after.step) == SPIKE
    same = after.replace(step=before.step, watched=before.watched)
    jax.tree.map(np.testing.assert_array_equal, same, before)
    record = read_json(tmp_path / 'whole' / 'summary.json')
    (event,) = record['events']
    assert (event['kind'], event['step']) == ('skip_step', SPIKE)
    assert 'standard deviations above the mean' in event['seen']
    assert (record['spikes'], record['skipped_steps']) == (1, 1)
    rows = timeless(tmp_path / 'whole')
    assert [row['step'] for row in rows if row.get('skipped')] == [SPIKE]
    for stop in (SPIKE, SPIKE + 2):
        with monkeypatch.context() as patch:
            before_step(patch, plant_at(SPIKE)[0])
            before_step(patch, terminate_at(stop))
            assert train(recipe, tmp_path / str(stop)) > SIGNALLED
        with monkeypatch.context() as patch:
            before_step(patch, plant_at(SPIKE)[0])
            assert train(recipe, tmp_path / str(stop)) == DONE
        assert timeless(tmp_path / str(stop)) == rows
        resumed = read_json(tmp_path / str(stop) / 'summary.json')
        assert [resumed[name] for name in ('spikes', 'skipped_steps', 'events')] == [1, 1, [event]]


def test_spike_ends_the_run(corpus, tmp_path, monkeypatch, capsys):
    """Status diverged, also with rollback, which is for numbers that are not finite."""
    before_step(monkeypatch, plant_at(SPIKE)[0])
    changes = {'train.on_spike': 'stop', 'train.on_divergence': 'rollback'}
    assert train(cell_config(tree(corpus), changes), tmp_path) == DIVERGED
    record = read_json(tmp_path / 'summary.json')
    assert (record['status'], record['diverged_step']) == ('diverged', SPIKE)
    assert record['reason'].startswith(f'step {SPIKE}: loss ')
    assert record['reason'].endswith('(train.on_spike=stop)')
    assert 'on_spike=stop' in capsys.readouterr().out


@pytest.mark.parametrize(
    'run_axis', [pytest.param(axis, marks=pytest.mark.full) for axis in ('loop', 'vmap')]
)
def test_sweep_runs_skip_alone(run_axis, corpus, tmp_path, monkeypatch):
    """One of three runs has a spike; the others have none."""
    before_step(monkeypatch, plant_at(SPIKE, slot=1)[0])
    seeds = [{'train.seed': seed} for seed in range(3)]
    sweep = tree(corpus, train_on_spike='skip', kernels_run_axis=run_axis)
    assert train_sweep(sweep, seeds, tmp_path) == DONE
    records = [summary(tmp_path, changes) for changes in seeds]
    assert [record['skipped_steps'] for record in records] == [0, 1, 0]
    assert [len(record['events']) for record in records] == [0, 1, 0]
    spiked = [
        [row['step'] for row in rows if row.get('spiked')] for rows in curves(tmp_path).values()
    ]
    assert spiked == [[], [SPIKE], []]
