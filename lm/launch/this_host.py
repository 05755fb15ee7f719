"""Detects which of several processes this is, by flags or by what a launcher has set. Standard
library only, as JAX is not imported yet.

The names of variables are those that JAX reads (jax/_src/clusters), in its order.
"""

import dataclasses
import glob
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lm.storage.files import expand_home

HOST_FLAGS = ('coordinator', 'num_processes', 'process_id', 'watch_port')
FLAGS = (*HOST_FLAGS, 'host_timeout', 'job_secret_file')
HOST_TIMEOUT_SEC = 300.0  # hosts of one job start minutes apart: JAX itself waits as long
CHILD = 'EVENKEEL_HOST'  # the Host of a child, from its supervisor
SECRET = 'EVENKEEL_JOB_SECRET'  # the same on all hosts (`lm.launch.secret`)
JOB = 'EVENKEEL_JOB'  # a name that all children of a job have, and those of no other job
TELL = 'EVENKEEL_TELL'  # the descriptor to which a child writes that it needs no other host
TPU_PORT = 8482  # JAX's on TPUs
# JAX's ports for jobs of a scheduler: the last 4096, by the number of the job. Supervisors use the
# 4096 ports below, as the next job on this machine has the port after this one's.
JOB_PORTS = 4096
METADATA = '/computeMetadata/v1/instance/attributes/'
METADATA_SEC = 5.0
GOOGLE = Path('/sys/class/dmi/id/product_name')


@dataclasses.dataclass(frozen=True)
class Host:
    """One process of a job of several."""

    coordinator: str  # HOST:PORT of process 0, where JAX's processes meet
    num_processes: int
    process_id: int
    watch_port: int  # of the host of process 0, where supervisors meet
    timeout: float = HOST_TIMEOUT_SEC
    names: tuple[str, ...] = ()  # of all hosts, where the launcher lists them
    local_devices: tuple[int, ...] | None = None  # of a machine that several share; None: all
    secret_file: str = ''  # with the secret of the job, the same on all hosts

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(':')[2])

    @property
    def watch_address(self) -> tuple[str, int]:
        return self.coordinator.rpartition(':')[0].strip('[]'), self.watch_port

    def host_name(self, process_id: int) -> str:
        """'host 1 (node002)', or 'host 1' where the launcher lists no names."""
        known = len(self.names) == self.num_processes
        return f'host {process_id}' + (f' ({self.names[process_id]})' if known else '')


def child_host(env: Mapping[str, str] = os.environ) -> Host | None:
    """The Host that a supervisor gave this process; None without a supervisor."""
    if CHILD not in env:
        return None
    record = json.loads(env[CHILD])
    return Host(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})


def detect_host(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Host | None:
    """Detects which process this is; None for one that is alone, as with --num_processes=1. Flags
    come before the environment. Raises ValueError for flags that are incomplete or wrong.
    """
    given = select_flags(argv)
    if 'num_processes' in given and _parse_number(given, 'num_processes') == 1:
        return None
    needed = {'coordinator', 'num_processes', 'process_id'}
    found = None
    if not needed <= given.keys() and (found := ask_launchers(env)) is None:
        if not (stray := sorted(given.keys() & needed)):
            return None
        raise ValueError(
            f'--{stray[0]} is of a job of several processes, of which nothing is known here: '
            'give --coordinator=HOST:PORT, --num_processes=N and --process_id=I.'
        )
    found = found or LauncherHost('')
    count = _parse_number(given, 'num_processes', found.num_processes)
    mine = _parse_number(given, 'process_id', found.process_id)
    if count < 1:
        raise ValueError(f'--num_processes must be at least 1; got {count}.')
    if count == 1:
        return None
    if not 0 <= mine < count:
        raise ValueError(f'--process_id must be from 0 to {count - 1}; got {mine}.')
    coordinator = given.get('coordinator') or found.coordinator
    if not re.fullmatch(r'(\[[^\]]+\]|[^:\[\]]+):\d{1,5}', coordinator):
        raise ValueError(
            f'--coordinator=HOST:PORT must name process 0 and a free port of it; got '
            f'{coordinator!r}' + (f' in {found.launcher}.' if not given else '.')
        )
    port = int(coordinator.rpartition(':')[2])
    by_launcher = None if 'coordinator' in given else found.watch_port
    watch_port = _parse_number(given, 'watch_port', by_launcher or port + 1)
    if not (0 < port <= 65535 and 0 < watch_port <= 65535 and port != watch_port):
        raise ValueError(
            f'ports must be from 1 to 65535, and two: got {port} of --coordinator and '
            f'{watch_port} of --watch_port, which is the one after it unless it is given.'
        )
    timeout = _parse_number(given, 'host_timeout', HOST_TIMEOUT_SEC, float)
    secret_file = expand_home(given.get('job_secret_file', ''))
    names, devices = found.names, found.local_devices
    return Host(coordinator, count, mine, watch_port, timeout, names, devices, secret_file)


def select_flags(argv: Sequence[str], names: Sequence[str] = FLAGS) -> dict[str, str]:
    """Returns the flags of `names` that are given, as --name=value or --name value, with one dash
    or two.
    """
    return _split_flags(argv, names)[0]


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments without FLAGS: the same on every host."""
    return _split_flags(argv, FLAGS)[1]


def _split_flags(argv: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    found, others, rest = {}, [], iter(argv)
    for argument in rest:
        match = re.fullmatch(rf'--?({"|".join(names)})(?:=(.*))?', argument, re.DOTALL)
        if argument == '--':
            others += [argument, *rest]
        elif match is None:
            others.append(argument)
        else:
            found[match[1]] = next(rest, None) if match[2] is None else match[2]
            if found[match[1]] is None:
                raise ValueError(f'{argument} needs a value')
    return found, others


def _parse_number(
    host_flags: Mapping[str, str], name: str, default: float | None = None, kind: type = int
) -> float:
    try:
        return kind(host_flags[name]) if name in host_flags else default
    except ValueError:
        raise ValueError(f'--{name} must be a number; got {host_flags[name]!r}') from None


@dataclasses.dataclass(frozen=True)
class LauncherHost:
    """The process that a launcher says this is; coordinator: '' where it names none."""

    launcher: str
    num_processes: int = 0
    process_id: int = 0
    coordinator: str = ''
    watch_port: int | None = None
    names: tuple[str, ...] = ()
    local_devices: tuple[int, ...] | None = None


def ask_launchers(env: Mapping[str, str]) -> LauncherHost | None:
    """Asks LAUNCHERS in their order for this process; None where none has set its variables."""
    return next(filter(None, (launcher(env) for launcher in LAUNCHERS)), None)


def open_mpi(env: Mapping[str, str]) -> LauncherHost | None:
    """A process of mpirun, which names the host of its own process up to version 4 alone."""
    names = ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK')
    if not all(name in env for name in names):
        return None
    count, mine, local = (_read_count(env, name) for name in names)
    alone = env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
    uri, ports = env.get('OMPI_MCA_orte_hnp_uri', ''), {}
    if address := re.search(r'tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]', uri):
        host = address[1] or f'[{address[2]}]'
        ports = _job_ports(host, int(uri.split('.')[0]) // 2**12)
    devices = _task_devices(env, None if alone else local)
    return LauncherHost('Open MPI', count, mine, local_devices=devices, **ports)


def slurm(env: Mapping[str, str]) -> LauncherHost | None:
    """A task of srun, with all devices of its machine or, among several tasks there, one."""
    numbers = ('SLURM_JOB_ID', 'SLURM_PROCID', 'SLURM_LOCALID')
    if not all(env.get(name) for name in ('SLURM_STEP_NODELIST', *numbers)):
        return None
    # In a shell of salloc, a step of one task, SLURM_NTASKS counts the tasks of the job; with
    # sbatch --ntasks-per-node alone it is not set.
    which = 'SLURM_STEP_NUM_TASKS' if env.get('SLURM_STEP_NUM_TASKS') else 'SLURM_NTASKS'
    count, (job, mine, local) = (
        _read_count(env, which),
        (_read_count(env, name) for name in numbers),
    )
    hosts, tasks = (
        expand_nodes(env['SLURM_STEP_NODELIST']),
        env.get('SLURM_STEP_TASKS_PER_NODE', ''),
    )
    names = tuple(hosts) if len(hosts) == count else ()
    alone = names or re.fullmatch(r'1(\(x\d+\))?', tasks)
    devices = _task_devices(env, None if alone else local)
    ports = _job_ports(hosts[0], job)
    return LauncherHost('SLURM', count, mine, names=names, local_devices=devices, **ports)


def _read_count(env: Mapping[str, str], name: str) -> int:
    """Returns the whole number in a variable. Raises ValueError, naming it, for anything else."""
    if not re.fullmatch(r'\d+', text := env.get(name, '')):
        raise ValueError(
            f'{name} must be a whole number where the other variables of its launcher are set; got '
            f'{text!r}. Set it, or give --coordinator=HOST:PORT, --num_processes=N and '
            '--process_id=I; --num_processes=1 is for a process that is alone.'
        )
    return int(text)


def _task_devices(env: Mapping[str, str], local: int | None) -> tuple[int, ...] | None:
    """The GPU of the task's number, as JAX has it; None: all that the launcher shows the task."""
    visible = env.get('CUDA_VISIBLE_DEVICES') or env.get('ROCR_VISIBLE_DEVICES') or ''
    own = visible != '' and ',' not in visible
    return None if local is None or own else (local,)


def _job_ports(host: str, job: int) -> dict[str, str | int]:
    port = 65536 - JOB_PORTS + job % JOB_PORTS
    return {'coordinator': f'{host}:{port}', 'watch_port': port - JOB_PORTS}


def expand_nodes(nodes: str) -> list[str]:
    """['n01', 'n02', 'gpu7'] for SLURM's 'n[01-02],gpu7'."""
    found = []
    for prefix, ranges, suffix in re.findall(r'([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)', nodes):
        for part in ranges.split(','):
            first, _, last = part.partition('-')
            numbers = range(int(first), int(last or first) + 1) if first else ()
            found += [f'{prefix}{n:0{len(first)}d}{suffix}' for n in numbers]
        if not ranges:
            found.append(prefix + suffix)
    return found


def kubernetes_tpus(env: Mapping[str, str]) -> LauncherHost | None:
    """A host of TPUs of GKE, in one slice or several."""
    if not has_tpu():
        return None
    if path := env.get('TPU_PROCESS_ADDRESSES_PATH'):
        workers = Path(path).read_text().strip()
    else:
        workers = env.get('TPU_PROCESS_ADDRESSES') or env.get('TPU_WORKER_HOSTNAMES') or ''
    if not workers or 'TPU_WORKER_ID' not in env:
        return None
    return _number_slices('TPUs of GKE', workers.split(','), int(env['TPU_WORKER_ID']), env.get)


def tpu_vms(env: Mapping[str, str]) -> LauncherHost | None:
    """A host of a TPU pod, by the machine's metadata."""
    on_google = 'GCE_METADATA_IP' in env or (GOOGLE.exists() and 'Google' in GOOGLE.read_text())
    if not has_tpu() or 'TPU_SKIP_MDS_QUERY' in env or not on_google:
        return None
    server = env.get('GCE_METADATA_IP', 'metadata.google.internal')
    workers = _read_metadata(server, 'worker-network-endpoints')
    if not workers or not (number := _read_metadata(server, 'agent-worker-number')):
        return None
    addresses = [worker.split(':')[-1] for worker in workers.split(',')]  # name:id:address, or it
    lines = re.findall(r"^(\w+): *'?(.*?)'? *$", _read_metadata(server, 'tpu-env'), re.MULTILINE)
    return _number_slices('TPU VMs', addresses, int(number), (dict(lines) | dict(env)).get)


def _number_slices(
    launcher: str, workers: list[str], number: int, get: Callable[[str], str | None]
) -> LauncherHost:
    """Numbers the processes through all slices, by the MEGASCALE_* variables."""
    slices, n = int(get('MEGASCALE_NUM_SLICES') or 1), len(workers)
    number += int(get('MEGASCALE_SLICE_ID') or 0) * n
    first = get('MEGASCALE_COORDINATOR_ADDRESS') or workers[0]
    names = [worker.rpartition(':')[0] or worker for worker in workers] if slices == 1 else []
    coordinator = f'{first.split(":")[0]}:{TPU_PORT}'
    return LauncherHost(launcher, slices * n, number, coordinator, names=tuple(names))


def _read_metadata(server: str, name: str) -> str:
    import urllib.request  # 20 ms, and all but TPU VMs do without

    flavor = {'Metadata-Flavor': 'Google'}
    request = urllib.request.Request(f'http://{server}{METADATA}{name}', headers=flavor)
    try:
        with urllib.request.urlopen(request, timeout=METADATA_SEC) as answer:
            return answer.read().decode()
    except OSError:  # and whatever urllib makes of it
        return ''


def has_tpu() -> bool:
    return any(glob.glob(pattern) for pattern in ('/dev/accel*', '/dev/vfio/[0-9]*'))


LAUNCHERS = (open_mpi, slurm, kubernetes_tpus, tpu_vms)
