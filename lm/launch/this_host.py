"""Detects which process of several this is, from flags or from the variables of a launcher.

Standard library only, since JAX is not imported yet. Reads the same variables as JAX
(jax/_src/clusters), in the same order.
"""

import dataclasses
import glob
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.storage.files import expand_home

HOST_FLAGS = ('coordinator', 'num_processes', 'process_id', 'watch_port')
FLAGS = (*HOST_FLAGS, 'host_timeout', 'job_secret_file')
HOST_TIMEOUT_SEC = 300.0  # hosts of one job start minutes apart; JAX itself waits as long
CHILD = 'EVENKEEL_HOST'  # the Host of a child, from its supervisor
SECRET = 'EVENKEEL_JOB_SECRET'  # the same on all hosts (`lm.launch.secret`)
JOB = 'EVENKEEL_JOB'  # a name shared by all children of a job, and by no other job
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
    watch_port: int  # port of process 0's host, where supervisors meet
    timeout: float = HOST_TIMEOUT_SEC
    names: tuple[str, ...] = ()  # names of all hosts, if the launcher lists them
    local_devices: tuple[int, ...] | None = None  # its devices on a shared machine; None: all
    secret_file: str = ''  # file with the secret of the job, the same on all hosts

    @property
    def port(self) -> int:
        """Returns the port at which JAX's processes meet."""
        return int(self.coordinator.rpartition(':')[2])

    @property
    def watch_address(self) -> tuple[str, int]:
        """Returns (host, port) at which supervisors meet."""
        return self.coordinator.rpartition(':')[0].strip('[]'), self.watch_port

    def host_name(self, process_id: int) -> str:
        """Returns 'host 1 (node002)', or 'host 1' if the launcher lists no names."""
        has_names = len(self.names) == self.num_processes
        return f'host {process_id}' + (f' ({self.names[process_id]})' if has_names else '')


def child_host(env: Mapping[str, str] = os.environ) -> Host | None:
    """Returns the Host that a supervisor gave this process; None without a supervisor."""
    if CHILD not in env:
        return None
    record = json.loads(env[CHILD])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Host(**fields)


def detect_host(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Host | None:
    """Returns this process of a job; None for a single process, as with --num_processes=1.

    Flags take precedence over the environment. Raises ValueError for flags that are incomplete or
    wrong.
    """
    host_flags = select_flags(argv)
    if 'num_processes' in host_flags and _parse_number(host_flags, 'num_processes', 0) == 1:
        return None
    needed = {'coordinator', 'num_processes', 'process_id'}
    launched = None
    if not needed <= host_flags.keys() and (launched := ask_launchers(env)) is None:
        if not (stray := sorted(host_flags.keys() & needed)):
            return None
        raise ValueError(
            f'--{stray[0]} is for jobs of several processes and is not enough alone. Set '
            '--coordinator=HOST:PORT, --num_processes=N and --process_id=I together. A single '
            'process uses all devices of its host without any of these flags.'
        )
    launched = launched or LauncherHost('')
    count = _parse_number(host_flags, 'num_processes', launched.num_processes)
    process_id = _parse_number(host_flags, 'process_id', launched.process_id)
    if count < 1:
        raise ValueError(f'--num_processes must be at least 1; got {count}.')
    if count == 1:
        return None
    if not 0 <= process_id < count:
        raise ValueError(f'--process_id must be from 0 to {count - 1}; got {process_id}.')
    coordinator = host_flags.get('coordinator') or launched.coordinator
    if not re.fullmatch(r'(\[[^\]]+\]|[^:\[\]]+):\d{1,5}', coordinator):
        raise ValueError(
            f'--coordinator=HOST:PORT must be the host of process 0 and a free port there; got '
            f'{coordinator!r}' + (f' in {launched.launcher}.' if not host_flags else '.')
        )
    port = int(coordinator.rpartition(':')[2])
    launcher_port = None if 'coordinator' in host_flags else launched.watch_port
    watch_port = _parse_number(host_flags, 'watch_port', launcher_port or port + 1)
    if not (0 < port <= 65535 and 0 < watch_port <= 65535 and port != watch_port):
        raise ValueError(
            f'--coordinator and --watch_port must have different ports from 1 to 65535; got {port} '
            f'and {watch_port}. By default --watch_port is the port after that of --coordinator.'
        )
    timeout = _parse_number(host_flags, 'host_timeout', HOST_TIMEOUT_SEC)
    if not 0 < timeout < math.inf:  # NaN too: its deadline would never pass
        raise ValueError(
            f'--host_timeout must be a number of seconds above 0; got {timeout:g}. By default it '
            f'is {HOST_TIMEOUT_SEC:g}.'
        )
    secret_file = expand_home(host_flags.get('job_secret_file', ''))
    names, devices = launched.names, launched.local_devices
    return Host(coordinator, count, process_id, watch_port, timeout, names, devices, secret_file)


def select_flags(argv: Sequence[str], names: Sequence[str] = FLAGS) -> dict[str, str]:
    """Returns the given flags of `names`: --name=value or --name value, with one dash or two."""
    return _split_flags(argv, names)[0]


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """Returns the arguments without FLAGS, which are the same on every host."""
    return _split_flags(argv, FLAGS)[1]


def _split_flags(argv: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns (flags of `names`, all other arguments)."""
    selected, remaining, iterator = {}, [], iter(argv)
    for argument in iterator:
        match = re.fullmatch(rf'--?({"|".join(names)})(?:=(.*))?', argument, re.DOTALL)
        if argument == '--':
            remaining += [argument, *iterator]
        elif match is None:
            remaining.append(argument)
        else:
            selected[match[1]] = next(iterator, None) if match[2] is None else match[2]
            if selected[match[1]] is None:
                raise ValueError(f'{argument} needs a value')
    return selected, remaining


def _parse_number[N: (int, float)](host_flags: Mapping[str, str], name: str, default: N) -> N:
    """Returns the number of a flag, of the type of its default. Raises ValueError for other
    text.
    """
    try:
        return type(default)(host_flags[name]) if name in host_flags else default
    except ValueError:
        raise ValueError(f'--{name} must be a number; got {host_flags[name]!r}') from None


@dataclasses.dataclass(frozen=True)
class LauncherHost:
    """This process, as described by a launcher; coordinator: '' if the launcher names none."""

    launcher: str
    num_processes: int = 0
    process_id: int = 0
    coordinator: str = ''
    watch_port: int | None = None
    names: tuple[str, ...] = ()
    local_devices: tuple[int, ...] | None = None


def ask_launchers(env: Mapping[str, str]) -> LauncherHost | None:
    """Returns this process as the first of LAUNCHERS describes it; None if none has set its
    variables.
    """
    return next(filter(None, (launcher(env) for launcher in LAUNCHERS)), None)


def open_mpi(env: Mapping[str, str]) -> LauncherHost | None:
    """Returns a process of mpirun. Only versions up to 4 name the host of mpirun itself."""
    names = ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK')
    if not all(name in env for name in names):
        return None
    count, process_id, local_id = (_read_count(env, name) for name in names)
    is_alone = env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
    uri, ports = env.get('OMPI_MCA_orte_hnp_uri', ''), {}
    if address := re.search(r'tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]', uri):
        host = address[1] or f'[{address[2]}]'
        ports = _job_ports(host, int(uri.split('.')[0]) // 2**12)
    devices = _task_devices(env, None if is_alone else local_id)
    return LauncherHost('Open MPI', count, process_id, local_devices=devices, **ports)


def slurm(env: Mapping[str, str]) -> LauncherHost | None:
    """Returns a task of srun, with all devices of its machine or, among several tasks there, one
    device.
    """
    numbers = ('SLURM_JOB_ID', 'SLURM_PROCID', 'SLURM_LOCALID')
    if not all(env.get(name) for name in ('SLURM_STEP_NODELIST', *numbers)):
        return None
    # In a shell of salloc, a step of one task, SLURM_NTASKS counts the tasks of the job; with
    # sbatch --ntasks-per-node alone it is not set.
    count_name = 'SLURM_STEP_NUM_TASKS' if env.get('SLURM_STEP_NUM_TASKS') else 'SLURM_NTASKS'
    count, (job, process_id, local_id) = (
        _read_count(env, count_name),
        (_read_count(env, name) for name in numbers),
    )
    hosts, tasks = (
        expand_nodes(env['SLURM_STEP_NODELIST']),
        env.get('SLURM_STEP_TASKS_PER_NODE', ''),
    )
    names = tuple(hosts) if len(hosts) == count else ()
    is_alone = names or re.fullmatch(r'1(\(x\d+\))?', tasks)
    devices = _task_devices(env, None if is_alone else local_id)
    ports = _job_ports(hosts[0], job)
    return LauncherHost('SLURM', count, process_id, names=names, local_devices=devices, **ports)


def _read_count(env: Mapping[str, str], name: str) -> int:
    """Returns the whole number in a variable. Raises ValueError, with its name, for anything
    else.
    """
    if not re.fullmatch(r'\d+', text := env.get(name, '')):
        raise ValueError(
            f'{name} must be a whole number if other variables of its launcher are set; got '
            f'{text!r}. Set it, or pass --coordinator=HOST:PORT, --num_processes=N and '
            '--process_id=I. For a single process pass --num_processes=1.'
        )
    return int(text)


def _task_devices(env: Mapping[str, str], local_id: int | None) -> tuple[int, ...] | None:
    """Returns the GPU with the task's number, as JAX does; None: all GPUs that the task can see."""
    visible = env.get('CUDA_VISIBLE_DEVICES') or env.get('ROCR_VISIBLE_DEVICES') or ''
    is_single = visible != '' and ',' not in visible
    return None if local_id is None or is_single else (local_id,)


def _job_ports(host: str, job: int) -> dict[str, Any]:
    """Returns the coordinator and watch port of a scheduler's job."""
    # Derived from the job's number, which all its hosts know: no port has to be agreed on.
    port = 65536 - JOB_PORTS + job % JOB_PORTS
    return {'coordinator': f'{host}:{port}', 'watch_port': port - JOB_PORTS}


def expand_nodes(nodes: str) -> list[str]:
    """Returns ['n01', 'n02', 'gpu7'] for SLURM's 'n[01-02],gpu7'."""
    names = []
    for prefix, ranges, suffix in re.findall(r'([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)', nodes):
        for part in ranges.split(','):
            first, _, last = part.partition('-')
            numbers = range(int(first), int(last or first) + 1) if first else ()
            names += [f'{prefix}{n:0{len(first)}d}{suffix}' for n in numbers]
        if not ranges:
            names.append(prefix + suffix)
    return names


def kubernetes_tpus(env: Mapping[str, str]) -> LauncherHost | None:
    """Returns a host of TPUs of GKE, in one slice or several."""
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
    """Returns a host of a TPU pod, from the machine's metadata."""
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
    launcher: str, workers: list[str], number: int, read_variable: Callable[[str], str | None]
) -> LauncherHost:
    """Returns a host, numbered through all slices by the MEGASCALE_* variables."""
    slices, n = int(read_variable('MEGASCALE_NUM_SLICES') or 1), len(workers)
    number += int(read_variable('MEGASCALE_SLICE_ID') or 0) * n
    first = read_variable('MEGASCALE_COORDINATOR_ADDRESS') or workers[0]
    names = [worker.rpartition(':')[0] or worker for worker in workers] if slices == 1 else []
    coordinator = f'{first.split(":")[0]}:{TPU_PORT}'
    return LauncherHost(launcher, slices * n, number, coordinator, names=tuple(names))


def _read_metadata(server: str, name: str) -> str:
    """Returns an attribute of a Google machine; '' if there is none."""
    import urllib.request  # 20 ms, and all but TPU VMs do without

    flavor = {'Metadata-Flavor': 'Google'}
    request = urllib.request.Request(f'http://{server}{METADATA}{name}', headers=flavor)
    try:
        with urllib.request.urlopen(request, timeout=METADATA_SEC) as answer:
            return answer.read().decode()
    except OSError:  # and whatever urllib makes of it
        return ''


def has_tpu() -> bool:
    """Whether there is a device file of a TPU."""
    return any(glob.glob(pattern) for pattern in ('/dev/accel*', '/dev/vfio/[0-9]*'))


LAUNCHERS = (open_mpi, slurm, kubernetes_tpus, tpu_vms)


# Scripts of users import the earlier name.
this_host = detect_host
