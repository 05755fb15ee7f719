"""Reference tests of damaged records: which cells are returned, and with which reason."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval import runs
from lm.storage.files import read_json
from lm.study.tables import columns, results
from tests.eval import sweep_fixture as fixture

AXES = {'model.norm': fixture.NORMS, 'train.seed': (0, 1)}


@pytest.fixture
def sweep(tmp_path):
    fixture.write_sweep(tmp_path / 'norms', AXES, {})
    return tmp_path / 'norms'


@pytest.mark.parametrize('name', ['config.json', 'summary.json'])
@pytest.mark.parametrize(
    'text',
    [b'', b'{"status": "do', b'\xff\xfe', b'[1]', b'[' * 100_000],
    ids=['empty', 'cut', 'not UTF-8', 'a list', 'deep'],
)
def test_unreadable_cell_is_reported_beside_others(sweep, name, text):
    before = runs.gather(sweep)
    path = sweep / before[1]['cell'] / name
    path.write_bytes(text)
    first, damaged, *intact = runs.gather(sweep)
    assert [first, *intact] == [before[0], *before[2:]]
    assert damaged['status'] == 'unreadable' and damaged['ce'] is None
    assert damaged['reason'].startswith(f'{path} cannot be read as JSON (')
    assert (damaged['norm'], damaged['train_seed']) == ('rmsnorm', 1)  # as sweep.json says
    [row] = runs.query("select cell from runs where status = 'unreadable'", sweep).to_pylist()
    assert row['cell'] == damaged['cell'] and len(pq.read_table(results.write_table(sweep))) == 4


@pytest.mark.parametrize(
    ('name', 'field', 'value'),
    [
        ('summary.json', 'step', 2e48),  # a digit that became an e
        ('summary.json', 'validation_ce', 'x'),
        ('summary.json', 'status', None),
        ('config.json', 'optim', {'lr': [1]}),
    ],
)
def test_value_with_wrong_type_is_unreadable(sweep, name, field, value):
    cell = runs.gather(sweep)[1]['cell']
    path = sweep / cell / name
    path.write_text(json.dumps(read_json(path) | {field: value}))
    damaged = runs.gather(sweep)[1]
    assert damaged['status'] == 'unreadable' and str(sweep / cell) in damaged['reason']


def test_infinite_number_is_none(sweep):
    path = sweep / runs.gather(sweep)[1]['cell'] / 'summary.json'
    path.write_text(path.read_text().replace('"wall_sec": 33.25', '"wall_sec": 33e999'))
    assert runs.gather(sweep)[1]['wall_sec'] is None


BASE = '{"base": {"optim": {"lr": 0.1}}, '
SWEEPS = ['', '{', '{}', '[]', BASE + '"axes": {"optim.lq": []}, "cells": []}']
SWEEPS += ['{"base": {}, "axes": {}, "cells": []}', BASE + '"axes": {}, "cells": [{"cell": "a"}]}']


@pytest.mark.parametrize('text', SWEEPS)
def test_unreadable_sweep_raises(sweep, text):
    """The runs alone do not determine the cells."""
    (sweep / 'sweep.json').write_text(text)
    for reader in (runs.gather, results.read_sweep):
        with pytest.raises(ValueError, match='cannot be read') as error:
            reader(sweep)
        assert str(error.value).startswith(str(sweep / 'sweep.json'))
        assert str(error.value).endswith('Run the train.py command of the sweep to rewrite it')


def test_unreadable_run_alone_and_among_others(sweep):
    fixture.write_run(sweep.parent / 'single', fixture.base_config())
    config = sweep.parent / 'single' / 'config.json'
    config.write_text('{')
    with pytest.raises(ValueError, match='Delete it, then run the') as error:
        runs.gather(config.parent)
    assert str(error.value).startswith(f'{config} cannot be read')
    *intact, damaged = runs.gather(sweep.parent)
    assert intact == runs.gather(sweep)
    assert (damaged['status'], damaged['cell']) == ('unreadable', 'single')
    assert damaged['reason'].startswith(f'{config} cannot be read')


def test_invalid_metrics_line_is_skipped(tmp_path):
    fixture.write_run(tmp_path / 'run', fixture.base_config(), 'unfinished')
    before = runs.gather(tmp_path / 'run')
    path = tmp_path / 'run' / 'metrics.jsonl'
    lines = path.read_text().splitlines()[:-1]  # the last is cut short
    path.write_text('\n'.join([*lines, '5', '{"stop": 200, "ce": 1.0}', '{"step": "9"}']) + '\n')
    assert runs.gather(tmp_path / 'run') == before


def test_damaged_table_never_changes_numbers_silently(sweep):
    """Flips one bit anywhere in the numbers of a column; checksums detect it."""
    path = results.write_table(sweep)
    for folder in [folder for folder in sweep.iterdir() if folder.is_dir()]:
        folder.rename(sweep.parent / folder.name)
    before, whole = runs.gather(sweep), path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    [column] = [column for column in columns if column.path_in_schema == 'ce']
    first = column.dictionary_page_offset
    for position in range(first, first + column.total_compressed_size, 3):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            assert runs.gather(sweep) == before
        except ValueError as error:
            assert str(error).startswith(f'{path} cannot be read')
            assert str(error).endswith('delete this file too to train them again')


CHANGES = {  # content of a file that a run without a summary gets, and columns of its row then
    'metrics.jsonl': (b'{"step": 9, "ce": 1.5}\n', {'step': 9, 'train_ce': 1.5}),
    'starts.jsonl': (b'{"step": 0, "began": "2026-01-01T00:00:00+00:00"}\n', {'starts': 1}),
    'branch.json': (b'{"ancestors": [{"workdir": "a", "step": 3}]}', {'parent': 'a@3'}),
    'checkpoints/7': (None, {'checkpoints': '[7]'}),
    'summary.json': (b'{"status": "done", "best_validation_ce": 2.0}', {'best_ce': 2.0}),
}


def test_every_change_is_read(sweep):
    """Records are kept until a file changes: catches a file that is not watched."""
    cell = runs.gather(sweep)[1]['cell']
    (sweep / cell / 'summary.json').unlink()
    for name, (content, expected) in CHANGES.items():
        before = runs.gather(sweep)[1]
        path = sweep / cell / name
        if content is None:
            path.mkdir(parents=True)
        else:
            path.write_bytes(content)
        after = runs.gather(sweep)[1]
        for column, value in expected.items():
            assert before[column] != value and after[column] == value, name


@pytest.mark.parametrize(
    ('name', 'column', 'value'), [('config.json', 'lr', 0.5), ('summary.json', 'ce', 5.0)]
)
def test_change_with_equal_size_and_time_is_read(sweep, name, column, value):
    before = runs.gather(sweep)[1]
    path = sweep / before['cell'] / name
    times, size = path.stat(), path.stat().st_size
    earlier, later = json.dumps(before[column]).encode(), json.dumps(value).encode()
    content = path.read_bytes()
    assert content.count(earlier) and len(earlier) >= len(later)
    path.write_bytes(content.replace(earlier, later.ljust(len(earlier))))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == size
    assert runs.gather(sweep)[1][column] == value


@pytest.mark.parametrize('kind', columns.ARROW.values(), ids=str)
def test_cast_returns_what_arrow_returns(tmp_path, kind):
    """Most values are returned without asking Arrow, and none is cut to an integer as by Arrow."""
    values = (0, -(2**53), 2**53 + 1, -(2**63), 2**63, True, 0.5, 1.0, 1e300)
    values = (*values, 'text', 'naïve', '\ud800', '')
    for value in values:
        try:
            expected = pa.scalar(value, kind).as_py()
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            if kind == pa.string() and not isinstance(value, str):
                assert columns.cast_to_column(tmp_path, 'x', value, kind) == json.dumps(value)
                continue
            with pytest.raises(ValueError, match='its x is'):
                columns.cast_to_column(tmp_path, 'x', value, kind)
            continue
        if expected != value or (value is True and kind == pa.float64()):
            with pytest.raises(ValueError, match=f'its x is {value!r}: must be of type'):
                columns.cast_to_column(tmp_path, 'x', value, kind)
            continue
        cast = columns.cast_to_column(tmp_path, 'x', value, kind)
        assert cast == expected and type(cast) is type(expected)
