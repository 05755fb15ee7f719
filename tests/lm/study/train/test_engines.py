"""Sweeps on a real Ray cluster on this machine, and refusals before a cluster is contacted.

Equivalence: a sweep on Ray equals the sweep in this process, even if workers are killed.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import psutil
import pytest

from lm.record.checkpoint import list_steps
from lm.record.remote.local_copy import fetch_records
from lm.record.remote.mirror import sweep_folder
from lm.record.workdir import write_json
from lm.storage.buckets import open_bucket
from lm.storage.files import read_json
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.train import engines
from lm.study.train.engines import default_resources, split_group
from lm.study.train.groups import Work
from tests.commands import PATIENCE_SEC
from tests.lm.launch.test_distributed import N, on_each  # noqa: F401
from tests.object_store import variables
from tests.sweep_helpers import (
    base,
    cell_folders,
    curves,
    statuses,
    table,
    timeless,
    write_corpus,
)
from train import DONE, SIGNALLED, train_sweep

SWEEP = {'train.log_every': (1, 2), 'train.seed': (0, 1)}  # two groups of two
LONGER = {'train_steps': 300, 'train_eval_every': 100, 'train_checkpoint_every': 50}
WORKER = 'ray::train_group_remotely'


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


def test_host_0_prints_through_the_progress_console(tmp_path):
    """Lines of another console would overwrite the live progress."""
    ledger = engines.Ledger(None, None, tmp_path, None, False, host=0, hosts=2)
    with ledger.terminal.console.capture() as capture:
        ledger.say_for_host('a line')
    assert capture.get() == 'a line\n'


@pytest.mark.parametrize(('url', 'writers'), [(None, [0]), ('s3://bucket/sweep', [0, 1, 2])])
def test_one_process_writes_sweep_on_a_shared_disk(on_each, monkeypatch, tmp_path, url, writers):  # noqa: F811
    """Another write would change its time, by which processes check that they see one file."""
    plan = SimpleNamespace(plan_wave=lambda folder: 'a wave', record=None, folder_names={})
    written_by = []

    def write(self, wave):
        written_by.append(jax.process_index())
        return {} if written_by.count(jax.process_index()) > 1 else {'cell': 'folder'}

    monkeypatch.setattr(engines.Ledger, '_write_sweep', write)

    def open_ledger(_):
        return engines.Ledger(plan, None, tmp_path, url, False, host=0, hosts=1).next_wave()

    assert on_each(open_ledger) == ['a wave'] * N
    assert sorted(written_by) == sorted(writers * 2) and plan.folder_names == {'cell': 'folder'}


@pytest.fixture(scope='module')
def local(corpus, tmp_path_factory):
    """Returns the workdir of SWEEP, trained in this process."""
    workdir = tmp_path_factory.mktemp('local') / 'sweep'
    assert train_sweep(base(corpus, **LONGER), SWEEP, workdir) == DONE
    return workdir


@pytest.fixture(scope='module')
def cluster():
    """Starts a cluster of two CPUs; its workers share this process's compiled programs."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level='ERROR')
    before = set(workers())
    yield ray
    ray.shutdown()
    running = [process for process in before | set(workers()) if process.is_running()]
    assert not psutil.wait_procs(running, timeout=20)[1]


def workers() -> list[psutil.Process]:
    """Returns the processes below this process that train a group."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [''])[0].startswith(WORKER):
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


def when(happened, act) -> threading.Thread:
    """Calls act() in a thread, once happened() is true."""

    def watch():
        deadline = time.monotonic() + PATIENCE_SEC
        while time.monotonic() < deadline:
            if happened():
                return act()
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def begun(workdir: Path) -> list[Path]:
    """Returns the folders of the cells that have begun."""
    is_there = (workdir / 'sweep.json').exists()
    return (
        [folder for folder in cell_folders(workdir).values() if timeless(folder)]
        if is_there
        else []
    )


def has_saved(folder: Path) -> bool:
    return bool(list_steps(folder / 'checkpoints'))


def kill_workers_half_way(workdir: Path) -> tuple[threading.Thread, list[int]]:
    """Kills all workers in a thread, once a cell has saved and has steps left; returns the thread,
    and the list of killed workers.
    """
    killed = []

    def half_way():
        return any(
            has_saved(folder) and timeless(folder)[-1]['step'] < 250 for folder in begun(workdir)
        )

    def kill():
        for victim in workers():
            victim.kill()
            killed.append(victim.pid)

    return when(half_way, kill), killed


def rows(workdir: Path) -> list[dict]:
    """Returns the table without the name of the sweep."""
    return [row | {'sweep': ''} for row in table(workdir)]


@pytest.mark.full
def test_killed_workers_change_no_number(cluster, local, corpus, tmp_path, capfd):
    """Kills all workers, since the worker of the observed cell cannot be identified."""
    thread, killed = kill_workers_half_way(tmp_path)
    assert train_sweep(base(corpus, **LONGER), SWEEP, tmp_path, engine='ray') == DONE
    thread.join()
    stdout = capfd.readouterr().out
    assert killed and 'resuming after step' in stdout
    assert "2 tasks on Ray, each with {'CPU': 1.0}" in stdout and '4 of 4 done' in stdout
    assert table(tmp_path) == table(local)
    assert curves(tmp_path) == curves(local)


@pytest.mark.full
def test_tuned_sweep_survives_killed_workers(cluster, corpus, tmp_path, capfd):
    """Waves and numbers equal a sweep in this process."""
    arms, tune = {'optim.b1': (0.9, 0.8)}, {'optim.lr': 0.01, 'seeds': 3, 'budget': 13}
    tree = base(corpus, train_steps=30, train_eval_every=30, train_checkpoint_every=10)
    assert train_sweep(tree, arms, tmp_path / 'local', tune=tune) == DONE
    workdir = tmp_path / 'ray'
    thread, killed = kill_workers_half_way(workdir)
    assert train_sweep(tree, arms, workdir, engine='ray', tune=tune) == DONE
    thread.join()
    stdout = capfd.readouterr().out
    assert killed and stdout.count('1 task on Ray') == 3 and 'look 1: 3 runs' in stdout
    ledgers = [read_json(tmp_path / name / 'sweep.json') for name in ('ray', 'local')]
    assert ledgers[0] == ledgers[1]
    assert rows(workdir) == rows(tmp_path / 'local')
    assert curves(workdir) == curves(tmp_path / 'local')


@pytest.mark.full
def test_bucket_sweep_matches_disk_sweep(cluster, local, corpus, bucket_url, monkeypatch, capfd):
    """Each worker holds its cells, and is killed once; the driver, which holds none, writes table
    and report. The cluster was started without the bucket's variables.
    """
    keys = {name: os.environ[name] for name in variables()}
    thread, killed = kill_workers_half_way(sweep_folder(bucket_url))
    options = engines._task_options

    def with_keys(resources):
        task_options = options(resources)
        task_options['runtime_env']['env_vars'].update(keys)
        return task_options

    monkeypatch.setattr(engines, '_task_options', with_keys)
    assert train_sweep(base(corpus, **LONGER), SWEEP, bucket_url, engine='ray') == DONE
    thread.join()
    stdout = capfd.readouterr().out
    assert killed and 'resuming after step' in stdout and '4 of 4 done' in stdout
    fetched = fetch_records(bucket_url)
    assert curves(fetched) == curves(local)
    assert rows(fetched) == rows(local)
    assert {'sweep.json', 'cells.parquet', 'report.html'} <= set(open_bucket(bucket_url).list())


@pytest.mark.full
def test_sigterm_ends_workers(cluster, corpus, tmp_path, capfd):
    """The same command resumes from their checkpoints."""
    thread = when(
        lambda: begun(tmp_path) and all(map(has_saved, begun(tmp_path))),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    tree = base(corpus, **LONGER | {'train_steps': 60_000})
    assert train_sweep(tree, SWEEP, tmp_path, engine='ray') == SIGNALLED + signal.SIGTERM
    thread.join()
    assert psutil.wait_procs(workers(), timeout=10)[1] == []
    assert 'SIGTERM: stopped. Run the same command to resume.' in capfd.readouterr().out
    assert 'done' not in statuses(tmp_path)


@pytest.mark.parametrize('resources', [{'GPU': 1.0}, {'CPU': 3.0}, {'CPU': 1.0, 'TPU': 4.0}])
def test_unavailable_resources_are_refused(cluster, corpus, tmp_path, resources):
    with pytest.raises(ValueError) as error:
        train_sweep(base(corpus), SWEEP, tmp_path, engine='ray', resources=resources)
    assert str(error.value) == (
        f"no node of the Ray cluster has {resources}; nodes have [{{'CPU': 2.0}}]"
    )


def test_missing_ray_error_names_the_extra(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ValueError, match=r'pip install "evenkeel\[cluster\]"'):
        train_sweep(base(corpus), SWEEP, tmp_path, engine='ray')


@pytest.mark.parametrize(
    ('cluster', 'expected'),
    [
        ({'CPU': 8.0}, {'CPU': 1.0}),
        ({'CPU': 8.0, 'GPU': 2.0}, {'GPU': 1.0}),
        ({'CPU': 8.0, 'GPU': 0.0}, {'CPU': 1.0}),
        ({'CPU': 8.0, 'TPU': 4.0}, {'TPU': 1.0}),
    ],
)
def test_default_resources_prefer_accelerator(cluster, expected):
    assert default_resources(cluster) == expected


@pytest.mark.parametrize(('runs_at_once', 'sizes'), [(0, [4]), (1, [1] * 4), (3, [3, 1])])
def test_split_group_into_unfinished_parts(corpus, tmp_path, runs_at_once, sizes):
    (group,) = group_by_program(expand_sweep(base(corpus), {'train.seed': range(6)}))
    for cell, status in ((group[0], 'done'), (group[3], 'diverged'), (group[4], 'failed')):
        (tmp_path / cell.name).mkdir()
        write_json(tmp_path / cell.name / 'summary.json', {'status': status})
    work = Work([group], tmp_path, [], print, print, runs_at_once, {})
    parts = split_group(group, work)
    assert [len(part) for part in parts] == sizes
    assert [cell for part in parts for cell in part] == [group[i] for i in (1, 2, 4, 5)]
