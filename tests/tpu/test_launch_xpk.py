"""JobSets by xpk: the commands, with an xpk and a kubectl that play back states, and the command of
a pod, in the shell that xpk puts around it.
"""

import ast
import json
import shlex
import signal
import subprocess
import sys

import pytest

from tests.tpu.conftest import signal_soon
from tests.tpu.stubs import NASTY, SWEEP, UNTIL_SIGTERM
from tpu import launch
from tpu.launchers import xpk
from tpu.launchers.base import Job

REQUIRED = {'cluster': 'c1', 'accelerator_type': 'v6e-16', 'image': 'gcr.io/p/evenkeel'}
FLAGS = [f'--{name}={value}' for name, value in REQUIRED.items()]
TRAIN = ['--', 'train.py', '--config=configs/default.py', '--workdir=gs://b/run']
RUNNING = {'status': {'restarts': 0, 'conditions': []}}
# The handling of signals and statuses in xpk's container (core/docker_container.py).
CONTAINER = """_sigterm() (kill -SIGTERM $! 2>/dev/null;);
trap _sigterm SIGTERM;
({command}) & PID=$!;
while kill -0 $PID 2>/dev/null; do sleep 0.1; done;
wait $PID;
EXIT_CODE=$?;
exit $EXIT_CODE
"""


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch):
    monkeypatch.setattr(xpk, 'LOOK_SEC', 0.0)


def ended_jobset(kind, restarts=0):
    conditions = [{'type': kind, 'status': 'True'}, {'type': 'Suspended', 'status': 'False'}]
    return {'status': {'restarts': restarts, 'conditions': conditions}}


def make_pod(host, phase, code=None, attempt=0, slice_=0):
    state = {'running': {}} if code is None else {'terminated': {'exitCode': code}}
    return {
        'metadata': {
            'name': f'job-slice-job-{slice_}-{host}-x{attempt}',
            'labels': {'jobset.sigs.k8s.io/restart-attempt': str(attempt)},
        },
        'status': {'phase': phase, 'containerStatuses': [{'state': state}]},
    }


def cat_command(record):
    return f"cat <<'END'\n{json.dumps(record)}\nEND"


class Cluster:
    """The states of a JobSet for each poll, and its pods. None: there is no JobSet."""

    def __init__(self, fake, states, pods=([],), logs=('echo said',)):
        self.xpk = fake('xpk')
        self.kubectl = fake(
            'kubectl',
            jobset=[cat_command(state) if state else 'true' for state in states],
            pods=[cat_command({'items': items}) for items in pods],
            logs=list(logs),
        )

    def xpk_verbs(self):
        return self.xpk.verbs('list create delete')


def run(*flags):
    return launch.main(['--engine=xpk', '--name=job', *FLAGS, *flags, *TRAIN])


def test_create_command():
    """Flags of src/xpk/parser/workload.py."""
    job = Job('job', ('--config=c.py', SWEEP), max_restarts=7, secret='0f' * 16)
    options = xpk.XpkOptions(
        **REQUIRED, zone='z', project='p', slices=2, spot=True, submit_flags='--priority=high'
    )
    command = xpk.create_command(job, options)
    locations = ['--cluster=c1', '--zone=z', '--project=p']
    assert command[:3] == ['xpk', 'workload', 'create'] and command[-3:] == locations
    assert set(command[3:-3]) == {
        '--workload=job',
        '--tpu-type=v6e-16',
        '--num-slices=2',
        '--docker-image=gcr.io/p/evenkeel',
        '--max-restarts=7',
        '--termination-grace-period-seconds=120',
        '--spot',
        '--priority=high',
        f'--command=exec env EVENKEEL_JOB_SECRET={"0f" * 16} '
        f'python3 train.py --config=c.py {shlex.quote(SWEEP)}',
    }
    on_tpu7x = xpk.XpkOptions(**REQUIRED | {'accelerator_type': 'tpu7x-16'})
    assert '--no-use-parallel-containers' in xpk.create_command(job, on_tpu7x)


def test_manifest_comes_from_xpk(fake, capsys):
    writes = 'for a; do case $a in --output-*=*) echo "kind: JobSet" > "${a#*=}";; esac; done'
    stub = fake('xpk', any=[writes])
    assert run('--dry_run') == 0
    stdout = capsys.readouterr().out
    assert stdout.endswith('# the JobSet that xpk makes of this:\nkind: JobSet\n')
    (call,) = stub.calls
    assert '--dry-run' in call and call[:2] == ['workload', 'create']
    create_lines = [line for line in stdout.splitlines() if line.startswith('xpk workload create')]
    assert [shlex.split(line)[1:] for line in create_lines] == [
        [word for word in call if 'dry-run' not in word and 'manifest' not in word]
    ]


def test_pod_gets_flags_and_sigterm(trainer, tmp_path):
    """Without `exec` xpk's SIGTERM ends a shell, and the trainer is killed after the grace
    period.
    """
    (trainer / 'then.py').write_text(UNTIL_SIGTERM)
    flags = tuple(flag for flag in NASTY if '\n' not in flag)
    options = xpk.XpkOptions(**REQUIRED, folder=str(trainer))
    command = xpk.container_command(Job('job', flags, python=sys.executable), options)
    process = subprocess.Popen(
        ['bash', '-c', CONTAINER.format(command=command)], text=True, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=10)
    assert stdout == 'saved\n' and process.returncode == 143
    assert ast.literal_eval((trainer / 'arguments').read_text()) == list(flags)


def test_completed_jobset_is_done(fake, capfd):
    states = [None, RUNNING, RUNNING, ended_jobset('Completed')]
    pods = [[make_pod(0, 'Pending')], [make_pod(1, 'Running'), make_pod(0, 'Running')]]
    cluster = Cluster(fake, states, pods)
    assert run() == 0
    assert cluster.xpk_verbs() == ['list', 'create']
    assert capfd.readouterr().out.startswith('said\n')
    assert ['logs', '--follow', 'job-slice-job-0-0-x0'] in cluster.kubectl.calls
    assert cluster.kubectl.calls[0] == [
        *('get', 'jobset', 'job', '--ignore-not-found', '--output=json')
    ]


@pytest.mark.parametrize(
    ('pods', 'status'),
    [
        (
            [make_pod(0, 'Failed', 1), make_pod(1, 'Failed', 143)],
            1,
        ),  # ended because the other had failed
        ([make_pod(0, 'Failed', 42), make_pod(1, 'Failed', 42)], 42),  # after the last restart
        ([make_pod(0, 'Failed', 42), make_pod(0, 'Failed', 2, attempt=1)], 2),
        ([make_pod(0, 'Succeeded', 0), make_pod(0, 'Failed', 137, slice_=1)], 137),
        ([make_pod(0, 'Running')], 1),
        ([], 1),
    ],
)
def test_failed_jobset_status(pods, status, fake):
    Cluster(fake, [None, RUNNING, ended_jobset('Failed')], [pods])
    assert run() == status


def test_restart_is_reported_and_followed(fake, capfd):
    states = [None, RUNNING, RUNNING | {'status': {'restarts': 1}}, ended_jobset('Completed', 1)]
    pods = [
        [make_pod(0, 'Running')],
        [make_pod(0, 'Failed', 143), make_pod(0, 'Running', attempt=1)],
    ]
    cluster = Cluster(fake, states, pods, ['echo one', 'echo two'])
    assert run('--max_restarts=4') == 0
    captured = capfd.readouterr()
    assert 'restart 1 of at most 4' in captured.err and 'two\n' in captured.out
    assert ['logs', '--follow', 'job-slice-job-0-0-x1'] in cluster.kubectl.calls


def test_running_jobset_is_found(fake, capfd):
    cluster = Cluster(fake, [RUNNING, ended_jobset('Completed')])
    assert run() == 0
    assert cluster.xpk_verbs() == ['list'] and 'is there already' in capfd.readouterr().err


def test_ended_jobset_is_replaced(fake):
    """xpk would ask for confirmation, and nobody answers."""
    cluster = Cluster(fake, [ended_jobset('Failed'), RUNNING, ended_jobset('Completed')])
    assert run() == 0
    assert cluster.xpk_verbs() == ['list', 'delete', 'create']
    assert '--force' in cluster.xpk.calls[1]


def test_sigterm_deletes_jobset(fake):
    cluster = Cluster(fake, [None, RUNNING])
    delete_answer = cluster.xpk.folder / 'delete.1'
    delete_answer.write_text(f'echo true > {cluster.kubectl.folder}/jobset.3; sleep 0.3\n')
    signal_soon(signal.SIGTERM)
    assert run() == 143
    assert cluster.xpk_verbs() == ['list', 'create', 'delete']


def test_kubectl_may_fail_temporarily(fake, capfd):
    cluster = Cluster(fake, [None, *[RUNNING] * 9, ended_jobset('Completed')])
    for i in range(2, 11):
        (cluster.kubectl.folder / f'jobset.{i}').write_text('echo refused >&2; exit 1\n')
    assert run() == 0


def test_failing_kubectl_ends_launch(fake, capfd):
    cluster = Cluster(fake, [None, RUNNING])
    (cluster.kubectl.folder / 'jobset.2').write_text('echo refused >&2; exit 1\n')
    assert run() == 1
    error = capfd.readouterr().err
    assert 'ended with status 1: refused. The JobSet is still running' in error
