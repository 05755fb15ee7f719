import pytest

from tpu.launchers import base


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """What is looked at every so many seconds is looked at all the time."""
    monkeypatch.setattr(base, 'PAUSE_SEC', 0.0)
    monkeypatch.setattr(base, 'POLL_SEC', 0.01)


@pytest.fixture
def trainer(tmp_path):
    """A folder with a train.py that writes its arguments to a file, one a line in repr, then does
    what the file `then.py` in it says.
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
