"""The number of cells that are opened at a time, and the folders that errors are written to."""

import resource
from pathlib import Path

import pytest

from lm.record.run import Run
from lm.record.workdir import SUMMARY, open_workdir
from lm.study.plan.cells import expand_sweep
from lm.study.train import groups
from tests.helpers import tiny_raw


@pytest.mark.parametrize(
    ('allowed', 'expected'),
    [(1024, 256), (256, 128), (100, 1), (resource.RLIM_INFINITY, 256)],
)
def test_open_folders_respect_file_limit(allowed, expected, monkeypatch):
    monkeypatch.setattr(groups.resource, 'getrlimit', lambda which: (allowed, allowed))
    assert groups.max_open_folders() == expected


@pytest.mark.parametrize(('n', 'max_size', 'sizes'), [(5, 2, [2, 2, 1]), (4, 9, [4]), (0, 3, [])])
def test_split_evenly_gives_even_parts(n, max_size, sizes):
    parts = list(groups._split_evenly(list(range(n)), max_size))
    assert [len(part) for part in parts] == sizes
    assert [cell for part in parts for cell in part] == list(range(n))


def test_note_is_printed_once():
    lines: list[str] = []
    work = groups.Work([], Path(), [], lines.append)
    for text in ('one', 'two', 'one'):
        work.note(text)
    assert lines == ['NOTE: one', 'NOTE: two']


def test_failure_leaves_other_processes_folders(tmp_path, monkeypatch):
    mine, held = expand_sweep(tiny_raw(), {'train.seed': (0, 1)})
    monkeypatch.setattr(groups.workdir, 'PATIENCE_SEC', 0.0)

    def fail(*_):
        raise RuntimeError('no program')

    monkeypatch.setattr(groups, 'compile_program', fail)
    with open_workdir(tmp_path / held.name, held.recipe, False):
        groups.train_group([mine, held], groups.Work([], tmp_path, []))
    assert (tmp_path / mine.name / SUMMARY).exists()
    assert not (tmp_path / held.name / SUMMARY).exists()


def test_ended_cell_gets_its_config_repaired(tmp_path):
    (cell,) = expand_sweep(tiny_raw(), {'train.seed': (0,)})
    folder, lines = tmp_path / cell.name, []
    folder.mkdir()
    (folder / SUMMARY).write_text('{"status": "done"}')
    (folder / 'config.json').write_text('{"mod')
    groups.train_group([cell], groups.Work([], tmp_path, [], lines.append))
    assert Run(folder).read_recipe() == cell.recipe
    assert len(lines) == 1 and 'config.json cannot be read' in lines[0]
