"""Contract: `python -m eval.sync` reports a mistake in one line, before it imports a tracker."""

import importlib.util
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from eval.sync import trackers
from eval.sync.__main__ import describe_sent
from eval.sync.marks import file_name, without_password
from lm.launch.tracking import PACKAGES
from tests import ROOT
from tests.eval.sync.fakes import begin, train


def sync(*flags):
    """Returns (exit status, lines of standard error, standard output)."""
    command = [sys.executable, '-X', 'importtime', '-m', 'eval.sync', *flags]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = [text for text in completed.stderr.splitlines() if not text.startswith('import time')]
    imported = {text.rpartition('|')[2].strip() for text in completed.stderr.splitlines()}
    assert not imported & {'jax', 'numpy', 'mlflow', 'wandb', 'pyarrow'}
    return completed.returncode, lines, completed.stdout


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--to=mlflw'], "--to must be one of mlflow, wandb; got 'mlflw'. Did you mean 'mlflow'?"),
        ([], '--workdir=DIR and --to=mlflow or --to=wandb are required'),
        (['mlflow'], "flags must begin with --, as in --to=mlflow; got 'mlflow'"),
        (
            ['--to=mlflow', '--workdir=gs://a/b'],
            '--workdir must be on a disk, where the last step sent is recorded; got gs://a/b',
        ),
        (['--to=mlflow', '--workdir=/none'], '/none contains no run and no sweep'),
    ],
)
def test_mistake_is_reported_in_one_line(tmp_path, flags, message):
    begin(tmp_path)
    train(tmp_path, 1, 2)
    status, lines, printed = sync(f'--workdir={tmp_path}', *flags)
    assert status == 1 and len(lines) == 1 and not printed
    assert lines[0].startswith(f'error: {message}')


def test_run_without_rows_is_reported(tmp_path):
    begin(tmp_path)
    status, lines, _ = sync(f'--workdir={tmp_path}', '--to=wandb')
    assert status == 1 and lines[0].endswith(
        'has no metrics.jsonl yet. To wait for it, add --follow.'
    )


def test_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name == 'mlflow' or None)
    with pytest.raises(ValueError, match=r'mlflow needs sqlalchemy and alembic\. .*--extra mlflow'):
        trackers.make_tracker('mlflow')


@pytest.mark.parametrize(
    ('sent', 'runs', 'errors', 'text'),
    [
        (4000, 1, (), '4,000 steps of 1 run sent'),
        (1, 3, ('a', 'b'), '1 step of 3 runs sent (2 runs incomplete)'),
    ],
)
def test_summary_counts_runs(sent, runs, errors, text):
    sender = SimpleNamespace(sent=sent, runs=runs, errors=dict.fromkeys(errors, 'no network'))
    assert describe_sent(sender) == text


def test_trackers_have_packages_and_extras():
    extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project'][
        'optional-dependencies'
    ]
    assert trackers.TRACKERS.keys() == PACKAGES.keys() and PACKAGES.keys() <= extras.keys()


@pytest.mark.parametrize(
    ('uri', 'stored'),
    [
        ('postgresql://me:secret@host/db', 'postgresql://host/db'),
        ('https://token@host:80/x@y', 'https://host:80/x@y'),
        ('sqlite:///mlflow.db', 'sqlite:///mlflow.db'),
    ],
)
def test_password_is_not_stored(uri, stored):
    assert without_password(uri) == stored
    assert (
        file_name('mlflow', stored) == file_name('mlflow', stored) != file_name('mlflow', 'other')
    )
