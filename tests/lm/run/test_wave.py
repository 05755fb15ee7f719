"""Waves of a sweep: runs side by side that diverge, roll back, end early, or do not all fit.

Equivalence: what one run goes through, and how many train at once and where, changes no number of
another.
"""

import json
import re
import threading

import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.data import loader
from lm.record.checkpoints import Checkpoints
from lm.run.program import Program, find_max_runs
from lm.run.wave import Wave
from lm.study.train import groups
from tests.sweep_helpers import (
    MODES,
    RTOL,
    assert_close,
    assert_same_curves,
    base,
    before_step,
    cell_folders,
    changed,
    curves,
    poison_at,
    silent_experiment,
    statuses,
    summary,
    table,
    timeless,
    write_corpus,
)
from train import BAD_INPUT, DONE, train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

FIVE = [{'train.seed': seed} for seed in range(5)]
BAD = 1  # the index of the run that something happens to
ROLLBACK = {'train_on_divergence': 'rollback', 'train_checkpoint_every': 4}
ONE_DIVERGED = ['done', 'diverged', 'done', 'done', 'done']


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    text = write_corpus(tmp_path_factory.mktemp('corpus'))
    return text | {'train.checkpoint_every': 0}  # writing takes longer than training here


@pytest.fixture(scope='module')
def five(corpus, tmp_path_factory):
    """{how: workdir} of FIVE, all at once, on one device."""
    folder = tmp_path_factory.mktemp('five')
    for how in MODES:
        assert train_sweep(base(corpus, kernels_run_axis=how), FIVE, folder / how) == DONE
    return {how: folder / how for how in MODES}


def sizes_of_waves(monkeypatch) -> list[int]:
    """Of each wave that is opened from now on, and of each that goes on with fewer slots."""
    sizes: list[int] = []
    original = Wave.compile

    def compile_(wave):
        sizes.append(wave.size)
        original(wave)

    monkeypatch.setattr(Wave, 'compile', compile_)
    return sizes


def infinite_lr_at(step: int, slot: int = 0):
    """Of one run, at that step only, for `before_step`."""

    def act(wave):
        configs = [one.recipe for one in wave.slots]
        if wave.slots[slot].journal.step == step - 1:
            configs[slot] = update_recipe(configs[slot], {'optim.lr': np.inf})
        wave.hypers = wave.program.hypers(configs)

    return act


class TestDivergence:
    @pytest.mark.full
    @pytest.mark.parametrize('how', MODES)
    def test_a_nan_leaves_the_other_runs_bitwise_unchanged(
        self, how, five, corpus, tmp_path, capsys
    ):
        """The other sweep has a sane learning rate in its place."""
        listed = [one if i != BAD else {'optim.lr': 1e30} for i, one in enumerate(FIVE)]
        assert train_sweep(base(corpus, kernels_run_axis=how), listed, tmp_path) == DONE
        found, sane = list(curves(tmp_path).values()), list(curves(five[how]).values())
        assert found.pop(BAD) != sane.pop(BAD) and found == sane
        assert statuses(tmp_path) == ONE_DIVERGED
        record = summary(tmp_path, listed[BAD])
        assert record['diverged_step'] == 1
        assert re.fullmatch('step 1: loss .*, update_norm inf', record['reason'])
        assert table(tmp_path)[BAD]['reason'] == record['reason']
        assert '4 of 5 done, 1 diverged' in capsys.readouterr().out

    @pytest.mark.full
    def test_a_diverged_run_is_a_result_and_not_tried_again(self, corpus, tmp_path, monkeypatch):
        listed = [{'optim.lr': 1e30, **one} for one in FIVE]
        assert train_sweep(base(corpus), listed, tmp_path) == DONE
        monkeypatch.setattr(groups, 'Program', lambda *_: pytest.fail('made a program'))
        assert train_sweep(base(corpus), listed, tmp_path) == DONE
        assert statuses(tmp_path) == ['diverged'] * 5

    @pytest.mark.full
    @pytest.mark.parametrize(('how', 'step'), [('loop', 6), ('vmap', 8)])
    def test_rollback_of_a_run_is_that_of_the_run_alone(
        self, how, step, five, corpus, tmp_path, monkeypatch
    ):
        """Poisoned at a step within the interval of checkpoints, and at its end."""
        tree = base(corpus, **ROLLBACK, kernels_run_axis=how)
        with monkeypatch.context() as patch:
            before_step(patch, poison_at(step, BAD))
            assert train_sweep(tree, FIVE, tmp_path / 'sweep') == DONE
        before_step(monkeypatch, poison_at(step))
        assert train(changed(tree, FIVE[BAD]), tmp_path / 'alone') == DONE
        self.assert_as_alone(tmp_path, five[how], how)
        assert [e['kind'] for e in summary(tmp_path / 'sweep', FIVE[BAD])['events']] == ['rollback']

    def assert_as_alone(self, folder, undisturbed, how):
        """The run BAD is that of folder/alone, and the others are those of the undisturbed sweep,
        bit for bit.
        """
        found = list(curves(folder / 'sweep').values())
        others = list(curves(undisturbed).values())
        bad = found.pop(BAD)
        others.pop(BAD)
        assert found == others
        assert_close(bad, timeless(folder / 'alone'), 0.0 if how == 'loop' else RTOL)

    @pytest.mark.full
    def test_rollback_without_a_checkpoint_ends_that_run_alone(
        self, five, corpus, tmp_path, monkeypatch
    ):
        before_step(monkeypatch, poison_at(2, BAD))
        tree = base(corpus, **ROLLBACK)
        assert train_sweep(tree, FIVE, tmp_path) == DONE
        assert statuses(tmp_path) == ONE_DIVERGED
        assert 'no checkpoint to roll back to' in summary(tmp_path, FIVE[BAD])['reason']

    @pytest.mark.full
    def test_skip_step_of_a_run_is_that_of_the_run_alone(self, five, corpus, tmp_path, monkeypatch):
        """The learning rate is infinite at step 6 only: that step changes nothing but the count."""
        tree = base(corpus, train_on_divergence='skip_step')
        with monkeypatch.context() as patch:
            before_step(patch, infinite_lr_at(6, BAD))
            assert train_sweep(tree, FIVE, tmp_path / 'sweep') == DONE
        before_step(monkeypatch, infinite_lr_at(6))
        assert train(changed(tree, FIVE[BAD]), tmp_path / 'alone') == DONE
        found = list(curves(tmp_path / 'sweep').values())
        assert found[BAD] == timeless(tmp_path / 'alone')
        skipped = [[row['skipped'] for row in rows if 'skipped' in row] for rows in found]
        assert skipped.pop(BAD) == [0.0] * 5 + [1.0] + [0.0] * 2 and skipped == [[0.0] * 8] * 4
        events = [summary(tmp_path / 'sweep', one)['events'] for one in FIVE]
        (event,) = events.pop(BAD)
        assert (event['kind'], event['step']) == ('skip_step', 6) and events == [[]] * 4
        ce = [[one['ce'] for one in table(path)] for path in (tmp_path / 'sweep', five['loop'])]
        assert ce[0][:BAD] + ce[0][BAD + 1 :] == pytest.approx(ce[1][:BAD] + ce[1][BAD + 1 :], RTOL)

    @pytest.mark.full
    def test_skip_step_gives_up_on_one_run_alone(self, corpus, tmp_path, monkeypatch):
        before_step(monkeypatch, poison_at(2, BAD))
        tree = base(corpus, train_on_divergence='skip_step')
        assert train_sweep(tree, FIVE, tmp_path) == DONE
        assert statuses(tmp_path) == ONE_DIVERGED
        record = summary(tmp_path, FIVE[BAD])
        assert '5 steps in a row skipped' in record['reason'] and record['diverged_step'] == 6
        assert [event['kind'] for event in record['events']] == ['skip_step'] * 5


def takes(monkeypatch) -> list[tuple[loader.Feed, list[int], int]]:
    """(feed, batch of each run, batches begun) of every step that a wave makes from now on."""
    seen, original = [], loader.Feed.take

    def take(feed, places):
        batches = original(feed, places)
        seen.append((feed, [place.index for place in places], len(feed._futures)))
        return batches

    monkeypatch.setattr(loader.Feed, 'take', take)
    return seen


class TestBatches:
    @pytest.mark.full
    def test_are_made_ahead_and_once_for_all_runs_of_one_order(self, corpus, tmp_path, monkeypatch):
        """Two orders of the text, one of which three runs share; and no thread is left over."""
        made, original = [], loader.batch_at

        def batch_at(rows, step, *, seed, **how):
            made.append(
                (seed, step, threading.current_thread().name.startswith(loader.THREAD_PREFIX))
            )
            return original(rows, step, seed=seed, **how)

        monkeypatch.setattr(loader, 'batch_at', batch_at)
        seen = takes(monkeypatch)
        listed = [*FIVE[:3], {'data.seed': 1}]
        assert train_sweep(base(corpus, data_prefetch=4), listed, tmp_path) == DONE
        assert sorted(made) == [(seed, step, True) for seed in (0, 1) for step in range(8)]
        assert [begun for _, _, begun in seen] == [6] * 6 + [4, 2]  # those of this step included
        assert not [
            one for one in threading.enumerate() if one.name.startswith(loader.THREAD_PREFIX)
        ]

    @pytest.mark.full
    def test_of_a_run_that_has_ended_are_not_made(self, corpus, tmp_path, monkeypatch):
        seen = takes(monkeypatch)
        assert train_sweep(base(corpus), [{'train.steps': 4}, {}], tmp_path) == DONE
        taken = [indices for _, indices, _ in seen]
        assert taken == [[step, step] for step in range(4)] + [[step] for step in range(4, 8)]


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_written_ends_that_run_alone(
    five, corpus, tmp_path, monkeypatch, capsys
):
    original = Checkpoints.save

    def save(checkpoints, state, *record):
        if checkpoints.workdir == cell_folders(tmp_path)[json.dumps(FIVE[BAD])]:
            raise OSError('no space left')
        original(checkpoints, state, *record)

    monkeypatch.setattr(Checkpoints, 'save', save)
    assert train_sweep(base(corpus), FIVE, tmp_path) == BAD_INPUT
    assert statuses(tmp_path) == ['done', 'failed', 'done', 'done', 'done']
    assert 'FAILED: OSError: ' in (said := capsys.readouterr().out) and 'no space left' in said
    assert_same_curves(tmp_path, five['loop'])


class TestWaves:
    @pytest.mark.full
    @pytest.mark.parametrize('how', MODES)
    def test_runs_at_once_changes_no_number(self, how, five, corpus, tmp_path, monkeypatch):
        sizes = sizes_of_waves(monkeypatch)
        tree = base(corpus, kernels_run_axis=how)
        assert train_sweep(tree, FIVE, tmp_path, runs_at_once=2) == DONE
        assert sizes == [2, 2, 2]
        assert_same_curves(tmp_path, five[how], 0.0 if how == 'loop' else RTOL)

    @pytest.mark.full
    def test_a_group_that_does_not_fit_goes_in_waves(
        self, five, corpus, tmp_path, monkeypatch, capsys
    ):
        """Of memory for two runs, as the compiler itself reports it."""
        tree = base(corpus)
        program = Program(silent_experiment(changed(tree, {})), 'loop')
        needed = program.memory_bytes(2)
        assert 0 < needed < program.memory_bytes(5)
        monkeypatch.setattr(groups, 'device_memory_bytes', lambda: needed)
        sizes = sizes_of_waves(monkeypatch)
        assert train_sweep(tree, FIVE, tmp_path) == DONE
        assert sizes == [2, 2, 2]
        assert '3 waves of 2 runs, ' in capsys.readouterr().out
        assert_same_curves(tmp_path, five['loop'])

    def test_devices_of_a_host_share_its_memory(self, corpus, monkeypatch):
        """On a CPU a wave may use of each device what is left when all do so."""
        setting = silent_experiment(changed(base(corpus, mesh_run=4), {}), runs=4)
        program = Program(setting, 'loop')
        monkeypatch.setattr(program, 'memory_bytes', lambda slots: slots * 100)
        monkeypatch.setattr(groups, 'device_memory_bytes', lambda: 4 * 800)
        assert groups.count_slots(program, 16, 0, lambda text: None) == 8
        program.shares_memory = False
        assert groups.count_slots(program, 16, 0, lambda text: None) == 16

    @pytest.mark.full
    def test_a_run_that_does_not_fit_fails_with_what_to_do(
        self, corpus, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(groups, 'device_memory_bytes', lambda: 10_000)
        assert train_sweep(base(corpus), FIVE[:2], tmp_path) == BAD_INPUT
        assert statuses(tmp_path) == ['failed', 'failed']
        for record in table(tmp_path):
            assert '1 runs need 0.00 GB a device' in record['reason']
            assert 'Make the model or data.batch_size smaller' in record['reason']
        assert 'FAILED: ValueError: 1 runs need' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('wanted', 'multiple', 'limit', 'runs', 'tries'),
    [
        (5, 1, 600, 5, [5]),  # as memory is 100 + 100 a run
        (5, 1, 599, 4, [5, 4]),
        (100, 1, 1000, 9, [100, 9]),
        (100, 1, 200, 1, [100, 1]),
        (5, 4, 900, 8, [8]),
        (5, 4, 899, 4, [8, 4]),
        (10, 4, 1000, 8, [12, 8]),
        (10, 4, 800, 4, [12, 4]),  # 7 would, and is no multiple
    ],
)
def test_the_most_runs_that_fit_are_found_in_few_tries(wanted, multiple, limit, runs, tries):
    asked = []

    def bytes_for(n):
        asked.append(n)
        return 100 + 100 * n

    assert find_max_runs(wanted, multiple, limit, bytes_for) == runs and asked == tries


def test_not_even_one_run_fits():
    with pytest.raises(ValueError, match=r'4 runs need 5\.00 GB a device, and there are 4\.00 GB'):
        find_max_runs(16, 4, 4e9, lambda n: (1 + n) * 1e9)


@pytest.mark.full
def test_a_mesh_of_runs_and_data_changes_no_number(five, corpus, tmp_path, monkeypatch):
    """Five runs on four times two devices: five slots of eight are empty."""
    sizes = sizes_of_waves(monkeypatch)
    tree = base(corpus, mesh_run=4, mesh_data=2, kernels_run_axis='vmap')
    assert train_sweep(tree, FIVE, tmp_path) == DONE
    assert sizes == [8]
    assert_same_curves(tmp_path, five['vmap'], RTOL)


class TestCompaction:
    """A wave of which most runs have ended goes on with fewer slots."""

    SWEEP = (  # two go on for long, and neither is first
        {'train.seed': 0, 'train.steps': 4},
        {'train.seed': 1},  # BAD
        {'train.seed': 2, 'train.steps': 12},
        {'train.seed': 3, 'train.steps': 4},
        {'train.seed': 4, 'train.steps': 12},
    )

    def sweep(self, corpus, workdir, monkeypatch, how: str, compile_sec: float) -> list[int]:
        """The sizes that its waves have."""
        with monkeypatch.context() as patch:
            pretended = property(lambda program: compile_sec, lambda program, seconds: None)
            patch.setattr(Program, 'compile_sec', pretended, raising=False)
            before_step(patch, poison_at(3, BAD))
            sizes = sizes_of_waves(patch)
            assert train_sweep(base(corpus, kernels_run_axis=how), self.SWEEP, workdir) == DONE
        assert statuses(workdir) == ONE_DIVERGED
        return sizes

    @pytest.mark.full
    def test_saves_slots_and_changes_no_number(self, corpus, tmp_path, monkeypatch):
        cheap, dear = tmp_path / 'cheap', tmp_path / 'dear'
        assert self.sweep(corpus, cheap, monkeypatch, 'vmap', compile_sec=0.0) == [5, 2]
        assert self.sweep(corpus, dear, monkeypatch, 'vmap', compile_sec=1e9) == [5]
        assert_same_curves(cheap, dear, RTOL)

    @pytest.mark.full
    def test_a_loop_has_no_need_of_it(self, corpus, tmp_path, monkeypatch):
        assert self.sweep(corpus, tmp_path, monkeypatch, 'loop', compile_sec=0.0) == [5]
