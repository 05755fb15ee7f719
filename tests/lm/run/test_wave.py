"""Waves of a sweep: runs side by side that diverge, roll back, end early, or do not all fit.

Equivalence: the events of one run, and how many runs train at once and where, change no number of
another run.
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
    cell_config,
    cell_folders,
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
    """Returns {run axis: workdir} of FIVE, all at once, on one device."""
    folder = tmp_path_factory.mktemp('five')
    for run_axis in MODES:
        assert train_sweep(base(corpus, kernels_run_axis=run_axis), FIVE, folder / run_axis) == DONE
    return {run_axis: folder / run_axis for run_axis in MODES}


def record_wave_sizes(monkeypatch) -> list[int]:
    """Records the size of each wave that is opened from now on, and of each that is compacted."""
    sizes: list[int] = []
    original = Wave.compile

    def compile_(wave):
        sizes.append(wave.size)
        original(wave)

    monkeypatch.setattr(Wave, 'compile', compile_)
    return sizes


def infinite_lr_at(step: int, slot: int = 0):
    """Makes the learning rate of one run infinite at one step, for `before_step`."""

    def set_lr(wave):
        configs = [run_slot.recipe for run_slot in wave.slots]
        if wave.slots[slot].journal.step == step - 1:
            configs[slot] = update_recipe(configs[slot], {'optim.lr': np.inf})
        wave.hypers = wave.program.stack_hypers(configs)

    return set_lr


class TestDivergenceInWave:
    @pytest.mark.full
    @pytest.mark.parametrize('run_axis', MODES)
    def test_nan_does_not_change_other_runs(self, run_axis, five, corpus, tmp_path, capsys):
        """The other sweep has a sane learning rate in its place."""
        listed = [changes if i != BAD else {'optim.lr': 1e30} for i, changes in enumerate(FIVE)]
        assert train_sweep(base(corpus, kernels_run_axis=run_axis), listed, tmp_path) == DONE
        found_curves, sane = list(curves(tmp_path).values()), list(curves(five[run_axis]).values())
        assert found_curves.pop(BAD) != sane.pop(BAD) and found_curves == sane
        assert statuses(tmp_path) == ONE_DIVERGED
        record = summary(tmp_path, listed[BAD])
        assert record['diverged_step'] == 1
        assert re.fullmatch('step 1: loss .*, update_norm inf', record['reason'])
        assert table(tmp_path)[BAD]['reason'] == record['reason']
        assert '4 of 5 done, 1 diverged' in capsys.readouterr().out

    @pytest.mark.full
    def test_diverged_run_is_not_tried_again(self, corpus, tmp_path, monkeypatch):
        listed = [{'optim.lr': 1e30, **changes} for changes in FIVE]
        assert train_sweep(base(corpus), listed, tmp_path) == DONE
        monkeypatch.setattr(groups, 'Program', lambda *_: pytest.fail('made a program'))
        assert train_sweep(base(corpus), listed, tmp_path) == DONE
        assert statuses(tmp_path) == ['diverged'] * 5

    @pytest.mark.full
    @pytest.mark.parametrize(('run_axis', 'step'), [('loop', 6), ('vmap', 8)])
    def test_rollback_equals_single_run(self, run_axis, step, five, corpus, tmp_path, monkeypatch):
        """Poisoned at a step within the interval of checkpoints, and at its end."""
        tree = base(corpus, **ROLLBACK, kernels_run_axis=run_axis)
        with monkeypatch.context() as patch:
            before_step(patch, poison_at(step, BAD))
            assert train_sweep(tree, FIVE, tmp_path / 'sweep') == DONE
        before_step(monkeypatch, poison_at(step))
        assert train(cell_config(tree, FIVE[BAD]), tmp_path / 'alone') == DONE
        self.assert_as_alone(tmp_path, five[run_axis], run_axis)
        assert [e['kind'] for e in summary(tmp_path / 'sweep', FIVE[BAD])['events']] == ['rollback']

    def assert_as_alone(self, folder, undisturbed, run_axis):
        """Compares the run BAD with the run in folder/alone, and the other runs bitwise with the
        undisturbed sweep.
        """
        sweep_curves = list(curves(folder / 'sweep').values())
        undisturbed_curves = list(curves(undisturbed).values())
        bad_curve = sweep_curves.pop(BAD)
        undisturbed_curves.pop(BAD)
        assert sweep_curves == undisturbed_curves
        assert_close(bad_curve, timeless(folder / 'alone'), 0.0 if run_axis == 'loop' else RTOL)

    @pytest.mark.full
    def test_rollback_without_checkpoint_ends_that_run_alone(
        self, five, corpus, tmp_path, monkeypatch
    ):
        before_step(monkeypatch, poison_at(2, BAD))
        tree = base(corpus, **ROLLBACK)
        assert train_sweep(tree, FIVE, tmp_path) == DONE
        assert statuses(tmp_path) == ONE_DIVERGED
        assert 'no checkpoint to roll back to' in summary(tmp_path, FIVE[BAD])['reason']

    @pytest.mark.full
    def test_skip_step_equals_single_run(self, five, corpus, tmp_path, monkeypatch):
        """The learning rate is infinite at step 6 only: that step changes nothing but the count."""
        tree = base(corpus, train_on_divergence='skip_step')
        with monkeypatch.context() as patch:
            before_step(patch, infinite_lr_at(6, BAD))
            assert train_sweep(tree, FIVE, tmp_path / 'sweep') == DONE
        before_step(monkeypatch, infinite_lr_at(6))
        assert train(cell_config(tree, FIVE[BAD]), tmp_path / 'alone') == DONE
        sweep_curves = list(curves(tmp_path / 'sweep').values())
        assert sweep_curves[BAD] == timeless(tmp_path / 'alone')
        skipped = [[row['skipped'] for row in rows if 'skipped' in row] for rows in sweep_curves]
        assert skipped.pop(BAD) == [0.0] * 5 + [1.0] + [0.0] * 2 and skipped == [[0.0] * 8] * 4
        events = [summary(tmp_path / 'sweep', record)['events'] for record in FIVE]
        (event,) = events.pop(BAD)
        assert (event['kind'], event['step']) == ('skip_step', 6) and events == [[]] * 4
        ce = [
            [record['ce'] for record in table(path)] for path in (tmp_path / 'sweep', five['loop'])
        ]
        assert ce[0][:BAD] + ce[0][BAD + 1 :] == pytest.approx(ce[1][:BAD] + ce[1][BAD + 1 :], RTOL)

    @pytest.mark.full
    def test_skip_step_ends_one_run_alone(self, corpus, tmp_path, monkeypatch):
        before_step(monkeypatch, poison_at(2, BAD))
        tree = base(corpus, train_on_divergence='skip_step')
        assert train_sweep(tree, FIVE, tmp_path) == DONE
        assert statuses(tmp_path) == ONE_DIVERGED
        record = summary(tmp_path, FIVE[BAD])
        assert '5 steps in a row were skipped' in record['reason'] and record['diverged_step'] == 6
        assert [event['kind'] for event in record['events']] == ['skip_step'] * 5


def record_takes(monkeypatch) -> list[tuple[loader.Feed, list[int], int]]:
    """Records (feed, batch of each run, batches begun) of every step of a wave from now on."""
    calls, original = [], loader.Feed.take

    def take(feed, places):
        batches = original(feed, places)
        calls.append((feed, [place.index for place in places], len(feed._futures)))
        return batches

    monkeypatch.setattr(loader.Feed, 'take', take)
    return calls


class TestBatches:
    @pytest.mark.full
    def test_batches_are_made_ahead_and_shared(self, corpus, tmp_path, monkeypatch):
        """Uses two orders of the text, one shared by three runs; no thread is left over."""
        built, original = [], loader.batch_at

        def batch_at(rows, step, *, seed, **options):
            built.append(
                (seed, step, threading.current_thread().name.startswith(loader.THREAD_PREFIX))
            )
            return original(rows, step, seed=seed, **options)

        monkeypatch.setattr(loader, 'batch_at', batch_at)
        calls = record_takes(monkeypatch)
        listed = [*FIVE[:3], {'data.seed': 1}]
        assert train_sweep(base(corpus, data_prefetch=4), listed, tmp_path) == DONE
        assert sorted(built) == [(seed, step, True) for seed in (0, 1) for step in range(8)]
        assert [begun for _, _, begun in calls] == [6] * 6 + [4, 2]  # those of this step included
        assert not [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith(loader.THREAD_PREFIX)
        ]

    @pytest.mark.full
    def test_finished_run_makes_no_batches(self, corpus, tmp_path, monkeypatch):
        calls = record_takes(monkeypatch)
        assert train_sweep(base(corpus), [{'train.steps': 4}, {}], tmp_path) == DONE
        batch_indices = [indices for _, indices, _ in calls]
        assert batch_indices == [[step, step] for step in range(4)] + [
            [step] for step in range(4, 8)
        ]


@pytest.mark.full
def test_failed_checkpoint_ends_that_run_alone(five, corpus, tmp_path, monkeypatch, capsys):
    original = Checkpoints.save

    def save(checkpoints, state, *record):
        if checkpoints.workdir == cell_folders(tmp_path)[json.dumps(FIVE[BAD])]:
            raise OSError('no space left')
        original(checkpoints, state, *record)

    monkeypatch.setattr(Checkpoints, 'save', save)
    assert train_sweep(base(corpus), FIVE, tmp_path) == BAD_INPUT
    assert statuses(tmp_path) == ['done', 'failed', 'done', 'done', 'done']
    assert (
        'FAILED: OSError: ' in (printed := capsys.readouterr().out) and 'no space left' in printed
    )
    assert_same_curves(tmp_path, five['loop'])


class TestWaves:
    @pytest.mark.full
    @pytest.mark.parametrize('run_axis', MODES)
    def test_runs_at_once_change_no_number(self, run_axis, five, corpus, tmp_path, monkeypatch):
        sizes = record_wave_sizes(monkeypatch)
        tree = base(corpus, kernels_run_axis=run_axis)
        assert train_sweep(tree, FIVE, tmp_path, runs_at_once=2) == DONE
        assert sizes == [2, 2, 2]
        assert_same_curves(tmp_path, five[run_axis], 0.0 if run_axis == 'loop' else RTOL)

    @pytest.mark.full
    def test_large_group_trains_in_waves(self, five, corpus, tmp_path, monkeypatch, capsys):
        """Memory for two runs, as reported by the compiler."""
        tree = base(corpus)
        program = Program(silent_experiment(cell_config(tree, {})), 'loop')
        memory = program.memory_bytes(2)
        assert 0 < memory < program.memory_bytes(5)
        monkeypatch.setattr(groups, 'device_memory_bytes', lambda: memory)
        sizes = record_wave_sizes(monkeypatch)
        assert train_sweep(tree, FIVE, tmp_path) == DONE
        assert sizes == [2, 2, 2]
        assert '3 waves of up to 2 runs ' in capsys.readouterr().out
        assert_same_curves(tmp_path, five['loop'])

    def test_devices_share_host_memory(self, corpus, monkeypatch):
        """Each CPU device may use an equal share of the host's memory."""
        experiment = silent_experiment(cell_config(base(corpus, mesh_run=4), {}), runs=4)
        program = Program(experiment, 'loop')
        monkeypatch.setattr(program, 'memory_bytes', lambda slots: slots * 100)
        monkeypatch.setattr(groups, 'device_memory_bytes', lambda: 4 * 800)
        assert groups.count_slots(program, 16, 0, lambda text: None) == 8
        program.shares_memory = False
        assert groups.count_slots(program, 16, 0, lambda text: None) == 16

    @pytest.mark.full
    def test_oversized_run_fails_with_advice(self, corpus, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(groups, 'device_memory_bytes', lambda: 10_000)
        assert train_sweep(base(corpus), FIVE[:2], tmp_path) == BAD_INPUT
        assert statuses(tmp_path) == ['failed', 'failed']
        for record in table(tmp_path):
            assert '1 run needs 0.00 GB per device' in record['reason']
            assert 'Make the model or data.batch_size smaller' in record['reason']
        assert 'FAILED: ValueError: 1 run needs' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('max_runs', 'multiple', 'limit', 'runs', 'tries'),
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
def test_max_runs_are_found_in_few_tries(max_runs, multiple, limit, runs, tries):
    calls = []

    def bytes_for(n):
        calls.append(n)
        return 100 + 100 * n

    assert find_max_runs(max_runs, multiple, limit, bytes_for) == runs and calls == tries


def test_find_max_runs_raises_if_none_fits():
    with pytest.raises(ValueError, match=r'4 runs need 5\.00 GB per device, but 4\.00 GB are'):
        find_max_runs(16, 4, 4e9, lambda n: (1 + n) * 1e9)


@pytest.mark.full
def test_run_and_data_mesh_changes_no_number(five, corpus, tmp_path, monkeypatch):
    """Five runs on four times two devices: three slots of eight are empty."""
    sizes = record_wave_sizes(monkeypatch)
    tree = base(corpus, mesh_run=4, mesh_data=2, kernels_run_axis='vmap')
    assert train_sweep(tree, FIVE, tmp_path) == DONE
    assert sizes == [8]
    assert_same_curves(tmp_path, five['vmap'], RTOL)


class TestCompaction:
    """A wave continues with fewer slots once most runs have ended."""

    SWEEP = (  # two go on for long, and neither is first
        {'train.seed': 0, 'train.steps': 4},
        {'train.seed': 1},  # BAD
        {'train.seed': 2, 'train.steps': 12},
        {'train.seed': 3, 'train.steps': 4},
        {'train.seed': 4, 'train.steps': 12},
    )

    def sweep(self, corpus, workdir, monkeypatch, run_axis: str, compile_sec: float) -> list[int]:
        """Returns the sizes of its waves."""
        with monkeypatch.context() as patch:
            fake_compile_sec = property(lambda program: compile_sec, lambda program, seconds: None)
            patch.setattr(Program, 'compile_sec', fake_compile_sec, raising=False)
            before_step(patch, poison_at(3, BAD))
            sizes = record_wave_sizes(patch)
            assert train_sweep(base(corpus, kernels_run_axis=run_axis), self.SWEEP, workdir) == DONE
        assert statuses(workdir) == ONE_DIVERGED
        return sizes

    @pytest.mark.full
    def test_compaction_changes_no_number(self, corpus, tmp_path, monkeypatch):
        cheap, dear = tmp_path / 'cheap', tmp_path / 'dear'
        assert self.sweep(corpus, cheap, monkeypatch, 'vmap', compile_sec=0.0) == [5, 2]
        assert self.sweep(corpus, dear, monkeypatch, 'vmap', compile_sec=1e9) == [5]
        assert_same_curves(cheap, dear, RTOL)

    @pytest.mark.full
    def test_loop_is_not_compacted(self, corpus, tmp_path, monkeypatch):
        assert self.sweep(corpus, tmp_path, monkeypatch, 'loop', compile_sec=0.0) == [5]
