"""Where the groups of a sweep train: in this process, or on a Ray cluster; and its flags.

Groups are independent work. An engine sees to it that each is trained; what a run leaves in its
folder is all that passes between them, so any group can be taken up again by another process.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from lm.launch.before_jax import TUNABLES
from lm.launch.signals import handlers_kept
from lm.launch.stopping import asked_to_stop
from lm.record.workdir import is_final, record_failure
from lm.storage.buckets import is_url
from lm.sweep.cells import Cell
from lm.sweep.group import train_group

flags.disclaim_key_flags()  # those that are defined here are of the program that asks for them

RETRIES = 10  # of a group whose worker was lost; its runs go on from their checkpoints
POLL_SEC = 1.0


def define_flags() -> None:
    """Flags of a sweep, which a single run has no use for."""
    flags.DEFINE_string('engine', 'local', 'Where a sweep trains: local, or ray.')
    flags.DEFINE_integer(
        'runs_at_once', 0, 'Runs of a sweep in one program; 0: as many as fit.', lower_bound=0
    )
    flags.DEFINE_list('resources', None, 'Of a Ray task: CPU=2, or GPU=1, or TPU=4.')


def asked(sweep: Any, workdir: str | Path) -> tuple[str, int, dict[str, float]]:
    """The engine, the runs at once and the resources that the flags give.

    Raises ValueError where they are given to a single run (`sweep` is None), and where processes of
    other machines would train in a folder of this one.
    """
    engine, runs_at_once = flags.FLAGS.engine, flags.FLAGS.runs_at_once
    resources = flags.FLAGS.resources
    if sweep is None and (engine != 'local' or runs_at_once or resources):
        raise ValueError('--engine, --runs_at_once and --resources are for config.sweep')
    if engine != 'local' and is_url(str(workdir)):
        raise ValueError(
            f'--engine={engine} needs a --workdir on a disk that its machines share, and '
            f'{workdir} is in object storage'
        )
    return engine, runs_at_once, parse_resources(resources)


def parse_resources(texts: list[str] | None) -> dict[str, float]:
    """{'GPU': 1.0} for GPU=1."""
    try:
        return {name: float(n) for name, n in (text.split('=') for text in texts or [])}
    except ValueError:
        raise ValueError(f'--resources must be such as CPU=2,GPU=1; got {texts}') from None


@dataclasses.dataclass
class Work:
    """What a sweep has to do. `caught`: signals that came. `tick` is called now and then."""

    groups: list[list[Cell]]
    workdir: Path
    caught: list[int]
    say: Callable[[str], None]
    tick: Callable[[], None]
    runs_at_once: int  # 0: as many as fit in memory
    resources: dict[str, float] | None  # of one group on a cluster, such as {'GPU': 1}
    start_over: bool = False  # cells whose checkpoints are all damaged begin anew


def local(work: Work) -> None:
    """One group after the other, in this process."""
    for group in work.groups:
        if asked_to_stop(work.caught):
            return
        train_group(
            group,
            work.workdir,
            caught=work.caught,
            say=work.say,
            tick=work.tick,
            runs_at_once=work.runs_at_once,
            start_over=work.start_over,
        )


def on_ray(work: Work) -> None:
    """Each group, or part of runs_at_once runs, as a Ray task with a process of its own.

    Connects to the cluster that RAY_ADDRESS or `ray start` names, or starts one on this machine. A
    task whose worker is lost is tried again, RETRIES times. The nodes need this checkout and the
    workdir under the same path. Raises ValueError where Ray is not installed, or no node has the
    resources that a group asks for.
    """
    # Ray would report its use; and under `uv run` give workers an environment of their own, which
    # it would have to install, where this one will do.
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
        # JAX warns of a fork, which is followed by exec at once.
        with handlers_kept(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', message=r'os\.fork', category=RuntimeWarning)
            ray.init(include_dashboard=False, logging_level='ERROR')
    try:
        resources = work.resources or default_resources(ray.cluster_resources())
        _check_resources(ray.nodes(), resources)
        parts = [part for group in work.groups for part in split(group, work)]
        work.say(f'{len(parts)} tasks on Ray, each with {resources}')
        task = ray.remote(**_task_options(resources))(train_group_remotely)
        running = {
            task.remote(
                part, str(work.workdir.absolute()), work.runs_at_once, work.start_over
            ): part
            for part in parts
        }
        _watch(ray, work, running)
    finally:
        if not connected:
            ray.shutdown()


def split(group: list[Cell], work: Work) -> list[list[Cell]]:
    """The cells of a group that have not ended, in parts of runs_at_once."""
    waiting = [cell for cell in group if not is_final(work.workdir / cell.name)]
    size = work.runs_at_once or max(1, len(waiting))
    return [waiting[i : i + size] for i in range(0, len(waiting), size)]


def default_resources(cluster: dict[str, float]) -> dict[str, float]:
    """One accelerator where the cluster has any, else one CPU."""
    for kind in ('TPU', 'GPU'):
        if cluster.get(kind):
            return {kind: 1.0}
    return {'CPU': 1.0}


def _check_resources(nodes: list[dict], resources: dict[str, float]) -> None:
    """Ray itself would wait without end for a node that can hold the task."""
    alive = [node['Resources'] for node in nodes if node['Alive']]
    if not any(all(node.get(k, 0) >= n for k, n in resources.items()) for node in alive):
        there = [{k: n for k, n in node.items() if k in ('CPU', 'GPU', 'TPU')} for node in alive]
        raise ValueError(f'no node of the Ray cluster has {resources}; there are {there}')


def _task_options(resources: dict[str, float]) -> dict:
    kinds = {'CPU': 'num_cpus', 'GPU': 'num_gpus'}
    known = {kinds[k]: n for k, n in resources.items() if k in kinds}
    other = {k: n for k, n in resources.items() if k not in kinds}
    variables = {}
    if os.environ.get('JAX_PLATFORMS') == 'cpu':
        variables = {'JAX_PLATFORMS': 'cpu', 'GLIBC_TUNABLES': ':'.join(TUNABLES)}
    return {
        'num_cpus': 0,
        **known,
        'resources': other,
        'max_retries': RETRIES,
        'max_calls': 1,  # JAX's memory and devices go with the process
        'runtime_env': {'env_vars': variables},
    }


def train_group_remotely(
    group: list[Cell], workdir: str, runs_at_once: int, start_over: bool
) -> None:
    """What a Ray worker does."""
    folder = Path(workdir)
    train_group(group, folder, caught=[], runs_at_once=runs_at_once, start_over=start_over)


def _watch(ray, work: Work, running: dict) -> None:
    """Until every task has ended or a signal came; a task that Ray gave up has failed."""
    while running and not work.caught:
        ended, _ = ray.wait(list(running), timeout=POLL_SEC)
        for reference in ended:
            group = running.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                for cell in group:
                    if not is_final(work.workdir / cell.name):
                        record_failure(work.workdir / cell.name, error, work.say)
        work.tick()
    for reference in running:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(reference, force=True)


ENGINES = {'local': local, 'ray': on_ray}
