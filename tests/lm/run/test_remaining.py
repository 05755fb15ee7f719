"""Reference tests of the time that a run still needs, with an invented clock."""

import types

import pytest

from lm.run.journal import Journal
from lm.run.remaining import DIAGNOSIS, EVALUATION, SAVING, RemainingTime, count_due
from lm.run.wave import Wave
from tests.helpers import tiny_config


@pytest.mark.parametrize('interval', [0, 1, 3, 5, 12, 50])
@pytest.mark.parametrize('steps', [1, 10, 12])
def test_due_work_is_counted_as_a_journal_does(interval, steps):
    journal = types.SimpleNamespace(recipe=tiny_config({'train.steps': steps}))
    due = []
    for step in range(1, steps + 1):
        journal.step, journal.is_finished = step, step >= steps
        if Journal._is_at(journal, interval):
            due.append(step)
    for step in range(steps + 1):
        assert count_due(interval, step, steps) == sum(due_step > step for due_step in due)


def make_remaining(**changes):
    train = {'steps': 100, 'eval_every': 20, 'checkpoint_every': 50, 'diagnose_every': 0}
    recipe = tiny_config({f'train.{name}': value for name, value in (train | changes).items()})
    return RemainingTime(recipe)


def test_first_evaluation_does_not_count():
    """The first evaluation took 9 s, most of it compilation; the second took 2 s."""
    remaining = make_remaining()
    assert remaining.estimate(10, 0.5) == 45.0
    remaining.record(EVALUATION, 9.0)
    assert remaining.estimate(30, 0.5) == 35.0
    remaining.record(EVALUATION, 2.0)
    assert remaining.estimate(50, 0.5) == 25.0 + 3 * 2.0  # at 60, 80 and 100
    assert remaining.estimate(80, 0.5) == 10.0 + 2 * 2.0  # the row precedes the work of its step
    for sec in (5.0, 3.0):
        remaining.record(SAVING, sec)
    assert remaining.estimate(60, 0.5) == 20.0 + 3 * 2.0 + 3.0


def test_diagnosis_counts_only_if_it_is_due():
    for interval, expected in ((0, 10.0), (25, 10.0 + 4 * 7.0)):
        remaining = make_remaining(diagnose_every=interval)
        for sec in (9.0, 7.0):
            remaining.record(DIAGNOSIS, sec)
        assert remaining.estimate(20, 0.125) == expected


def test_wave_records_time_beside_steps(monkeypatch):
    """Catches work without a kind, and time that counts for a run that has ended."""
    times = iter([10.0, 13.0, 20.0, 25.0])
    monkeypatch.setattr('lm.run.wave.time.perf_counter', lambda: next(times))
    clock = types.SimpleNamespace(pause=lambda: None, resume=lambda: None)
    recorded = []
    remaining = types.SimpleNamespace(record=lambda *pair: recorded.append(pair))
    journal = types.SimpleNamespace(throughput=clock, remaining=remaining)
    slots = [types.SimpleNamespace(journal=journal), None]
    wave = types.SimpleNamespace(active_slots=[0], slots=slots)
    with Wave._pause_clocks(wave, EVALUATION):
        pass
    with Wave._pause_clocks(wave):  # a trace
        pass
    assert recorded == [(EVALUATION, 3.0)]
