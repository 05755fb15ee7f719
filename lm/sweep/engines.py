"""Trains a sweep: its flags, and where its groups train, in this process or on a Ray cluster.

Groups are independent. All that passes between them is what runs leave in their folders, so another
process can take up any group again.
"""

import contextlib
import itertools
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from absl import flags
from rich.console import Console

from lm.config.fields import AUTO
from lm.config.resolve import resolve
from lm.devices.check_mesh import check_devices, check_single
from lm.devices.mesh import make_mesh
from lm.launch.before_jax import TUNABLES, usual_dtype
from lm.launch.distributed import (
    asked_to_stop,
    first_then_others,
    from_first,
    is_first,
    several,
)
from lm.launch.exit_status import BAD_INPUT, DONE, SIGNALLED
from lm.launch.signals import caught_signals, handlers_kept
from lm.launch.terminal import Terminal
from lm.launch.tracking import tracked
from lm.record.machine import device_name
from lm.record.remote.mirror import sweep_folder, sweep_records
from lm.record.workdir import LOCK, SWEEP, check_shared
from lm.storage.buckets import is_url
from lm.storage.files import locked
from lm.sweep.arms import Ablation
from lm.sweep.cells import Cell, cells, groups
from lm.sweep.group import Work, train_group
from lm.sweep.hosts import dealt, have_ended, host_0_first, join_sweep
from lm.sweep.ledger import open_sweep
from modules.choices import choose

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

RETRIES = 10  # of a group whose worker was lost; its runs go on from their checkpoints
POLL_SEC = 1.0


def define_flags() -> None:
    """Defines the flags of a sweep, which a single run has no use for."""
    flags.DEFINE_string('engine', 'local', 'Where a sweep trains: local, or ray.')
    flags.DEFINE_integer(
        'runs_at_once', 0, 'Runs of a sweep in one program; 0: as many as fit.', lower_bound=0
    )
    flags.DEFINE_list('resources', None, 'Of a Ray task: CPU=2, or GPU=1, or TPU=4.')


def asked(is_sweep: bool) -> dict[str, Any]:
    """Returns the arguments of `train_sweep` that the flags give: engine, runs at once, resources.
    Raises ValueError where a single run has them.
    """
    given = flags.FLAGS
    engine, runs_at_once, resources = given.engine, given.runs_at_once, given.resources
    if not is_sweep and (engine != 'local' or runs_at_once or resources):
        raise ValueError('--engine, --runs_at_once and --resources are for config.sweep')
    how = {'engine': engine, 'runs_at_once': runs_at_once}
    return how | {'resources': parse_resources(resources)}


def dtype_of_workers() -> str:
    """Returns the type of products where runs train and the config leaves it open: by what a Ray
    task asks for, and otherwise by this machine.
    """
    asked = parse_resources(flags.FLAGS.resources)
    return 'bfloat16' if {'GPU', 'TPU'} & asked.keys() else usual_dtype()


def parse_resources(texts: list[str] | None) -> dict[str, float]:
    """{'GPU': 1.0} for GPU=1."""
    try:
        return {name: float(n) for name, n in (text.split('=') for text in texts or [])}
    except ValueError:
        raise ValueError(f'--resources must be such as CPU=2,GPU=1; got {texts}') from None


class View(Protocol):
    """Shows and writes the records of a sweep (`eval.console.progress.SweepView`)."""

    def live(
        self, groups: Sequence[Sequence[Cell]], console: Console
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Shows where the runs stand; yields a function that is to be called now and then."""

    def table(self) -> str:
        """Writes the table of all cells; returns how they ended, and its path."""

    def report(self) -> str:
        """Writes the report; returns its path."""


def train_sweep(
    base: dict[str, Any],
    sweep: Any,
    workdir: str | Path,
    view: Callable[[Path], View],
    continue_changed: bool,
    engine: str,
    trackers: Sequence[str] = (),
    tune: Any = None,
    **how: Any,
) -> int:
    """Trains the cells that have not ended yet; returns the exit status.

    base: the config that all cells start from, as nested dicts; sweep: config.sweep; tune:
    config.tune, with which there are further cells once those before have ended (`lm.sweep.arms`).
    workdir: a folder, or the URL of one in a bucket. view: shows and writes what a folder holds.
    continue_changed: go on where the folder holds a sweep from another base. engine: a name of
    ENGINES. trackers: they get the rows of all cells. how: fields of `lm.sweep.group.Work`.
    """
    train_groups = choose(ENGINES, engine, '--engine')
    ablation = None if tune is None else Ablation(base, sweep, tune)
    grouped = groups(cells(base, sweep) if ablation is None else ablation.first)
    host, hosts = join_sweep(grouped, engine)
    url = str(workdir) if is_url(str(workdir)) else None
    if url is not None and several():
        raise ValueError(
            f'{url}: a sweep of runs that have the devices of several hosts together needs a '
            '--workdir on a disk that all of them see. Each run alone takes a bucket.'
        )
    workdir = sweep_folder(workdir)
    shown = view(workdir)
    for group in grouped:  # whether its runs can be laid over the devices at hand
        recipe = group[0].recipe
        if several():
            check_single(recipe)
        elif recipe.mesh.axes != AUTO:
            check_devices(recipe, make_mesh(recipe.mesh, runs=len(group)))
    # One speaks for the whole sweep, the other for this host.
    terminal, own = Terminal(silent=not is_first() or host > 0), Terminal(silent=not is_first())
    say = own.say if host == 0 else lambda text: own.say(f'host {host}: {text}')

    def so_far() -> list[list[Cell]]:
        """The groups of all cells, which follow from what the folder holds where they are tuned."""
        if ablation is None:
            return grouped
        if url is not None:
            with sweep_records(url, terminal.say):  # brings what other hosts have trained
                pass
        return groups(ablation.cells(from_first(ablation.runs(workdir) if is_first() else None)))

    def opened() -> list[list[Cell]]:
        record = None if ablation is None else ablation.record()
        with sweep_records(url, terminal.say):
            how = continue_changed, terminal.say, record
            return open_sweep(workdir, resolve(base), grouped, *how)

    grouped = so_far()
    # In a bucket the lease of the sweep lets one host in after the other.
    grouped = host_0_first(workdir, host if url is None else 0, hosts, opened)
    check_shared(workdir / SWEEP)
    n = sum(map(len, grouped))
    terminal.say(f'{url or workdir}: {n} cells, {len(grouped)} programs, on {device_name()}')
    with (
        tracked(workdir, trackers if host == 0 else (), terminal.say),
        caught_signals() as caught,
    ):
        work = Work([], workdir, caught, say, url=url, **how)
        while True:
            work.groups = dealt(grouped, host, hosts)
            if hosts > 1:
                mine = sum(map(len, work.groups))
                say(f'{mine} of the {sum(map(len, grouped))} cells train on this host')
            with shown.live(grouped, terminal.console) as work.tick:
                train_groups(work)
            if ablation is None or not have_ended(grouped, work, hosts):
                break
            before, grouped = grouped, so_far()
            if sum(map(len, grouped)) == sum(map(len, before)):
                break
            if host == 0 or url is not None:
                first_then_others(opened)
    work.groups = work.groups if ablation is None else grouped
    return from_first(_end(work, shown, terminal.say) if is_first() else None)


def _end(work: Work, view: View, say: Callable[[str], None]) -> int:
    """Writes the table and report of all cells; returns the exit status for those of `work`."""
    # Another host may end too.
    with sweep_records(work.url, say), locked(work.workdir / LOCK):
        say(view.table())
        if work.caught:
            say(f'{signal.Signals(work.caught[0]).name}: the same command goes on')
            return SIGNALLED + work.caught[0]
        say(view.report())
    return DONE if all(map(work.is_final, itertools.chain(*work.groups))) else BAD_INPUT


def local(work: Work) -> None:
    """Trains one group after the other, in this process."""
    for group in work.groups:
        if asked_to_stop(work.caught):
            return
        train_group(group, work)


def on_ray(work: Work) -> None:
    """Trains each group, or part of runs_at_once runs, as a Ray task with a process of its own.

    Connects to the cluster that RAY_ADDRESS or `ray start` names, or starts one on this machine. A
    task whose worker is lost is tried again, RETRIES times. The nodes need this checkout and the
    workdir under the same path, or in a bucket. Raises ValueError where Ray is not installed, or no
    node has the resources that a group asks for.
    """
    # Ray would report its use, and install an environment for workers under `uv run`.
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    os.environ.setdefault('RAY_ENABLE_UV_RUN_RUNTIME_ENV', '0')
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            '--engine=ray needs Ray: pip install "evenkeel[cluster]", or uv sync --extra cluster'
        ) from error
    connected = ray.is_initialized()
    if not connected:
        # JAX warns of a fork, which exec follows at once.
        with handlers_kept(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', message=r'os\.fork', category=RuntimeWarning)
            ray.init(include_dashboard=False, logging_level='ERROR')
    try:
        resources = work.resources or default_resources(ray.cluster_resources())
        _check_resources(ray.nodes(), resources)
        parts = [part for group in work.groups for part in split(group, work)]
        work.say(f'{len(parts)} tasks on Ray, each with {resources}')
        task = ray.remote(**_task_options(resources))(train_group_remotely)
        how = work.url or str(work.workdir.absolute()), work.runs_at_once, work.start_over
        _await_tasks(ray, work, {task.remote(part, *how): part for part in parts})
    finally:
        if not connected:
            ray.shutdown()


def split(group: list[Cell], work: Work) -> list[list[Cell]]:
    """The cells of a group that have not ended, in parts of runs_at_once."""
    waiting = [cell for cell in group if not work.is_final(cell)]
    size = work.runs_at_once or max(1, len(waiting))
    return [waiting[i : i + size] for i in range(0, len(waiting), size)]


def default_resources(cluster: dict[str, float]) -> dict[str, float]:
    """One accelerator where the cluster has any, else one CPU."""
    return {next((kind for kind in ('TPU', 'GPU') if cluster.get(kind)), 'CPU'): 1.0}


def _check_resources(nodes: list[dict], resources: dict[str, float]) -> None:
    """Raises ValueError where no node can hold the task: Ray would wait for one without end."""
    alive = [node['Resources'] for node in nodes if node['Alive']]
    if not any(all(node.get(k, 0) >= n for k, n in resources.items()) for node in alive):
        there = [{k: n for k, n in node.items() if k in ('CPU', 'GPU', 'TPU')} for node in alive]
        raise ValueError(f'no node of the Ray cluster has {resources}; there are {there}')


def _task_options(resources: dict[str, float]) -> dict:
    kinds = {'CPU': 'num_cpus', 'GPU': 'num_gpus'}
    known = {kinds[k]: n for k, n in resources.items() if k in kinds}
    other = {k: n for k, n in resources.items() if k not in kinds}
    on_cpu = {'JAX_PLATFORMS': 'cpu', 'GLIBC_TUNABLES': ':'.join(TUNABLES)}
    return {
        'num_cpus': 0,
        **known,
        'resources': other,
        'max_retries': RETRIES,
        'max_calls': 1,  # JAX's memory and devices go with the process
        'runtime_env': {'env_vars': on_cpu if os.environ.get('JAX_PLATFORMS') == 'cpu' else {}},
    }


def train_group_remotely(
    group: list[Cell], workdir: str, runs_at_once: int, start_over: bool
) -> None:
    """Trains a part of a group in a Ray worker."""
    url = workdir if is_url(workdir) else None
    how = {'runs_at_once': runs_at_once, 'start_over': start_over, 'url': url}
    work = Work([], sweep_folder(workdir), [], **how)
    train_group(group, work)


def _await_tasks(ray, work: Work, running: dict) -> None:
    """Waits until every task has ended or a signal came; a task that Ray gives up has failed."""
    while running and not work.caught:
        ended, _ = ray.wait(list(running), timeout=POLL_SEC)
        for reference in ended:
            group = running.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                work.fail(group, error)
        work.tick()
    for reference in running:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(reference, force=True)


ENGINES = {'local': local, 'ray': on_ray}
