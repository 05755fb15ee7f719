"""A damaged file of a sweep: readers of records return all others, or an error that names it."""

import random
import shutil

import pytest

from eval import runs
from eval.report.page import write_report
from lm.study.tables import results
from tests.eval import sweep_fixture as fixture

AXES = {'model.norm': fixture.NORMS, 'optim.lr': (0.003, 0.01), 'train.seed': (0, 1)}
FATES = {
    ('rmsnorm', 0.01, 0): 'unfinished',
    ('rmsnorm', 0.01, 1): 'waiting',
    ('layernorm', 0.01, 0): 'diverged',
    ('layernorm', 0.01, 1): 'failed',
}
FILES = ('sweep.json', 'config.json', 'summary.json', 'metrics.jsonl')


@pytest.fixture
def sweep(tmp_path):
    fixture.write_sweep(tmp_path / 'norms', AXES, FATES)
    return tmp_path / 'norms'


def cut(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def empty(text: bytes, rng: random.Random) -> bytes:
    del text, rng
    return b''


def overwrite(text: bytes, rng: random.Random) -> bytes:
    """Overwrites a byte, or a block of a disk."""
    start, length = rng.randrange(len(text)), rng.choice((1, 1, 1, 2, 4096))
    damaged = text[:start] + rng.randbytes(length) + text[start + length :]
    return damaged[: len(text)]


def zeros(text: bytes, rng: random.Random) -> bytes:
    """Writes zeros, as after a power cut: the length is on disk, the content is not."""
    del rng
    return bytes(len(text))


DAMAGES = (cut, empty, overwrite, overwrite, zeros)


def damage(path, rng) -> None:
    if rng.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(rng.choice(DAMAGES)(path.read_bytes(), rng))


def without_group(record):
    return {name: value for name, value in record.items() if name != 'group'}


@pytest.mark.default_rows('0')
@pytest.mark.trials(short=6, long=400)
def test_damaged_file_leaves_other_cells(sweep, trial):
    rng = random.Random(trial)
    before = {record['cell']: without_group(record) for record in runs.gather(sweep)}
    files = sorted(sweep.rglob(FILES[trial % len(FILES)]))
    path = rng.choice([file for file in files if file.stat().st_size])
    damage(path, rng)
    affected = {path.parent.name}
    try:
        records = {record['cell']: without_group(record) for record in runs.gather(sweep)}
        markdown = write_report(sweep).with_suffix('.md').read_text()
    except (ValueError, OSError) as error:
        assert path.name == 'sweep.json'
        assert str(path if path.exists() else sweep) in str(error)
        return
    if path.name == 'sweep.json':  # one name or value in it is another
        affected |= {name for name in before if name not in records or before[name]['step'] is None}
    for name in before.keys() - affected:
        assert records[name] == before[name]
        assert f'| {name} |' in markdown
    if records.get(path.parent.name, {}).get('status') == results.UNREADABLE:
        assert str(path) in records[path.parent.name]['reason']


@pytest.mark.trials(short=3, long=400)
def test_damaged_table_is_named(sweep, trial):
    rng = random.Random(trial)
    path = results.write_table(sweep)
    before = runs.gather(sweep)
    for folder in sweep.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    path.write_bytes(rng.choice(DAMAGES)(path.read_bytes(), rng))
    try:
        gathered = runs.gather(sweep)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert [record['cell'] for record in gathered] == [record['cell'] for record in before]
