"""Contract: a folder that cannot hold checkpoints is refused before anything is compiled.

The tiny checkpoint of this test is never taken for a real one.
"""

from importlib import metadata

import pytest

import train
from lm.record import machine, trial
from lm.record.checkpoint import FOLDER, list_steps
from lm.record.machine import package_version, versions
from lm.record.remote.local_copy import list_local_checkpoints, list_local_files
from lm.record.trial import NAME, try_checkpoint
from lm.run.runs import try_storage
from lm.storage.files import write_json
from lm.study.train import groups
from tests.commands import tiny
from tests.lm.record.test_checkpoints import assert_is, shapes, write
from tests.sweep_helpers import base


@pytest.fixture
def nothing_compiles(monkeypatch):
    def compile(*_):
        raise AssertionError('it was compiled')

    monkeypatch.setattr(train, 'Program', compile)
    monkeypatch.setattr(groups, 'Program', compile)


class TrialKilled(BaseException):
    """Ends a process at this point."""


def test_trial_is_read_back_and_removed(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        trial, 'read_items', lambda path, **items: calls.append((path.name, sorted(items)))
    )
    try_checkpoint(tmp_path / 'run', {'versions': versions()})
    assert calls == [(NAME, ['meta', 'weights'])]
    assert [path.name for path in (tmp_path / 'run').rglob('*')] == [FOLDER]


def test_first_host_writes_trial_without_shared_disk(tmp_path, monkeypatch):
    """Process 0 writes no device arrays: Orbax accepts none that only one process has."""
    monkeypatch.setattr(trial, 'has_private_disks', lambda: True)
    monkeypatch.setattr(trial, '_zeros', lambda: pytest.fail('an array of devices'))
    try_checkpoint(tmp_path / 'first', {})
    assert [path.name for path in (tmp_path / 'first').rglob('*')] == [FOLDER]
    monkeypatch.setattr(trial, 'is_first', lambda: False)
    try_checkpoint(tmp_path / 'other', {})
    assert not (tmp_path / 'other').exists()


@pytest.mark.parametrize('is_committed', [False, True])
def test_killed_trial_is_no_checkpoint(is_committed, tmp_path, monkeypatch):
    """Readers, buckets and retention ignore it, and the next start removes it. Catches a name that
    is taken for a step.
    """
    with monkeypatch.context() as patch, pytest.raises(TrialKilled):
        patch.setattr(trial, 'read_items', lambda *_, **__: (_ for _ in ()).throw(TrialKilled))
        try_checkpoint(tmp_path, {})
    folder = tmp_path / FOLDER
    assert (folder / NAME / 'meta').is_dir()
    if not is_committed:
        (folder / NAME).rename(folder / f'{NAME}.orbax-checkpoint-tmp')
    assert (
        list_steps(folder) == []
        and not list_local_checkpoints(tmp_path)
        and not list_local_files(tmp_path)
    )
    checkpoints = write(tmp_path, {1: None, 2: None, 3: None}, keep_last=2, keep_best=0)
    assert checkpoints.steps() == [2, 3] and list(list_local_checkpoints(tmp_path)) == [
        f'{FOLDER}/2',
        f'{FOLDER}/3',
    ]
    assert_is(checkpoints.restore(shapes()), 3)
    checkpoints.close()
    try_checkpoint(tmp_path, {})
    assert sorted(path.name for path in folder.iterdir()) == ['2', '3']


def test_unusable_folder_is_refused_before_compiling(corpus, tmp_path, nothing_compiles):
    """The error has the reason, and no config is left that would make the folder a run."""
    (tmp_path / FOLDER).write_text('a file')
    with pytest.raises(OSError, match=r'cannot store checkpoints: .*File.*another --workdir'):
        train.train(tiny(corpus), tmp_path)
    assert not (tmp_path / 'config.json').exists()


def test_unwritable_record_is_refused_before_compiling(
    corpus, tmp_path, monkeypatch, nothing_compiles
):
    monkeypatch.setattr('lm.run.runs.versions', lambda: {'jax': object()})
    with pytest.raises(OSError, match=r'cannot store checkpoints: .*JSON'):
        train.train(tiny(corpus), tmp_path)


def test_sweep_tries_one_folder_for_all_cells(corpus, tmp_path, monkeypatch):
    tried = []
    work = groups.Work([], tmp_path, [])
    cells = groups.Cell('a', {}, tiny(corpus)), groups.Cell('b', {}, tiny(corpus))
    monkeypatch.setattr(groups, 'try_storage', lambda recipe, folder: tried.append(folder))
    monkeypatch.setattr(groups, '_train_cells', lambda *_: None)
    monkeypatch.setattr(groups, 'compile_program', lambda *_: (None, 1))
    for cell in cells:
        groups.train_group([cell], work)
    assert tried == [tmp_path / 'a']


@pytest.mark.full
def test_cells_fail_before_compiling(corpus, tmp_path, monkeypatch, nothing_compiles, capsys):
    monkeypatch.setattr('lm.run.runs.versions', lambda: {'jax': object()})
    sweep = {'optim.lr': (0.003, 0.01)}
    assert train.train_sweep(base(corpus), sweep, tmp_path) == train.BAD_INPUT
    assert capsys.readouterr().out.count('FAILED: OSError: ') == 2


def test_finished_run_is_not_tried(corpus, tmp_path):
    """The folder of a finished run may be read-only, as it may belong to someone else."""
    write_json(tmp_path / 'summary.json', {'status': 'done'})
    (tmp_path / FOLDER).write_text('a file')
    try_storage(tiny(corpus), tmp_path)
    write_json(tmp_path / 'summary.json', {'status': 'stopped'})
    with pytest.raises(OSError, match='cannot store checkpoints'):
        try_storage(tiny(corpus), tmp_path)


class TestVersionsWithoutAnInstallation:
    """Dependencies are installed, and the project is a checkout."""

    @pytest.fixture(autouse=True)
    def not_installed(self, monkeypatch):
        def version(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, 'version', version)

    def test_version_is_read_from_project_file(self):
        text = (machine.ROOT / 'pyproject.toml').read_text()
        assert f'version = "{versions()["evenkeel"]}"' in text
        assert versions()['jax'] == 'unknown'

    @pytest.mark.parametrize('text', [None, 'no toml', '[project]\nname = "other"\nversion = "9"'])
    def test_version_is_unknown_without_project_file(self, text, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, 'ROOT', tmp_path)
        if text is not None:
            (tmp_path / 'pyproject.toml').write_text(text)
        assert package_version('evenkeel') == 'unknown'
