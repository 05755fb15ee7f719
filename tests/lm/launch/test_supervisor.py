"""Detection of this process in a job, and supervisors: with stub children, without JAX."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm.launch.coordinator import blame_rank
from lm.launch.exit_status import BAD_INPUT, DIVERGED, DONE, RESUME, SIGNALLED
from lm.launch.this_host import Host, detect_host, expand_nodes, shared_arguments, slurm
from tests import ROOT
from tests.object_store import serving

FLAGS = ['--coordinator=n0:1234', '--num_processes=3', '--process_id', '2']
SLURM = {
    'SLURM_JOB_ID': '4095',
    'SLURM_STEP_NODELIST': 'gpu[08-10],head',
    'SLURM_NTASKS': '4',
    'SLURM_PROCID': '3',
    'SLURM_LOCALID': '0',
}
OPEN_MPI = {
    'OMPI_COMM_WORLD_SIZE': '4',
    'OMPI_COMM_WORLD_RANK': '3',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
}
GKE = {'TPU_WORKER_HOSTNAMES': 'a,b', 'TPU_WORKER_ID': '1'}
SLICES = {
    'MEGASCALE_NUM_SLICES': '2',
    'MEGASCALE_SLICE_ID': '1',
    'MEGASCALE_COORDINATOR_ADDRESS': 'first:8080',
}


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr('lm.launch.this_host.has_tpu', lambda: True)
    monkeypatch.setattr('lm.launch.this_host.GOOGLE', Path('/nowhere'))


def test_flags_define_the_host():
    host = detect_host(['--config=c.py', *FLAGS, '--host_timeout=7'], SLURM)
    assert host == Host('n0:1234', 3, 2, watch_port=1235, timeout=7.0)
    assert host.watch_address == ('n0', 1235)
    assert detect_host([*FLAGS, '--watch_port=99'], {}).watch_address == ('n0', 99)
    bracketed = detect_host(['--coordinator=[::1]:5', *FLAGS[1:]], {})
    assert bracketed.watch_address == ('::1', 6)


@pytest.mark.parametrize(
    ('argv', 'env'),
    [
        ([], {}),
        (['--config=a', '--host_timeout=3'], {'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '4'}),
        (['--num_processes=1'], SLURM),
        ([], SLURM | {'SLURM_NTASKS': '1', 'SLURM_STEP_NODELIST': 'n1', 'SLURM_PROCID': '0'}),
        ([], GKE),  # without a TPU
        (['--', *FLAGS], {}),
    ],
)
def test_single_process_has_no_host(argv, env):
    assert detect_host(argv, env) is None


@pytest.mark.parametrize(
    ('argv', 'env', 'message'),
    [
        (FLAGS[1:], {}, '--num_processes is for jobs of several .* Set --coordinator=HOST:PORT'),
        (
            ['--coordinator=n0', *FLAGS[1:]],
            {},
            "HOST:PORT must be the host of process 0 .* got 'n0'",
        ),
        (['--coordinator=n0:65535', *FLAGS[1:]], {}, 'got 65535 and 65536'),
        ([*FLAGS[:2], '--process_id=3'], {}, 'from 0 to 2; got 3'),
        ([*FLAGS[:2], '--process_id=x'], {}, "--process_id must be a number; got 'x'"),
        ([], {k: v for k, v in OPEN_MPI.items() if 'hnp' not in k}, "got '' in Open MPI"),
        ([*FLAGS[:2], '--process_id'], {}, '--process_id needs a value'),
        *(
            ([*FLAGS, f'--host_timeout={text}'], {}, 'timeout must be a number of seconds above 0')
            for text in ('nan', 'inf', '-5', '0')
        ),
        ([], SLURM | {'SLURM_NTASKS': ''}, "SLURM_NTASKS must be a whole number .* got ''"),
        ([], SLURM | {'SLURM_PROCID': 'x'}, "SLURM_PROCID must be a whole number .* got 'x'"),
        ([*FLAGS, '--job_secret_file=~nobody_here/a'], {}, "there is no user 'nobody_here'"),
    ],
)
def test_inconsistent_flags_are_refused(argv, env, message):
    with pytest.raises(ValueError, match=message):
        detect_host(argv, env)


def test_slurm_variables_define_the_host():
    """Checks JAX's port for the job; a task alone on its machine has all devices."""
    host = detect_host([], SLURM)
    assert host.coordinator == 'gpu08:65535' and host.watch_address == ('gpu08', 61439)
    assert (
        host.names == ('gpu08', 'gpu09', 'gpu10', 'head') and host.host_name(3) == 'host 3 (head)'
    )
    assert (host.num_processes, host.process_id, host.local_devices) == (4, 3, None)
    by_hand = detect_host(['--coordinator=n0:1234'], SLURM)
    assert by_hand.watch_address == ('n0', 1235) and by_hand.process_id == 3


@pytest.mark.parametrize('of_job', [{}, {'SLURM_NTASKS': ''}, {'SLURM_NTASKS': '9'}], ids=repr)
def test_slurm_counts_step_tasks(of_job):
    """SLURM_NTASKS is not set with sbatch --ntasks-per-node alone, and counts the whole job in a
    shell of salloc.
    """
    task = {name: value for name, value in SLURM.items() if name != 'SLURM_NTASKS'}
    host = detect_host([], task | of_job | {'SLURM_STEP_NUM_TASKS': '4'})
    assert (host.num_processes, host.process_id, len(host.names)) == (4, 3, 4)
    shell = {'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'}
    assert detect_host([], task | of_job | shell) is None


def test_slurm_with_a_task_for_each_gpu():
    tasks = SLURM | {'SLURM_STEP_NODELIST': 'n[1-2]', 'SLURM_STEP_TASKS_PER_NODE': '2(x2)'}
    tasks |= {'SLURM_LOCALID': '1'}
    assert detect_host([], tasks).local_devices == (1,)
    assert detect_host([], tasks).names == ()
    assert detect_host([], tasks | {'CUDA_VISIBLE_DEVICES': '3'}).local_devices is None
    assert detect_host([], tasks | {'CUDA_VISIBLE_DEVICES': '0,1'}).local_devices == (1,)


def test_slurm_host_matches_jax(monkeypatch):
    from jax._src.clusters.slurm_cluster import SlurmCluster

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert SlurmCluster.is_env_present()
    assert SlurmCluster.get_coordinator_address(None, None) == slurm(SLURM).coordinator


def test_open_mpi_host_matches_jax(monkeypatch):
    from jax._src.clusters.ompi_cluster import OmpiCluster

    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    host = detect_host([], OPEN_MPI)
    assert OmpiCluster.get_coordinator_address(None, None) == host.coordinator
    assert (host.num_processes, host.process_id, host.local_devices) == (4, 3, (1,))


@pytest.mark.parametrize(
    ('nodes', 'expected'),
    [
        ('node001', ['node001']),
        ('node001,host2', ['node001', 'host2']),
        ('n[007,009-010]x,host2', ['n007x', 'n009x', 'n010x', 'host2']),
    ],
)
def test_expand_nodes_parses_slurm_lists(nodes, expected):
    assert expand_nodes(nodes) == expected


def test_kubernetes_tpus(on_tpu, tmp_path):
    host = detect_host([], GKE)
    assert host.coordinator == 'a:8482' and host.watch_address == ('a', 8483)
    assert (host.process_id, host.num_processes, host.names) == (1, 2, ('a', 'b'))
    host = detect_host([], GKE | SLICES)
    assert host.coordinator == 'first:8482' and (host.process_id, host.num_processes) == (3, 4)
    (tmp_path / 'addresses').write_text('a:1,b:1,c:1\n')
    by_file = GKE | {'TPU_PROCESS_ADDRESSES_PATH': str(tmp_path / 'addresses')}
    assert detect_host([], by_file).names == ('a', 'b', 'c')


def test_tpu_vms_from_metadata(on_tpu):
    answers = {
        'worker-network-endpoints': 'w:1:10.0.0.1,w:2:10.0.0.2',
        'agent-worker-number': '1',
        'tpu-env': "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '0'\n",
    }

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[self.path.rpartition('/')[2]].encode())

        def log_message(self, *_):
            pass

    with serving(Metadata) as address:
        env = {'GCE_METADATA_IP': address.removeprefix('http://')}
        host = detect_host([], env)
        assert host.coordinator == '10.0.0.1:8482'
        assert (host.process_id, host.num_processes) == (1, 4)
        assert detect_host([], env | {'TPU_SKIP_MDS_QUERY': '1'}) is None


def test_shared_arguments_drop_host_flags():
    host_flags = ['-process_id', '1', '--coordinator=h:1']
    argv = ['--config=a', *host_flags, '--workdir=w', '--host_timeout=3']
    assert shared_arguments(argv) == ['--config=a', '--workdir=w']


# Parents, each a process of its own, with children that are a line of Python.
SECRET = 'what the hosts of this job alone know'
PARENT = (
    'import sys; import lm.launch.supervisor as s; from lm.launch.this_host import Host; '
    's.GRACE_SEC = 0.5; '  # what sleeps would not use more
    'sys.exit(s.supervise(Host({address!r}, {count}, {number}, {port}, {timeout}), '
    '[sys.executable, "-c", {child!r}], {argv!r}))'
)
SLEEPS = 'import time; print("begun", flush=True); time.sleep(1000)'
ENDS = 'import os, sys; print("begun", flush=True); sys.stdin.readline(); {then}'


def free_ports():
    """Returns two free ports."""
    with socket.create_server(('', 0)) as first, socket.create_server(('', 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


@pytest.fixture
def ports():
    return free_ports()


@pytest.fixture
def job(ports):
    """job(number, child, ...) starts a supervisor; all are killed at the end."""
    begun = []

    def start(number, child=SLEEPS, count=2, argv=(), timeout=60.0, before='', secret=SECRET):
        program = before + PARENT.format(
            address=f'127.0.0.1:{ports[0]}',
            count=count,
            number=number,
            port=ports[1],
            timeout=timeout,
            child=child,
            argv=list(argv),
        )
        pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
        env = os.environ | {'EVENKEEL_JOB_SECRET': secret}
        process = subprocess.Popen(
            [sys.executable, '-c', program], cwd=ROOT, text=True, env=env, **pipes
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def wait_begun(*parents):
    for parent in parents:
        assert parent.stdout.readline() == 'begun\n', parent.stderr.read()


def let_end(*parents):
    """Lets the children with ENDS end."""
    for parent in parents:
        parent.stdin.write('\n')
        parent.stdin.flush()


def wait_for_end(parent):
    """Returns (exit status, log)."""
    status = parent.wait(timeout=60)
    return status, parent.stderr.read()


def assert_ended(parents, status, *words):
    """Asserts that all end with this status, and that each log has all of the words."""
    for parent in parents:
        exit_status, log = wait_for_end(parent)
        assert exit_status == status and all(word in log for word in words), log


def find_child(parent):
    path = Path(f'/proc/{parent.pid}/task/{parent.pid}/children')
    return int(path.read_text().split()[0])


def is_there(pid):
    with contextlib.suppress(OSError):
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    return False


def wait_gone(pid):
    while is_there(pid):
        time.sleep(0.01)


NAME = socket.gethostname()


@pytest.mark.parametrize('status', [DONE, DIVERGED, SIGNALLED + signal.SIGTERM])
def test_hosts_end_with_common_child_status(job, status):
    child = ENDS.format(then=f'sys.exit({status})')
    parents = [job(i, child, count=3) for i in (2, 1, 0)]
    let_end(*parents)
    assert [wait_for_end(parent) for parent in parents] == [(status, '')] * 3


def test_job_waits_for_all_hosts(job):
    first = job(0, count=3)
    third = job(2, count=3)
    time.sleep(1.0)  # nothing may have begun in it; too short a time hides a bug, and fails nothing
    assert not Path(f'/proc/{first.pid}/task/{first.pid}/children').read_text()
    wait_begun(job(1, count=3), first, third)


@pytest.mark.default_rows(
    'os.kill(os.getpid(), 9)-42-was ended by SIGKILL-0',
    'os.abort()-42-was ended by SIGABRT-1',
    'os._exit(1)-1-ended with status 1-1',
    'os._exit(130)-130-ended with status 130-0',
)
@pytest.mark.parametrize('whose', [0, 1])
@pytest.mark.parametrize(
    ('ending', 'status', 'words'),
    [
        ('os.kill(os.getpid(), 9)', RESUME, 'was ended by SIGKILL'),
        ('os.abort()', RESUME, 'was ended by SIGABRT'),
        ('os.kill(os.getpid(), 35)', RESUME, 'was ended by signal 35'),  # it has no name
        ('os._exit(77)', RESUME, 'ended with status 77'),
        ('os._exit(1)', BAD_INPUT, 'ended with status 1'),
        ('os._exit(130)', 130, 'ended with status 130'),
    ],
)
def test_failing_child_ends_all_hosts(job, whose, ending, status, words):
    """The other child would sleep on."""
    parents = [job(i, ENDS.format(then=ending) if i == whose else SLEEPS) for i in range(2)]
    wait_begun(*parents)
    children = [find_child(parent) for parent in parents]
    let_end(parents[whose])
    for parent in parents:
        exit_status, log = wait_for_end(parent)
        assert exit_status == status and f'host {whose} ({NAME}) {words}' in log, log
        assert ('Run the same command to resume.' in log) == (status == RESUME)
    for child in children:
        wait_gone(child)


@pytest.mark.parametrize('killed', [0, 1])
def test_killed_supervisor_ends_child_and_other_hosts(job, killed):
    parents = [job(i, count=3) for i in range(3)]
    wait_begun(*parents)
    children = [find_child(parent) for parent in parents]
    parents[killed].kill()
    remaining = parents[:killed] + parents[killed + 1 :]
    assert_ended(remaining, RESUME, f'host {killed} ({NAME}) was lost')
    for child in children:
        wait_gone(child)


def test_first_failure_is_named_despite_earlier_abort(job):
    """As with JAX, the runtime of the other hosts aborts them. Host 1 was killed."""
    first = job(0, ENDS.format(then='os.abort()'))
    second = job(1, ENDS.format(then='import time; time.sleep(0.5); os.kill(os.getpid(), 9)'))
    wait_begun(first, second)
    let_end(first, second)
    assert_ended((first, second), RESUME, f'host 1 ({NAME}) was ended by SIGKILL')


@pytest.mark.parametrize(
    ('first', 'ends'),
    [
        (1, {0: (2.0, -6), 1: (1.0, 1)}),
        (1, {0: (1.0, -6), 1: (2.0, None)}),  # an abort is seen sooner than what it follows from
        (0, {0: (1.1, 1), 1: (1.0, 1), 2: (0.9, 1)}),  # it ended them, and its parent looked later
        (1, {0: (1.0, 0), 1: (2.0, -11)}),
        (2, {1: (2.0, 1), 2: (1.0, 1)}),
        (1, {0: (1.0, 1), 1: (2.0, -9)}),
    ],
)
def test_blame_rank_names_the_cause(first, ends):
    assert min(ends, key=lambda i: blame_rank(i, *ends[i])) == first


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_is_forwarded_to_child(job, number):
    child = (
        'import signal, sys, time; '
        'signal.signal({0}, lambda n, frame: (print("asked", flush=True), sys.exit(128 + n))); '
        'print("begun", flush=True); time.sleep(1000)'
    )
    parents = [job(i, child.format(int(number)) if i else SLEEPS) for i in range(2)]
    wait_begun(*parents)
    parents[1].send_signal(number)
    assert wait_for_end(parents[1])[0] == wait_for_end(parents[0])[0] == 128 + number
    assert parents[1].stdout.readline() == 'asked\n'


@pytest.mark.parametrize('signalled', [0, 1])
def test_signal_before_start_ends_all_hosts(job, signalled):
    met = (  # the first prints once it has read a hello, the other once it has sent one
        'from lm.launch.coordinator import Coordinator as c; from lm.launch.link import Link as l; '
        'read, send, begun = c._admit, l.send, lambda: print("begun", flush=True); '
        'c._admit = lambda *a: (read(*a), begun())[0]; '
        'l.send = lambda *a, **said: (send(*a, **said), "hello" in said and begun())[0]; '
    )
    parents = [job(i, count=3, before=met) for i in range(2)]
    wait_begun(*parents)
    parents[signalled].send_signal(signal.SIGTERM)
    assert_ended(parents, SIGNALLED + signal.SIGTERM, 'host ')


def test_missing_hosts_are_named(job):
    parents = [job(i, count=4, timeout=2.0) for i in (0, 2)]
    words = 'not connected within 2 s (--host_timeout): host 1, host 3. Connected: host 0'
    assert_ended(parents, RESUME, words, f'host 2 ({NAME})')


def test_missing_first_host_is_named(job):
    assert_ended([job(1, timeout=1.0)], RESUME, 'no host 0 at 127.0.0.1, port ')


@pytest.mark.parametrize(
    ('difference', 'words'),
    [
        ({'argv': ['--config=a', '--config.optim.lr=2']}, 'has --config.optim.lr=1, host 1'),
        ({'count': 3}, 'was started as one of 3 processes, but host 0'),
    ],
)
def test_differing_hosts_are_refused_everywhere(job, difference, words):
    first = job(0, argv=['--config=a', '--config.optim.lr=1'])
    second = job(1, **{'argv': ['--config=a', '--config.optim.lr=1']} | difference)
    assert_ended((first, second), BAD_INPUT, words)
    assert first.stdout.read() == second.stdout.read() == ''  # no child was started


def test_duplicate_process_id_is_refused_everywhere(job):
    parents = [job(number, count=3) for number in (0, 1, 1)]
    assert_ended(parents, BAD_INPUT, 'two processes have the id 1')


def connect(port):
    """Returns a connection, once a server listens."""
    while True:
        with contextlib.suppress(ConnectionError):
            return socket.create_connection(('127.0.0.1', port))
        time.sleep(0.01)


def test_second_coordinator_on_a_machine_is_refused(job, ports):
    first = job(0)
    connect(ports[1]).close()
    assert_ended([job(0)], BAD_INPUT, 'Is another process 0 running on this host?')
    wait_begun(job(1), first)  # which it does not disturb


def test_late_host_learns_why_start_was_refused(job):
    parents = [job(0, count=3), job(1, count=3, argv=['--other'])]
    assert wait_for_end(parents[1])[0] == BAD_INPUT
    assert_ended([job(2, count=3), parents[0]], BAD_INPUT, 'has --other')


SOONER = (
    'import lm.launch.coordinator as c, lm.launch.member as m, lm.launch.link as l; '
    'c.SILENT_SEC = m.SILENT_SEC = 2.0; l.PING_SEC = 0.2; '
)


def test_silent_children_keep_training(job):
    """Their supervisors send messages."""
    parents = [job(i, ENDS.format(then='sys.exit(2)'), before=SOONER) for i in range(2)]
    wait_begun(*parents)
    time.sleep(3.0)  # beyond SILENT_SEC
    let_end(*parents)
    assert [wait_for_end(parent) for parent in parents] == [(DIVERGED, '')] * 2


def test_silent_host_is_lost(job):
    """A machine without power breaks no connection: a stopped process stands for it."""
    parents = [job(i, before=SOONER) for i in range(2)]
    wait_begun(*parents)
    parents[1].send_signal(signal.SIGSTOP)
    assert_ended(parents[:1], RESUME, f'host 1 ({NAME}) was lost')


# Children that need no other host and say so; their parents print that they have heard it.
APART = (
    'import os, signal, sys; signal.signal(15, lambda n, frame: os._exit(128 + n)); '
    'os.write(int(os.environ["EVENKEEL_TELL"]), b"."); sys.stdin.readline(); os._exit({status})'
)
AT_ONCE = (
    'import lm.launch.coordinator as c, lm.launch.supervisor as s; '
    'c.LEAVE_SEC = c.COLLECT_SEC = 0.1; says = s._is_child_independent; '
    's._is_child_independent = lambda heard: says(heard) and (print("begun", flush=True) or True); '
)


@pytest.fixture
def apart(job):
    """apart(statuses) starts a supervisor for each status, and returns once the children have
    begun.
    """

    def start(*statuses):
        hosts = [
            job(i, APART.format(status=status), count=len(statuses), before=AT_ONCE)
            for i, status in enumerate(statuses)
        ]
        wait_begun(*hosts)
        return hosts

    return start


def still_there(*parents):
    """Asserts that they run for longer than dependent hosts would."""
    time.sleep(0.5)
    assert all(parent.poll() is None for parent in parents)


def test_independent_done_host_ends_no_other(apart):
    parents = apart(DONE, DONE, DONE)
    for i in (1, 0):
        let_end(parents[i])
        still_there(*parents)
    let_end(parents[2])
    assert [wait_for_end(parent) for parent in parents] == [(DONE, '')] * 3


def test_independent_lost_host_ends_no_other(apart):
    parents = apart(DONE, DONE, DONE)
    parents[1].kill()
    let_end(parents[0])
    still_there(parents[0], parents[2])
    let_end(parents[2])
    for i in (0, 2):
        status, log = wait_for_end(parents[i])
        assert status == RESUME
        assert f'host 1 ({NAME}) was lost' in log and 'all hosts end with status 42' in log
        assert ('the other hosts train their cells' in log) == (i == 0)


def test_independent_host_0_is_like_others(apart):
    parents = apart(DONE, DONE)
    child = find_child(parents[1])
    parents[0].kill()
    still_there(parents[1])
    assert is_there(child)
    let_end(parents[1])
    status, log = wait_for_end(parents[1])
    assert status == RESUME and log.count(f'host 0 ({NAME}) was lost') == 2, log


@pytest.mark.parametrize('signalled', [0, 1])
def test_independent_host_receives_signals_alone(apart, signalled):
    """The host exits within a few seconds, and the others continue."""
    parents, stopped = apart(DONE, DONE, DONE), SIGNALLED + signal.SIGTERM
    parents[signalled].send_signal(signal.SIGTERM)
    assert wait_for_end(parents[signalled])[0] == stopped
    remaining = [parent for parent in parents if parent is not parents[signalled]]
    still_there(*remaining)
    let_end(*remaining)
    # Of host 0 nobody knows how it ended.
    assert [wait_for_end(parent)[0] for parent in remaining] == [
        stopped if signalled else RESUME
    ] * 2


def test_independent_failures_are_reported_at_the_end(apart):
    parents = apart(DONE, BAD_INPUT)
    let_end(parents[1])
    still_there(*parents)
    let_end(parents[0])
    assert_ended(parents, BAD_INPUT, f'host 1 ({NAME}) ended with status 1; all')
