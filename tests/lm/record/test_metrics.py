"""metrics.jsonl, workdir files and throughput."""

import json
import subprocess
import sys

import pytest

from lm.files import write_text
from lm.record import metrics
from lm.record.checkpoint import check_tree
from lm.record.metrics import Recorder, Throughput, read_rows
from lm.run.process import TUNABLES


def rows_of(path):
    return read_rows(path / 'metrics.jsonl')


def test_recorder_drops_rows_after_the_step_it_resumes_from(tmp_path):
    recorder = Recorder(tmp_path, 0, None, print)
    for step in range(1, 6):
        recorder.write({'step': step, 'loss': float(step)})
    recorder = Recorder(tmp_path, 3, 3, print)
    recorder.write({'step': 4, 'loss': 40.0})
    assert [(row['step'], row['loss']) for row in rows_of(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


def test_a_line_cut_short_is_left_out(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2, "lo')
    assert rows_of(tmp_path) == [{'step': 1}]


def test_not_finite_values_are_null_in_json(tmp_path):
    recorder = Recorder(tmp_path, 0, None, print)
    recorder.write({'step': 1, 'loss': float('nan'), 'grad_norm': float('inf')})
    text = (tmp_path / 'metrics.jsonl').read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        'step': 1,
        'loss': None,
        'grad_norm': None,
    }


def test_throughput_leaves_pauses_out(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 13.0, 13.0])  # go on, pause, go on, read, reset
    monkeypatch.setattr(metrics.time, 'perf_counter', lambda: next(clock))
    throughput = Throughput(flops_per_token=6.0, peak_flops=1000.0)
    throughput.tokens, throughput.steps, throughput.waited = 100.0, 4, 0.5
    throughput.pause()
    throughput.go_on()
    row = throughput.read()
    assert row == {
        'tokens_per_sec': 20.0,
        'mfu': 0.12,
        'step_sec': 1.25,
        'data_wait_sec': 0.125,
    }
    assert (throughput.total_seconds, throughput.total_tokens) == (5.0, 100.0)
    assert throughput.tokens == throughput.steps == 0


def test_write_text_leaves_the_old_file_if_it_cannot_finish(tmp_path, monkeypatch):
    path = tmp_path / 'summary.json'
    write_text(path, 'old')

    def fail(*_):
        raise OSError('disk full')

    monkeypatch.setattr('os.replace', fail)
    with pytest.raises(OSError, match='disk full'):
        write_text(path, 'new')
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


def test_check_tree_accepts_equal_and_lists_all_differences():
    tree = {'a': 'float32[2]', 'b': 'float32[3]'}
    check_tree(tree, dict(tree), 'here')
    with pytest.raises(ValueError) as error:
        check_tree({'a': 'float32[2]', 'c': 'float32[1]'}, {'a': 'float32[4]', 'b': 'x'}, 'here')
    text = str(error.value)
    assert text.count('\n') == 3
    assert 'missing  b' in text and 'extra    c' in text and 'differs  a' in text


@pytest.mark.skipif(sys.platform != 'linux', reason='the settings are of glibc')
def test_the_process_starts_again_with_its_malloc_settings_once():
    code = (
        'import os; from lm.run.process import prepare_process; print(os.getpid(), flush=True); '
        'prepare_process(); print(os.environ["GLIBC_TUNABLES"])'
    )
    import os

    environment = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
    done = subprocess.run(
        [sys.executable, '-c', code],
        env=environment | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, tunables = done.stdout.split()
    assert first == second and tunables == ':'.join(TUNABLES)
