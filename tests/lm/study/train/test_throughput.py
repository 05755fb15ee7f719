"""Step times are measured once before a sweep trains, with the programs that train."""

import pytest

from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.train import groups, throughput
from lm.study.train.groups import Work
from lm.study.train.throughput import FILE, measure_throughput, program_digest, read_throughput
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
    sec_by_program = measure_throughput(grouped, work)
    assert (
        sec_by_program.keys() == {program_digest(cell) for cell in grouped[0]}
        and len(sec_by_program) == 1
    )
    assert all(0 < sec < 10 for sec in sec_by_program.values())
    groups.train_group(grouped[0], work)
    assert builds == [1]
    monkeypatch.setattr(throughput, 'measure_step_sec', lambda *_: pytest.fail('again'))
    assert measure_throughput(grouped, Work([], tmp_path, [])) == sec_by_program
    assert read_throughput(Work([], tmp_path, [])) == sec_by_program


def test_failing_program_is_left_to_its_runs(corpus, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError('no program')

    monkeypatch.setattr(groups, '_build_program', fail)
    lines = []
    work = Work([], tmp_path, [], lines.append)
    assert measure_throughput(group_by_program(expand_sweep(base(corpus), SWEEP)), work) == {}
    assert 'could not be timed (no program)' in lines[0]
    assert read_throughput(work) == {} and (tmp_path / FILE).exists()
