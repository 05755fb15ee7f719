"""Trains what a config describes.

    python train.py --config=configs/default.py [--config.a.b=value ...] [--workdir=DIR]

The same command again resumes what the workdir holds. Exit status: 0 done, 1 bad input, 2 diverged,
128 + n stopped by signal n, after a checkpoint.
"""

from lm.startup import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import ast
import contextlib
import hashlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from lm.check import check, check_devices
from lm.config import Config, resolve, to_json
from lm.host import device_name
from lm.mesh import make_mesh
from lm.metrics import Terminal
from lm.run import Diverged, Run
from lm.workdir import open_workdir, write_config

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
    check_devices(config, make_mesh(config.mesh).size, jax.process_count())
    open_workdir(workdir, config, continue_changed)
    terminal = Terminal()
    terminal.say(f'{workdir} on {device_name()}, jax {jax.__version__}')
    run = Run(config, workdir, terminal, continue_changed)
    write_config(workdir, config)  # not before: a changed one may not have fitted the checkpoint
    run.describe()
    if run.step >= config.train.steps:
        terminal.say(f'{workdir} is at step {run.step} of {config.train.steps}: nothing left to do')
        return DONE
    run.compile()
    terminal.say(f'compiled in {run.compile_sec:.1f} s')
    terminal.start(config.train.steps, run.step)
    try:
        with caught_signals() as caught:
            return loop(run, caught)
    finally:
        terminal.close()
        run.close()


def loop(run: Run, caught: list[int]) -> int:
    """Steps until the end, a signal, or a divergence that cannot be mended."""
    every = run.config.train
    while run.step < every.steps:
        try:
            run.dispatch()
            last, stopping = run.step == every.steps, list(caught)
            evaluate = last or due(run.step, every.eval_every)
            save = last or bool(stopping) or due(run.step, every.checkpoint_every)
            if evaluate or save:
                run.settle()
        except Diverged as seen:
            if not mend(run, seen):
                return DIVERGED
            continue
        if evaluate:
            run.evaluate()
        if save:
            run.save()
        if stopping and not last:
            return leave(run, stopping[0])
    run.checkpoints.wait()
    run.summarize('done')
    run.terminal.say(f'done: {run.workdir}, {run.wall_sec() / 60:.1f} min')
    return DONE


def due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 is never."""
    return every > 0 and step % every == 0


def mend(run: Run, seen: Diverged) -> bool:
    """Rolls back where the config asks for it and it can; otherwise says what was seen and where
    the last good checkpoint is.
    """
    try:
        if run.config.train.on_divergence != 'rollback':
            raise seen
        run.roll_back(seen)
        return True
    except Diverged as final:
        run.summarize('diverged')
        run.terminal.say(f'DIVERGED: {final}\nlast good checkpoint: {run.last_good()}')
        return False


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """A list that the first SIGTERM or SIGINT is put in; a second one ends the process at once."""
    caught: list[int] = []

    def catch(number, frame):
        del frame
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(run: Run, number: int) -> int:
    run.checkpoints.wait()
    run.summarize('stopped')
    name = signal.Signals(number).name
    run.terminal.say(f'{name}: saved step {run.step} in {run.workdir}; the same command goes on')
    return SIGNALLED + number


def default_workdir(config: Config, config_file: str) -> Path:
    """runs/default-1a2b3c4d: the same command finds the same folder, another config another."""
    digest = hashlib.sha256(to_json(config).encode()).hexdigest()[:8]
    return Path('runs') / f'{Path(config_file).stem}-{digest}'


def parse_flags(argv: list[str]) -> list[str]:
    """absl's own parsing, but an unknown config field is one line instead of a traceback."""
    try:
        return app.parse_flags_with_usage(argv)
    except AttributeError as error:
        try:  # ml_collections quotes its message once more
            missing, _, hint = ast.literal_eval(str(error)).partition('\n')
        except (SyntaxError, ValueError):
            raise error from None  # a mistake in the config file itself: its traceback helps
        print(f'error: the config has no field {missing}. {hint}'.strip(), file=sys.stderr)
        sys.exit(BAD_INPUT)


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
    app.run(main, flags_parser=parse_flags)
