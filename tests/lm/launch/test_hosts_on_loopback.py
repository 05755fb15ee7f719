"""Equivalence: a job of two processes, with four CPU devices each and started as on two hosts,
gives the numbers of one process, also if it is killed and resumed. Property: an error or refusal on
one host ends both.

    uv run pytest -m 'full or product' tests/lm/launch/test_hosts_on_loopback.py

The full tier has the shortest job of each kind; the others take minutes, and are run by hand.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lm import data
from lm.config.resolve import resolve
from lm.inference.load import load
from lm.launch.exit_status import BAD_INPUT, DONE, RESUME, SIGNALLED
from lm.record.checkpoint import list_steps, read_meta
from lm.record.metrics import read_rows
from lm.record.remote.local_copy import fetch_records
from lm.record.remote.mirror import mirror_workdir
from lm.storage.buckets import open_bucket
from lm.storage.files import read_json
from lm.study.plan.cells import expand_sweep
from modules.params import named_leaves
from tests import strangers
from tests.commands import ROOT
from tests.eval.convert.test_hf import import_case, save_case
from tests.lm.launch.test_supervisor import free_ports
from tests.object_store import BUCKET, CREDENTIALS, QUICK, server
from tests.sweep_helpers import (
    assert_close,
    assert_same_curves,
    base,
    cell_folders,
    settings,
    statuses,
    table,
    timeless,
)
from tests.xla import EIGHT_DEVICES, ONE_DEVICE
from train import train, train_sweep

N = 2
NAME = socket.gethostname()
RUN = {
    'mesh_data': -1,
    'model_d_model': 32,
    'model_n_layers': 1,
    'train_steps': 60,
    'train_eval_every': 20,
    'train_checkpoint_every': 10,
    'train_diagnose_every': 30,
    'data_validation_fraction': 0.2,
}
CUT = {'mesh_data': 1, 'mesh_fsdp': 8}  # each host holds a part of every parameter
MOST_SEC = 400  # of a job of seconds, on a machine that does much else


TRAIN = (str(ROOT / 'train.py'),)
# A program of its own sets the limit: a fork of this process, whose JAX has threads, might not end.
LIMITED = (
    *(sys.executable, '-c'),
    'import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); '
    'os.execv(sys.argv[1], sys.argv[1:])',
)


class Job:
    """The same command on n hosts; the output of each goes to a file."""

    def __init__(
        self, folder: Path, arguments: list[str], host_options=lambda number: {}, program=TRAIN, n=N
    ):
        self.ports = ports = free_ports()
        which = [f'--coordinator=127.0.0.1:{ports[0]}', f'--watch_port={ports[1]}']
        devices = f'{ONE_DEVICE} --xla_force_host_platform_device_count=4'
        self.logs = [folder / f'host{i}.log' for i in range(n)]
        self.hosts = []
        for i in range(n):
            process = [
                *host_options(i).get('before', ()),
                sys.executable,
                *program,
                *arguments,
                *which,
            ]
            with self.logs[i].open('w') as log:
                self.hosts.append(
                    subprocess.Popen(
                        [*process, f'--num_processes={n}', f'--process_id={i}'],
                        env={**os.environ, 'XLA_FLAGS': devices, **host_options(i).get('env', {})},
                        cwd=host_options(i).get('cwd', ROOT),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def end(self) -> list[int]:
        """Returns the exit statuses, once all hosts have ended."""
        return [host.wait(MOST_SEC) for host in self.hosts]

    def wait(self, status: int = DONE) -> 'Job':
        """Waits until all hosts have ended with the status; returns the job."""
        assert self.end() == [status] * len(self.hosts), [
            *map(self.read_log, range(len(self.hosts)))
        ]
        return self

    def kill_child(self, i: int) -> None:
        os.kill(self.find_child(i), signal.SIGKILL)

    def kill(self) -> None:
        for host in self.hosts:
            host.kill()  # and with it its child
            host.wait()

    def read_log(self, i: int) -> str:
        return self.logs[i].read_text()

    def find_child(self, i: int) -> int:
        pid = self.hosts[i].pid
        return int(Path(f'/proc/{pid}/task/{pid}/children').read_text().split()[0])

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MOST_SEC
        while not is_there():
            runs = all(host.poll() is None for host in self.hosts)
            assert runs and time.monotonic() < deadline, [self.read_log(i) for i in range(N)]
            time.sleep(0.01)

    def wait_for_row(self, workdir: Path, step: int) -> None:
        """Waits until the run trains; its checkpoints may still be written."""

        def is_there():
            rows = read_rows(workdir / 'metrics.jsonl')
            return bool(rows) and rows[-1]['step'] >= step

        self.wait_for(is_there)

    def wait_for_checkpoint(self, workdir: Path, step: int) -> None:
        """Waits until a checkpoint of this step, or a later one, is complete, so that a run resumes
        from it.
        """
        self.wait_for(lambda: max(list_steps(workdir / 'checkpoints'), default=0) >= step)

    def wait_for_upload(self, url: str, step: int) -> None:
        """Waits until a bucket has a complete checkpoint of this step, or a later one."""
        whole = re.compile(r'checkpoints/(\d+)/\.whole')
        bucket = open_bucket(url)

        def is_there():
            marks = filter(None, map(whole.fullmatch, bucket.list()))
            return any(int(mark[1]) >= step for mark in marks)

        self.wait_for(is_there)


@pytest.fixture
def start(tmp_path):
    """start(workdir, corpus) returns a Job; remaining processes are killed at the end."""
    with jobs(tmp_path) as start:
        yield start


@contextlib.contextmanager
def jobs(folder):
    begun = []

    def start(
        workdir,
        corpus,
        *flags,
        config='configs/default.py',
        host_options=lambda i: {},
        n=N,
        **changes,
    ):
        overrides = [f'--config.{k}={v}' for k, v in settings(corpus, **RUN | changes).items()]
        arguments = [f'--config={config}', f'--workdir={workdir}', *overrides, *flags]
        begun.append(Job(folder, arguments, host_options, n=n))
        return begun[-1]

    yield start
    for job in begun:
        job.kill()


@pytest.fixture(scope='module')
def undisturbed_run(corpus, tmp_path_factory):
    """Returns (workdir, log of host 1) of an uninterrupted run on two hosts."""
    folder = tmp_path_factory.mktemp('undisturbed')
    with jobs(folder) as start:
        job = start(folder / 'run', corpus).wait()
        assert job.read_log(0).count('step     60 of 60') == 1 and 'done: ' in job.read_log(0)
        return folder / 'run', job.read_log(1)


def digests(workdir):
    """Returns the digests of all arrays of the newest checkpoint, and its step."""
    folder = workdir / 'checkpoints'
    step = list_steps(folder)[-1]
    return step, read_meta(folder, step)['digests']


def assert_same(workdir, expected):
    """Asserts bitwise equality, except for times."""
    assert timeless(workdir) == timeless(expected)
    assert digests(workdir) == digests(expected)


@pytest.mark.full
def test_two_hosts_match_one(undisturbed_run, corpus, tmp_path):
    """Equals eight devices of one process, up to the order of sums. Host 1 writes nothing: a second
    set of events, or of rows, would show.
    """
    workdir, log = undisturbed_run
    assert train(resolve(base(corpus, **RUN)), tmp_path / 'one') == DONE
    assert_close(timeless(workdir), timeless(tmp_path / 'one'), rtol=1e-4)
    assert len(list((workdir / 'tensorboard').iterdir())) == 1
    assert sorted(p.name for p in workdir.iterdir() if p.name != '.lock') == sorted(
        p.name for p in (tmp_path / 'one').iterdir() if p.name != '.lock'
    )
    lines = [line for line in log.splitlines() if '[Gloo]' not in line]
    assert lines == []


@pytest.mark.product
@pytest.mark.parametrize(
    'sizes', [{'mesh_fsdp': 8}, {'mesh_tensor': 8}, {'mesh_fsdp': 4, 'mesh_context': 2}]
)
def test_two_hosts_shard_one_state(sizes, start, corpus, tmp_path):
    """Equals eight devices of one process: the losses, and the parameters, which both hosts save
    and one process reads. With `tensor` over both, both read the same rows: catches a share of them
    for each.
    """
    changes = {'model_n_heads': 8, 'model_n_kv_heads': 8, 'train_steps': 20, 'mesh_data': 1}
    start(tmp_path / 'run', corpus, **changes | sizes).wait()
    options = RUN | changes | {'mesh_data': -1}
    assert train(resolve(base(corpus, **options)), tmp_path / 'one') == DONE
    assert_close(timeless(tmp_path / 'run'), timeless(tmp_path / 'one'), rtol=1e-4)
    params, reference = (load(tmp_path / name, print).weights.params for name in ('run', 'one'))
    for path, leaf in named_leaves(params).items():
        np.testing.assert_allclose(leaf, named_leaves(reference)[path], rtol=0, atol=1e-4)


@pytest.mark.product
def test_cpu_processes_share_no_compilation_cache(start, corpus, tmp_path):
    """In a saved program the collectives of a loop have lost their place among the others: a host
    that reads it and a host that compiles would wait for each other, as in the second job here.
    """
    programs = tmp_path / 'programs'
    host_options = lambda i: {'env': {'JAX_COMPILATION_CACHE_DIR': str(programs)}}  # noqa: E731
    changes = {'mesh_data': 1, 'mesh_fsdp': 8, 'train_steps': 2, 'train_diagnose_every': 1}
    for name in ('first', 'second'):
        start(tmp_path / name, corpus, host_options=host_options, **changes).wait()
    assert not programs.exists() or not any(programs.iterdir())


@pytest.mark.product
def test_killed_child_and_killed_supervisor(undisturbed_run, start, corpus, tmp_path):
    workdir = tmp_path / 'run'
    job = start(workdir, corpus)
    job.wait_for_checkpoint(workdir, 10)
    job.kill_child(1)
    job.wait(RESUME)
    for i in range(N):
        assert (
            f'host 1 ({NAME}) was ended by SIGKILL; all hosts end with status 42' in job.read_log(i)
        )

    job = start(workdir, corpus)
    job.wait_for_checkpoint(workdir, list_steps(workdir / 'checkpoints')[-1] + 10)
    job.hosts[0].kill()
    assert job.end() == [-signal.SIGKILL, RESUME]
    assert f'host 0 ({NAME}) was lost' in job.read_log(1)

    saved = list_steps(workdir / 'checkpoints')[-1]
    job = start(workdir, corpus).wait()
    assert f'resuming after step {saved}' in job.read_log(0)
    assert_same(workdir, undisturbed_run[0])


@pytest.mark.product
def test_sigterm_to_one_host_saves_on_all(undisturbed_run, start, corpus, tmp_path):
    """If the checkpoint is damaged, all return to the one before."""
    workdir = tmp_path / 'run'
    job = start(workdir, corpus)
    job.wait_for_checkpoint(workdir, 20)
    job.hosts[1].send_signal(signal.SIGTERM)
    job.wait(SIGNALLED + signal.SIGTERM)
    step = read_rows(workdir / 'metrics.jsonl')[-1]['step']
    *_, before, last = list_steps(workdir / 'checkpoints')
    assert 20 <= step < 60 and last == step
    assert job.read_log(0).count(f'SIGTERM: saved step {step} in {workdir}') == 1
    summary = read_json(workdir / 'summary.json')
    assert (summary['status'], summary['step']) == ('stopped', step)

    damage(workdir / 'checkpoints' / str(step))
    job = start(workdir, corpus).wait()
    assert f'falling back to the one before\nresuming after step {before}' in job.read_log(0)
    assert_same(workdir, undisturbed_run[0])


@pytest.mark.product
def test_port_scan_changes_nothing(start, corpus, tmp_path):
    """Sends ten thousand messages of fifty kinds, and connects a JAX client without the
    certificate.
    """
    longer = {'train_steps': 800, 'train_checkpoint_every': 400, 'train_eval_every': 400}
    job = start(tmp_path / 'run', corpus, **longer)
    job.wait_for_row(tmp_path / 'run', 2)
    rng = random.Random(0)
    for port in job.ports:
        strangers.send(('127.0.0.1', port), strangers.kinds(5000), rng)
    client = (
        'from jaxlib import _jax; _jax.get_distributed_runtime_client('
        f'"127.0.0.1:{job.ports[0]}", 1, init_timeout=1).connect(); print("connected")'
    )
    stranger = subprocess.run([sys.executable, '-c', client], capture_output=True, text=True)
    assert stranger.returncode != 0 and 'connected' not in stranger.stdout
    assert all(host.poll() is None for host in job.hosts)  # it was scanned as it trained
    job.wait()
    assert 'connections closed that did not belong to this job: 5000' in job.read_log(0)
    assert [line for line in job.read_log(1).splitlines() if '[Gloo]' not in line] == []
    assert start(tmp_path / 'quiet', corpus, **longer).end() == [DONE] * N
    assert_same(tmp_path / 'run', tmp_path / 'quiet')


def damage(checkpoint):
    """Flips one bit of the largest file, which holds arrays."""
    files = [path for path in checkpoint.rglob('*') if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


@pytest.mark.full
def test_error_on_one_host_ends_all(start, corpus, tmp_path):
    """Host 0 cannot write its part of the first checkpoint, for which host 1 would wait."""
    data.open_dataset(resolve(base(corpus, **RUN)).data)  # larger files than the checkpoint's
    host_options = lambda i: {} if i else {'before': LIMITED}  # noqa: E731
    job = start(tmp_path / 'run', corpus, host_options=host_options).wait(BAD_INPUT)
    assert 'error: ' in job.read_log(0) and 'run the same command to start again' in job.read_log(0)
    assert f'host 0 ({NAME}) ended with status 1; all hosts end with status 1' in job.read_log(1)


@pytest.mark.full
def test_differing_config_file_is_refused(start, corpus, tmp_path):
    """The command is the same; nothing is compiled, and no run begins."""
    file = tmp_path / 'config.py'
    file.write_text(
        'import os\nfrom configs import default\n\n\ndef get_config():\n'
        '    config = default.get_config()\n'
        '    config.optim.b1 = float(os.environ["B1"])\n    return config\n'
    )
    host_options = [{'env': {'B1': '0.9', 'PYTHONPATH': str(ROOT)}}, {'env': {'B1': '0.8'}}]
    job = start(tmp_path / 'run', corpus, config=file, host_options=lambda i: host_options[i]).wait(
        BAD_INPUT
    )
    for i in range(N):
        log = job.read_log(i)
        assert 'the resolved config must be the same on all hosts' in log
        assert f'host 0 ({NAME}): ' in log and f'host 1 ({NAME}): ' in log
    assert not (tmp_path / 'run').exists()


@pytest.mark.product
def test_differing_text_is_refused(start, corpus, tmp_path):
    """Each host prepares the text of its own disk, and the digests differ."""
    for i in range(N):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / 'a.txt').write_text(f'{i} of some words, and more of them\n' * 100)
    relative_corpus = corpus | {'data.source': 'text:*.txt', 'data.cache_dir': 'cache'}
    config = ROOT / 'configs' / 'default.py'
    host_options = lambda i: {'cwd': tmp_path / str(i), 'env': {'PYTHONPATH': str(ROOT)}}  # noqa: E731
    job = start(tmp_path / 'run', relative_corpus, config=config, host_options=host_options).wait(
        BAD_INPUT
    )
    for i in range(N):
        assert 'the digest of the prepared data must be the same on all hosts' in job.read_log(i)
    assert not (tmp_path / 'run' / 'config.json').exists()


@pytest.mark.full
def test_two_hosts_each_read_half_the_import(tmp_path):
    """Equals the import of one process bitwise. Catches a host that reads the whole model, and
    parts on the wrong host.
    """
    folder = save_case(tmp_path / 'theirs', 'llama2', max_bytes=9000)
    job = Job(
        tmp_path,
        ['import-hf', str(folder), f'--out={tmp_path / "run"}'],
        host_options=lambda i: {'env': {'PYTHONPATH': str(ROOT)}},
        program=('-m', 'eval.convert'),
    )
    try:
        job.wait()
    finally:
        job.kill()
    params, reference = named_leaves(load(tmp_path / 'run').weights.params), import_case('llama2')
    assert params.keys() == reference.params.keys()
    for path, array in reference.params.items():
        np.testing.assert_array_equal(array, params[path])
    for i in range(N):
        read_mb, total_mb = re.search(
            rf'host {i} read (\S+) MB of (\S+) MB', job.read_log(i)
        ).groups()
        assert 0.5 <= float(read_mb) / float(total_mb) < 0.6


@pytest.mark.product
@pytest.mark.parametrize(
    'reparam_options', [{}, {'model_reparam': 'weight_norm', 'optim_average': 'ema'}]
)
def test_two_hosts_init_from_their_shards(reparam_options, start, corpus, tmp_path):
    """Equals one process, bitwise if the source stores the used weights, since programs round
    differently. Factors of LoRA are drawn, and an average is begun. Catches arrays that each host
    has by itself, and parts of another host.
    """
    source, steps = tmp_path / 'source', {'train_steps': 2, 'train_eval_every': 2}
    assert train(resolve(base(corpus, **RUN | CUT | steps | reparam_options)), source) == DONE
    changes = {'train_init_from': source, 'model_reparam': 'lora', 'train_trainable': 'lora'}
    changes |= {'optim_average': 'ema', 'train_steps': 1, 'train_eval_every': 0}
    start(tmp_path / 'run', corpus, **CUT | changes).wait()
    source_checkpoint, checkpoint = (load(tmp_path / name) for name in ('source', 'run'))
    source_params, params = (
        named_leaves(run.variables['params']) for run in (source_checkpoint, checkpoint)
    )
    bases = named_leaves(checkpoint.weights.params)
    for path, array in source_params.items():
        param = bases.get(f'{path}/base', params[path])
        np.testing.assert_allclose(param, array, rtol=0, atol=1e-6 if reparam_options else 0)
    assert np.any(bases['layers/mlp/up/a']) and np.any(bases['layers/mlp/up/b'])


@pytest.mark.product
def test_two_hosts_branch_from_their_shards(start, corpus, tmp_path):
    """A branch with permanent checkpoints has the numbers of its parent, bit for bit."""
    start(tmp_path / 'trunk', corpus, **CUT, train_checkpoint_steps='0,20').wait()
    source = {'train_branch_from': f'{tmp_path}/trunk@20'}
    changes = {'train_checkpoint_steps': '30', 'train_keep_last': 1, 'train_keep_best': 0}
    start(tmp_path / 'branch', corpus, **CUT | source | changes).wait()
    assert {0, 20} <= {*list_steps(tmp_path / 'trunk' / 'checkpoints')}
    assert list_steps(tmp_path / 'branch' / 'checkpoints') == [30, 60]
    expected = [row for row in timeless(tmp_path / 'trunk') if row['step'] > 20]
    assert timeless(tmp_path / 'branch') == expected
    assert digests(tmp_path / 'branch') == digests(tmp_path / 'trunk')


SWEEP = {'optim.lr': (1e-3, 3e-3), 'train.seed': (0, 1)}  # two cells a host
FLAG = f'--config.sweep={SWEEP}'


@pytest.fixture(scope='module')
def single_host_sweep(corpus, tmp_path_factory):
    """Returns a sweep on the eight devices of this process."""
    workdir = tmp_path_factory.mktemp('one') / 'sweep'
    assert train_sweep(base(corpus, **RUN), SWEEP, workdir) == DONE
    return workdir


@pytest.fixture(scope='module')
def dealt_sweep(corpus, tmp_path_factory):
    """Returns a sweep on two hosts, and the logs of both."""
    folder = tmp_path_factory.mktemp('dealt')
    with jobs(folder) as start:
        job = start(folder / 'sweep', corpus, FLAG).wait()
        return folder / 'sweep', [job.read_log(i) for i in range(N)]


@pytest.mark.full
def test_sweep_is_dealt_to_hosts(dealt_sweep, single_host_sweep):
    workdir, logs = dealt_sweep
    assert_same_curves(workdir, single_host_sweep, rtol=1e-4)
    assert statuses(workdir) == ['done'] * 4
    assert all('2 of the 4 cells train on this host' in text for text in logs)
    assert not any('Gloo' in text for text in logs)  # JAX's processes are not joined
    files = [
        {path.name for path in folder.iterdir()} - {'.job'}
        for folder in (workdir, single_host_sweep)
    ]
    assert files[0] == files[1]


@pytest.mark.full
def test_killed_host_loses_only_its_cells(dealt_sweep, start, corpus, tmp_path):
    workdir = tmp_path / 'sweep'
    job = start(workdir, corpus, FLAG)
    theirs = list(cell_folders(dealt_sweep[0]).values())[2].name
    job.wait_for_checkpoint(workdir / theirs, 10)
    job.kill_child(1)
    job.wait(RESUME)
    assert f'host 1 ({NAME}) was ended by SIGKILL; all hosts end with status 42' in job.read_log(0)
    assert statuses(workdir) == ['done', 'done', 'unfinished', 'unfinished']

    saved = list_steps(workdir / theirs / 'checkpoints')[-1]
    job = start(workdir, corpus, FLAG).wait()
    assert f'resuming after step {saved}' in job.read_log(1)
    assert_same_curves(workdir, dealt_sweep[0])


@pytest.mark.full
def test_runs_on_both_hosts_train_in_turn(single_host_sweep, start, corpus, tmp_path):
    """A signal to either host stops both after a checkpoint, from which the same command
    resumes.
    """
    workdir = tmp_path / 'sweep'
    job = start(workdir, corpus, FLAG, mesh_data=8)
    first = expand_sweep(base(corpus, **RUN | {'mesh_data': 8}), SWEEP)[0].name
    job.wait_for_checkpoint(workdir / first, 10)
    job.hosts[0].send_signal(signal.SIGTERM)
    job.wait(SIGNALLED + signal.SIGTERM)
    assert 'on 2-core x86_64 CPU as 8 devices' in job.read_log(0)
    assert 'cells' not in job.read_log(1)
    assert statuses(workdir) == ['stopped', *['unfinished'] * 3]

    job = start(workdir, corpus, FLAG, mesh_data=8).wait()
    assert_same_curves(workdir, single_host_sweep, rtol=1e-4)


@pytest.mark.product
def test_folder_refused_by_host_0_ends_all(start, corpus, tmp_path):
    """Host 1 waits for host 0 to open the folder."""
    (tmp_path / 'sweep').mkdir()
    (tmp_path / 'sweep' / 'config.json').write_text('{}')
    job = start(tmp_path / 'sweep', corpus, FLAG).wait(BAD_INPUT)
    assert 'contains a single run' in job.read_log(0)
    assert f'host 0 ({NAME}) ended with status 1' in job.read_log(1)


ARMS = {'optim.b1': (0.9, 0.8)}
TUNE = {'optim.lr': 0.01, 'seeds': 3, 'budget': 13}
TUNED = (f'--config.sweep={ARMS}', f'--config.tune={TUNE}')
BRIEF = {'mesh_data': 1, 'train_steps': 20, 'train_diagnose_every': 0}


@pytest.fixture(scope='module')
def single_host_tuned_sweep(corpus, tmp_path_factory):
    """Returns a tuned sweep on one host that compiles as two hosts do."""
    folder = tmp_path_factory.mktemp('tuned')
    with jobs(folder) as start:
        start(folder / 'sweep', corpus, *TUNED, n=1, **BRIEF).wait()
    return folder / 'sweep'


def assert_same_study(workdir, expected, rtol=0.0):
    """Asserts the same runs, arms, waves and numbers."""
    of_each = [
        [(cell['tuned'], cell['changes']) for cell in read_json(path / 'sweep.json')['cells']]
        for path in (workdir, expected)
    ]
    assert of_each[0] == of_each[1]
    assert_same_curves(workdir, expected, rtol)
    assert {*statuses(workdir)} == {'done'}


@pytest.mark.full
def test_tuned_sweep_on_two_hosts_matches_one(single_host_tuned_sweep, start, corpus, tmp_path):
    """Each host trains its share of every wave, and waits for the other."""
    job = start(tmp_path / 'sweep', corpus, *TUNED, **BRIEF).wait()
    assert_same_study(tmp_path / 'sweep', single_host_tuned_sweep)
    for i in range(N):
        assert job.read_log(i).count('of the 10 cells train on this host') == 2
    assert 'wave 2, ' in job.read_log(0) and 'wave' not in job.read_log(1)


@pytest.mark.product
def test_tuned_sweep_survives_killed_host(single_host_tuned_sweep, start, corpus, tmp_path):
    """The other host waits as long as it may be alive, then trains its remaining cells."""
    workdir = tmp_path / 'sweep'
    job = start(workdir, corpus, *TUNED, **BRIEF)
    theirs = [cell['cell'] for cell in read_json(single_host_tuned_sweep / 'sweep.json')['cells']
              if cell['tuned'] == {'arm': 1, 'k': [16], 'seed': 0, 'stage': 'scan'}]  # fmt: skip
    job.wait_for_row(workdir / theirs[0], 5)
    job.kill_child(1)
    job.wait(RESUME)
    assert 'of lost hosts will train on this host' in job.read_log(0)
    assert_same_study(workdir, single_host_tuned_sweep)


@pytest.mark.product
def test_tuned_sweep_with_runs_on_both_hosts(start, corpus, tmp_path):
    """The reference has the eight devices in one process, so that the sums have the same parts. Its
    rates are small, since rounding differences grow with every large step.
    """
    tuned = (TUNED[0], f'--config.tune={TUNE | {"optim.lr": 0.001}}')
    brief = BRIEF | {'mesh_data': 8}
    eight = {'XLA_FLAGS': EIGHT_DEVICES}
    start(
        tmp_path / 'one', corpus, *tuned, n=1, host_options=lambda i: {'env': eight}, **brief
    ).wait()
    start(tmp_path / 'two', corpus, *tuned, **brief).wait()
    assert_same_study(tmp_path / 'two', tmp_path / 'one', rtol=1e-3)


@pytest.fixture(scope='module')
def bucket_env():
    secret = {'EVENKEEL_JOB_SECRET': 'of hosts that share no disk'}
    with server() as port:
        yield CREDENTIALS | QUICK | secret | {'AWS_ENDPOINT_URL': f'http://127.0.0.1:{port}'}


@pytest.fixture
def bucket_access(bucket_env, tmp_path, monkeypatch):
    """Gives this process access to the bucket."""
    for name, value in (bucket_env | {'EVENKEEL_CACHE': str(tmp_path / 'reads')}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def start_anew(bucket_env, start, tmp_path):
    """start_anew(url, corpus, ...) returns (Job, disks) of two machines with empty disks."""
    machines = itertools.count()

    def begin(*arguments, **changes):
        disks = [tmp_path / f'machine-{next(machines)}' for _ in range(N)]
        host_options = lambda i: {'env': bucket_env | {'EVENKEEL_CACHE': str(disks[i])}}  # noqa: E731
        return start(*arguments, host_options=host_options, **changes), disks

    return begin


@pytest.mark.full
def test_bucket_run_matches_one_process(start_anew, corpus, tmp_path, bucket_access):
    """Equal up to the order of sums. Catches a checkpoint with the part of only one host."""
    url, steps = f's3://{BUCKET}/short', {'train_steps': 20}
    job, _ = start_anew(url, corpus, **CUT | steps)
    assert f'{url} is complete' in job.wait().read_log(0)
    assert train(resolve(base(corpus, **RUN | CUT | steps)), tmp_path / 'one') == DONE
    with mirror_workdir(url) as workdir:
        assert_close(timeless(workdir), timeless(tmp_path / 'one'), rtol=1e-4)
        params, reference = (
            load(path, print).weights.params for path in (workdir, tmp_path / 'one')
        )
    for path, leaf in named_leaves(params).items():
        np.testing.assert_allclose(leaf, named_leaves(reference)[path], rtol=0, atol=1e-4)


@pytest.mark.product
def test_hosts_without_a_common_disk_train_in_a_bucket(
    start_anew, start, corpus, tmp_path, bucket_access
):
    """Killed, stopped, and resumed on machines with empty disks: bitwise equal to hosts with a
    common disk. Catches a checkpoint with the part of only one host.
    """
    start(tmp_path / 'disk', corpus, **CUT).wait()
    url = f's3://{BUCKET}/hosts'
    job, disks = start_anew(url, corpus, **CUT)
    job.wait_for_upload(url, 10)
    job.kill_child(1)
    job.wait(RESUME)
    assert not list(disks[1].rglob('checkpoints'))

    job, _ = start_anew(url, corpus, **CUT)
    job.wait_for_upload(url, 30)
    job.hosts[1].send_signal(signal.SIGTERM)
    job.wait(SIGNALLED + signal.SIGTERM)
    assert 'resuming after step' in job.read_log(0)

    job, _ = start_anew(url, corpus, **CUT)
    assert f'{url} is complete' in job.wait().read_log(0)
    assert [line for line in job.read_log(1).splitlines() if '[Gloo]' not in line] == []
    with mirror_workdir(url) as workdir:
        assert_same(workdir, tmp_path / 'disk')


@pytest.mark.product
def test_unreachable_bucket_ends_all_hosts(bucket_env, start, corpus, tmp_path):
    nowhere = bucket_env | {'AWS_ENDPOINT_URL': 'http://127.0.0.1:9'}
    job = start(f's3://{BUCKET}/nowhere', corpus, host_options=lambda i: {'env': nowhere}).wait(
        BAD_INPUT
    )
    assert f'error: s3://{BUCKET}/nowhere' in job.read_log(0)
    assert f'host 0 ({NAME}) ended with status 1; all hosts end with status 1' in job.read_log(1)


@pytest.mark.product
def test_sweep_is_dealt_without_common_disk(start_anew, dealt_sweep, corpus, bucket_access):
    """Killed, and resumed on machines with empty disks: losses and table are bitwise equal to hosts
    with a common disk, and each host has only its own cells.
    """
    url = f's3://{BUCKET}/dealt'
    job, disks = start_anew(url, corpus, FLAG)
    names = [folder.name for folder in cell_folders(dealt_sweep[0]).values()]
    bucket, whole = open_bucket(url), {f'{name}/checkpoints/10/.whole' for name in names[2:]}
    job.wait_for(lambda: whole <= set(bucket.list()))
    job.kill_child(1)
    job.wait(RESUME)
    assert f'host 1 ({NAME}) was ended by SIGKILL' in job.read_log(0)
    for i in range(N):
        trained = {path.parent.parent.name for path in disks[i].rglob('dealt/*/checkpoints/*')}
        assert trained == set(names[2 * i : 2 * i + 2])
    assert statuses(url) == ['done', 'done', 'unfinished', 'unfinished']

    job, _ = start_anew(url, corpus, FLAG)
    job.wait()
    assert 'resuming after step' in job.read_log(1) and 'is in use by' in job.read_log(1)
    fetched = fetch_records(url)
    assert_same_curves(fetched, dealt_sweep[0])
    fetched_rows, expected_rows = (
        [row | {'sweep': ''} for row in table(folder)] for folder in (fetched, dealt_sweep[0])
    )
    assert fetched_rows == expected_rows
    assert {'sweep.json', 'cells.parquet', 'report.html'} <= set(bucket.list())
    bucket.fetch('cells.parquet', fetched / 'cells.parquet')
    rows = pq.read_table(fetched / 'cells.parquet').to_pylist()
    assert [row['status'] for row in rows] == ['done'] * 4


@pytest.mark.product
def test_sweep_on_both_hosts_needs_a_disk(bucket_env, start, corpus):
    host_options = lambda i: {'env': bucket_env}  # noqa: E731
    job = start(f's3://{BUCKET}/sweep', corpus, FLAG, host_options=host_options, mesh_data=8).wait(
        BAD_INPUT
    )
    assert 'needs a --workdir on a disk that all hosts share' in job.read_log(0)
