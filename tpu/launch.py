"""Starts a training on every host of a TPU slice, a GKE cluster, SLURM or Ray, and restarts it.

    python -m tpu.launch --engine=gcloud --zone=Z --accelerator_type=T --runtime_version=R \\
        [--dry_run] -- train.py --config=configs/mine.py --workdir=/shared/runs/mine

docs/guide/hosts.md describes the command after --; --python sets the program that runs it. The
launcher prints the output of the first host and returns the exit status of train.py. After a
preemption or the loss of a host (status 42 or 128 + n), it restarts the command, at most
--max_restarts times.

Before it creates anything, the launcher checks the flags, the config, its parts, and the mesh, as
the hosts would (tpu.check_training).

--dry_run only checks, and prints the commands that would run. Each flag names the engines that read
it; without engines, all do. tpu/launchers/ENGINE.py documents the timeouts of each engine.
"""

import dataclasses
import hashlib
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from absl import flags

from lm.launch import streams
from lm.launch.before_jax import docstring, prepare_streams
from lm.launch.exit_status import BAD_INPUT, DONE, STOP_SIGNALS
from lm.launch.signals import catch_signals
from modules.choices import choose
from tpu.launchers import base, gcloud, ray, slurm, xpk
from tpu.launchers.base import JobEngine

ENGINES = {
    'gcloud': JobEngine(gcloud.GcloudOptions, gcloud.GcloudLaunch, gcloud.check, gcloud.script),
    'ray': JobEngine(ray.RayOptions, ray.RayLaunch, ray.check, ray.script),
    'slurm': JobEngine(slurm.SlurmOptions, slurm.SlurmLaunch, slurm.check, slurm.script),
    'xpk': JobEngine(xpk.XpkOptions, xpk.XpkLaunch, xpk.check, xpk.script),
}
DEFAULT_NAME = 28  # characters, the limit of xpk for jobs over several joined slices
DEFINE: dict[type, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    bool: flags.DEFINE_bool,
}


def define_flags() -> tuple[flags.FlagValues, list[str]]:
    """Returns the flags of this command, and the names of the options of engines among them."""
    flag_values = flags.FlagValues()
    help_text = f'Engine that starts the hosts: {", ".join(ENGINES)}.'
    flags.DEFINE_string('engine', None, help_text, flag_values)
    flags.DEFINE_string(
        'name', None, 'Name of the job; default: CONFIG-HASH, from the command.', flag_values
    )
    help_text = 'Program that runs train.py on the hosts, such as "uv run" or python3.'
    flags.DEFINE_string('python', '', help_text, flag_values)
    help_text = 'Maximum number of restarts.'
    flags.DEFINE_integer('max_restarts', base.MAX_RESTARTS, help_text, 0, flag_values=flag_values)
    flags.DEFINE_bool('dry_run', False, 'Print the commands without running them.', flag_values)
    flags.DEFINE_alias('dry-run', 'dry_run', flag_values)
    flags.DEFINE_bool('help', False, 'Print this help.', flag_values)
    fields: dict[str, dict[str, dataclasses.Field]] = {}
    for engine, row in ENGINES.items():
        for field in dataclasses.fields(row.options):
            fields.setdefault(field.name, {})[engine] = field
    for name, by_engine in fields.items():
        (kind,) = {cast(type, field.type) for field in by_engine.values()}
        DEFINE[kind](name, None, option_help(by_engine), flag_values=flag_values)
    return flag_values, list(fields)


def option_help(fields: dict[str, dataclasses.Field]) -> str:
    """Returns '[gcloud, xpk] Zone of ...' for an option, given its field in each of its engines."""
    engines_by_text: dict[str, list[str]] = {}
    for engine, field in fields.items():
        engines_by_text.setdefault(field.metadata['words'], []).append(engine)
    return ' '.join(f'[{", ".join(engines)}] {text}' for text, engines in engines_by_text.items())


def job_name(training: Sequence[str], config: str) -> str:
    """Returns a name such as 'default-1a2b3c4d', which depends only on the command."""
    stem = re.sub(r'[^a-z0-9]+', '-', Path(config).stem.lower()).strip('-')
    if not stem[:1].isalpha():
        stem = f'run-{stem}'.strip('-')
    digest = hashlib.sha256(shlex.join(training).encode()).hexdigest()[:8]
    return f'{stem[: DEFAULT_NAME - 9].rstrip("-")}-{digest}'


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before and after the first --, or before and from train.py."""
    for separator in ('--', 'train.py'):
        if separator in argv:
            index = argv.index(separator)
            return list(argv[:index]), list(argv[index + (separator == '--') :])
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
    train_flags = list(words[1:])
    files = [
        flag.partition('=')[2] if '=' in flag else ''.join(train_flags[i + 1 : i + 2])
        for i, flag in enumerate(train_flags)
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
    return tuple(train_flags), path


def launch(argv: Sequence[str]) -> int:
    """Starts a job and waits for it. Returns its exit status.

    Raises ValueError for bad input before anything runs.
    """
    values, options = define_flags()
    own_args, command = split_arguments(argv)
    positional = values(['tpu.launch', *own_args])[1:]
    if values.help:
        print(f'{docstring(sys.modules[__name__])}\n{values.get_help()}')
        return DONE
    if values.engine is None:
        raise ValueError(f'--engine is missing: one of {", ".join(ENGINES)}')
    engine = choose(ENGINES, values.engine, '--engine')
    if positional:
        raise ValueError(f'flags begin with --, as in --engine=slurm; got {positional}')
    training, config = parse_training(command)
    option_values = {name: values[name].value for name in options if values[name].value is not None}
    engine_options = base.read_options(values.engine, engine.options, option_values)
    name = values.name or job_name(training, config)
    job = base.Job(name, training, values.python, values.max_restarts)
    base.check_name('--name', name)
    base.check_flags(job)
    engine.check(job, engine_options)
    base.check_training(job, engine_options.chips(), say)
    if values.dry_run:
        print(engine.script(job, engine_options), end='')
        return DONE
    base.check_installed(values.engine, engine.launch)
    streams.ignore_output_loss()  # the job survives if nobody reads the output any more
    # If the terminal hangs up, hosts that outlive the launcher continue; others stop as by SIGTERM.
    stops = (signal.SIGINT, signal.SIGTERM) if engine.launch.outlives_launcher else STOP_SIGNALS
    with catch_signals(stops) as caught:
        return base.supervise(engine.launch(job, engine_options, caught, say), caught, say)


def say(text: str) -> None:
    """Prints to stderr, as stdout is the first host's."""
    print(f'launch: {text}', file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Runs `launch`, and prints its errors. Returns the exit status."""
    try:
        return launch(argv)
    except (ValueError, OSError, flags.Error) as error:
        print(f'error: {error}', file=sys.stderr)
        return BAD_INPUT


if __name__ == '__main__':
    prepare_streams()
    sys.exit(main(sys.argv[1:]))
