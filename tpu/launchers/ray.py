"""Hosts of a Ray cluster: a placement group with a bundle for each, and an actor in each bundle.

Connects to the cluster that RAY_ADDRESS or `ray start` names, or starts one on this machine. The
nodes need this repository under the same path. If a host is lost, its group is released, and a new
group is requested after PAUSE_SEC of `tpu.launchers.base`.

Waits: the trainers are polled every LOOK_SEC; a host that does not answer for ANSWER_SEC is lost.
There is no limit on the wait for hosts, and trainers start once all hosts are there: a TPU slice
may take a quarter of an hour to boot.

Sources: docs.ray.io, ray.util.tpu.slice_placement_group (alpha) and Placement Groups; stale
variables of slices: ray-project/ray#62893.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lm.launch.before_jax import ACCELERATORS
from lm.launch.exit_status import DONE, RESUME, SIGNALLED
from lm.launch.signals import preserve_handlers
from lm.launch.this_host import SECRET
from tpu.launchers import base
from tpu.launchers.base import Chips, Job, option

LOOK_SEC = 1.0
ANSWER_SEC = 30.0
SAY_SEC = 60.0  # between messages while waiting for nodes
LAST_CHARS = 2000  # last output of each host but the first, shown if the job fails
PR_SET_PDEATHSIG = 1
STALE_PREFIX = 'MEGASCALE_'  # variables of an earlier job on a host, for other slices


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Options of --engine=ray."""

    nodes: int = option('Number of hosts, on different nodes if possible.', 0)
    resources: str = option('Resources per host, such as CPU=8,GPU=8.', 'CPU=1')
    topology: str = option(
        'Shape of a TPU slice, such as 4x4. The job uses all hosts of a slice.', ''
    )
    accelerator_version: str = option('TPU version of the slices, such as v6e.', '')
    slices: int = option('Number of slices that train one run together.', 1)
    address: str = option('Address of the cluster; default: RAY_ADDRESS, or this machine.', '')
    folder: str = option('Folder of this repository on the nodes; default: this folder.', '')

    def chips(self) -> Chips:
        """Returns the slices, or the GPUs of all hosts; only hosts know their number of CPUs."""
        if self.topology:
            slice_name = f'{self.accelerator_version.lower()}:{self.topology}'
            return Chips(slice_name, self.slices, '--accelerator_version and --topology')
        gpus = parse_resources(self.resources).get('GPU', 0)
        return Chips(devices=int(self.nodes * gpus))


def parse_resources(text: str) -> dict[str, float]:
    """Returns {'CPU': 8.0, 'GPU': 8.0} for CPU=8,GPU=8."""
    try:
        resources = {name: float(n) for name, n in (part.split('=') for part in text.split(','))}
    except ValueError:
        resources = {}
    if not resources or any(not name or n <= 0 for name, n in resources.items()):
        raise ValueError(f'--resources must be such as CPU=8,GPU=8; got {text!r}')
    return resources


def actor_options(bundle: dict[str, float]) -> dict:
    """Returns the options of an actor that takes the whole bundle."""
    kinds = {'CPU': 'num_cpus', 'GPU': 'num_gpus'}
    counted = {kinds[kind]: amount for kind, amount in bundle.items() if kind in kinds}
    custom = {kind: amount for kind, amount in bundle.items() if kind not in kinds}
    # Ray takes CPUs and GPUs as separate options, and refuses them among `resources`. Without
    # num_cpus an actor would need 1 CPU to be placed, which a bundle of GPUs may lack.
    return {'num_cpus': 0, **counted, 'resources': custom}


def select_python(options: RayOptions) -> str:
    """Returns the words before train.py.

    This interpreter is used if it has the packages that JAX needs for the TPUs or GPUs of the
    hosts, otherwise uv with the extra that installs them.
    """
    kinds = parse_resources(options.resources)
    needed_extra = 'tpu' if options.topology or 'TPU' in kinds else 'cuda' if 'GPU' in kinds else ''
    for _, _, packages, extra in ACCELERATORS:
        if extra == needed_extra and not any(map(importlib.util.find_spec, packages)):
            return f'uv run --extra {extra}'
    return shlex.quote(sys.executable)


def order_bundles(hosts: Sequence[dict], slices: int) -> list[int]:
    """Returns the bundle of each process: slice by slice, and in each by the host's number.

    libtpu and JAX must number the hosts alike.
    """
    # TPU_WORKER_ID counts from 0 in each slice; a host without it keeps its place.
    size, workers = len(hosts) // slices, [host['worker'] for host in hosts]
    numbers = [i if worker is None else worker for i, worker in enumerate(workers)]
    return sorted(range(len(hosts)), key=lambda i: (i // size, numbers[i]))


def host_flags(first: dict, count: int | str, number: int | str) -> list[str]:
    """Returns the flags of a process.

    Args:
      first: `RayHost.describe` of process 0.
      count: number of processes.
      number: number of the process.
    """
    if count == 1:
        return ['--num_processes=1']
    port, watch_port = first['ports']
    flags = [f'--coordinator={first["address"]}:{port}', f'--watch_port={watch_port}']
    return [*flags, f'--num_processes={count}', f'--process_id={number}']


def slice_env(first: dict, slices: int, number: int) -> dict[str, str]:
    """Returns libtpu's variables for a host of a slice; none with one slice.

    Args:
      first: `RayHost.describe` of process 0.
      slices: number of slices.
      number: number of the slice.
    """
    if slices == 1:
        return {}
    from ray.util.tpu import get_tpu_coordinator_env_vars

    return get_tpu_coordinator_env_vars(first['address'], slices, number)


def child_env(env: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a trainer, without stale variables of slices.

    libtpu would wait forever for the slices of an earlier job.
    """
    return {name: value for name, value in env.items() if not name.startswith(STALE_PREFIX)} | dict(
        changes
    )


def node_address() -> str:
    """Returns the address of this node within the cluster."""
    import ray

    return ray.util.get_node_ip_address()


class RayHost:
    """The actor of a host; it starts train.py there and reads its output.

    The trainer is a separate process, because its variables must be set before it imports JAX.
    """

    def describe(self) -> dict:
        """Returns the host's address, two free ports, and its number within its TPU slice."""
        # Both sockets are open at once, so that the two ports differ.
        with socket.create_server(('', 0)) as coordinator, socket.create_server(('', 0)) as watch:
            ports = coordinator.getsockname()[1], watch.getsockname()[1]
        worker = os.environ.get('TPU_WORKER_ID', '')
        number = int(worker) if worker.isdigit() else None
        return {'address': node_address(), 'ports': ports, 'worker': number}

    def start(self, words: Sequence[str], folder: str, changes: Mapping[str, str]) -> None:
        """Starts the trainer, which gets SIGTERM if this actor is killed.

        Args:
          words: the command.
          folder: where to run it.
          changes: environment variables to set.
        """
        libc = ctypes.CDLL(None) if platform.system() == 'Linux' else None
        stop_with_actor = (
            functools.partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if libc else None
        )
        # A file, not a pipe: a full pipe would block the trainer while nobody reads.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.offset = 0
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=child_env(os.environ, changes),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            preexec_fn=stop_with_actor,
        )

    def read(self) -> tuple[str, int | None]:
        """Returns the trainer's new output, and its exit status once it has ended."""
        code = self.process.poll()  # polled before the file is read, so that no output is missed
        end = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), end - self.offset, self.offset)
        self.offset = end
        status = code if code is None or code >= 0 else SIGNALLED - code
        return text.decode(errors='replace'), status

    def stop(self) -> None:
        """Sends SIGTERM: the trainer saves a checkpoint and ends."""
        self.process.send_signal(signal.SIGTERM)


def script(job: Job, options: RayOptions) -> str:
    """Returns the requested group, and the commands of each bundle."""
    first = {'address': 'HOST0', 'ports': ('PORT', 'OTHER_PORT')}
    if options.topology:
        names = f'{options.topology!r}, {options.accelerator_version!r}'
        group = f'ray.util.tpu.slice_placement_group({names}, num_slices={options.slices})'
        flags = host_flags(first, 'HOSTS', 'NUMBER')
    else:
        bundles = [parse_resources(options.resources)]
        group = f"ray.util.placement_group({bundles} * {options.nodes}, strategy='SPREAD')"
        flags = host_flags(first, options.nodes, 'NUMBER')
    return base.shell_lines(
        f'# {group}',
        '# in each bundle, without MEGASCALE_* of earlier jobs, once all have their nodes:',
        ['cd', options.folder or os.getcwd()],
        [*job.argv(select_python(options)), *flags],
        f'# at most {job.max_restarts} times more, after status 42, 128 + n or a lost host',
    )


def check(job: Job, options: RayOptions) -> None:
    """Raises ValueError for options that this engine does not support."""
    del job
    parse_resources(options.resources)
    if bool(options.nodes) == bool(options.topology) or options.nodes < 0:
        raise ValueError(
            '--engine=ray needs --nodes=N, or --topology=4x4 of TPU slices; got '
            f'--nodes={options.nodes} and --topology={options.topology!r}.'
        )
    if bool(options.topology) != bool(options.accelerator_version):
        raise ValueError(
            '--topology=4x4 and --accelerator_version=v6e are of TPU slices: give both.'
        )
    if options.slices < 1 or (options.slices > 1 and not options.topology):
        raise ValueError(f'--slices is of --topology, and at least 1; got {options.slices}.')


class RayLaunch(base.JobLaunch):
    """A placement group and its actors."""

    outlives_launcher = False
    packages = (('ray', 'pip install "evenkeel[cluster]", or uv sync --extra cluster'),)

    def __init__(self, *args):
        super().__init__(*args)
        self.folder = self.options.folder or os.getcwd()
        self.ray = _connect(self.options.address)
        self.group: Any = None
        self.slices: Any = None
        self.hosts: list[Any] = []
        self.codes: list[int | None] = []
        self.last_output: list[str] = []

    def submit(self) -> None:
        """Reserves the nodes, and starts the trainers."""
        self.close()
        self._reserve()
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors = [
            self.ray.remote(RayHost)
            .options(scheduling_strategy=strategy(self.group, i), **actor_options(bundle))
            .remote()
            for i, bundle in enumerate(self.group.bundle_specs)
        ]
        descriptions = self.ray.get([actor.describe.remote() for actor in actors])
        order = order_bundles(descriptions, self.options.slices)
        first, hosts_per_slice = descriptions[order[0]], len(actors) // self.options.slices
        self.hosts = [actors[place] for place in order]
        secret = {SECRET: self.job.secret}
        for number, host in enumerate(self.hosts):
            flags = host_flags(first, len(order), number)
            variables = slice_env(first, self.options.slices, number // hosts_per_slice) | secret
            words = [*self.job.argv(select_python(self.options)), *flags]
            self.ray.get(host.start.remote(words, self.folder, variables))
        self.codes, self.last_output = [None] * len(order), [''] * len(order)

    def _reserve(self) -> None:
        """Waits until every bundle has its node."""
        if self.options.topology:
            self.slices = self.ray.util.tpu.slice_placement_group(
                self.options.topology,
                self.options.accelerator_version,
                num_slices=self.options.slices,
                name=self.job.name,
            )
            self.group = self.slices.slice_placement_group
        else:
            bundles = [parse_resources(self.options.resources)] * self.options.nodes
            self.group = self.ray.util.placement_group(bundles, strategy='SPREAD')
        ready, last_message = self.group.ready(), 0.0
        while not self.ray.wait([ready], timeout=0.5)[0]:
            if self.caught:
                raise base.LaunchInterrupted
            if time.monotonic() - last_message > SAY_SEC:
                last_message = time.monotonic()
                cluster = self.ray.cluster_resources()
                resources = {
                    kind: amount
                    for kind, amount in cluster.items()
                    if kind in ('CPU', 'GPU', 'TPU')
                }
                specs = self.group.bundle_specs
                self.say(f'waiting for {len(specs)} nodes with {specs[0]}; in all, {resources}')

    def poll(self) -> int | None:
        """Forwards output of the first host; returns the job's status once all hosts have ended."""
        if not self.is_due(LOOK_SEC):
            return None
        for i, host in enumerate(self.hosts):
            if self.codes[i] is not None:
                continue
            try:
                text, self.codes[i] = self.ray.get(host.read.remote(), timeout=ANSWER_SEC)
            except (self.ray.exceptions.RayError, TimeoutError) as error:
                self.say(f'host {i} is lost: {str(error).splitlines()[0]}')
                self._show_last_output()
                return RESUME
            if i == 0:
                sys.stdout.write(text)
                sys.stdout.flush()
            self.last_output[i] = (self.last_output[i] + text)[-LAST_CHARS:]
        if None in self.codes:
            return None
        status = base.combine_statuses([code for code in self.codes if code is not None])
        if status != DONE and not self.caught:
            self._show_last_output()
        return status

    def _show_last_output(self) -> None:
        """Shows the last output of all hosts but the first, which is forwarded anyway."""
        for i, text in enumerate(self.last_output[1:], 1):
            if text.strip():
                self.say(f'host {i} said last:\n{text.rstrip()}')

    def stop(self) -> None:
        """Sends SIGTERM to all trainers."""
        for host in self.hosts:
            with contextlib.suppress(self.ray.exceptions.RayError, TimeoutError):
                self.ray.get(host.stop.remote(), timeout=ANSWER_SEC)

    def close(self) -> None:
        """Releases the placement group."""
        if self.slices is not None:
            self.slices.shutdown()
        elif self.group is not None:
            self.ray.util.remove_placement_group(self.group)
        self.group = self.slices = None
        self.hosts = []

    def stop_commands(self) -> list[list[str]]:
        """Returns the command that stops this launcher, and with it the job."""
        return [['kill', '-TERM', str(os.getpid())]]


def _connect(address: str):
    """Connects to the cluster, and returns the ray package."""
    # Ray would report its use, and under `uv run` give workers an environment of their own.
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    os.environ.setdefault('RAY_ENABLE_UV_RUN_RUNTIME_ENV', '0')
    import ray
    import ray.util.scheduling_strategies
    import ray.util.tpu

    if not ray.is_initialized():
        with preserve_handlers(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', category=RuntimeWarning)
            ray.init(
                address=address or None,
                include_dashboard=None if address else False,
                logging_level='ERROR',  # ty: ignore[invalid-argument-type]  # Ray takes names too
                log_to_driver=False,
            )
    return ray
