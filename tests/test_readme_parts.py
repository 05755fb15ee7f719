"""The pages' instructions on adding a part, followed word for word in a copy of the project."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.pages import TEXT, add_lines, arguments
from tests.xla import ONE_DEVICE

ROOMS = ('configs', 'eval', 'lm', 'modules')
START = '# modules/'  # of blocks that are or change a file there


def blocks(language: str, start: str = START) -> list[str]:
    code_blocks = re.findall(rf'^```{language}\n(.*?)^```$', TEXT, re.DOTALL | re.MULTILINE)
    return [block for block in code_blocks if block.startswith(start)]


def apply_diff(folder: Path, diff: str) -> None:
    for path, lines in re.findall(r'# (\S+)\n((?:[+ ].*\n)+)', diff):
        changed = add_lines((folder / path).read_text(), lines.splitlines())
        (folder / path).write_text(changed)


@pytest.fixture(scope='module')
def project(tmp_path_factory) -> Path:
    """Returns a copy with the parts of the pages."""
    folder = tmp_path_factory.mktemp('project')
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copy(ROOT / 'train.py', folder)
    for block in blocks('python'):
        path, code = re.fullmatch(r'# (\S+)\n(.*)', block, re.DOTALL).groups()
        # A reader who types the example has the file already.
        (folder / path).write_text(code)
    (diff,) = blocks('diff')
    apply_diff(folder, diff)
    return folder


def command(project: Path, *arguments: str) -> str:
    environment = {**os.environ, 'PYTHONPATH': str(project), 'XLA_FLAGS': ONE_DEVICE}
    done = subprocess.run(
        [sys.executable, 'train.py', *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_parts_are_listed_with_options(project):
    assert 'length' in command(project, '--choices=model.norm').split('scalenorm')[1]
    listed = command(project, '--choices=optim.name').split('signum')[1]
    assert 'nesterov' in listed and 'arXiv:1802.04434' in listed


@pytest.mark.full
def test_parts_sweep_in_one_program(project, tmp_path):
    """Traced options of an optimizer and of a loss: four runs, one program, different losses."""
    sweep = "{'optim.beta': (0.5, 0.9), 'loss.poly_weight': (1.0, 3.0)}"
    changes = {
        'model.norm': 'scalenorm',
        'norm.length': 2.0,
        'optim.name': 'signum',
        'optim.nesterov': True,
        'optim.centralized': 1.0,
        'optim.lr': 0.003,
        'loss.name': 'poly',
        'model.d_model': 16,
        'model.n_layers': 1,
        'model.qk_norm': 'none',
        'model.d_ff': 32,
        'data.source': 'synthetic:markov',
        'data.tokenizer': 'byte',
        'data.cache_dir': tmp_path / 'cache',
        'data.seq_len': 16,
        'train.steps': 4,
    }
    overrides = [f'--config.{path}={value}' for path, value in changes.items()]
    config = ['--config=configs/default.py', f'--workdir={tmp_path}/sweep']
    stdout = command(project, *config, *overrides, f'--config.sweep={sweep}')
    assert '4 cells, 1 program,' in stdout
    assert '4 of 4 done' in stdout
    metrics = [path.read_text() for path in (tmp_path / 'sweep').glob('*/metrics.jsonl')]
    assert len(set(metrics)) == 4


@pytest.mark.full
def test_lines_in_tests_let_the_norm_pass(project):
    """Catches a table in the tests that a new norm needs and the page does not name."""
    shutil.copytree(ROOT / 'tests', project / 'tests', dirs_exist_ok=True)
    for name in ('pyproject.toml', 'README.md', 'docs'):
        (project / name).symlink_to(ROOT / name)
    (diff,) = blocks('diff', '# tests/')
    apply_diff(project, diff)
    tests = ['tests/modules/test_norms.py', 'tests/modules/test_norm_statistics.py']
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-n', '0', '-k', 'scalenorm or every_norm', *tests],
        cwd=project,
        env={**os.environ, 'PYTHONPATH': str(project)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and ' passed' in done.stdout, done.stdout[-3000:]


@pytest.mark.full
def test_changed_block_trains_and_passes_its_test(tmp_path):
    """Catches a diff of the page that no longer applies to the code."""
    for room in (*ROOMS, 'tests'):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('train.py', 'pyproject.toml'):
        shutil.copy(ROOT / name, tmp_path)
    (diff,) = blocks('diff', '--- a/lm/')
    subprocess.run(['git', 'apply', '-'], cwd=tmp_path, input=diff, text=True, check=True)
    (block,) = blocks('python', '# tests/')
    path, code = re.fullmatch(r'# (\S+)\n(.*)', block, re.DOTALL).groups()
    (tmp_path / path).write_text(code)
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-n', '0', path],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and '2 passed' in done.stdout, done.stdout[-3000:]
    lines = re.findall(r'^    (uv run train.py .*model.residual_rank.*)$', TEXT, re.MULTILINE)
    printed = [command(tmp_path, *arguments(line)[1:]) for line in lines]
    assert 'done: runs/rank' in printed[0]
    assert '6 cells, 2 programs' in printed[1] and '6 of 6 done' in printed[1]
