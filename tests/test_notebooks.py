"""Contract: the notebooks for Colab and Kaggle train, plot, save and resume, on CPU devices.

The cell that installs, which is tagged `service`, is the only one that does not run here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests import ROOT
from tests.commands import PATIENCE_SEC
from tests.pages import SMALL
from tests.xla import EIGHT_DEVICES, ONE_DEVICE

NOTEBOOKS = {name: ROOT / f'docs/_static/{name}_tpu.ipynb' for name in ('colab', 'kaggle')}
INSTALLS = re.compile(r'(!git clone|!uv sync|%pip install|%cd|%env|assert REPOSITORY\b).*')


def read_cells(name: str) -> list[dict]:
    """Returns the code cells, each with its source as one text."""
    cells = json.loads(NOTEBOOKS[name].read_text())['cells']
    return [cell | {'source': ''.join(cell['source'])} for cell in cells if 'outputs' in cell]


class NotebookSession:
    """Runs cells as a notebook does, with small models and on CPU devices.

    images: the pictures that cells have shown, by path.
    """

    def __init__(self, folder: Path, flags: str, monkeypatch: pytest.MonkeyPatch, **settings: str):
        self.folder, self.flags, self.settings = folder, flags, settings
        self.names, self.images = {}, []
        colab = types.SimpleNamespace(drive=types.SimpleNamespace(mount=lambda path: None))
        display = types.SimpleNamespace(Image=self.images.append)
        for module, stub in {'google.colab': colab, 'IPython.display': display}.items():
            monkeypatch.setitem(sys.modules, module, stub)
            monkeypatch.setitem(sys.modules, module.split('.')[0], types.ModuleType('stub'))

    def run_cell(self, source: str) -> str:
        """Runs a cell and returns the output of its commands."""
        printed, lines = '', []
        for line in source.splitlines():
            if not line.startswith('!'):
                lines.append(line)
                continue
            exec('\n'.join(lines), self.names)
            printed, lines = printed + self.run_command(line[1:].format(**self.names)), []
        exec('\n'.join(lines), self.names)
        if 'CONFIG =' in source:
            small = ' '.join(f'--{name}={value}' for name, value in SMALL.items())
            self.names |= self.settings | {'CONFIG': f'{self.names["CONFIG"]} {small}'}
        return printed

    def run_command(self, line: str) -> str:
        uv, run, *words = shlex.split(line)
        assert (uv, run) == ('uv', 'run')
        program = words[1:] if words[0] == 'python' else [str(ROOT / words[0]), *words[1:]]
        done = subprocess.run(
            [sys.executable, *program],
            cwd=self.folder,
            env=os.environ | {'XLA_FLAGS': self.flags, 'PYTHONPATH': str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SEC,
        )
        assert done.returncode == 0, f'{line}:\n{done.stdout}'
        return done.stdout


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_notebook_has_no_output_and_one_cell_for_its_service(name):
    cells = read_cells(name)
    assert not any(cell['outputs'] or cell['execution_count'] for cell in cells)
    (install,) = [cell for cell in cells if 'service' in cell['metadata'].get('tags', ())]
    assert all(map(INSTALLS.fullmatch, install['source'].splitlines()))


@pytest.mark.full  # three programs that compile, and twice for a resumed session
@pytest.mark.parametrize(('name', 'n_devices'), [('colab', 1), ('kaggle', 8)])
def test_notebook_trains_and_resumes(name, n_devices, tmp_path, monkeypatch):
    flags = ONE_DEVICE if n_devices == 1 else EIGHT_DEVICES
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    workdir, saved = tmp_path / 'run', tmp_path / 'saved'
    settings = {'WORKDIR': str(workdir)} | ({'SAVED': str(saved)} if name == 'colab' else {})
    session = NotebookSession(tmp_path, flags, monkeypatch, **settings)
    cells = [c['source'] for c in read_cells(name) if not c['metadata']]
    printed = [session.run_cell(source) for source in cells]
    _, devices, plan, copied, trained, *_ = printed
    assert devices.count('CpuDevice') == n_devices and not copied
    plural = '' if n_devices == 1 else 's'
    assert f'here: {n_devices} device{plural}, mesh ' in plan and f'done: {workdir}' in trained
    assert n_devices == 1 or ('mesh data=8' in plan and 'mesh data=8' in trained)
    (image,) = session.images
    assert Path(image).read_bytes().startswith(b'\x89PNG')

    if name == 'kaggle':  # its output is the input of the next session
        workdir.rename(saved)
        settings['EARLIER'] = str(saved)
    rows = (saved / 'metrics.jsonl').read_bytes()
    second = tmp_path / 'second'
    session = NotebookSession(tmp_path, flags, monkeypatch, **settings | {'WORKDIR': str(second)})
    for source in (cells[0], *cells[3:5]):
        session.run_cell(source)
    assert (second / 'metrics.jsonl').read_bytes() == rows
