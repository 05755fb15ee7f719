"""How many cells of a group are opened at a time, and whose folders an error is written to."""

import resource

import pytest

from lm.record.run import Run
from lm.record.workdir import SUMMARY, open_workdir
from lm.study.plan.cells import expand_sweep
from lm.study.train import groups
from tests.helpers import tiny_raw


@pytest.mark.parametrize(
    ('allowed', 'most'),
    [(1024, 256), (256, 128), (100, 1), (resource.RLIM_INFINITY, 256)],
)
def test_fewer_are_opened_where_few_files_may_be(allowed, most, monkeypatch):
    monkeypatch.setattr(groups.resource, 'getrlimit', lambda which: (allowed, allowed))
    assert groups.max_open_folders() == most


@pytest.mark.parametrize(('n', 'most', 'sizes'), [(5, 2, [2, 2, 1]), (4, 9, [4]), (0, 3, [])])
def test_parts_are_even(n, most, sizes):
    parts = list(groups._split_evenly(list(range(n)), most))
    assert [len(part) for part in parts] == sizes
    assert [cell for part in parts for cell in part] == list(range(n))


def test_a_failure_is_not_written_to_a_folder_that_another_process_has(tmp_path, monkeypatch):
    mine, others = expand_sweep(tiny_raw(), {'train.seed': (0, 1)})
    monkeypatch.setattr(groups.workdir, 'PATIENCE_SEC', 0.0)

    def fail(*_):
        raise RuntimeError('no program')

    monkeypatch.setattr(groups, 'compile_program', fail)
    with open_workdir(tmp_path / others.name, others.recipe, False):
        groups.train_group([mine, others], groups.Work([], tmp_path, []))
    assert (tmp_path / mine.name / SUMMARY).exists()
    assert not (tmp_path / others.name / SUMMARY).exists()


def test_the_config_of_a_cell_that_has_ended_is_repaired(tmp_path):
    (cell,) = expand_sweep(tiny_raw(), {'train.seed': (0,)})
    folder, said = tmp_path / cell.name, []
    folder.mkdir()
    (folder / SUMMARY).write_text('{"status": "done"}')
    (folder / 'config.json').write_text('{"mod')
    groups.train_group([cell], groups.Work([], tmp_path, [], said.append))
    assert Run(folder).read_recipe() == cell.recipe
    assert len(said) == 1 and 'config.json cannot be read' in said[0]
