"""Trains what a config describes: a run, or the many runs of a sweep.

    python train.py --config=configs/default.py [--config.a.b=value ...] [--workdir=DIR]
    python train.py --config=configs/default.py --config.sweep="{'optim.lr': (1e-3, 3e-3)}"

The same command again resumes what the workdir holds. Exit status: 0 done, 1 bad input or a cell
that failed, 2 diverged (a sweep goes on: its diverged cells are results), 128 + n stopped by signal
n, after a checkpoint, 42 another host is gone or did not come: the same command goes on.

On several hosts the same command on each, by SLURM, Open MPI or on a TPU pod; elsewhere with
--coordinator=HOST:PORT --num_processes=N --process_id=I. --host_timeout=SECONDS to wait for all,
--watch_port=PORT where the one after the coordinator's is taken.
"""

from lm.run.process import prepare_process
from lm.run.watch import watch_if_several

if __name__ == '__main__':
    watch_if_several()  # all of this before JAX is imported
    prepare_process()

import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from ml_collections import config_flags

from eval.progress import Progress, counts
from eval.runs import gather, write_table
from lm.buckets import is_url
from lm.check import check
from lm.check_mesh import check_devices, check_single
from eval.choices import listing
from lm.config import digest, resolve, to_json
from lm.files import locked
from lm.sections import AUTO, Config
from lm.many import SINGLE
from lm.mesh import make_mesh
from lm.processes import from_first, is_first, several
from lm.record.host import device_name
from lm.record.workdir import LOCK, SWEEP, check_shared, is_final, open_workdir
from lm.run.describe import describe, memory_words
from lm.run.experiment import Experiment
from lm.run.mirrored import mirrored
from lm.run.program import Program
from lm.run.schedule import schedule_listing
from lm.run.signals import caught_signals
from lm.run.start import check_run
from lm.run.slot import RunSpec, Slot, Status
from lm.run.statuses import BAD_INPUT, DIVERGED, DONE, SIGNALLED
from lm.run.terminal import Terminal, quiet_libraries
from lm.run.command import parse_flags
from lm.run.together import define_flags, join, leave
from lm.run.wave import Wave, closing
from lm.sweep.cells import Cell, cells, groups, split_sweep
from lm.sweep.engines import ENGINES, Work
from lm.sweep.hosts import dealt, first_then_others, join_sweep
from lm.sweep.ledger import open_sweep
from modules.choices import choose

CONFIG = config_flags.DEFINE_config_file('config', None, 'Python file with get_config().')
WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run, or gs:// or s3://BUCKET/PATH; default runs/NAME-HASH.'
)
CHOICES = flags.DEFINE_flag(
    flags.Flag(  # boolean, so that it may stand alone: it is 'true' then
        flags.ArgumentParser(),
        None,
        'choices',
        None,
        'List all parts, or the options of some: --choices=model.norm.',
        boolean=True,
    )
)
PRINT_CONFIG = flags.DEFINE_bool('print_config', False, 'Print the resolved config and stop.')
PRINT_SCHEDULE = flags.DEFINE_bool(
    'print_schedule', False, 'Print the learning rate over the run and stop.'
)
CONTINUE_CHANGED = flags.DEFINE_bool(
    'continue_changed', False, 'Go on from a workdir whose run had another config or other data.'
)
START_OVER = flags.DEFINE_bool(
    'start_over', False, 'Begin at step 1 where a run has trained and all its checkpoints are lost.'
)
ENGINE = flags.DEFINE_string('engine', 'local', 'Where a sweep trains: local, or ray.')
RUNS_AT_ONCE = flags.DEFINE_integer(
    'runs_at_once', 0, 'Runs of a sweep in one program; 0: as many as fit.', lower_bound=0
)
RESOURCES = flags.DEFINE_list('resources', None, 'Of a Ray task: CPU=2, or GPU=1, or TPU=4.')
define_flags()  # of several hosts


def train(
    config: Config, workdir: Path, continue_changed: bool = False, start_over: bool = False
) -> int:
    """Trains to config.train.steps, from the newest checkpoint there is; the exit status."""
    check_run(config)
    check_single(config)
    terminal = Terminal(silent=not is_first())
    with open_workdir(workdir, config, continue_changed, terminal.say):
        terminal.say(f'{workdir} on {device_name()}, jax {jax.__version__}')
        program = Program(Experiment(config, terminal.say), SINGLE)
        run = RunSpec(config, workdir, terminal, continue_changed, start_over)
        with closing(Wave(program, [run], size=1)) as wave:
            (slot,) = wave.slots
            describe(slot.journal)
            if slot.journal.finished:
                step, steps = slot.journal.step, config.train.steps
                terminal.say(f'{workdir} is at step {step} of {steps}: nothing left to do')
                return DONE
            wave.compile()
            held = memory_words(program.experiment, program)
            terminal.say(f'compiled in {program.compile_sec:.1f} s; {held}')
            with terminal.live(config.train.steps, slot.journal.step), caught_signals() as caught:
                wave.train(caught)
                return exit_status(slot, caught)


def exit_status(slot: Slot, caught: list[int]) -> int:
    """Says how the run ended."""
    journal, say = slot.journal, slot.journal.terminal.say
    if slot.status == Status.DIVERGED:
        say(f'last good checkpoint: {journal.last_good()}')
        return DIVERGED
    if slot.status == Status.STOPPED:
        name = signal.Signals(caught[0]).name
        what = f'saved step {journal.step}' if journal.step else 'nothing trained yet'
        say(f'{name}: {what} in {journal.workdir}; the same command goes on')
        return SIGNALLED + caught[0]
    say(f'done: {journal.workdir}, {journal.wall_sec() / 60:.1f} min')
    return DONE


def train_sweep(
    base: dict[str, Any],
    sweep: Any,
    workdir: Path,
    continue_changed: bool = False,
    engine: str = 'local',
    runs_at_once: int = 0,
    resources: dict[str, float] | None = None,
    start_over: bool = False,
) -> int:
    """Trains the cells that have not ended yet; the exit status."""
    train_groups = choose(ENGINES, engine, '--engine')
    grouped = groups(cells(base, sweep))
    host, hosts = join_sweep(grouped, engine)
    for group in grouped:
        check_group(group)
    tells = is_first() and host == 0  # of the whole sweep
    terminal, own = Terminal(silent=not tells), Terminal(silent=not is_first())
    say = own.say if host == 0 else lambda text: own.say(f'host {host}: {text}')
    open_folder = functools.partial(
        open_sweep, workdir, resolve(base), grouped, continue_changed, terminal.say
    )
    grouped = first_then_others(workdir, host, hosts, open_folder)
    check_shared(workdir / SWEEP)
    mine = dealt(grouped, host, hosts)
    n = sum(map(len, grouped))
    terminal.say(f'{workdir}: {n} cells, {len(grouped)} programs, on {device_name()}')
    if hosts > 1:
        say(f'{sum(map(len, mine))} of the {n} cells train on this host')
    with caught_signals() as caught, Progress(workdir, grouped, terminal.console) as progress:
        tick = progress.tick
        train_groups(Work(mine, workdir, caught, say, tick, runs_at_once, resources, start_over))
    return from_first(_end_sweep(workdir, mine, caught, terminal) if is_first() else None)


def check_group(group: list[Cell]) -> None:
    """ValueError where runs of one program cannot be laid over the devices at hand."""
    config = group[0].config
    if several():
        check_single(config)
    elif config.mesh.axes != AUTO:
        check_devices(config, make_mesh(config.mesh, runs=len(group)))


def _end_sweep(
    workdir: Path, groups: list[list[Cell]], caught: list[int], terminal: Terminal
) -> int:
    """Writes what is known of all cells; the exit status, which is of these alone."""
    with locked(workdir / LOCK, waiting='', say=lambda _: None):  # another host may end too
        terminal.say(f'{counts(gather(workdir))}; {write_table(workdir)}')
        if caught:
            terminal.say(f'{signal.Signals(caught[0]).name}: the same command goes on')
            return SIGNALLED + caught[0]
        # It brings Matplotlib and SciPy, which a single run need not wait for.
        from eval.report.page import report

        terminal.say(str(report(workdir)))
    folders = [workdir / cell.name for group in groups for cell in group]
    return DONE if all(map(is_final, folders)) else BAD_INPUT


def default_workdir(config: Config, config_file: str, suffix: str = '') -> Path:
    """runs/default-1a2b3c4d: the same command finds the same folder, another config another."""
    return Path('runs') / f'{Path(config_file).stem}-{digest(config)}{suffix}'


def check_engine(sweep: Any, workdir: str | Path) -> None:
    """ValueError for flags that a single run has no use for, and for processes of other machines
    that would train in a folder of this one.
    """
    if sweep is None and (ENGINE.value != 'local' or RUNS_AT_ONCE.value or RESOURCES.value):
        raise ValueError('--engine, --runs_at_once and --resources are for config.sweep')
    if ENGINE.value != 'local' and is_url(str(workdir)):
        raise ValueError(
            f'--engine={ENGINE.value} needs a --workdir on a disk that its machines share, and '
            f'{workdir} is in object storage'
        )


def parse_resources(texts: list[str] | None) -> dict[str, float]:
    """{'GPU': 1.0} for GPU=1."""
    try:
        return {name: float(n) for name, n in (text.split('=') for text in texts or [])}
    except ValueError:
        raise ValueError(f'--resources must be such as CPU=2,GPU=1; got {texts}') from None


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # instead of that of prepare_process
    quiet_libraries()
    if len(argv) > 1:
        raise app.UsageError(f'flags begin with --, as in --config=PATH; got {argv[1:]}')
    if CONFIG.value is None and CHOICES.value is None:
        raise app.UsageError('--config=PATH is needed, such as --config=configs/default.py')
    try:
        if CHOICES.value is not None:
            print(listing(None if CHOICES.value == 'true' else CHOICES.value), end='')
            return
        base, sweep = split_sweep(CONFIG.value)
        config = resolve(base)
        if PRINT_CONFIG.value or PRINT_SCHEDULE.value:
            (check_run if PRINT_CONFIG.value else check)(config)
            found = [] if sweep is None else cells(base, sweep)
            if PRINT_CONFIG.value:
                print(to_json(config), end='')
            if PRINT_SCHEDULE.value:
                print(schedule_listing(config), end='')
            if found:
                print(f'{len(found)} cells start from this', file=sys.stderr)
            return
        config_file = config_flags.get_config_filename(flags.FLAGS['config'])
        suffix = '' if sweep is None else '-sweep'
        where = WORKDIR.value or default_workdir(config, config_file, suffix)
        check_engine(sweep, where)
        if sweep is None:
            join(digest(config))
        with mirrored(where) as workdir:
            if sweep is None:
                status = train(config, workdir, CONTINUE_CHANGED.value, START_OVER.value)
            else:
                how = (ENGINE.value, RUNS_AT_ONCE.value, parse_resources(RESOURCES.value))
                status = train_sweep(
                    base, sweep, workdir, CONTINUE_CHANGED.value, *how, START_OVER.value
                )
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        status = BAD_INPUT
    except KeyboardInterrupt as error:  # before a run trains; from then on signals are caught
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        said = 'nothing new has been trained; the same command goes on'
        print(f'\n{number.name}: {said}', file=sys.stderr, flush=True)
        os._exit(SIGNALLED + number)  # at once: no thread has anything to write
    leave(status)


if __name__ == '__main__':
    app.run(main, flags_parser=parse_flags)
