"""Trains what a config describes.

    python train.py --config=configs/default.py [--config.a.b=value ...] [--workdir=DIR]

The same command again resumes what the workdir holds. Exit status: 0 done, 1 bad input, 2 diverged,
128 + n stopped by signal n, after a checkpoint.
"""

from lm.startup import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import hashlib
import signal
import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from lm.check import check, check_devices
from lm.config import Config, resolve, to_json
from lm.host import device_name
from lm.metrics import Terminal
from lm.run import Diverged, Run
from lm.workdir import open_workdir

CONFIG = config_flags.DEFINE_config_file('config', None, 'Python file with get_config().')
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run; default runs/NAME-HASH.')
PRINT_CONFIG = flags.DEFINE_bool('print_config', False, 'Print the resolved config and stop.')
CONTINUE_CHANGED = flags.DEFINE_bool(
    'continue_changed', False, 'Go on from a workdir whose run had another config or other data.'
)
DONE, BAD_INPUT, DIVERGED, SIGNALLED = 0, 1, 2, 128


def train(config: Config, workdir: Path, continue_changed: bool = False) -> int:
    """Trains to config.train.steps, from the newest checkpoint there is; the exit status."""
    check(config)
    check_devices(config, jax.device_count(), jax.process_count())
    open_workdir(workdir, config, continue_changed)
    terminal = Terminal()
    terminal.say(f'{workdir} on {device_name()}, jax {jax.__version__}')
    run = Run(config, workdir, terminal, continue_changed)
    run.describe()
    if run.step >= config.train.steps:
        terminal.say(f'{workdir} is at step {run.step} of {config.train.steps}: nothing left to do')
        return DONE
    run.compile()
    terminal.say(f'compiled in {run.compile_sec:.1f} s')
    terminal.start(config.train.steps, run.step)
    status = loop(run)
    run.close()
    terminal.close()
    return status


def loop(run: Run) -> int:
    """Steps until the end, a signal, or a divergence that cannot be mended."""
    every = run.config.train
    stop = catch_signals()
    while run.step < every.steps:
        try:
            run.dispatch()
            last = run.step == every.steps
            evaluate = last or (every.eval_every and run.step % every.eval_every == 0)
            save = last or (every.checkpoint_every and run.step % every.checkpoint_every == 0)
            if evaluate or save or stop:
                run.settle()
        except Diverged as seen:
            try:
                if every.on_divergence != 'rollback':
                    raise
                run.roll_back(seen)
                continue
            except Diverged as final:
                return give_up(run, final)
        if evaluate:
            run.evaluate()
        if save or stop:
            run.save()
        if stop:
            return leave(run, stop[0])
    run.summarize('done')
    run.terminal.say(f'done: {run.workdir}, {run.wall_sec() / 60:.1f} min')
    return DONE


def catch_signals() -> list[int]:
    """A list that the first SIGTERM or SIGINT is put in; a second one ends the process at once."""
    caught = []

    def catch(number, frame):
        del frame
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, catch)
    signal.signal(signal.SIGINT, catch)
    return caught


def leave(run: Run, number: int) -> int:
    run.checkpoints.wait()
    run.summarize('stopped')
    name = signal.Signals(number).name
    run.terminal.say(f'{name}: saved step {run.step} in {run.workdir}; the same command goes on')
    return SIGNALLED + number


def give_up(run: Run, seen: Diverged) -> int:
    run.summarize('diverged')
    run.terminal.say(f'DIVERGED: {seen}\nlast good checkpoint: {run.last_good()}')
    return DIVERGED


def default_workdir(config: Config, config_file: str) -> Path:
    """runs/default-1a2b3c4d: the same command finds the same folder, another config another."""
    digest = hashlib.sha256(to_json(config).encode()).hexdigest()[:8]
    return Path('runs') / f'{Path(config_file).stem}-{digest}'


def main(_) -> None:
    if not flags.FLAGS['verbosity'].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells of each file at INFO
    if CONFIG.value is None:
        raise app.UsageError('--config=PATH is needed, such as --config=configs/default.py')
    try:
        config = resolve(CONFIG.value)
        if PRINT_CONFIG.value:
            check(config)
            print(to_json(config), end='')
            return
        config_file = config_flags.get_config_filename(flags.FLAGS['config'])
        workdir = Path(WORKDIR.value or default_workdir(config, config_file))
        status = train(config, workdir, CONTINUE_CHANGED.value)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        status = BAD_INPUT
    sys.exit(status)


if __name__ == '__main__':
    app.run(main)
