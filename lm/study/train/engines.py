"""Trains a sweep in this process or on a Ray cluster, and defines its flags.

Groups are independent. They exchange information only through the folders of their runs, so that
another process can resume any group.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from lm.config.fields import AUTO
from lm.config.recipe import Recipe
from lm.config.resolve import resolve
from lm.devices.check_mesh import check_devices, check_single_run
from lm.devices.mesh import make_mesh
from lm.launch.before_jax import TUNABLES, default_dtype
from lm.launch.distributed import (
    broadcast_from_first,
    is_first,
    is_multiprocess,
    is_stop_requested,
    run_first_then_others,
)
from lm.launch.exit_status import BAD_INPUT, DONE, SIGNALLED
from lm.launch.signals import catch_signals, preserve_handlers
from lm.launch.terminal import Terminal
from lm.launch.tracking import send_to_trackers
from lm.record.code import describe_code, find_other_code, running_code, summarize_codes
from lm.record.machine import device_name
from lm.record.names import FINAL
from lm.record.remote.mirror import mirror_sweep_records, sweep_folder
from lm.record.run import Run
from lm.record.workdir import LOCK, SWEEP, check_shared
from lm.run.branch import check_branch
from lm.run.program import build_without_text, locate_data
from lm.run.suites import SuiteLoader, check_suites
from lm.storage.buckets import is_url
from lm.storage.files import hold_lock
from lm.study.plan.cells import Cell, call_for_cell, group_by_program
from lm.study.plan.protocols import apply_protocol, resolve_protocol
from lm.study.tables.text import format_count
from lm.study.train import words
from lm.study.train.groups import Work, train_group
from lm.study.train.hosts import OtherHosts, deal_cells, join_sweep, run_host_0_first
from lm.study.train.ledger import open_sweep
from lm.study.train.means import local_measurements
from lm.study.train.throughput import measure_throughput, read_throughput
from lm.study.train.waves import Groups, PlannedWave, WavePlan
from modules.choices import choose

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

Train = Callable[[Work], None]  # trains the groups of the work, and returns once they have ended

RETRIES = 10  # retries of a group after its worker is lost; its runs resume from checkpoints
POLL_SEC = 1.0


def define_flags() -> None:
    """Defines the flags of sweeps."""
    flags.DEFINE_string('engine', 'local', 'Where a sweep trains: local or ray.')
    flags.DEFINE_integer(
        'runs_at_once', 0, 'Maximum runs that train at once; 0: as many as fit.', lower_bound=0
    )
    flags.DEFINE_list('resources', None, 'Resources of each Ray task: CPU=2, GPU=1 or TPU=4.')


def read_sweep_flags(is_sweep: bool) -> dict[str, Any]:
    """Returns the arguments of `train_sweep` from the flags: engine, runs at once, resources.

    Raises ValueError if a single run has these flags.
    """
    values = flags.FLAGS
    engine, runs_at_once, resources = values.engine, values.runs_at_once, values.resources
    if not is_sweep and (engine != 'local' or runs_at_once or resources):
        raise ValueError('--engine, --runs_at_once and --resources apply only to config.sweep')
    options = {'engine': engine, 'runs_at_once': runs_at_once}
    return options | {'resources': parse_resources(resources)}


def worker_dtype() -> str:
    """Returns the dtype of matrix products in training, if the config leaves it open.

    It follows from the resources of a Ray task, and otherwise from this machine.
    """
    resources = parse_resources(flags.FLAGS.resources)
    return 'bfloat16' if {'GPU', 'TPU'} & resources.keys() else default_dtype()


def parse_resources(texts: list[str] | None) -> dict[str, float]:
    """Returns {'GPU': 1.0} for GPU=1."""
    try:
        return {name: float(n) for name, n in (text.split('=') for text in texts or [])}
    except ValueError:
        raise ValueError(
            f'--resources must be NAME=NUMBER, as in CPU=2,GPU=1; got {texts}'
        ) from None


def train_sweep(
    base: dict[str, Any],
    sweep: Any,
    workdir: str | Path,
    continue_changed: bool,
    engine: str,
    report: Callable[[Path], str],
    notes: Sequence[str] = (),
    trackers: Sequence[str] = (),
    tune: Any = None,
    **work_options: Any,
) -> int:
    """Trains the cells that have not ended yet.

    Args:
      base: the config that all cells start from, as nested dicts.
      sweep: config.sweep.
      workdir: a folder, or the URL of a folder in a bucket.
      continue_changed: whether to continue a sweep from another base in the folder.
      engine: a name of ENGINES.
      report: writes the report of a folder, and returns the text to print.
      notes: lines to print before the first wave.
      trackers: trackers that receive the rows of all cells.
      tune: config.tune; with it, further cells follow once the present ones have ended
        (`lm.study.train.waves`).
      **work_options: fields of `lm.study.train.groups.Work`.

    Returns:
      The exit status.
    """
    enter = choose(ENGINES, engine, '--engine')
    plan = WavePlan(base, sweep, tune)
    # Before anything asks for devices: JAX's processes can join only until then.
    host, hosts = join_sweep(plan.first_groups, engine)
    url = str(workdir) if is_url(str(workdir)) else None
    _check_devices(plan.first_groups, url)
    loader: SuiteLoader | None = work_options.get('suite_loader')
    for first, *_ in plan.first_groups:
        call_for_cell(first.changes, check_suites, first.recipe, loader)
    if engine == 'local':  # tasks of Ray may have devices of another platform
        _check_models(plan.first_groups, sweep_folder(workdir))
    ledger = Ledger(plan, resolve(base), sweep_folder(workdir), url, continue_changed, host, hosts)
    work = Work([], ledger.folder, [], ledger.say_for_host, url=url, **work_options)
    if (protocol := resolve_protocol(base, sweep)) is not None:
        applied = apply_protocol(protocol, base, sweep, local_measurements(work, engine, host))
        _say_lines(ledger, applied.summary_lines)
        plan = ledger.plan = WavePlan(base, sweep, tune, applied.overrides)
        ledger.protocol = applied.record()
    wave, say = ledger.open(), ledger.say
    programs = format_count(len(wave.all_groups), 'program')
    say(f'{workdir}: {plan.describe(wave)}, {programs}, on {device_name()}')
    _say_lines(ledger, lambda: list(notes))
    _say_lines(ledger, describe_sweep_code, itertools.chain(*wave.all_groups), work)
    with (
        # Host 0 alone sends, as it sees the records of all hosts: every row would otherwise be sent
        # once per host.
        send_to_trackers(ledger.folder, trackers if host == 0 else (), say),
        catch_signals() as work.caught,
        enter() as train,
    ):
        last_wave = _train_waves(ledger, work, wave, train, is_here=engine == 'local')
    work.groups = work.groups if plan.arms is None else last_wave.all_groups
    return broadcast_from_first(_finish(work, report, say) if is_first() else None)


def describe_sweep_code(cells: Iterable[Cell], work: Work) -> list[str]:
    """Returns notes on ended cells that other code has trained, with their number."""
    summaries = (Run(work.folder(cell)).summary for cell in cells)
    ended = [summary for summary in summaries if summary.get('status') in FINAL]
    other_code = summarize_codes(find_other_code(summary.get('code'), summary) for summary in ended)
    if not other_code:
        return []
    return [
        f'NOTE: of {format_count(len(ended), "finished cell")}, trained by other code: '
        f'{other_code}; the code is now {describe_code(running_code())}. To train all cells with '
        'this code, use another --workdir'
    ]


def _check_devices(grouped: Groups, url: str | None) -> None:
    """Raises ValueError if the devices cannot hold the runs, or if the hosts cannot write there."""
    if url is not None and is_multiprocess():
        raise ValueError(
            f'{url}: a sweep whose runs each use several hosts needs a --workdir on a disk that '
            'all hosts share. A single run may use a bucket.'
        )
    for group in grouped:
        recipe = group[0].recipe
        if is_multiprocess():
            check_single_run(recipe)
        elif recipe.mesh.axes != AUTO:
            check_devices(recipe, make_mesh(recipe.mesh, runs=len(group)))


def _check_models(grouped: Groups, workdir: Path) -> None:
    """Raises ValueError, with the cell, if a model of the sweep cannot be built, or cannot continue
    the state of train.branch_from.

    Without this check a cell would fail only after earlier cells have trained for hours.
    """
    platform = jax.devices()[0].platform
    for group in grouped:
        first = group[0]
        tokenizer = locate_data(first.recipe, workdir / first.name).tokenizer
        learner = call_for_cell(
            first.changes, build_without_text, first.recipe, tokenizer, platform
        )
        for cell in {cell.recipe.train.branch_from: cell for cell in reversed(group)}.values():
            call_for_cell(cell.changes, check_branch, cell.recipe, learner, workdir / cell.name)


@dataclasses.dataclass
class Ledger:
    """The folder of a sweep, on one of the hosts that train it."""

    plan: WavePlan
    base: Recipe
    folder: Path
    url: str | None
    continue_changed: bool
    host: int
    hosts: int
    protocol: dict[str, Any] | None = None  # as sweep.json has it

    def __post_init__(self):
        # `terminal` prints lines about the whole sweep, `_host_terminal` about this host.
        self.terminal = Terminal(silent=not is_first() or self.host > 0)
        # One console on host 0: lines of another would run into the live progress of the sweep.
        self._host_terminal = self.terminal if self.host == 0 else Terminal(silent=not is_first())
        self.say = self.terminal.say

    def say_for_host(self, text: str) -> None:
        """Prints a line about this host."""
        self._host_terminal.say(f'host {self.host}: {text}' if self.host else text)

    def refresh(self) -> None:
        """Fetches the records of other hosts from a bucket."""
        if self.url is not None:
            with mirror_sweep_records(self.url, self.say):
                pass

    def open(self) -> PlannedWave:
        """Creates or takes over the folder, one host after the other; returns the wave to train."""
        self.refresh()
        # In a bucket the lease of the sweep lets one host in after the other.
        host = self.host if self.url is None else 0
        wave = (
            run_host_0_first(self.folder, host, self.hosts, self.next_wave)
            if self.hosts > 1
            else self.next_wave()
        )
        check_shared(self.folder / SWEEP)
        return wave

    def next_wave(self) -> PlannedWave:
        """Records and returns the wave that follows the ended ones; the same on all hosts."""
        while True:
            wave = self.plan.plan_wave(self.folder)
            write = functools.partial(self._write_sweep, wave)
            if self.url is None:
                # On a shared disk processes compare when the file changed (`check_shared`), so that
                # only one of them may write it.
                names = broadcast_from_first(write() if is_first() else None)
            else:
                names = run_first_then_others(write)
            if not names:
                return wave
            self.plan.folder_names |= names

    def _write_sweep(self, wave: PlannedWave) -> dict[str, str]:
        """Writes sweep.json; returns {cell: folder} for cells with folders under another name."""
        with mirror_sweep_records(self.url, self.say):
            options = self.continue_changed, self.say, self.plan.record, self.protocol
            return open_sweep(self.folder, self.base, wave.all_groups, *options)


def _train_waves(
    ledger: Ledger,
    work: Work,
    wave: PlannedWave,
    train: Train,
    *,
    is_here: bool,
) -> PlannedWave:
    """Trains one wave after the other; returns the last, without cells if all have ended.

    is_here: whether this process trains, so that it can measure the time of a step.
    """
    from lm.study.train.progress import (
        show_progress,  # brings Arrow, which a single run need not wait for
    )

    folder, arms, costs = ledger.folder, ledger.plan.arms, ledger.plan.costs
    if arms is not None:
        can_measure = is_here and ledger.hosts == 1 and wave.cells
        costs.by_program = (
            measure_throughput(wave.groups, work) if can_measure else read_throughput(work)
        )
        total_compile_sec = costs.estimate_compile_sec(costs.cells)
        _say_lines(ledger, lambda: words.describe_costs(arms, costs.run_sec, total_compile_sec))
    printed: set[str] = set()
    while wave.cells:
        began = time.monotonic()
        waiting = [cell for cell in wave.cells if not work.is_final(cell)]
        compile_sec = costs.estimate_compile_sec(waiting, work.programs)
        if arms is not None:
            numbers = costs.run_sec, compile_sec
            _say_lines(
                ledger, lambda n=numbers: words.describe_wave(arms.load_ablation(folder), *n)
            )
        with show_progress(
            folder, wave.groups, ledger.terminal.console, printed, work.list_compiled
        ) as work.tick:
            has_ended = _train_wave(ledger, work, wave, train)
        if arms is None or not has_ended:
            return wave
        _say_lines(ledger, lambda: words.describe_arms(arms.load_ablation(folder)))
        wave = ledger.next_wave()
        shares = [(cell, _share_trained(cell, work)) for cell in waiting]
        costs.record_wave(shares, compile_sec or 0.0, time.monotonic() - began)
    if arms is not None:
        _say_lines(
            ledger, lambda: words.describe_spending(arms, arms.load_ablation(folder), folder)
        )
    return wave


def _share_trained(cell: Cell, work: Work) -> float:
    """Returns the share of its steps that a cell has trained; less than 1 if it diverged."""
    steps = cell.recipe.train.steps
    return Run(work.folder(cell)).summary.get('step', steps) / steps


def _say_lines(ledger: Ledger, make_lines: Callable[..., list[str]], *arguments: Any) -> None:
    """Prints lines about the whole sweep, only on host 0."""
    if is_first() and ledger.host == 0:
        for line in make_lines(*arguments):
            ledger.say(line)


def _train_wave(ledger: Ledger, work: Work, wave: PlannedWave, train: Train) -> bool:
    """Trains the cells of a wave, together with the other hosts; returns whether all have ended for
    good.

    If the next wave depends on all of these cells, waits for the other hosts, and trains the cells
    of lost hosts.
    """
    work.groups = deal_cells(wave.groups, ledger.host, ledger.hosts)
    if ledger.hosts > 1:
        mine = sum(map(len, work.groups))
        ledger.say_for_host(f'{mine} of the {len(wave.cells)} cells train on this host')
    other_hosts = OtherHosts(wave.cells, work, ledger.refresh)
    train(work)
    if ledger.plan.arms is None:
        return True
    while ledger.hosts > 1 and (lost_cells := other_hosts.wait()):
        ledger.say_for_host(
            f'{format_count(len(lost_cells), "cell")} of lost hosts will train on this host'
        )
        work.groups = group_by_program(lost_cells)
        train(work)
    ledger.refresh()
    if is_stop_requested(work.caught):
        return False
    unfinished = [cell.name for cell in wave.cells if not work.is_final(cell)]
    if unfinished:
        ledger.say_for_host(
            f'{", ".join(unfinished)} did not finish, and the next wave needs all results of this '
            'one. Run the same command to try again.'
        )
    return broadcast_from_first(not unfinished)


def _finish(work: Work, report: Callable[[Path], str], say: Callable[[str], None]) -> int:
    """Writes the table and report of all cells; returns the exit status for the cells of `work`."""
    from lm.study.train.progress import write_summary  # brings Arrow

    # The lock keeps another host, which may end at the same time, from writing the same files.
    with mirror_sweep_records(work.url, say), hold_lock(work.workdir / LOCK):
        say(write_summary(work.workdir))
        if work.caught:
            say(f'{signal.Signals(work.caught[0]).name}: stopped. Run the same command to resume.')
            return SIGNALLED + work.caught[0]
        say(report(work.workdir))
    return DONE if all(map(work.is_final, itertools.chain(*work.groups))) else BAD_INPUT


@contextlib.contextmanager
def local_engine() -> Generator[Train]:
    """Yields a function that trains one group after the other in this process."""

    def train(work: Work) -> None:
        for group in work.groups:
            if is_stop_requested(work.caught):
                return
            train_group(group, work)

    yield train


@contextlib.contextmanager
def ray_engine() -> Generator[Train]:
    """Yields a function that trains each group, or part of `runs_at_once` runs, as a Ray task.

    Each task runs in its own process. Connects to the cluster that RAY_ADDRESS or `ray start`
    names, or starts a cluster on this machine. A task is retried RETRIES times if its worker is
    lost. The nodes need this checkout and the workdir under the same path, or a workdir in a
    bucket. Raises ValueError if Ray is not installed, or if no node has the resources of a group.
    """
    # Without these Ray reports its use, and installs an environment for workers under `uv run`.
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
        # JAX warns about forks, but Ray's are followed by exec at once.
        with preserve_handlers(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', message=r'os\.fork', category=RuntimeWarning)
            # Ray also takes the name of a level.
            ray.init(include_dashboard=False, logging_level='ERROR')  # ty: ignore[invalid-argument-type]
    try:
        yield functools.partial(_train_on_ray, ray)
    finally:
        if not connected:
            ray.shutdown()


def _train_on_ray(ray: Any, work: Work) -> None:
    """Trains the groups of `work` as tasks of a connected Ray cluster."""
    resources = work.resources or default_resources(ray.cluster_resources())
    _check_resources(ray.nodes(), resources)
    parts = [part for group in work.groups for part in split_group(group, work)]
    work.say(f'{format_count(len(parts), "task")} on Ray, each with {resources}')
    task = ray.remote(**_task_options(resources))(train_group_remotely)
    folder = work.url or str(work.workdir.absolute())
    options = folder, work.runs_at_once, work.start_over, work.suite_loader
    _await_tasks(ray, work, {task.remote(part, *options): part for part in parts})


def split_group(group: list[Cell], work: Work) -> list[list[Cell]]:
    """Returns the cells of a group that have not ended, in parts of runs_at_once."""
    waiting = [cell for cell in group if not work.is_final(cell)]
    size = work.runs_at_once or max(1, len(waiting))
    return [waiting[i : i + size] for i in range(0, len(waiting), size)]


def default_resources(cluster: dict[str, float]) -> dict[str, float]:
    """Returns one accelerator if the cluster has any, else one CPU."""
    return {next((kind for kind in ('TPU', 'GPU') if cluster.get(kind)), 'CPU'): 1.0}


def _check_resources(nodes: list[dict], resources: dict[str, float]) -> None:
    """Raises ValueError if no node can hold the task, since Ray would wait for one forever."""
    alive = [node['Resources'] for node in nodes if node['Alive']]
    if not any(all(node.get(k, 0) >= n for k, n in resources.items()) for node in alive):
        available = [
            {k: n for k, n in node.items() if k in ('CPU', 'GPU', 'TPU')} for node in alive
        ]
        raise ValueError(f'no node of the Ray cluster has {resources}; nodes have {available}')


def _task_options(resources: dict[str, float]) -> dict:
    """Returns the options of a Ray task with these resources."""
    kinds = {'CPU': 'num_cpus', 'GPU': 'num_gpus'}
    named = {kinds[k]: n for k, n in resources.items() if k in kinds}
    custom = {k: n for k, n in resources.items() if k not in kinds}
    on_cpu = {'JAX_PLATFORMS': 'cpu', 'GLIBC_TUNABLES': ':'.join(TUNABLES)}
    return {
        # Ray's default of one CPU for each task would also count for tasks of accelerators.
        'num_cpus': 0,
        **named,
        'resources': custom,
        'max_retries': RETRIES,
        'max_calls': 1,  # JAX's memory and devices go with the process
        'runtime_env': {'env_vars': on_cpu if os.environ.get('JAX_PLATFORMS') == 'cpu' else {}},
    }


def train_group_remotely(
    group: list[Cell],
    workdir: str,
    runs_at_once: int,
    start_over: bool,
    suite_loader: SuiteLoader | None = None,
) -> None:
    """Trains a part of a group in a Ray worker.

    Args:
      group: cells to train.
      workdir: folder or URL of the sweep.
      runs_at_once: maximal number of runs in one wave; 0: as many as fit.
      start_over: whether runs begin anew if all their checkpoints are damaged.
      suite_loader: opens the suites of eval.suites.
    """
    url = workdir if is_url(workdir) else None
    options: dict[str, Any] = {'runs_at_once': runs_at_once, 'start_over': start_over, 'url': url}
    options |= {'suite_loader': suite_loader}
    work = Work([], sweep_folder(workdir), [], **options)
    train_group(group, work)


def _await_tasks(ray, work: Work, running: dict) -> None:
    """Waits until every task has ended or a signal arrives; a task that Ray gives up has failed."""
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


ENGINES = {'local': local_engine, 'ray': ray_engine}
