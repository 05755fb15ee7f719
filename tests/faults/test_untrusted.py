"""A folder from a stranger: readers return its records or one line, and never block.

They write nothing outside of it.
"""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from eval import runs
from eval.convert.fold import fold_checkpoint
from eval.load import load
from eval.report.page import write_report
from lm.config.resolve import resolve
from lm.data import tokenizers
from lm.record.checkpoint import FOLDER, list_steps, read_meta
from lm.record.metrics import Recorder
from lm.record.run import Run
from lm.record.workdir import (
    LOCK,
    open_workdir,
    record_failure,
    write_config,
)
from lm.storage.files import UnreadableFile, read_json, seal_record, write_json
from lm.study.plan.cells import expand_sweep
from lm.study.train.ledger import open_sweep
from tests.commands import TWELVE
from tests.eval import sweep_fixture as fixture
from tests.sweep_helpers import base, write_corpus
from train import DONE, train

MOST_SEC = 60  # of one reader; one that waits for a pipe waits for ever
MOST_LINES = 12  # of an error: a refusal lists the fields that differ
AXES = {'model.norm': fixture.NORMS, 'optim.lr': (0.003, 0.01), 'train.seed': (0,)}


# Damages: each takes a file's path and a random generator.
def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def noise(path, rng):
    path.write_bytes(rng.randbytes(200))


def pipe(path, rng):
    del rng
    path.unlink()
    os.mkfifo(path)


def folder(path, rng):
    del rng
    path.unlink()
    path.mkdir()


def link(path, rng):
    """A link to a file outside, whose content must not change."""
    del rng
    path.unlink()
    path.symlink_to(path.parents[1] / 'outside.txt')


def broken_link(path, rng):
    del rng
    path.unlink()
    path.symlink_to('/nowhere/at/all')


def delete(path, rng):
    del rng
    path.unlink()


def other_json(path, rng):
    texts = ('', '[]', '{}', 'null', '"x"', '[' * 10**5, '{"a":' * 10**4, '[' * 500 + ']' * 500)
    path.write_text(rng.choice((*texts, '{"status": ["done"]}', '9' * 5000, '{"step": NaN}')))


WRONG = (None, True, -1, 10**30, 1e308, '', '../x', '/etc/passwd', '\x1b[2J', [], {}, [[]], ['x'])


def other_value(path, rng):
    """Changes a value in a JSON file, or in a line of a JSON-lines file."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == '.jsonl' else [text]
    number = rng.randrange(len(lines))
    value = json.loads(lines[number])
    place, key, within = None, None, value
    while isinstance(within, dict | list) and within and (place is None or rng.random() < 0.8):
        key = rng.choice(list(within) if isinstance(within, dict) else range(len(within)))
        place, within = within, within[key]
    place[key] = rng.choice((*WRONG, '<script>alert(1)</script>'))
    if isinstance(value, dict):
        value.pop('sha256', None)  # a stranger would seal it anew
    lines[number] = json.dumps(value)
    path.write_text('\n'.join(lines))


ANY = (cut, flip, noise, pipe, folder, link, broken_link, delete)
OF_JSON = (*ANY, other_json, other_value, other_value, other_value, other_value)


def damage(workdir: Path, rng: random.Random, files: list[Path]) -> str:
    path = rng.choice(files)
    act = rng.choice(OF_JSON if path.suffix in ('.json', '.jsonl') and path.stat().st_size else ANY)
    if path.stat().st_size or act not in (cut, flip):
        act(path, rng)
    return f'{act.__name__} of {path.relative_to(workdir)}'


def list_files(place: Path, but: Path) -> dict[str, tuple]:
    """Returns everything below `place` except one folder."""
    entries = {}
    for path in sorted(place.rglob('*')):
        if but not in (path, *path.parents):
            content = path.read_bytes() if path.is_file() else None
            entries[str(path)] = os.lstat(path).st_mode, content
    return entries


class ReaderTimeout(BaseException):
    """Raised on a timeout. No reader catches it."""


def outcome(reader, workdir: Path) -> str:
    """Returns '' for records or a clear error; else a description of the failure."""

    def alarm(*_):
        raise ReaderTimeout

    files_before, previous_handler = (
        list_files(workdir.parent, workdir),
        signal.signal(signal.SIGALRM, alarm),
    )
    signal.alarm(MOST_SEC)
    try:
        reader(workdir)
    except ReaderTimeout:
        return 'it waits'
    except (ValueError, OSError) as error:
        if str(error).count('\n') > MOST_LINES or not str(error).strip():
            return f'{type(error).__name__} of many lines: {str(error)[:500]}'
    except Exception as error:
        return f'{type(error).__name__}: {str(error)[:300]}'
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
    return '' if list_files(workdir.parent, workdir) == files_before else 'it wrote outside'


def query_runs(workdir):
    runs.overview(runs.gather_all([workdir]))
    runs.query('select * from runs', workdir)
    runs.query('select * from metrics', workdir)


def make_page(workdir):
    page = write_report(workdir)
    assert '<script>alert' not in page.read_text(errors='replace')
    assert '<script' not in page.with_suffix('.md').read_text(errors='replace')


def resume_sweep(workdir):
    """Reads a sweep as training does before it starts."""
    tree = fixture.base_config()
    tree['data'] |= {'source': 'python'}
    open_sweep(workdir, resolve(tree), [expand_sweep(tree, AXES)], True, lambda text: None)
    for path in sorted(workdir.glob('*')):
        _ = Run(path).status


def resume(workdir):
    """Reads a run as training does before it starts."""
    recipe = Run(workdir).read_recipe()
    with open_workdir(workdir, recipe, True, lambda text: None, wait_until=0.0):
        Recorder(workdir, 8, 3, lambda text: None)
        for step in list_steps(workdir / FOLDER):
            read_meta(workdir / FOLDER, step)


def open_checkpoint(workdir):
    load(workdir, lambda text: None)


def convert(workdir):
    fold_checkpoint(load(workdir, lambda text: None), 'none', False)


SMALL = ('sweep.json', 'config.json', 'summary.json', 'metrics.jsonl')


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('sweep') / 'sweep'
    fixture.write_sweep(workdir, AXES, {('rmsnorm', 0.01, 0): 'unfinished'})
    return workdir


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    tree = base(write_corpus(tmp_path_factory.mktemp('corpus')), **TWELVE)
    workdir = tmp_path_factory.mktemp('run') / 'run'
    assert train(resolve(tree), workdir) == DONE
    return workdir


def try_damages(original, readers, tmp_path, seeds, names=None):
    wrong = []
    for seed in seeds:
        rng, place = random.Random(seed), tmp_path / str(seed)
        place.mkdir()
        (place / 'outside.txt').write_text('stays')
        workdir = shutil.copytree(original, place / 'given')
        files = sorted(path for path in workdir.rglob('*') if path.is_file())
        done = damage(workdir, rng, [file for file in files if not names or file.name in names])
        if failure := outcome(readers[seed % len(readers)], workdir):
            wrong.append(f'{seed} {readers[seed % len(readers)].__name__}: {done}: {failure}')
        shutil.rmtree(place)
    assert not wrong, '\n'.join([f'{len(wrong)} of {len(seeds)}:', *wrong])


@pytest.mark.full
@pytest.mark.parametrize(
    'seeds', [range(24), pytest.param(range(24, 200), marks=pytest.mark.full)], ids=['few', 'many']
)
def test_damaged_sweep_is_read_or_refused(sweep, tmp_path, seeds):
    try_damages(sweep, (query_runs, make_page, resume_sweep), tmp_path, seeds, SMALL)


@pytest.mark.full
def test_damaged_run_is_read_or_refused(run, tmp_path):
    """100 damages. The checkpoint and the tokenizer are opened."""
    readers = (open_checkpoint, resume, query_runs, make_page, open_checkpoint, resume, convert)
    try_damages(run, readers, tmp_path, range(100))


@pytest.mark.parametrize('name', ['../x', '/tmp/x', 'a/b', '..', '.', '', 'a\x1b[2Jb', None, 3])
def test_cells_stay_in_their_sweep(sweep, tmp_path, name):
    workdir = shutil.copytree(sweep, tmp_path / 'sweep')
    record = json.loads((workdir / 'sweep.json').read_text())
    record.pop('sha256', None)
    record['cells'][0]['cell'] = name
    (workdir / 'sweep.json').write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r'is not the name of a cell'):
        runs.gather_all([workdir])


@pytest.mark.full
@pytest.mark.parametrize('value', ['x', ['x'], [{'kind': 'x'}], {'a': 1}, [{'kind': 1}], None])
def test_invalid_warnings_are_named(sweep, tmp_path, value):
    workdir = shutil.copytree(sweep, tmp_path / 'sweep')
    cell = next(path.parent for path in sorted(workdir.rglob('summary.json')))
    record = json.loads((cell / 'summary.json').read_text()) | {'warnings': value}
    record.pop('sha256', None)
    (cell / 'summary.json').write_text(json.dumps(record))
    row = {cell_row['cell']: cell_row for cell_row in runs.gather(workdir)}[cell.name]
    assert row['status'] == 'unreadable' and 'its warnings have another format' in row['reason']
    write_report(workdir)


def test_record_text_is_escaped_in_report(sweep, tmp_path):
    workdir = shutil.copytree(sweep, tmp_path / 'sweep')
    cell = next(path.parent for path in sorted(workdir.rglob('summary.json')))
    record = json.loads((cell / 'summary.json').read_text())
    record |= {'status': 'failed', 'reason': '<img src=x onerror=alert(1)> and 1 < 2'}
    record.pop('sha256', None)
    (cell / 'summary.json').write_text(json.dumps(record))
    text = write_report(workdir).with_suffix('.md').read_text()
    assert '&lt;img src=x' in text and '<img' not in text and '1 < 2' in text


@pytest.mark.parametrize('name', ['config.json', 'summary.json', 'sweep.json'])
def test_changed_digit_is_detected(tmp_path, name):
    record = {'model': {'d_model': 128}, 'lr': 0.003}
    write_json(tmp_path / name, seal_record(record))
    assert read_json(tmp_path / name) == record
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text.replace('0.003', '0.004'))
    with pytest.raises(UnreadableFile, match='it was changed or damaged after it was written'):
        read_json(tmp_path / name)
    (tmp_path / name).write_text(json.dumps(record))  # as older versions wrote it
    assert read_json(tmp_path / name) == record


def test_records_are_sealed(tmp_path):
    """Records read as before: the seal is not a field of a config or a summary."""
    recipe = resolve(fixture.base_config())
    write_config(tmp_path, recipe)
    record_failure(tmp_path, RuntimeError('x'), lambda text: None)
    for name in ('config.json', 'summary.json'):
        assert 'sha256' in json.loads((tmp_path / name).read_text())
        assert 'sha256' not in read_json(tmp_path / name)
    assert Run(tmp_path).read_recipe() == recipe and Run(tmp_path).status == 'failed'


@pytest.mark.parametrize('file', [tokenizers.LIBRARY_FILE, tokenizers.TOKENIZER_FILE])
def test_changed_tokenizer_is_detected(tmp_path, file):
    tokenizers.plan_tokenizer('bpe:300').build(['some text of words and words of text'] * 9).save(
        tmp_path
    )
    assert tokenizers.load(tmp_path).vocab_size == 300
    path = tmp_path / file
    text = path.read_text()
    digit = next(i for i in reversed(range(len(text))) if text[i].isdigit())
    path.write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    with pytest.raises(ValueError, match=rf'{path.name}.* was changed or damaged after'):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize('text', ['{}', '[]', '{"kind": "x"}', '{"kind": "subword"}', 'null', ''])
def test_invalid_tokenizer_is_named(tmp_path, text):
    (tmp_path / tokenizers.TOKENIZER_FILE).write_text(text)
    with pytest.raises(ValueError, match=tokenizers.TOKENIZER_FILE):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize('name', ['metrics.jsonl', 'summary.json', LOCK])
def test_links_are_not_written_through(tmp_path, name):
    outside = tmp_path / 'outside'
    outside.write_text('stays')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / name).symlink_to(outside)
    recipe = resolve(fixture.base_config())
    with pytest.raises(ValueError, match='is a link to'):  # noqa: SIM117
        with open_workdir(tmp_path / 'run', recipe, True):
            pass
    assert outside.read_text() == 'stays'
