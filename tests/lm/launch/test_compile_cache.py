"""Equivalence: runs with programs that were compiled, stored and read have the same numbers.
Property: the user's settings hold, a folder that fails stops nothing, and the folder is bounded.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lm.launch import compile_cache
from lm.launch.compile_cache import FOLDER, VARIABLES, remove_old_entries
from lm.record.checkpoint import read_meta
from lm.record.metrics import read_rows
from tests.commands import ROOT, command
from tests.xla import ONE_DEVICE

# Compiles two programs, and prints how many of them were read from the cache.
PROGRAM = """
import sys
import jax
from lm.launch import compile_cache
compile_cache.MIN_COMPILE_SEC = 0.0
hits = []
listen = lambda event, **_: hits.append(event.endswith('/cache_hits'))
jax.monitoring.register_event_listener(listen)
compile_cache.enable_compile_cache()
def one(x): return x + 1
def two(x): return x + 2
x = jax.numpy.ones(3)
before = sum(hits)
assert jax.jit(one)(x).tolist() + jax.jit(two)(x).tolist() == [2] * 3 + [3] * 3
print(sum(hits) - before)
"""
# Trains, and prints the same about the step.
TRAIN = """
import runpy, sys
from lm.launch import before_jax
before_jax.prepare_process()
import jax
hits = []
listen = lambda event, **_: hits.append(event.endswith('/cache_hits'))
jax.monitoring.register_event_listener(listen)
sys.argv = sys.argv[1:]
try:
    runpy.run_path('train.py', run_name='__main__')
finally:
    print(sum(hits))
"""


def environment(cache: Path, **changes: str) -> dict[str, str]:
    """Returns the environment of a user whose cache is elsewhere."""
    ours = {k: v for k, v in os.environ.items() if 'COMPILATION_CACHE' not in k}
    ours |= {'XLA_FLAGS': ONE_DEVICE, 'JAX_PLATFORMS': 'cpu', 'XDG_CACHE_HOME': str(cache)}
    return {k: v for k, v in ours.items() if 'PERSISTENT_CACHE' not in k} | changes


def run(cache: Path, file_bytes: int | None = None, **changes: str) -> tuple[int, list[str]]:
    """Runs PROGRAM; returns its number, and the lines that it printed to stderr."""
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        cwd=ROOT,
        env=environment(cache, **changes),
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=file_bytes
        and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))),
    )
    return int(done.stdout), done.stderr.splitlines()


def entries(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache / 'evenkeel' / FOLDER).glob('jit_*')}


@pytest.mark.full
def test_training_is_bitwise_equal_without_cache_and_with_a_cold_or_warm_one(corpus, tmp_path):
    """Catches a cached step that does not update its donated state, or is another program."""
    outcomes, n_hits = {}, {}
    cases = {'none': {'JAX_ENABLE_COMPILATION_CACHE': 'false'}, 'cold': {}, 'warm': {}}
    for name, changes in cases.items():
        workdir = tmp_path / name
        flags = command(workdir, corpus, model_n_layers=1)[1:]
        done = subprocess.run(
            [sys.executable, '-c', TRAIN, *flags],
            cwd=ROOT,
            env=environment(tmp_path / 'cache', **changes),
            capture_output=True,
            text=True,
            check=True,
        )
        n_hits[name] = int(done.stdout.splitlines()[-1])
        losses = [
            (r['step'], r.get('loss'), r.get('validation_ce'))
            for r in read_rows(workdir / 'metrics.jsonl')
        ]
        outcomes[name] = losses, read_meta(workdir / 'checkpoints', 12)['digests']
        assert (name != 'none') == any(
            'train_step' in entry for entry in entries(tmp_path / 'cache')
        )
    assert len(outcomes['none'][0]) >= 12 and outcomes['none'][1]['training']
    assert outcomes['none'] == outcomes['cold'] == outcomes['warm']
    assert n_hits['none'] == n_hits['cold'] == 0 and n_hits['warm'] >= 3  # init, step, evaluation


def test_second_start_reads_stored_programs(tmp_path):
    assert run(tmp_path) == (0, [])
    stored = entries(tmp_path)
    assert {name.split('-')[0] for name in stored} >= {'jit_one', 'jit_two'}
    assert (tmp_path / 'evenkeel' / FOLDER).stat().st_mode & 0o777 == 0o700
    assert run(tmp_path) == (2, [])


def test_truncated_entry_is_reported_once_and_replaced(tmp_path):
    """Catches JAX's warning at each start, and an entry that stays cut short for ever."""
    run(tmp_path)
    stored = entries(tmp_path)
    for name, content in stored.items():
        if name.startswith(('jit_one', 'jit_two')):
            (tmp_path / 'evenkeel' / FOLDER / name).write_bytes(content[: len(content) // 2])
    n_read, (line,) = run(tmp_path)
    assert n_read == 0 and line.startswith('NOTE: stored programs could not be read')
    assert run(tmp_path) == (2, [])


def test_full_disk_is_reported_once_and_leaves_no_truncated_entry(tmp_path):
    n_read, (line,) = run(tmp_path, file_bytes=500)
    assert n_read == 0 and str(tmp_path / 'evenkeel' / FOLDER) in line
    assert 'could not be stored' in line and 'JAX_COMPILATION_CACHE_DIR' in line
    assert not entries(tmp_path)
    assert run(tmp_path) == (0, [])


def test_folder_that_cannot_be_made_is_reported_once(tmp_path):
    (tmp_path / 'file').write_text('')
    n_read, (line,) = run(tmp_path / 'file')
    assert n_read == 0 and line.startswith('NOTE: compiled programs are not stored')
    assert str(tmp_path / 'file') in line and line.endswith('set JAX_COMPILATION_CACHE_DIR.')


def test_process_that_compiles_nothing_prints_no_note(tmp_path):
    """As eval.runs, where the user has no home folder."""
    code = 'from lm.launch.compile_cache import enable_compile_cache; enable_compile_cache()'
    (tmp_path / 'file').write_text('')
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env=environment(tmp_path / 'file'),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ''


@pytest.mark.parametrize(
    'changes',
    [
        {'JAX_COMPILATION_CACHE_DIR': '/elsewhere'},
        {'JAX_ENABLE_COMPILATION_CACHE': 'false'},
        {'XLA_FLAGS': '--xla_force_host_platform_device_count=2'},
        {'JAX_NUM_CPU_DEVICES': '2'},
        {'EVENKEEL_CHILD': json.dumps({})},
        {},
    ],
    ids=lambda changes: next(iter(changes), 'default'),
)
def test_user_setting_holds(changes, tmp_path, monkeypatch):
    """Catches a default folder over the user's, and in jobs whose processes would wait for ever."""
    updates = []
    config = SimpleNamespace(
        jax_compilation_cache_dir=None, update=lambda name, value: updates.append((name, value))
    )
    for name in (*VARIABLES, compile_cache.MIN_VARIABLE, 'XLA_FLAGS', 'JAX_NUM_CPU_DEVICES'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compile_cache, 'child_host', lambda: os.environ.get('EVENKEEL_CHILD'))
    for name in ('_report_failures_once', '_remove_old_entries_at_exit'):
        monkeypatch.setattr(compile_cache, name, lambda folder: None)
    monkeypatch.setattr(compile_cache, 'jax', SimpleNamespace(config=config))
    compile_cache.enable_compile_cache()
    folder = tmp_path / 'evenkeel' / FOLDER
    assert folder.exists() == (not changes)
    assert dict(updates).get('jax_compilation_cache_dir') == (None if changes else str(folder))


def test_entries_used_longest_ago_are_removed_first(tmp_path):
    """Catches removal by age, by name, or of more than needed; and a subfolder that is left out."""
    (tmp_path / 'tuned').mkdir()
    files = {'a': (10, 40), 'b': (30, 30), 'tuned/c': (20, 20), 'd': (50, 50)}
    for name, (written, used) in files.items():
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (used, written))
    remaining = lambda: {name for name in files if (tmp_path / name).exists()}  # noqa: E731
    remove_old_entries(tmp_path, 400)
    assert remaining() == {*files}
    remove_old_entries(tmp_path, 399)
    assert remaining() == {'a', 'b', 'd'}
    remove_old_entries(tmp_path, 100)
    assert remaining() == {'d'}


def test_process_that_writes_entries_removes_old_ones(tmp_path):
    """Catches a bound that nothing enforces."""
    folder = tmp_path / 'evenkeel' / FOLDER
    folder.mkdir(parents=True)
    with (folder / 'jit_old-cache').open('wb') as file:
        file.truncate(int(compile_cache.MAX_BYTES))  # sparse
    os.utime(folder / 'jit_old-cache', (1, 1))
    assert run(tmp_path) == (0, [])
    assert {name.split('-')[0] for name in entries(tmp_path)} >= {'jit_one', 'jit_two'}
    assert not (folder / 'jit_old-cache').exists()
