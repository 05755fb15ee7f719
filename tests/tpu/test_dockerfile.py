"""Contract: the image copies existing paths, includes all imports, and installs extras that exist.

Docker itself is not used.
"""

import ast
import re
import tomllib

import pytest

from tests import ROOT
from tpu.launchers import base, xpk

TEXT = (ROOT / 'tpu' / 'Dockerfile').read_text()
LINES = re.sub(r'\\\n', '', TEXT).splitlines()
COPIED = [name for line in LINES if line.startswith('COPY ') for name in line.split()[1:-1]]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())


def list_imports(path) -> set[str]:
    """Returns the top-level names of all modules that a file imports."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) if node.module]
    return {name.split('.')[0] for name in names}


@pytest.mark.parametrize('name', COPIED)
def test_copied_paths_exist_and_are_sent(name):
    assert (ROOT / name).exists()
    assert f'!{name}' in (ROOT / '.dockerignore').read_text().splitlines()


def test_imports_are_copied():
    """The packages that pyproject.toml installs are copied too."""
    files = [path for name in COPIED for path in [ROOT / name, *(ROOT / name).rglob('*.py')]]
    names = set().union(*(list_imports(path) for path in files if path.suffix == '.py'))
    local = {name for name in names if (ROOT / name).is_dir() or (ROOT / f'{name}.py').exists()}
    packages = PROJECT['tool']['hatch']['build']['targets']['wheel']['packages']
    assert {'lm', 'modules'} <= local
    assert {*local, *packages, PROJECT['project']['readme']} <= {*COPIED, 'train'}
    assert 'train.py' in COPIED


def test_extras_exist_in_project():
    extras = PROJECT['project']['optional-dependencies'].keys()
    named = re.search(r'^# EXTRA: (\w+), (\w+), or empty', TEXT, re.MULTILINE).groups()
    default = re.search(r'^ARG EXTRA=(\w+)$', TEXT, re.MULTILINE)[1]
    assert {*named, default, *re.findall(r'--extra=(\w+)', TEXT)} <= extras


def test_xpk_command_matches_entrypoint():
    (folder,) = re.findall(r'^WORKDIR (\S+)$', TEXT, re.MULTILINE)
    (entry,) = re.findall(r'^ENTRYPOINT (.+)$', TEXT, re.MULTILINE)
    assert f'ENV PATH={folder}/.venv/bin:$PATH' in TEXT
    options = xpk.XpkOptions(cluster='c', accelerator_type='v6e-16', image='I')
    words = xpk.container_command(base.Job('job', ()), options).split()
    assert words[-2:] == ast.literal_eval(entry) and words[0] == 'exec'


def test_python_version_matches_project():
    (version,) = re.findall(r'^FROM python:([\d.]+)-slim$', TEXT, re.MULTILINE)
    assert version == (ROOT / '.python-version').read_text().strip()
    assert PROJECT['project']['requires-python'] == f'>={version}'
