"""train.seconds: the steps that it sets, a run that resumes with them, and refusals.

Equivalence: the run is, bit for bit, the run of as many train.steps; timing its steps before leaves
no trace. Times are replaced by set ones.
"""

import shutil
from pathlib import Path

import pytest

from lm.config.resolve import resolve, to_dict
from lm.run import runs, start, time_budget
from lm.run.program import Experiment, Program, open_text
from lm.run.wave import Wave
from lm.storage.files import discard_line, read_json
from lm.study.plan.protocols import resolve_protocol
from tests.commands import tiny
from tests.killed import KilledBeforeStep
from tests.sweep_helpers import base, before_step, timeless
from train import DONE, train

pytestmark = pytest.mark.usefixtures('programs_once')
SECONDS = {'train_steps': 500, 'train_seconds': 12.5}


def set_step_time(monkeypatch, seconds):
    """Sets the time that a step is found to take; the steps are made all the same."""
    measure = time_budget.time_step

    def time_step(recipe, program, min_sec):
        assert measure(recipe, program, 0.0) > 0
        return seconds

    monkeypatch.setattr(time_budget, 'time_step', time_step)


@pytest.fixture(scope='module')
def budget_run(corpus, tmp_path_factory):
    """Returns the workdir of a run with steps of one second, killed at step 7; read only."""
    workdir = tmp_path_factory.mktemp('budget') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        set_step_time(patch, 1.0)

        def kill(wave):
            journal = wave.slots[0].journal
            if (journal.workdir, journal.step) == (workdir, 6):
                raise KilledBeforeStep

        before_step(patch, kill)
        with pytest.raises(KilledBeforeStep):
            train(tiny(corpus, **SECONDS), workdir)
    return workdir


def test_budget_run_equals_run_with_its_steps(corpus, budget_run, whole, tmp_path, monkeypatch):
    """It resumes after a kill with the steps of its start, without timing them again."""
    monkeypatch.setattr(time_budget, 'time_step', lambda *_: pytest.fail('timed again'))
    workdir = Path(shutil.copytree(budget_run, tmp_path / 'run'))
    assert read_json(workdir / 'config.json')['train']['steps'] == 12
    assert train(tiny(corpus, **SECONDS), workdir) == DONE
    assert timeless(workdir) == timeless(whole)
    assert train(tiny(corpus, **SECONDS), workdir) == DONE  # finished


@pytest.mark.full
def test_another_budget_counts_the_whole_run(corpus, budget_run, tmp_path, monkeypatch):
    set_step_time(monkeypatch, 0.5)
    workdir = Path(shutil.copytree(budget_run, tmp_path / 'run'))
    changed = tiny(corpus, **SECONDS | {'train_seconds': 7.5})
    with pytest.raises(ValueError, match=r'train\.seconds: 12\.5 -> 7\.5'):
        train(changed, workdir)
    assert train(changed, workdir, continue_changed=True) == DONE
    config = read_json(workdir / 'config.json')['train']
    assert (config['steps'], config['seconds']) == (15, 7.5)
    assert timeless(workdir)[-1]['step'] == 15


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'train_seconds': 0.5}, r'shorter than one step, which takes 1 s'),
        ({'train_seconds': 1e6}, 'data.epochs'),
    ],
)
def test_budget_must_fit(corpus, tmp_path, monkeypatch, changes, message):
    set_step_time(monkeypatch, 1.0)
    with pytest.raises(ValueError, match=message):
        train(tiny(corpus, **SECONDS | changes), tmp_path / 'run')
    assert not (tmp_path / 'run' / 'config.json').exists()


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'train_stages': '0.5: batch_size=4; 1:'}, r'train\.stages=.* changes them'),
        ({'train_branch_from': 'runs/a@10'}, 'train.branch_from=runs/a@10 continues one'),
    ],
)
def test_refusals(corpus, changes, message):
    with pytest.raises(ValueError, match=message):
        start.check_run(tiny(corpus, **SECONDS | changes))


def test_branch_does_not_follow_the_budget():
    assert 'train.seconds' in start.NOT_FOLLOWED


def test_timing_leaves_no_folder(corpus, tmp_path, monkeypatch):
    """The run that is thrown away leaves nothing. Timed are 1, 2, 4, ... steps after the first."""
    recipe, dispatched = tiny(corpus, **SECONDS), []
    program = Program(Experiment(recipe, open_text(recipe, discard_line), discard_line))
    monkeypatch.setattr(time_budget.tempfile, 'tempdir', str(tmp_path))
    before_step(monkeypatch, lambda wave: dispatched.append(wave.slots[0].journal.workdir.exists()))
    train_steps, seconds = time_budget._train_steps, iter([9.0, 1.0, 2.0, 6.0])
    monkeypatch.setattr(
        time_budget, '_train_steps', lambda *args: train_steps(*args) and next(seconds)
    )
    assert time_budget.time_step(recipe, program, 5.0) == 6 / 4
    assert dispatched == [True] * (1 + 1 + 2 + 4)
    assert list(tmp_path.iterdir()) == []


def test_divergence_while_timed_is_said(corpus, monkeypatch):
    recipe = tiny(corpus, **SECONDS)
    program = Program(Experiment(recipe, open_text(recipe, discard_line), discard_line))

    dispatch = Wave.dispatch

    def diverge(wave):
        dispatch(wave)
        wave.slots[0].status = runs.Status.DIVERGED

    monkeypatch.setattr(Wave, 'dispatch', diverge)
    with pytest.raises(ValueError, match='diverged while its first steps were timed'):
        time_budget.time_step(recipe, program, 60.0)


def test_sweep_has_equal_time(corpus):
    sweep = {'optim.lr': (1e-3, 2e-3)}
    protocol = resolve_protocol(base(corpus, **SECONDS), sweep)
    assert (protocol.name, protocol.options) == ('equal_time', {'hours': 12.5 / 3600})
    assert resolve_protocol(base(corpus), sweep) is None
    with pytest.raises(ValueError, match=r'train\.seconds=12\.5 and sweep\.protocol=equal_tokens'):
        resolve_protocol(base(corpus, **SECONDS), sweep | {'protocol': 'equal_tokens'})
    with pytest.raises(ValueError, match=r'determines train\.seconds'):
        resolve_protocol(base(corpus, **SECONDS), {'train.seconds': (1.0, 2.0)})


def test_missed_budget_is_said(corpus):
    recipe = resolve(to_dict(tiny(corpus, train_steps=100, train_seconds=10.0)))
    assert runs.describe_budget(recipe, 10.4) == runs.describe_budget(recipe, 9.6) == []
    (line,) = runs.describe_budget(recipe, 12.0)
    assert 'train.seconds=10, but the 100 steps took 12 s' in line
    assert runs.describe_budget(tiny(corpus), 12.0) == []
