"""Starts a training on every host of a TPU slice, a GKE cluster, SLURM or Ray, and keeps it going.

    python -m tpu.launch --engine=gcloud --zone=Z --accelerator_type=T --runtime_version=R \\
        [--dry_run] -- train.py --config=configs/mine.py --workdir=/shared/runs/mine

The command behind -- is that of docs/guide/hosts.md, without the program that runs it
(--python). The first host's output is passed on, and train.py's exit status returned. After a
preemption, or where a host is lost (42, 128 + n), the command is started again, at most
--max_restarts times.

Before anything is created the command is checked here, as the hosts would (tpu.check_training):
flags, config, parts, and the mesh over as many devices as the chips have.

--dry_run checks, and prints what would run. The flags of an engine are in --help, its waits in
tpu/launchers/ENGINE.py.
"""

import dataclasses
import hashlib
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from lm.launch import streams
from lm.launch.before_jax import docstring, prepare_streams
from lm.launch.exit_status import BAD_INPUT, DONE, STOP_SIGNALS
from lm.launch.signals import catch_signals
from modules.choices import choose
from tpu.launchers import base, gcloud, ray, slurm, xpk

ENGINES = {'gcloud': gcloud, 'ray': ray, 'slurm': slurm, 'xpk': xpk}
DEFAULT_NAME = 28  # characters, the limit of xpk for jobs over several joined slices
DEFINE = {str: flags.DEFINE_string, int: flags.DEFINE_integer, bool: flags.DEFINE_bool}


def define_flags() -> tuple[flags.FlagValues, list[str]]:
    """Returns the flags of this command, and the names of those that are options of engines."""
    found = flags.FlagValues()
    words = f'Engine that starts the hosts: {", ".join(ENGINES)}.'
    flags.DEFINE_string('engine', None, words, found)
    flags.DEFINE_string('name', None, 'Name of the job; default CONFIG-HASH of the command.', found)
    words = 'Words before train.py on the hosts, such as "uv run" or python3.'
    flags.DEFINE_string('python', '', words, found)
    words = 'Most times that the job is started again.'
    flags.DEFINE_integer('max_restarts', base.MAX_RESTARTS, words, 0, flag_values=found)
    flags.DEFINE_bool('dry_run', False, 'Print what would run, and run nothing.', found)
    flags.DEFINE_alias('dry-run', 'dry_run', found)
    flags.DEFINE_bool('help', False, 'Print this.', found)
    fields: dict[str, dict[str, dataclasses.Field]] = {}
    for engine, row in ENGINES.items():
        for field in dataclasses.fields(row.Options):
            fields.setdefault(field.name, {})[engine] = field
    for name, by_engine in fields.items():
        (kind,) = {field.type for field in by_engine.values()}
        DEFINE[kind](name, None, option_help(by_engine), flag_values=found)
    return found, list(fields)


def option_help(fields: dict[str, dataclasses.Field]) -> str:
    """Returns '[gcloud, xpk] Zone of ...' from an option's field in each engine that reads it."""
    words: dict[str, list[str]] = {}
    for engine, field in fields.items():
        words.setdefault(field.metadata['words'], []).append(engine)
    return ' '.join(f'[{", ".join(engines)}] {text}' for text, engines in words.items())


def job_name(training: Sequence[str], config: str) -> str:
    """Returns a name such as 'default-1a2b3c4d', the same for the same command alone."""
    stem = re.sub(r'[^a-z0-9]+', '-', Path(config).stem.lower()).strip('-')
    if not stem[:1].isalpha():
        stem = f'run-{stem}'.strip('-')
    digest = hashlib.sha256(shlex.join(training).encode()).hexdigest()[:8]
    return f'{stem[: DEFAULT_NAME - 9].rstrip("-")}-{digest}'


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before and after the first --, or before and from train.py."""
    for first in ('--', 'train.py'):
        if first in argv:
            place = argv.index(first)
            return list(argv[:place]), list(argv[place + (first == '--') :])
    return list(argv), []


def parse_training(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Returns (flags of train.py, the config file). Raises ValueError for another command."""
    if not words:
        raise ValueError('the training is missing: ... -- train.py --config=configs/default.py')
    if words[0] != 'train.py':
        raise ValueError(
            f'the command behind -- must begin with train.py; got {words[0]!r}. The program that '
            'runs it on the hosts is --python, such as --python="uv run".'
        )
    given = list(words[1:])
    files = [
        flag.partition('=')[2] if '=' in flag else ''.join(given[i + 1 : i + 2])
        for i, flag in enumerate(given)
        if re.fullmatch(r'--?config(=.*)?', flag, re.DOTALL)
    ]
    if not files:
        raise ValueError('train.py needs --config=PATH, such as --config=configs/default.py')
    path = files[-1].partition(':')[0]  # PATH:ARGUMENT, which get_config takes
    if not Path(path).is_file():
        raise ValueError(
            f'--config={files[-1]} is no file here; paths are from the folder of the repository, '
            'here and on the hosts'
        )
    return tuple(given), path


def launch(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises ValueError for bad input before anything runs."""
    values, options = define_flags()
    own, words = split_arguments(argv)
    stray = values(['tpu.launch', *own])[1:]
    if values.help:
        print(f'{docstring(sys.modules[__name__])}\n{values.get_help()}')
        return DONE
    if values.engine is None:
        raise ValueError(f'--engine is missing: one of {", ".join(ENGINES)}')
    engine = choose(ENGINES, values.engine, '--engine')
    if stray:
        raise ValueError(f'flags begin with --, as in --engine=slurm; got {stray}')
    training, config = parse_training(words)
    given = {name: values[name].value for name in options if values[name].value is not None}
    asked = base.read_options(values.engine, engine.Options, given)
    name = values.name or job_name(training, config)
    job = base.Job(name, training, values.python, values.max_restarts)
    base.check_name('--name', name)
    base.check_flags(job)
    engine.check(job, asked)
    base.check_training(job, asked.chips(), say)
    if values.dry_run:
        print(engine.script(job, asked), end='')
        return DONE
    base.check_installed(values.engine, engine.Launch)
    streams.ignore_output_loss()  # a job does not end with the reader of what it prints
    # If the terminal hangs up, hosts that outlive the launcher go on; others stop as by SIGTERM.
    stops = (signal.SIGINT, signal.SIGTERM) if engine.Launch.outlives_launcher else STOP_SIGNALS
    with catch_signals(stops) as caught:
        return base.supervise(engine.Launch(job, asked, caught, say), caught, say)


def say(text: str) -> None:
    """Prints to stderr, as stdout is the first host's."""
    print(f'launch: {text}', file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    try:
        return launch(argv)
    except (ValueError, OSError, flags.Error) as error:
        print(f'error: {error}', file=sys.stderr)
        return BAD_INPUT


if __name__ == '__main__':
    prepare_streams()
    sys.exit(main(sys.argv[1:]))
