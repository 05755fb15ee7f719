"""What launchers say of the processes of a job. Standard library only, as JAX is not imported yet.

The names of variables are those that JAX reads (jax/_src/clusters), in its order.
"""

import dataclasses
import glob
import re
from collections.abc import Callable, Mapping
from pathlib import Path

TPU_PORT = 8482  # JAX's on TPUs
# JAX's ports for jobs of a scheduler: the last 4096, by the number of the job. Those of parents lie
# below, as the next job on this machine has the port after this one's.
JOB_PORTS = 4096
METADATA = '/computeMetadata/v1/instance/attributes/'
METADATA_SEC = 5.0
GOOGLE = Path('/sys/class/dmi/id/product_name')


@dataclasses.dataclass(frozen=True)
class Found:
    """What a launcher says; `coordinator` is '' where it does not say that."""

    launcher: str
    num_processes: int
    process_id: int
    coordinator: str = ''
    watch_port: int | None = None
    names: tuple[str, ...] = ()
    local_devices: tuple[int, ...] | None = None


def detected(env: Mapping[str, str]) -> Found | None:
    """By what a launcher has set, in the order in which JAX asks; None where there is none."""
    for launcher in LAUNCHERS:
        if found := launcher(env):
            return found
    return None


def open_mpi(env: Mapping[str, str]) -> Found | None:
    """Up to version 4 it says where its own process is; from 5 on it does not."""
    names = ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK')
    if not all(name in env for name in names):
        return None
    count, mine, local = (int(env[name]) for name in names)
    alone = env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
    of_all = {'launcher': 'Open MPI', 'num_processes': count, 'process_id': mine}
    of_all['local_devices'] = _of_task(env, None if alone else local)
    uri = env.get('OMPI_MCA_orte_hnp_uri', '')
    address = re.search(r'tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]', uri)
    if address is None:
        return Found(**of_all)
    host = address[1] or f'[{address[2]}]'
    return Found(**of_all, **_job_ports(host, int(uri.split('.')[0]) // 2**12))


def slurm(env: Mapping[str, str]) -> Found | None:
    """A step of srun; a task may have all devices of its machine, or one of several there."""
    names = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
    if not all(name in env for name in names):
        return None
    job, nodes, count, mine, local = (env[name] for name in names)
    hosts = expanded(nodes)
    tasks = env.get('SLURM_STEP_TASKS_PER_NODE', '')
    alone = len(hosts) == int(count) or re.fullmatch(r'1(\(x\d+\))?', tasks) is not None
    return Found(
        launcher='SLURM',
        num_processes=int(count),
        process_id=int(mine),
        names=tuple(hosts) if len(hosts) == int(count) else (),
        local_devices=_of_task(env, None if alone else int(local)),
        **_job_ports(hosts[0], int(job)),
    )


def _of_task(env: Mapping[str, str], local: int | None) -> tuple[int, ...] | None:
    """Of several processes of a machine each has the GPU of its number, as JAX has it, unless the
    launcher shows each one only its own.
    """
    shown = env.get('CUDA_VISIBLE_DEVICES') or env.get('ROCR_VISIBLE_DEVICES') or ''
    own = shown != '' and ',' not in shown
    return None if local is None or own else (local,)


def _job_ports(host: str, job: int) -> dict[str, str | int]:
    port = 65536 - JOB_PORTS + job % JOB_PORTS
    return {'coordinator': f'{host}:{port}', 'watch_port': port - JOB_PORTS}


def expanded(nodes: str) -> list[str]:
    """['n01', 'n02', 'gpu7'] for SLURM's 'n[01-02],gpu7'."""
    found = []
    for prefix, ranges, suffix in re.findall(r'([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)', nodes):
        if not ranges:
            found.append(prefix + suffix)
            continue
        for part in ranges.split(','):
            first, _, last = part.partition('-')
            for number in range(int(first), int(last or first) + 1):
                found.append(f'{prefix}{number:0{len(first)}d}{suffix}')
    return found


def kubernetes_tpus(env: Mapping[str, str]) -> Found | None:
    """TPUs of GKE, one slice or several."""
    if not has_tpu():
        return None
    if path := env.get('TPU_PROCESS_ADDRESSES_PATH'):
        workers = Path(path).read_text().strip()
    else:
        workers = env.get('TPU_PROCESS_ADDRESSES') or env.get('TPU_WORKER_HOSTNAMES') or ''
    if not workers or 'TPU_WORKER_ID' not in env:
        return None
    return _slices('TPUs of GKE', workers.split(','), int(env['TPU_WORKER_ID']), env.get)


def tpu_vms(env: Mapping[str, str]) -> Found | None:
    """The hosts of a TPU pod, by the machine's metadata."""
    on_google = 'GCE_METADATA_IP' in env or (GOOGLE.exists() and 'Google' in GOOGLE.read_text())
    if not has_tpu() or 'TPU_SKIP_MDS_QUERY' in env or not on_google:
        return None
    server = env.get('GCE_METADATA_IP', 'metadata.google.internal')
    workers = _metadata(server, 'worker-network-endpoints')
    number = _metadata(server, 'agent-worker-number')
    if not workers or not number:
        return None
    addresses = [worker.split(':')[-1] for worker in workers.split(',')]  # name:id:address, or it
    lines = re.findall(r"^(\w+): *'?(.*?)'? *$", _metadata(server, 'tpu-env'), re.MULTILINE)
    known = dict(lines) | dict(env)
    return _slices('TPU VMs', addresses, int(number), known.get)


def _slices(
    launcher: str, workers: list[str], number: int, read: Callable[[str], str | None]
) -> Found:
    """Processes are numbered through all slices, of which MEGASCALE_* variables tell."""
    slices = int(read('MEGASCALE_NUM_SLICES') or 1)
    first = read('MEGASCALE_COORDINATOR_ADDRESS') or workers[0]
    names = [worker.rpartition(':')[0] or worker for worker in workers]
    return Found(
        launcher=launcher,
        num_processes=slices * len(workers),
        process_id=number + int(read('MEGASCALE_SLICE_ID') or 0) * len(workers),
        coordinator=f'{first.split(":")[0]}:{TPU_PORT}',
        names=tuple(names) if slices == 1 else (),
    )


def _metadata(server: str, name: str) -> str:
    import urllib.request  # 20 ms, and all but TPU VMs do without

    request = urllib.request.Request(
        f'http://{server}{METADATA}{name}', headers={'Metadata-Flavor': 'Google'}
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_SEC) as answer:
            return answer.read().decode()
    except OSError:  # and whatever urllib makes of it
        return ''


def has_tpu() -> bool:
    return any(glob.glob(pattern) for pattern in ('/dev/accel*', '/dev/vfio/[0-9]*'))


LAUNCHERS = (open_mpi, slurm, kubernetes_tpus, tpu_vms)
