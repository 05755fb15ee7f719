"""Jobs of SLURM: the batch script, which bash runs here, and programs that play back states.

tests/slurm_on_one_machine.py uses SLURM itself.
"""

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.tpu.conftest import signal_soon
from tests.tpu.stubs import NASTY
from tpu import launch
from tpu.launchers import slurm
from tpu.launchers.base import Job

TRAIN = ['--', 'train.py', '--config=configs/default.py']


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch):
    monkeypatch.setattr(slurm, 'LOOK_SEC', 0.0)


def job_line(state, code='0:0', restarts=0, reason='None'):
    """Returns a line of `scontrol show job --oneliner`."""
    return (
        f'JobId=7 JobName=job UserId=me(1) Priority=1 Account=(null) JobState={state} '
        f'Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 '
        f'ExitCode={code} RunTime=00:00:01 Command=(null) Comment=a=b'
    )


class Controller:
    def __init__(self, fake, tmp_path, lines, queue='', says=''):
        self.logs = tmp_path / 'logs'
        script = f'cat > {tmp_path}/batch; '
        script += f'printf {shlex.quote(says)} > {self.logs}/job-7.out; ' if says else ''
        self.sbatch = fake('sbatch', any=[script + 'echo "7;cluster"'])
        self.squeue = fake('squeue', any=[f'echo {queue}'])
        self.scancel = fake('scancel')
        self.scontrol = fake(
            'scontrol', show=[f'echo {shlex.quote(line)}' for line in lines], update=['true']
        )

    def run(self, *flags):
        flags = [f'--logs={self.logs}', '--nodes=2', '--name=job', *flags]
        return launch.main(['--engine=slurm', *flags, *TRAIN])


def make_batch_script(flags, max_restarts=10, **options):
    return slurm.batch_script(
        Job('job', tuple(flags), python='python3', max_restarts=max_restarts),
        slurm.SlurmOptions(nodes=2, **options),
    )


def test_batch_script_requests_job():
    text = make_batch_script(
        ['--config=c.py'], tasks_per_node=8, logs='/shared/logs', folder='/x y'
    )
    head = [line[8:] for line in text.splitlines() if line.startswith('#SBATCH ')]
    assert head == [
        '--job-name=job',
        '--nodes=2',
        '--ntasks-per-node=8',
        '--output=/shared/logs/job-%j.out',
        '--open-mode=append',
        '--requeue',
        '--signal=TERM@120',
    ]
    assert "\ncd '/x y' || exit 1\n" in text and text.startswith('#!/bin/bash\n#SBATCH')


@pytest.mark.parametrize(
    ('status', 'restarts', 'requeued'),
    [
        *[(status, None, False) for status in (0, 1, 2, 126, 127, 128)],
        *[(status, None, True) for status in (42, 130, 137, 143, 255)],
        *[(143, '2', True), (143, '3', False), (42, '4', False)],
    ],
)
def test_batch_script_requeues_itself(status, restarts, requeued, fake, monkeypatch, tmp_path):
    """The flags are unchanged, and srun leaves the tasks to themselves."""
    srun = fake('srun', any=[f'exit {status}'])
    scontrol = fake('scontrol')
    fake('sleep')
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    if restarts is not None:
        monkeypatch.setenv('SLURM_RESTART_COUNT', restarts)
    done = subprocess.run(
        ['bash', '-c', make_batch_script(NASTY, max_restarts=3, folder=str(tmp_path))]
    )
    assert done.returncode == status
    tasks = ['--kill-on-bad-exit=0', '--wait=0']
    assert srun.calls == [[*tasks, 'python3', 'train.py', *NASTY]]
    assert scontrol.calls == ([['requeue', '7']] if requeued else [])


@pytest.mark.parametrize(
    ('files', 'extra_words'),
    [('nvidia0', ['--extra', 'cuda']), ('accel0', ['--extra', 'tpu']), ('', [])],
)
def test_first_node_determines_extra(files, extra_words, fake, monkeypatch, tmp_path):
    rows = [
        (extra_words, f'{tmp_path}/{Path(pattern).name}', *fields)
        for extra_words, pattern, *fields in slurm.ACCELERATORS
    ]
    monkeypatch.setattr(slurm, 'ACCELERATORS', rows)
    (tmp_path / (files or 'null')).touch()
    srun = fake('srun')
    text = slurm.batch_script(
        Job('job', ('--x=a b',)), slurm.SlurmOptions(nodes=2, folder=str(tmp_path))
    )
    subprocess.run(['bash', '-c', text], check=True)
    (call,) = srun.calls
    assert call[2:] == ['uv', 'run', *extra_words, 'train.py', '--x=a b']


def test_every_start_has_new_secret(fake, tmp_path):
    secrets_file = tmp_path / 'seen'
    fake('srun', any=[f'echo "$EVENKEEL_JOB_SECRET" >> {secrets_file}'])
    for _ in range(2):
        subprocess.run(['bash', '-c', make_batch_script([], folder=str(tmp_path))], check=True)
    first, second = secrets_file.read_text().split()
    assert re.fullmatch('[0-9a-f]{32}', first) and first != second


def test_flags_do_not_end_here_document(fake, tmp_path):
    """The script that --dry_run prints gives sbatch the same text as a launch does."""
    fake('sbatch', any=[f'cat > {tmp_path}/batch'])
    for name in ('squeue', 'scontrol', 'tail', 'scancel'):
        fake(name)
    job, options = Job('job', ('--x=1\nEND\nEND_\nrm -r /',)), slurm.SlurmOptions(nodes=2)
    subprocess.run(['bash', '-c', slurm.script(job, options)], cwd=tmp_path, check=True)
    assert (tmp_path / 'batch').read_text() == slurm.batch_script(job, options)


@pytest.mark.parametrize(
    ('state', 'code', 'status'),
    [
        ('COMPLETED', '0:0', 0),
        ('FAILED', '1:0', 1),
        ('FAILED', '2:0', 2),
        ('FAILED', '42:0', 42),
        ('FAILED', '143:0', 143),
        ('CANCELLED', '0:15', 143),
        ('NODE_FAIL', '0:0', 42),
        ('TIMEOUT', '0:0', 42),
        ('OUT_OF_MEMORY', '0:125', 253),
        *[(state, '0:0', None) for state in ('PENDING', 'RUNNING', 'COMPLETING', 'REQUEUED')],
    ],
)
def test_job_status_is_parsed(state, code, status):
    assert slurm.parse_status(slurm.parse_fields(job_line(state, code))) == status


def test_job_is_submitted_and_followed(fake, tmp_path, capfd):
    """The job is followed through a preemption; SLURM then runs it again."""
    lines = [
        job_line('PENDING', reason='Resources'),
        job_line('RUNNING'),
        job_line('COMPLETING'),
        job_line('PENDING', restarts=1, reason='BeginTime'),
        job_line('RUNNING', restarts=1),
        job_line('COMPLETED', restarts=1),
    ]
    controller = Controller(fake, tmp_path, lines, says='step 1\nstep 2\n')
    assert controller.run('--submit_flags=--gres=gpu:8 --time=9', '--max_restarts=5') == 0
    captured = capfd.readouterr()
    assert captured.out == 'step 1\nstep 2\n'
    assert 'job 7 is PENDING (Resources), 0 restarts' in captured.err
    assert 'job 7 is RUNNING, 1 restarts' in captured.err
    assert controller.sbatch.calls == [['--parsable', '--gres=gpu:8', '--time=9']]
    assert '< 5 )); then' in (tmp_path / 'batch').read_text()
    assert controller.squeue.calls == [['--me', '--noheader', '--name=job', '--format=%i']]
    assert controller.scontrol.calls[0] == ['show', 'job', '--oneliner', '7']


@pytest.mark.parametrize('status', [1, 42])
def test_status_is_returned_without_resubmission(status, fake, tmp_path):
    controller = Controller(fake, tmp_path, [job_line('FAILED', f'{status}:0')])
    assert controller.run() == status and len(controller.sbatch.calls) == 1


def test_queued_job_is_found(fake, tmp_path):
    """A second trainer would find the workdir locked."""
    controller = Controller(fake, tmp_path, [job_line('COMPLETED')], queue='7')
    assert controller.run() == 0 and not controller.sbatch.calls


@pytest.mark.timeout(60)  # a job that is not held would be polled forever
@pytest.mark.parametrize(
    ('state', 'cancelled'), [('RUNNING', ['--signal=TERM', '7']), ('PENDING', ['7'])]
)
def test_sigterm_stops_tasks_for_good(state, cancelled, fake, tmp_path):
    """If the job were not held first, its script would queue it again."""
    controller = Controller(fake, tmp_path, [job_line(state)])
    after = f'echo {shlex.quote(job_line("FAILED", "143:0"))}'
    (controller.scancel.folder / 'any.1').write_text(
        f'[ $(wc -c < {controller.scontrol.folder}/held) = 5 ] &&'
        f' printf "%s" {shlex.quote(after)} > {controller.scontrol.folder}/show.1\n'
    )
    (controller.scontrol.folder / 'update.1').write_text(
        f'echo held > {controller.scontrol.folder}/held\n'
    )
    signal_soon(signal.SIGTERM, 0.4)
    assert controller.run() == 143
    assert controller.scancel.calls == [cancelled]
    assert ['update', 'JobId=7', 'Requeue=0'] in controller.scontrol.calls


def test_scontrol_may_fail_temporarily(fake, tmp_path, capfd):
    controller = Controller(fake, tmp_path, [job_line('RUNNING')] * 9 + [job_line('COMPLETED')])
    for i in range(1, 10):
        (controller.scontrol.folder / f'show.{i}').write_text('echo down >&2; exit 1\n')
    assert controller.run() == 0
    (controller.scontrol.folder / 'show.10').write_text('echo down >&2; exit 1\n')
    assert controller.run() == 1
    assert 'ended with status 1: down' in capfd.readouterr().err


def test_dry_run_prints_shell_lines(fake, tmp_path, capsys):
    """Contract: pasted in a shell, the lines submit the same script."""
    controller = Controller(fake, tmp_path, [job_line('COMPLETED')])
    assert controller.run('--dry_run') == 0
    printed = capsys.readouterr().out
    assert not controller.squeue.calls
    upto = printed[: printed.index('# every')]
    subprocess.run(['bash', '-c', upto], check=True)
    pasted = (tmp_path / 'batch').read_text()
    assert controller.run() == 0 and (tmp_path / 'batch').read_text() == pasted
    assert controller.sbatch.calls[0] == controller.sbatch.calls[1]
