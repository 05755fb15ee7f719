"""metrics.jsonl, workdir files and throughput."""

import json
import os
import struct
import subprocess
import sys
import threading

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from lm.launch.before_jax import TUNABLES
from lm.record import metrics
from lm.record.checkpoint import check_tree
from lm.record.metrics import Recorder, Throughput, flatten_row, read_rows
from lm.record.run import Run
from lm.storage.files import write_text


def read_run_rows(path):
    return read_rows(path / 'metrics.jsonl')


def test_recorder_drops_rows_after_resumed_step(tmp_path):
    recorder = Recorder(tmp_path, 0, None, print)
    for step in range(1, 6):
        recorder.write({'step': step, 'loss': float(step)})
    recorder = Recorder(tmp_path, 3, 3, print)
    recorder.write({'step': 4, 'loss': 40.0})
    assert [(row['step'], row['loss']) for row in read_run_rows(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


def record_steps(path, steps):
    """Returns the lines of a run with rows of these steps."""
    recorder = Recorder(path, 0, None, print)
    for step in steps:
        recorder.write({'step': step, 'loss': step / 2})
    return (path / 'metrics.jsonl').read_bytes().splitlines(keepends=True)


def test_new_run_drops_all_rows(tmp_path):
    """Catches a second row of step 0, which is diagnosed before the first step."""
    record_steps(tmp_path, (0, 1))
    assert Recorder(tmp_path, 0, None, print).rows == 0 and read_run_rows(tmp_path) == []


def test_truncated_line_is_dropped(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_run_rows(tmp_path) == [{'step': 1}]
    messages = []
    Recorder(tmp_path, 1, 1, messages.append).write({'step': 2})
    assert read_run_rows(tmp_path) == [{'step': 1}, {'step': 2}] and not messages


def test_missing_line_end_joins_no_rows(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2}')
    Recorder(tmp_path, 2, 2, print).write({'step': 3})
    assert read_run_rows(tmp_path) == [{'step': 1}, {'step': 2}, {'step': 3}]


@pytest.mark.parametrize('damage', [b'{"step": 3, "l\x00ss": 1.5}\n', b'\xff\n', b'[3]\n', b'\n'])
def test_damaged_line_is_moved_with_a_note(tmp_path, damage):
    lines = record_steps(tmp_path, range(1, 6))
    lines[2] = damage
    (tmp_path / 'metrics.jsonl').write_bytes(b''.join(lines))
    assert [row['step'] for row in read_run_rows(tmp_path)] == [1, 2, 4, 5]
    messages = []
    Recorder(tmp_path, 5, 5, messages.append)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == b''.join([*lines[:2], *lines[3:]])
    assert (tmp_path / 'metrics_damaged.jsonl').read_bytes() == damage
    assert '1 of 5 lines' in messages[0] and 'lacks 1 of the 5 rows up to step 5' in messages[1]


@pytest.mark.parametrize(
    'line',
    [
        '{"step": -1}',
        f'{{"step": {2**63}}}',
        '{"step": true}',
        '{"step": 1.0}',
        f'{{"step": 3, "ce": {10**400}}}',
        f'{{"step": 3, "heads": [[1.0, -{10**400}]]}}',
    ],
    ids=lambda line: line[:24],
)
def test_number_that_no_table_holds_is_damage(tmp_path, line):
    """Catches an OverflowError in each reader of the rows."""
    last = 2**63 - 2  # TensorBoard stores the step after it too
    edges = [f'{{"step": {last}, "ce": {10**300}}}', '{"step": 0}']
    (tmp_path / 'metrics.jsonl').write_text('\n'.join([edges[0], line, edges[1]]) + '\n')
    rows = [{'step': last, 'ce': 10**300}, {'step': 0}]
    assert read_run_rows(tmp_path) == Run(tmp_path).rows() == rows
    if line.startswith('{"step": 3'):
        assert Run(tmp_path).tail().read()[0] == rows
    messages = []
    Recorder(tmp_path, last, None, messages.append)
    assert (tmp_path / 'metrics_damaged.jsonl').read_text() == f'{line}\n'
    assert '1 of 3 lines' in messages[0]


@pytest.mark.parametrize(('n_lines', 'n_missing'), [(3, 2), (0, 5), (None, 5)])
def test_missing_rows_are_noted(tmp_path, n_lines, n_missing):
    lines = record_steps(tmp_path, range(1, 6))
    path = tmp_path / 'metrics.jsonl'
    path.unlink() if n_lines is None else path.write_bytes(b''.join(lines[:n_lines]))
    messages = []
    Recorder(tmp_path, 5, 5, messages.append)
    assert (
        len(messages) == 1 and f'lacks {n_missing} of the 5 rows' in messages[0] and path.exists()
    )


def test_sync_flushes_rows(tmp_path, monkeypatch):
    synced = []
    recorder = Recorder(tmp_path, 0, None, print)
    recorder.write({'step': 1})
    monkeypatch.setattr('os.fsync', lambda fd: synced.append(os.readlink(f'/proc/self/fd/{fd}')))
    recorder.sync()
    assert synced == [str(tmp_path / 'metrics.jsonl')]


def test_event_file_follows_its_format(tmp_path):
    """Parses the format: the length and the content of each record have their CRCs."""
    recorder = Recorder(tmp_path, 4, None, print)
    recorder.write({'step': 5, 'loss': 2.5, 'grads': [1.0, 3.0], 'bad': float('nan')})
    heads = [[0.5, float('nan')], [0.25, 0.125]]
    recorder.write({'step': 6, 'entropy': heads})
    (path,) = (tmp_path / 'tensorboard').iterdir()
    content, events = path.read_bytes(), []
    while content:
        length, crc = struct.unpack('<QI', content[:12])
        assert crc == masked_crc32c(content[:8])
        assert struct.unpack('<I', content[12 + length : 16 + length])[0] == masked_crc32c(
            content[12 : 12 + length]
        )
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    assert events[0].file_version == 'brain.Event:2' and events[1].step == 5
    scalars = {value.tag: value.simple_value for value in events[2].summary.value}
    assert scalars == {'loss': 2.5, 'grads/layer_0': 1.0, 'grads/layer_1': 3.0}
    scalars = {value.tag: value.simple_value for value in events[3].summary.value}
    head_scalars = {f'entropy/layer_{i}/head_{j}': heads[i][j] for i, j in ((0, 0), (1, 0), (1, 1))}
    assert scalars == head_scalars
    assert 'tfevents' in path.name and len(events) == 4
    assert read_rows(tmp_path / 'metrics.jsonl')[1]['entropy'] == [[0.5, None], [0.25, 0.125]]


def test_recorder_keeps_no_file_open(tmp_path):
    before = len(os.listdir('/proc/self/fd')), threading.active_count()
    recorders = [Recorder(tmp_path / f'{i}', 0, None, print) for i in make_folders(tmp_path, 20)]
    for recorder in recorders:
        recorder.write({'step': 1, 'loss': 1.0})
    assert (len(os.listdir('/proc/self/fd')), threading.active_count()) == before


def make_folders(path, n):
    for i in range(n):
        (path / f'{i}').mkdir()
        yield i


def test_non_finite_values_are_null_in_json(tmp_path):
    recorder = Recorder(tmp_path, 0, None, print)
    recorder.write({'step': 1, 'loss': float('nan'), 'grad_norm': float('inf')})
    text = (tmp_path / 'metrics.jsonl').read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        'step': 1,
        'loss': None,
        'grad_norm': None,
        'not_finite': {'loss': 'nan', 'grad_norm': 'inf'},
    }


def test_non_finite_values_are_restored_by_tag(tmp_path):
    """Reference: the recorded numbers. Other readers see nulls alone."""
    inf, nan = float('inf'), float('nan')
    recorder, path = Recorder(tmp_path, 0, None, print), tmp_path / 'metrics.jsonl'
    recorder.write(
        {'step': 1, 'loss': 0.5, 'entropy': [[-inf, 1.0], [2.0, nan]], 'rms': [inf, 3.0]}
    )
    recorder.write({'step': 2, 'loss': 0.25})
    first, second = (json.loads(text) for text in path.read_text().splitlines())
    assert repr(flatten_row(first)) == repr(
        {
            'loss': 0.5,
            'entropy/layer_0/head_1': 1.0,
            'entropy/layer_1/head_0': 2.0,
            'rms/layer_1': 3.0,
            'entropy/layer_0/head_0': -inf,
            'entropy/layer_1/head_1': nan,
            'rms/layer_0': inf,
        }
    )
    assert second == {'step': 2, 'loss': 0.25}, 'a finite row is as it was'
    row = {'step': 1, 'loss': 0.5, 'entropy': [[None, 1.0], [2.0, None]], 'rms': [None, 3.0]}
    assert read_rows(path) == [row, second]
    before = path.read_bytes()
    Recorder(tmp_path, 2, 2, print)
    assert path.read_bytes() == before, 'a run that goes on keeps it'


def test_throughput_excludes_pauses(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 13.0, 13.0])  # go on, pause, go on, read, reset
    monkeypatch.setattr(metrics.time, 'perf_counter', lambda: next(clock))
    throughput = Throughput(flops_per_token=6.0, utilisation=lambda rate: rate / 1000)
    throughput.tokens, throughput.steps, throughput.wait_seconds = 100.0, 4, 0.5
    throughput.pause()
    throughput.resume()
    row = throughput.read()
    assert row == {
        'tokens_per_sec': 20.0,
        'mfu': 0.12,
        'step_sec': 1.25,
        'data_wait_sec': 0.125,
    }
    assert (throughput.total_seconds, throughput.total_tokens) == (5.0, 100.0)
    assert throughput.tokens == throughput.steps == 0


def test_failed_write_leaves_old_file(tmp_path, monkeypatch):
    path = tmp_path / 'summary.json'
    write_text(path, 'old')

    def fail(*_):
        raise OSError('disk full')

    monkeypatch.setattr('os.replace', fail)
    with pytest.raises(OSError, match='disk full'):
        write_text(path, 'new')
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


def test_check_tree_lists_all_differences():
    tree = {'a': 'float32[2]', 'b': 'float32[3]'}
    check_tree(tree, dict(tree), 'here')
    with pytest.raises(ValueError) as error:
        check_tree({'a': 'float32[2]', 'c': 'float32[1]'}, {'a': 'float32[4]', 'b': 'x'}, 'here')
    text = str(error.value)
    assert text.count('\n') == 3
    assert 'missing  b' in text and 'extra    c' in text and 'differs  a' in text


@pytest.mark.skipif(sys.platform != 'linux', reason='the settings are of glibc')
def test_process_restarts_once_with_malloc_settings():
    code = (
        'import os; from lm.launch.before_jax import prepare_process; '
        'print(os.getpid(), flush=True); prepare_process(); print(os.environ["GLIBC_TUNABLES"])'
    )
    import os

    environment = {name: value for name, value in os.environ.items() if name != 'GLIBC_TUNABLES'}
    completed = subprocess.run(
        [sys.executable, '-c', code],
        env=environment | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, tunables = completed.stdout.split()
    assert first == second and tunables == ':'.join(TUNABLES)
