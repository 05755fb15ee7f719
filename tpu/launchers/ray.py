"""Hosts of a Ray cluster: a placement group with a bundle for each, and an actor in each bundle.

    python -m tpu.launch --engine=ray --nodes=2 --resources=CPU=8,GPU=8 \\
        -- train.py --config=... --workdir=...
    python -m tpu.launch --engine=ray --topology=4x4 --accelerator_version=v6e -- train.py ...

Connects to the cluster that RAY_ADDRESS or `ray start` names, or starts one on this machine. The
nodes need this repository under the same path. Where a host is lost, its group is given back, and a
new one is asked for after PAUSE_SEC of `tpu.launchers.base`.

What is asked how often: the trainers, every LOOK_SEC; a host that does not answer for ANSWER_SEC is
lost. Hosts are waited for without end, and trainers start once all are there: a TPU slice may take
a quarter of an hour to boot.

Sources: docs.ray.io, ray.util.tpu.slice_placement_group (alpha) and Placement Groups; stale
variables of slices: ray-project/ray#62893.
"""

import contextlib
import dataclasses
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence

from lm.run.signals import handlers_kept
from lm.run.statuses import DONE, RESUME
from tpu.launchers import base
from tpu.launchers.base import Engine, Job, option
from tpu.launchers.ray_host import Host

LOOK_SEC = 1.0
ANSWER_SEC = 30.0
SAY_SEC = 60.0  # between words on what is waited for
LAST_WORDS = 2000  # characters of each other host, said where the job fails
INSTALL = 'pip install "evenkeel[cluster]", or uv sync --extra cluster'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    nodes: int = option('Hosts of the job, on different nodes where there are.', 0)
    resources: str = option('Of each host, such as CPU=8,GPU=8.', 'CPU=1')
    topology: str = option('Of a TPU slice, such as 4x4; its hosts are taken as a whole.', '')
    accelerator_version: str = option('Of a TPU slice, such as v6e.', '')
    slices: int = option('Slices that train one run together.', 1)
    address: str = option('Of the cluster; default RAY_ADDRESS, or the one of this machine.', '')
    folder: str = option('Folder of this repository on the nodes; default this one.', '')


def parse_resources(text: str) -> dict[str, float]:
    """{'CPU': 8.0, 'GPU': 8.0} for CPU=8,GPU=8."""
    try:
        found = {name: float(n) for name, n in (part.split('=') for part in text.split(','))}
    except ValueError:
        found = {}
    if not found or any(not name or n <= 0 for name, n in found.items()):
        raise ValueError(f'--resources must be such as CPU=8,GPU=8; got {text!r}')
    return found


def actor_options(bundle: dict[str, float]) -> dict:
    """An actor that takes the whole bundle."""
    kinds = {'CPU': 'num_cpus', 'GPU': 'num_gpus'}
    known = {kinds[kind]: n for kind, n in bundle.items() if kind in kinds}
    other = {kind: n for kind, n in bundle.items() if kind not in kinds}
    return {'num_cpus': 0, **known, 'resources': other}


def order(hosts: Sequence[dict], slices: int) -> list[int]:
    """The bundle of each process: slice by slice, and in each by its number there, as libtpu and
    JAX must number them alike.
    """
    size = len(hosts) // slices
    workers = [host['worker'] for host in hosts]
    known = [worker if worker is not None else i for i, worker in enumerate(workers)]
    return sorted(range(len(hosts)), key=lambda i: (i // size, known[i]))


def host_flags(first: dict, count: int | str, number: int | str) -> list[str]:
    """Which of the processes one is. first: what process 0's host says of itself."""
    if count == 1:
        return ['--num_processes=1']
    port, watch_port = first['ports']
    return [
        f'--coordinator={first["address"]}:{port}',
        f'--watch_port={watch_port}',
        f'--num_processes={count}',
        f'--process_id={number}',
    ]


def slice_env(first: dict, slices: int, number: int) -> dict[str, str]:
    """Variables of a host of slice `number`, for libtpu; none with one slice."""
    if slices == 1:
        return {}
    from ray.util.tpu import get_tpu_coordinator_env_vars

    return get_tpu_coordinator_env_vars(first['address'], slices, number)


def script(job: Job, options: Options) -> str:
    """The group that is asked for, and what runs in each bundle."""
    first = {'address': 'HOST0', 'ports': ('PORT', 'OTHER_PORT')}
    if options.topology:
        names = f'{options.topology!r}, {options.accelerator_version!r}'
        group = f'ray.util.tpu.slice_placement_group({names}, num_slices={options.slices})'
        flags = host_flags(first, 'HOSTS', 'NUMBER')
    else:
        bundles = [parse_resources(options.resources)]
        group = f"ray.util.placement_group({bundles} * {options.nodes}, strategy='SPREAD')"
        flags = host_flags(first, options.nodes, 'NUMBER')
    return '\n'.join(
        [
            f'# {group}',
            '# in each bundle, without MEGASCALE_* of earlier jobs, once all have their nodes:',
            f'cd {shlex.quote(options.folder or os.getcwd())}',
            shlex.join([*job.words(sys.executable), *flags]),
            f'# at most {job.max_restarts} times more, after status 42, 128 + n or a lost host',
            '',
        ]
    )


def check(job: Job, options: Options) -> None:
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


class Launch:
    """A placement group and its actors."""

    def __init__(self, job: Job, options: Options, caught: list[int], say: Callable[[str], None]):
        self.job, self.options, self.caught, self.say = job, options, caught, say
        self.restarts = job.max_restarts
        self.ray = _connect(options.address)
        self.group = self.slices = None
        self.hosts, self.codes, self.last = [], [], []
        self.looked = 0.0

    def submit(self) -> None:
        self._release()
        self._reserve()
        bundles = self.group.bundle_specs
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors = [
            self.ray.remote(Host)
            .options(scheduling_strategy=strategy(self.group, i), **actor_options(bundle))
            .remote()
            for i, bundle in enumerate(bundles)
        ]
        about = self.ray.get([actor.about.remote() for actor in actors])
        places = order(about, self.options.slices)
        first, size = about[places[0]], len(actors) // self.options.slices
        folder = self.options.folder or os.getcwd()
        self.hosts = [actors[place] for place in places]
        for number, host in enumerate(self.hosts):
            flags = host_flags(first, len(places), number)
            env = slice_env(first, self.options.slices, number // size)
            words = [*self.job.words(sys.executable), *flags]
            self.ray.get(host.start.remote(words, folder, env))
        self.codes = [None] * len(self.hosts)
        self.last = [''] * len(self.hosts)

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
            bundle = parse_resources(self.options.resources)
            self.group = self.ray.util.placement_group(
                [bundle] * self.options.nodes, strategy='SPREAD'
            )
        ready, said = self.group.ready(), 0.0
        while not self.ray.wait([ready], timeout=0.5)[0]:
            if self.caught:
                raise base.Stopped
            if time.monotonic() - said > SAY_SEC:
                said = time.monotonic()
                there = self.ray.cluster_resources()
                kinds = {k: n for k, n in there.items() if k in ('CPU', 'GPU', 'TPU')}
                wanted = self.group.bundle_specs
                self.say(f'waiting for {len(wanted)} nodes with {wanted[0]}; in all, {kinds}')

    def poll(self) -> int | None:
        if time.monotonic() - self.looked < LOOK_SEC:
            return None
        self.looked = time.monotonic()
        for i, host in enumerate(self.hosts):
            if self.codes[i] is not None:
                continue
            try:
                text, self.codes[i] = self.ray.get(host.read.remote(), timeout=ANSWER_SEC)
            except (self.ray.exceptions.RayError, TimeoutError) as error:
                self.say(f'host {i} is lost: {str(error).splitlines()[0]}')
                self._say_last()
                return RESUME
            if i == 0:
                sys.stdout.write(text)
                sys.stdout.flush()
            self.last[i] = (self.last[i] + text)[-LAST_WORDS:]
        if None in self.codes:
            return None
        status = base.worst(self.codes)
        if status != DONE and not self.caught:
            self._say_last()
        return status

    def _say_last(self) -> None:
        """Of the hosts whose output is not passed on."""
        for i, text in enumerate(self.last[1:], 1):
            if text.strip():
                self.say(f'host {i} said last:\n{text.rstrip()}')

    def stop(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(self.ray.exceptions.RayError, TimeoutError):
                self.ray.get(host.stop.remote(), timeout=ANSWER_SEC)

    def _release(self) -> None:
        if self.slices is not None:
            self.slices.shutdown()
        elif self.group is not None:
            self.ray.util.remove_placement_group(self.group)
        self.group = self.slices = None
        self.hosts = []

    def close(self) -> None:
        self._release()

    def by_hand(self) -> str:
        return f'kill -TERM {os.getpid()}'


def _connect(address: str):
    """The ray package, connected."""
    # Ray would report its use; and under `uv run` give workers an environment of their own.
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    os.environ.setdefault('RAY_ENABLE_UV_RUN_RUNTIME_ENV', '0')
    import ray
    import ray.util.scheduling_strategies
    import ray.util.tpu

    if not ray.is_initialized():
        with handlers_kept(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', category=RuntimeWarning)
            ray.init(
                address=address or None,
                include_dashboard=None if address else False,
                logging_level='ERROR',
                log_to_driver=False,
            )
    return ray


ENGINE = Engine(Options, script, Launch, check, packages={'ray': INSTALL})
