"""Reference tests of the estimated time of a tuned sweep, with invented times of programs."""

import pytest

from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import program_key
from lm.study.train.costs import StudyCosts
from lm.study.train.throughput import ProgramCost, program_digest
from tests.helpers import tiny_config, tiny_raw


@pytest.mark.parametrize(('interval', 'evaluations'), [(0, 1), (30, 4), (50, 2), (1000, 1)])
def test_runs_include_their_evaluations(interval, evaluations):
    recipe = tiny_config({'train.steps': 100, 'train.eval_every': interval})
    cost = ProgramCost(0.1, 4.0, 30.0)
    assert cost.estimate_run_sec(recipe) == pytest.approx(10.0 + 4.0 * evaluations)
    assert ProgramCost(0.1).estimate_run_sec(recipe) == pytest.approx(10.0)


@pytest.fixture
def cells():
    """Returns a cell of two arms, whose programs differ."""
    raw = tiny_raw({'train.steps': 100, 'train.eval_every': 50})
    return ArmPlan(raw, {'optim.name': ('adamw', 'lion')}, {'optim.lr': 0.01}).first_cells


@pytest.fixture
def costs(cells):
    study_costs = StudyCosts(cells)
    first, second = map(program_digest, cells)
    study_costs.by_program = {
        first: ProgramCost(0.1, 5.0, 30.0),
        second: ProgramCost(0.2, 5.0, 40.0),
    }
    return study_costs


def test_each_program_is_compiled_once(cells, costs):
    assert costs.run_sec == pytest.approx([20.0, 30.0])
    assert costs.estimate_compile_sec([*cells, *cells]) == 70.0
    assert costs.estimate_compile_sec(cells, {program_key(cells[0]): 'program'}) == 40.0
    assert costs.estimate_compile_sec(cells, map(program_key, cells)) == 0.0
    costs.by_program[program_digest(cells[1])] = ProgramCost(0.2)  # of an older version
    assert costs.estimate_compile_sec(cells) is None


def test_waves_correct_the_estimate(cells, costs):
    """Two runs of each arm were estimated at 100 s, and 70 s to compile; the wave took 340 s."""
    costs.record_wave([(cell, 1.0) for cell in (*cells, *cells)], 70.0, 340.0)
    assert costs.factor == pytest.approx(2.0)
    assert costs.run_sec == pytest.approx([40.0, 60.0])
    costs.record_wave([(cells[0], 0.5)], 0.0, 40.0)  # diverged halfway: 10 s were estimated
    assert costs.factor == pytest.approx(380 / 180)


def test_waves_without_new_runs_do_not_count(cells, costs):
    costs.record_wave([], 0.0, 40.0)
    costs.record_wave([(cells[0], 0.0)], 0.0, 40.0)
    assert costs.factor == 1.0


def test_first_wave_replaces_missing_measurements(cells):
    """500 steps took 200 s with everything else, so a run of 100 steps takes 40 s."""
    costs = StudyCosts(cells)
    assert costs.run_sec == [None, None]
    costs.record_wave([(cell, 1.0) for cell in (*cells, *cells, cells[0])], 0.0, 200.0)
    assert costs.run_sec == pytest.approx([40.0, 40.0])
    costs.record_wave([(cells[0], 1.0)], 0.0, 60.0)
    assert costs.run_sec == pytest.approx([60.0, 60.0])
