"""JobSets by xpk: the commands, against an xpk and a kubectl that play back states, and what a pod
runs, in the shell that xpk puts around it.
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
# xpk's container (core/docker_container.py), as far as its signals and statuses go.
CONTAINER = """_sigterm() (kill -SIGTERM $! 2>/dev/null;);
trap _sigterm SIGTERM;
({command}) & PID=$!;
while kill -0 $PID 2>/dev/null; do sleep 0.1; done;
wait $PID;
EXIT_CODE=$?;
exit $EXIT_CODE
"""


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    monkeypatch.setattr(xpk, 'LOOK_SEC', 0.0)


def ended(kind, restarts=0):
    conditions = [{'type': kind, 'status': 'True'}, {'type': 'Suspended', 'status': 'False'}]
    return {'status': {'restarts': restarts, 'conditions': conditions}}


def pod(host, phase, code=None, attempt=0, slice_=0):
    state = {'running': {}} if code is None else {'terminated': {'exitCode': code}}
    return {
        'metadata': {
            'name': f'job-slice-job-{slice_}-{host}-x{attempt}',
            'labels': {'jobset.sigs.k8s.io/restart-attempt': str(attempt)},
        },
        'status': {'phase': phase, 'containerStatuses': [{'state': state}]},
    }


def cat(record):
    return f"cat <<'END'\n{json.dumps(record)}\nEND"


class Cluster:
    """Of the JobSet's state at each look, and its pods. None: there is no JobSet."""

    def __init__(self, fake, states, pods=([],), logs=('echo said',)):
        self.xpk = fake('xpk')
        self.kubectl = fake(
            'kubectl',
            jobset=[cat(state) if state else 'true' for state in states],
            pods=[cat({'items': found}) for found in pods],
            logs=list(logs),
        )

    def asked(self):
        return self.xpk.verbs('list create delete')


def run(*flags):
    return launch.main(['--engine=xpk', '--name=job', *FLAGS, *flags, *TRAIN])


def test_create():
    """Flags of src/xpk/parser/workload.py."""
    job = Job('job', ('--config=c.py', SWEEP), max_restarts=7, secret='0f' * 16)
    options = xpk.XpkOptions(
        **REQUIRED, zone='z', project='p', slices=2, spot=True, submit_flags='--priority=high'
    )
    command = xpk.create_command(job, options)
    places = ['--cluster=c1', '--zone=z', '--project=p']
    assert command[:3] == ['xpk', 'workload', 'create'] and command[-3:] == places
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
    seven = xpk.XpkOptions(**REQUIRED | {'accelerator_type': 'tpu7x-16'})
    assert '--no-use-parallel-containers' in xpk.create_command(job, seven)


def test_the_manifest_is_xpks_own(fake, capsys):
    writes = 'for a; do case $a in --output-*=*) echo "kind: JobSet" > "${a#*=}";; esac; done'
    stub = fake('xpk', any=[writes])
    assert run('--dry_run') == 0
    out = capsys.readouterr().out
    assert out.endswith('# the JobSet that xpk makes of this:\nkind: JobSet\n')
    (call,) = stub.calls
    assert '--dry-run' in call and call[:2] == ['workload', 'create']
    sent = [line for line in out.splitlines() if line.startswith('xpk workload create')]
    assert [shlex.split(line)[1:] for line in sent] == [
        [word for word in call if 'dry-run' not in word and 'manifest' not in word]
    ]


def test_a_pod_has_the_flags_and_the_sigterm(trainer, tmp_path):
    """Without `exec` xpk's SIGTERM ends a shell, and the trainer is killed after the grace."""
    (trainer / 'then.py').write_text(UNTIL_SIGTERM)
    flags = tuple(flag for flag in NASTY if '\n' not in flag)
    options = xpk.XpkOptions(**REQUIRED, folder=str(trainer))
    command = xpk.container_command(Job('job', flags, python=sys.executable), options)
    process = subprocess.Popen(
        ['bash', '-c', CONTAINER.format(command=command)], text=True, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert out == 'saved\n' and process.returncode == 143
    assert ast.literal_eval((trainer / 'arguments').read_text()) == list(flags)


def test_done(fake, capfd):
    states = [None, RUNNING, RUNNING, ended('Completed')]
    pods = [[pod(0, 'Pending')], [pod(1, 'Running'), pod(0, 'Running')]]
    cluster = Cluster(fake, states, pods)
    assert run() == 0
    assert cluster.asked() == ['list', 'create']
    assert capfd.readouterr().out.startswith('said\n')
    assert ['logs', '--follow', 'job-slice-job-0-0-x0'] in cluster.kubectl.calls
    assert cluster.kubectl.calls[0] == [
        *('get', 'jobset', 'job', '--ignore-not-found', '--output=json')
    ]


@pytest.mark.parametrize(
    ('found', 'status'),
    [
        ([pod(0, 'Failed', 1), pod(1, 'Failed', 143)], 1),  # ended as the other had failed
        ([pod(0, 'Failed', 42), pod(1, 'Failed', 42)], 42),  # after the last restart
        ([pod(0, 'Failed', 42), pod(0, 'Failed', 2, attempt=1)], 2),
        ([pod(0, 'Succeeded', 0), pod(0, 'Failed', 137, slice_=1)], 137),
        ([pod(0, 'Running')], 1),
        ([], 1),
    ],
)
def test_the_status_of_a_jobset_that_failed(found, status, fake):
    Cluster(fake, [None, RUNNING, ended('Failed')], [found])
    assert run() == status


def test_a_restart_is_said_and_its_pod_followed(fake, capfd):
    states = [None, RUNNING, RUNNING | {'status': {'restarts': 1}}, ended('Completed', 1)]
    pods = [[pod(0, 'Running')], [pod(0, 'Failed', 143), pod(0, 'Running', attempt=1)]]
    cluster = Cluster(fake, states, pods, ['echo one', 'echo two'])
    assert run('--max_restarts=4') == 0
    captured = capfd.readouterr()
    assert 'restart 1 of at most 4' in captured.err and 'two\n' in captured.out
    assert ['logs', '--follow', 'job-slice-job-0-0-x1'] in cluster.kubectl.calls


def test_a_jobset_that_runs_is_found_again(fake, capfd):
    cluster = Cluster(fake, [RUNNING, ended('Completed')])
    assert run() == 0
    assert cluster.asked() == ['list'] and 'is there already' in capfd.readouterr().err


def test_a_jobset_that_has_ended_is_replaced(fake):
    """xpk would ask whether to, and there is nobody to answer."""
    cluster = Cluster(fake, [ended('Failed'), RUNNING, ended('Completed')])
    assert run() == 0
    assert cluster.asked() == ['list', 'delete', 'create']
    assert '--force' in cluster.xpk.calls[1]


def test_sigterm_deletes_the_jobset(fake):
    cluster = Cluster(fake, [None, RUNNING])
    gone = cluster.xpk.folder / 'delete.1'
    gone.write_text(f'echo true > {cluster.kubectl.folder}/jobset.3; sleep 0.3\n')
    signal_soon(signal.SIGTERM)
    assert run() == 143
    assert cluster.asked() == ['list', 'create', 'delete']


def test_kubectl_may_fail_for_a_while(fake, capfd):
    cluster = Cluster(fake, [None, *[RUNNING] * 9, ended('Completed')])
    for i in range(2, 11):
        (cluster.kubectl.folder / f'jobset.{i}').write_text('echo refused >&2; exit 1\n')
    assert run() == 0


def test_kubectl_that_never_answers_ends_it(fake, capfd):
    cluster = Cluster(fake, [None, RUNNING])
    (cluster.kubectl.folder / 'jobset.2').write_text('echo refused >&2; exit 1\n')
    assert run() == 1
    error = capfd.readouterr().err
    assert 'ended with status 1: refused. The JobSet goes on' in error
