"""Property: the program trains open studies, stops when its hours end, resumes, and computes the
board from records alone; a study that changed since is stale.
"""

import json
import os
import subprocess
import sys

import pytest

from lm.storage.files import read_json
from tests import ROOT
from tests.xla import ONE_DEVICE

STUDY = """from configs import default


def get_config():
    config = default.get_config()
    config.model.d_model = 16
    config.model.n_layers = 1
    config.model.d_ff = 32
    config.model.qk_norm = 'none'
    config.data.source = 'synthetic:markov'
    config.data.tokenizer = 'byte'
    config.data.seq_len = 16
    config.data.cache_dir = {cache!r}
    config.optim.warmup_steps = 2
    config.train.steps = config.train.eval_every = 8
    config.train.checkpoint_every = 0
    config.sweep = {{'optim.name': ('adamw', 'sgd')}}
    config.tune = {{'optim.lr': {centre}, 'seeds': 3, 'budget': 13}}
    return config
"""
CLAIM = '''"""{title}

Paper:    none.
Says:     it is so.
Here:     a model of a few weights.
Counts:   the loss is {counts}.
"""

PART = 'optimizers'
STUDIES = {{'tiny': {study!r}}}
HOLDS = ({{'study': 'tiny', 'arm': {{'optim.name': 'sgd'}}, 'difference': {within}}},)
CONTROL = (HOLDS[0] | {{'difference': (None, 9.0), 'label': 'an effect'}},)
FIDELITY = {{'SGD': {{'setting': 'plain', 'published': 'plain', 'source': 'a book'}}}}
'''


@pytest.fixture
def board(tmp_path):
    """Returns board(*flags) -> (rows by claim, stderr) of a folder with two claims on one study."""
    study = tmp_path / 'tiny.py'
    study.write_text(STUDY.format(cache=str(tmp_path / 'cache'), centre=0.01))
    folder = tmp_path / 'claims'
    folder.mkdir()
    for name, within in {'near': (None, 9.0), 'far': (9.0, None)}.items():
        text = CLAIM.format(title=f'{name}.', counts=name, study=str(study), within=within)
        (folder / f'{name}.py').write_text(text)

    def run(*flags, status=0):
        process = subprocess.run(
            [
                *(sys.executable, '-m', 'eval.claims', '--format=json'),
                *(f'--workdir={tmp_path}/runs', f'--claims={folder}', *flags),
            ],
            cwd=ROOT,
            env={**os.environ, 'XLA_FLAGS': ONE_DEVICE},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert process.returncode == status, process.stderr
        return {row['claim']: row for row in json.loads(process.stdout)}, process.stderr

    run.study = study
    return run


@pytest.mark.full
def test_trains_open_studies_once(board, tmp_path):
    rows, _ = board()
    assert {row['verdict'] for row in rows.values()} == {'not yet tested'}
    rows, stderr = board('--run', '--hours=0.0005')  # 1.8 s, in which Python has not imported JAX
    assert {row['verdict'] for row in rows.values()} == {'not yet tested'}
    assert stderr.count('python train.py') == 1
    rows, stderr = board('--run')
    assert {name: row['verdict'] for name, row in rows.items()} == {
        'near': 'not checked',  # without a broken method
        'far': 'not reproduced',
    }
    assert rows['near']['runs'] == rows['far']['runs'] >= 20
    assert rows['far']['note'] == ''  # on record before the runs
    assert 'broken method' in rows['near']['note']
    assert read_json(tmp_path / 'runs' / 'claims.json').keys() == {'near', 'far'}
    second_rows, stderr = board('--run', f'--pages={tmp_path}/pages')
    assert second_rows == rows and 'python train.py' not in stderr  # nothing is open
    assert sorted(path.name for path in (tmp_path / 'pages').iterdir()) == [
        'board.json',
        'far.md',
        'index.md',
        'near.md',
    ]
    board.study.write_text(board.study.read_text().replace('0.01', '0.02'))
    rows, _ = board()
    assert {row['verdict'] for row in rows.values()} == {'stale'}
    assert 'has changed since its runs' in rows['near']['note']
