import functools
import os
import threading

import pytest

from tests import ROOT
from tests.tpu.stubs import Stub
from tpu.launchers import base

CHECK = base.check_training


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Polls without pauses, from the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(base, 'PAUSE_SEC', 0.0)
    monkeypatch.setattr(base, 'POLL_SEC', 0.01)
    monkeypatch.setattr(base, 'MAX_FAILURES', 10)


@pytest.fixture(autouse=True)
def skip_training_check(monkeypatch):
    """Replaces the check, which takes four seconds; many launches here are no training. See
    `checked`.
    """
    monkeypatch.setattr(base, 'check_training', lambda job, chips, say: None)


@pytest.fixture
def with_training_check(monkeypatch, skip_training_check):
    """Lets a launch check its training."""
    monkeypatch.setattr(base, 'check_training', CHECK)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Returns fake(name, describe=[...]) -> Stub: a program that is not here, with its answers."""
    return functools.partial(Stub, monkeypatch, tmp_path)


def signal_soon(number: int, seconds: float = 0.3) -> None:
    """Sends this process a signal after some seconds, like another process would."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), number)).start()


@pytest.fixture
def trainer(tmp_path):
    """A folder with a train.py that appends its arguments to a file, then runs `then.py` in the
    folder.
    """
    folder = tmp_path / 'a repository'
    folder.mkdir()
    (folder / 'train.py').write_text(
        'import pathlib, sys\n'
        'here = pathlib.Path(__file__).parent\n'
        "with open(here / 'arguments', 'a') as file:\n"
        '    print(sys.argv[1:], file=file)\n'
        "exec((here / 'then.py').read_text())\n"
    )
    (folder / 'then.py').write_text("print('a step')\n")
    return folder
