"""Step times are measured once before a sweep trains, with the programs that train."""

import pytest

from lm.storage.files import seal_record, write_json
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.train import groups, throughput
from lm.study.train.groups import Work
from lm.study.train.throughput import (
    FILE,
    ProgramCost,
    measure_throughput,
    program_digest,
    read_throughput,
)
from tests.sweep_helpers import base

pytestmark = pytest.mark.usefixtures('programs_once')

SWEEP = {'optim.lr': (0.003, 0.01)}


@pytest.mark.full
def test_steps_are_timed_once_with_the_training_program(corpus, tmp_path, monkeypatch):
    """The file keeps its times, whatever a step takes later."""
    grouped = group_by_program(expand_sweep(base(corpus), SWEEP))
    work, builds, original = Work([], tmp_path, []), [], groups._build_program

    def count_build(*arguments):
        builds.append(1)
        return original(*arguments)

    monkeypatch.setattr(groups, '_build_program', count_build)
    cost_by_program = measure_throughput(grouped, work)
    assert cost_by_program.keys() == {program_digest(cell) for cell in grouped[0]}
    (cost,) = cost_by_program.values()
    assert 0 < cost.step_sec < 10 and 0 < cost.evaluation_sec < 10 and cost.compile_sec > 0
    groups.train_group(grouped[0], work)
    assert builds == [1]
    monkeypatch.setattr(throughput, 'measure_cost', lambda *_: pytest.fail('again'))
    assert measure_throughput(grouped, Work([], tmp_path, [])) == cost_by_program
    assert read_throughput(Work([], tmp_path, [])) == cost_by_program


def test_first_call_and_later_calls_are_timed_apart(monkeypatch):
    """The first call takes 9 s, the others 1, 2, 3, 4 and 50 s."""
    clock = [0.0]
    monkeypatch.setattr(throughput.time, 'perf_counter', lambda: clock[0])
    durations = iter([9.0, 1.0, 2.0, 3.0, 4.0, 50.0])

    def work():
        clock[0] += next(durations)

    assert throughput.time_calls(work) == (9.0, 3.0)


def test_older_file_has_only_steps(tmp_path):
    write_json(tmp_path / FILE, seal_record({'device': 'a', 'programs': {'key': {'sec': 0.5}}}))
    assert read_throughput(Work([], tmp_path, [])) == {'key': ProgramCost(0.5)}


def test_failing_program_is_left_to_its_runs(corpus, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError('no program')

    monkeypatch.setattr(groups, '_build_program', fail)
    lines = []
    work = Work([], tmp_path, [], lines.append)
    assert measure_throughput(group_by_program(expand_sweep(base(corpus), SWEEP)), work) == {}
    assert 'could not be timed (no program)' in lines[0]
    assert read_throughput(work) == {} and (tmp_path / FILE).exists()
