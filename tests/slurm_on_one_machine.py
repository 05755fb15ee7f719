"""Trains under SLURM itself, on a cluster of this one machine that is started here.

    apt-get install slurmctld slurmd slurm-client munge
    uv run pytest tests/slurm_on_one_machine.py -n 0

Not part of `uv run pytest`: it needs these programs and root, and takes minutes. It neither uses
nor changes the machine's own SLURM: all files are in a folder of pytest.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm.launch.exit_status import BAD_INPUT, DONE, SIGNALLED
from lm.record.checkpoint import list_steps
from lm.record.metrics import read_rows
from tests.commands import ROOT
from tests.sweep_helpers import settings
from tests.xla import ONE_DEVICE
from tpu.launchers import slurm

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun')
absent = [name for name in PROGRAMS if shutil.which(name, path='/usr/sbin:/usr/bin') is None]
if absent or os.geteuid() != 0:
    pytest.skip(f'needs root, and is without {absent}', allow_module_level=True)

MOST_SEC = 300
WAITS_SEC = 5  # of a job that is queued again, before it may run
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={waits}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
ReturnToService=2
KillWait=60
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
RUN = {
    'mesh_data': -1,
    'train_steps': 300,
    'train_eval_every': 150,
    'train_checkpoint_every': 50,
    'data_validation_fraction': 0.2,
}


def free_ports(n):
    servers = [socket.create_server(('', 0)) for _ in range(n)]
    try:
        return [server.getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    """Returns the folder of a SLURM cluster; SLURM_CONF names its configuration."""
    folder = tmp_path_factory.mktemp('slurm')
    for name in ('state', 'spool', 'logs'):
        (folder / name).mkdir()
    key = folder / 'munge.key'
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().split('.')[0]
    config = folder / 'slurm.conf'
    config.write_text(
        CONFIG.format(
            folder=folder, host=host, ports=free_ports(2), waits=WAITS_SEC, cpus=os.cpu_count()
        )
    )
    munge = ['munged', '--foreground', '--force', f'--key-file={key}']
    munge += [f'--{name}={folder}/munge.{name.split("-")[0]}' for name in ('socket', 'pid-file')]
    munge += [f'--log-file={folder}/munge.log', f'--seed-file={folder}/munge.seed']
    daemons = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SLURM_CONF', str(config))
        patch.setenv('PATH', f'/usr/sbin:/usr/bin:{os.environ["PATH"]}')
        try:
            for command in (munge, ['slurmctld', '-D', '-c'], ['slurmd', '-D']):
                log = (folder / f'{command[0]}.said').open('w')
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
                time.sleep(1)
            wait_for(lambda: 'idle' in run('sinfo', '--noheader', '--format=%T'), folder)
            yield folder
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(60)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_for(happened, what):
    deadline = time.monotonic() + MOST_SEC
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.1)


class Launched:
    """The launch command in a separate process."""

    def __init__(self, cluster: Path, workdir: Path, corpus: dict, *flags, **changes):
        overrides = [f'--config.{k}={v}' for k, v in settings(corpus, **RUN | changes).items()]
        self.workdir = workdir
        self.log = workdir.with_suffix('.log')
        command = [sys.executable, '-m', 'tpu.launch', '--engine=slurm', '--nodes=1']
        command += ['--tasks_per_node=2', f'--python={sys.executable}', f'--logs={cluster}/logs']
        command += [f'--name={workdir.name}', *flags, '--', 'train.py']
        command += ['--config=configs/default.py', f'--workdir={workdir}', *overrides]
        env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ONE_DEVICE}
        with self.log.open('a') as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_for_step(self, step: int) -> None:
        """Waits until it has trained this step, or has ended."""

        def has_step():
            rows = read_rows(self.workdir / 'metrics.jsonl')
            return self.process.poll() is not None or (rows and rows[-1]['step'] >= step)

        wait_for(has_step, self.log)
        assert self.process.poll() is None, self.read_log()

    def end(self) -> int:
        return self.process.wait(MOST_SEC)

    def read_log(self) -> str:
        return self.log.read_text()

    @property
    def number(self) -> str:
        return run(*slurm.find_command(slurm.Job(self.workdir.name, ()))).strip()


@pytest.fixture
def start(cluster, corpus, tmp_path):
    """start(NAME, *flags, **changes) returns a Launched; remaining jobs are cancelled at the
    end.
    """
    begun = []

    def start(name, *flags, **changes):
        begun.append(Launched(cluster, tmp_path / name, corpus, *flags, **changes))
        return begun[-1]

    yield start
    for launched in begun:
        launched.process.kill()
        launched.process.wait()
    run('scancel', '--me', '--full')
    wait_for(lambda: not run('squeue', '--me', '--noheader'), 'the queue is empty')


def assert_trained(launched, restarts):
    assert launched.end() == DONE, launched.read_log()
    log = launched.read_log()
    steps = sorted({row['step'] for row in read_rows(launched.workdir / 'metrics.jsonl')})
    assert steps == list(range(1, RUN['train_steps'] + 1))
    assert log.count('resuming after step') == restarts and 'done: ' in log
    assert f'is COMPLETED, {restarts} restarts' in log


def test_two_tasks_train(start):
    assert_trained(start('plain'), 0)


def test_preempted_job_resumes(start):
    """SLURM preempts a job (PreemptMode=REQUEUE) by SIGTERM, time to save, and the queue."""
    launched = start('preempted')
    launched.wait_for_step(60)
    run('scontrol', 'requeue', launched.number)
    assert_trained(launched, 1)
    assert 'SIGTERM: saved step' in launched.read_log()


def test_signalled_tasks_are_requeued(start):
    """SLURM signals tasks before the time limit (--signal), and an operator may."""
    launched = start('signalled')
    launched.wait_for_step(60)
    run('scancel', '--signal=TERM', launched.number)
    assert_trained(launched, 1)
    assert 'status 143: queued again' in launched.read_log()


def test_lost_host_is_requeued(start):
    launched = start('lost')
    launched.wait_for_step(60)
    process_ids = run(
        'pgrep', '--full', f'^{sys.executable} train.py .*--workdir={launched.workdir} '
    )
    os.kill(max(map(int, process_ids.split())), signal.SIGKILL)
    assert_trained(launched, 1)
    assert 'was ended by SIGKILL; all hosts end with status 42' in launched.read_log()
    assert 'status 42: queued again' in launched.read_log()


def test_restarts_are_limited(start):
    launched = start('limited', '--max_restarts=1')
    for step in (60, 120):
        launched.wait_for_step(step)
        run('scancel', '--signal=TERM', launched.number)
        wait_for(
            lambda step=step: list_steps(launched.workdir / 'checkpoints')[-1] >= step, 'saved'
        )
    assert launched.end() == SIGNALLED + signal.SIGTERM
    assert launched.read_log().count(': queued again') == 1


def test_sigterm_to_launcher_stops_job(start):
    launched = start('stopped')
    launched.wait_for_step(60)
    number = launched.number
    launched.process.terminate()
    assert launched.end() == SIGNALLED + signal.SIGTERM
    assert 'SIGTERM: saved step' in launched.read_log()
    assert ': queued again' not in launched.read_log()
    fields = slurm.parse_fields(run(*slurm.show_command(number)))
    assert (fields['JobState'], fields['ExitCode'], fields['Restarts']) == ('FAILED', '143:0', '0')


def test_launcher_may_exit(start):
    """The same command, given again, shows all output of the job, and returns its status."""
    launched = start('left')
    launched.wait_for_step(60)
    launched.process.kill()
    launched.process.wait()
    again = start('left')
    assert_trained(again, 0)
    assert 'is there already' in again.read_log()


def test_bad_input_is_final(start):
    launched = start('bad', model_n_heads=3)
    assert launched.end() == BAD_INPUT
    assert 'n_heads' in launched.read_log() and ': queued again' not in launched.read_log()
