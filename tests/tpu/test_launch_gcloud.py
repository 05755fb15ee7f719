"""Queued TPU slices: the commands, and a gcloud that plays back states.

tests/tpu/test_launch_gcloud_host.py tests the script of a host.
"""

import secrets
import shlex
import signal

import pytest

from tests.tpu.conftest import signal_soon
from tpu import launch
from tpu.launchers import gcloud
from tpu.launchers.base import Job

REQUIRED = {'zone': 'us-east5-b', 'accelerator_type': 'v6e-16'}
REQUIRED |= {'runtime_version': 'v2-alpha-tpuv6e'}
FLAGS = [f'--{name}={value}' for name, value in REQUIRED.items()]
TRAIN = ['--', 'train.py', '--config=configs/default.py', '--workdir=/shared/run']
REPORT = 'echo "evenkeel: a host ended with status {0}"; exit {0}'
ACTIVE = {'describe': ['echo "WARNING: a component was not found" >&2; echo ACTIVE']}
NOT_FOUND = 'echo "ERROR: NOT_FOUND: Resource was not found" >&2; exit 1'


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch):
    monkeypatch.setattr(gcloud, 'LOOK_SEC', 0.01)
    monkeypatch.setattr(gcloud, 'HOST_SEC', 0.1)


def run(*flags):
    return launch.main(['--engine=gcloud', '--name=job', *FLAGS, *flags, *TRAIN])


def test_create_command():
    options = gcloud.GcloudOptions(**REQUIRED)
    head = 'gcloud compute tpus queued-resources create job --zone=us-east5-b'
    software = '--accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e'
    command = shlex.join(gcloud.create_command(Job('job', ()), options))
    assert command == f'{head} {software} --node-id=job --async'
    options = gcloud.GcloudOptions(
        **REQUIRED, slices=2, spot=True, project='p', submit_flags="--labels='a=b c' --reserved"
    )
    assert gcloud.create_command(Job('job', ()), options) == [
        *f'{head} --project=p {software} --node-count=2 --node-prefix=job --spot'.split(),
        '--labels=a=b c',
        '--reserved',
        '--async',
    ]


def test_all_hosts_are_reached_at_once():
    """gcloud's default is 64 at a time, and each would wait for those that are not started."""
    single, double = (gcloud.GcloudOptions(**REQUIRED, slices=n) for n in (1, 2))
    assert gcloud.ssh_command(Job('job', ()), single, 'date')[:6] == [
        *('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'job')
    ]
    command = gcloud.ssh_command(Job('job', ()), double, 'date')
    assert command[:6] == ['gcloud', 'compute', 'tpus', 'queued-resources', 'ssh', 'job']
    assert {'--node=all', '--worker=all', '--batch-size=all', '--command=date'} <= set(command)


def test_hosts_install_tpu_extra():
    text = gcloud.host_script(Job('job', ()), gcloud.GcloudOptions(**REQUIRED))
    assert ' uv run --extra tpu train.py' in text


def test_dry_run_prints_shell_lines(capsys, monkeypatch, fake):
    """Contract: the printed lines are the commands that run, except for the secret, which is new
    each time.
    """
    monkeypatch.setattr(secrets, 'token_hex', lambda count: '0f' * count)
    stub = fake('gcloud', describe=[NOT_FOUND, 'echo ACTIVE'])
    assert run('--setup=git clone x', '--dry_run', '--python=python3') == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith('#')]
    assert not stub.calls
    assert run('--setup=git clone x', '--python=python3') == 0
    printed = [shlex.split(line)[1:] for line in lines]
    create, describe, train, *deletes = printed
    assert stub.calls == [describe, create, describe, train, deletes[-1]]
    assert deletes[0] == deletes[-1] and deletes[0][3] == 'delete'


# Answers of ssh: the number of tries, and the launcher's status.
@pytest.mark.parametrize(
    ('answers', 'tries', 'status'),
    [
        ([REPORT.format(0)], 1, 0),
        ([REPORT.format(1)], 1, 1),
        ([REPORT.format(2)], 1, 2),
        ([REPORT.format(127)], 1, 127),
        ([REPORT.format(42), REPORT.format(0)], 2, 0),
        ([REPORT.format(143), REPORT.format(2)], 2, 2),
        (['echo step; exit 255', REPORT.format(0)], 2, 0),  # the connection broke
        (['echo step; exit 1', REPORT.format(0)], 2, 0),  # gcloud gave up, and no host told
        ([REPORT.format(0).replace('exit 0', 'exit 255'), REPORT.format(0)], 2, 0),  # some host
        (['(' + REPORT.format(143) + '); ' + REPORT.format(1)], 1, 1),  # of two hosts
        ([REPORT.format(42)], 3, 42),
    ],
)
def test_statuses_restart_or_end(answers, tries, status, fake, capfd):
    stub = fake('gcloud', ssh=answers, **ACTIVE)
    assert run('--max_restarts=2') == status
    assert stub.verbs('describe create delete ssh') == ['describe', 'ssh'] * tries
    stdout = capfd.readouterr().out
    assert 'evenkeel: a host' not in stdout and stdout.count('step') == sum(
        'step' in answer for answer in answers
    )


def test_preempted_slice_is_recreated(fake, capfd):
    stub = fake(
        'gcloud',
        describe=[
            *[f'echo {state}' for state in ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE')],
            *[f'echo {state}' for state in ('SUSPENDING', 'SUSPENDED', 'CREATING', 'ACTIVE')],
        ],
        ssh=['echo first; exit 255', 'echo second; ' + REPORT.format(0)],
    )
    assert run() == 0
    assert ' '.join(stub.verbs('describe create delete ssh')) == (
        'describe describe describe ssh describe describe delete create describe describe ssh '
        'delete'
    )
    captured = capfd.readouterr()
    assert captured.out == 'first\nsecond\n'
    for message in (
        'job is PROVISIONING',
        'job is SUSPENDED',
        'restart 1 of at most 10',
        'deleting',
    ):
        assert message in captured.err
    assert '--force' in stub.calls[6] and '--quiet' in stub.calls[6]


@pytest.mark.parametrize(
    ('flags', 'status', 'deleted'), [([], 0, 1), (['--keep'], 0, 0), ([], 2, 1), ([], 1, 1)]
)
def test_created_slice_is_deleted(flags, status, deleted, fake, capfd):
    """The slice is deleted after bad input too: a corrected command has another name, and would not
    find the slice.
    """
    stub = fake('gcloud', describe=[NOT_FOUND, 'echo ACTIVE'], ssh=[REPORT.format(status)])
    assert run(*flags) == status
    assert stub.verbs('describe create delete ssh').count('delete') == deleted
    assert ('costs until' in capfd.readouterr().err) == (not deleted)


def test_failed_creation_is_not_retried(fake, capfd):
    stub = fake('gcloud', describe=[NOT_FOUND, 'echo FAILED'])
    assert run() == 1
    assert stub.verbs('describe create ssh delete') == ['describe', 'create', 'describe', 'delete']
    assert 'could not be created. The reason: gcloud compute' in capfd.readouterr().err


def test_refused_create_shows_gcloud_error(fake, capfd):
    refuses = ['echo "ERROR: quota exceeded" >&2; exit 1']
    stub = fake('gcloud', describe=[NOT_FOUND], create=refuses)
    assert run() == 1
    assert stub.verbs('describe create delete') == ['describe', 'create']
    assert 'ended with status 1: ERROR: quota exceeded' in capfd.readouterr().err


@pytest.mark.parametrize(('failures', 'status'), [(gcloud.MAX_TRIES - 1, 0), (gcloud.MAX_TRIES, 1)])
def test_gcloud_may_fail_temporarily(failures, status, fake, capfd):
    """If it fails for longer, a slice that may be training is not deleted."""
    broken = 'echo "ERROR: connection reset" >&2; exit 1'
    states = [NOT_FOUND, 'echo ACTIVE', *[broken] * failures, 'echo ACTIVE']
    ends = ['exit 255', REPORT.format(0)]
    stub = fake('gcloud', describe=states, ssh=ends)
    assert run() == status
    error = capfd.readouterr().err
    assert ('connection reset. The job is still running' in error) == bool(status)
    assert stub.verbs('describe create ssh delete').count('delete') == (not status)


def test_initial_gcloud_error_is_final(fake, capfd):
    refuses = ['echo "ERROR: You do not have permission" >&2; exit 1']
    stub = fake('gcloud', describe=refuses)
    assert run() == 1 and len(stub.calls) == 1
    assert 'error: gcloud refuses: ERROR: You do not have permission' in capfd.readouterr().err


def test_sigterm_stops_hosts_and_sets_status(fake, tmp_path):
    """The first ssh trains until the second has stopped the host."""
    flag = tmp_path / 'stopped'
    stub = fake(
        'gcloud',
        ssh=[
            f'while [ ! -e {flag} ]; do sleep 0.05; done; ' + REPORT.format(143),
            f'touch {flag}',
        ],
        **ACTIVE,
    )
    signal_soon(signal.SIGTERM, 0.5)
    assert run() == 143
    assert stub.verbs('describe ssh delete') == ['describe', 'ssh', 'ssh']
    assert any(word.startswith('--command=kill -TERM') for word in stub.calls[-1])


def test_signal_in_queue_ends_wait(fake):
    stub = fake('gcloud', describe=[NOT_FOUND, 'echo WAITING_FOR_RESOURCES'])
    signal_soon(signal.SIGINT)
    assert run() == 130
    assert 'ssh' not in stub.verbs('describe create delete ssh') and stub.calls[-1][3] == 'delete'
