"""The parts that all launch engines share: jobs, options, restarts, and commands of this machine.

Standard library only: JAX is for the hosts, and a launcher starts without it.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.launch.exit_status import BAD_INPUT, DIVERGED, DONE, RESUME, SIGNALLED
from lm.launch.this_host import HOST_FLAGS, SECRET, select_flags
from modules.choices import suggest_nearest

POLL_SEC = 0.2  # interval of polling local processes and caught signals
PAUSE_SEC = 30.0  # before the same job is submitted again
READ_SEC = 5.0  # timeout for the last output of a command, as a child may hold the pipe open
MAX_RESTARTS = 10  # default of --max_restarts, as for a sweep's groups on Ray
MAX_FAILURES = 60  # consecutive failures of a scheduler to tell the state of a job
NAME = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')
MAX_NAME_LENGTH = 40


@dataclasses.dataclass(frozen=True)
class Job:
    """A training to be started.

    flags: of train.py, the same on every host. python: words before train.py, '' for the engine's
    default. max_restarts: how often the job is started again. secret: shared by its hosts
    (`lm.launch.secret`).
    """

    name: str
    flags: tuple[str, ...]
    python: str = ''
    max_restarts: int = MAX_RESTARTS
    secret: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16), compare=False)

    def argv(self, python: str) -> list[str]:
        """Returns the command of a host; `python` is the engine's default."""
        return [*shlex.split(self.python or python), 'train.py', *self.flags]

    def command(self, python: str) -> str:
        """Returns the command of a host for a shell."""
        return shlex.join(self.argv(python))

    def command_with_secret(self, python: str) -> str:
        """Returns `command` with the secret, for hosts that may share no disk to store it on."""
        return f'env {SECRET}={self.secret} {self.command(python)}'


@dataclasses.dataclass(frozen=True)
class Chips:
    """The chips of a job's hosts together, as far as its options tell.

    accelerator: a slice, as Google names it, or KIND:SHAPE, given by `flag`. devices: number of
    devices if there is no slice; 0 if unknown.
    """

    accelerator: str = ''
    slices: int = 1
    flag: str = '--accelerator_type'
    devices: int = 0


class JobLaunch:
    """A job in progress.

    programs, packages: (requirement of this machine, how to install it). restarts: how often
    `supervise` submits the job again, 0 if the scheduler restarts it. caught: signals that came.
    stream: output that is forwarded. outlives_launcher: whether the hosts continue if the launcher
    ends, and the same command finds them again.
    """

    programs = packages = ()
    outlives_launcher = True

    def __init__(self, job: Job, options: Any, caught: list[int], say: Callable[[str], None]):
        self.job, self.options, self.caught, self.say = job, options, caught, say
        self.stream: Stream | None = None
        self.last_poll, self.failures = -math.inf, 0

    @property
    def restarts(self) -> int:
        """Returns how often `supervise` submits the job again."""
        return self.job.max_restarts

    def submit(self) -> None:
        """Starts the job, or finds it. Raises LaunchInterrupted if a signal comes first."""

    def poll(self) -> int | None:
        """Forwards new output of the first host; returns the job's exit status once it ended."""

    def stop_commands(self) -> list[list[str]]:
        """Returns the commands that make the hosts save a checkpoint and end."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stops the job; `poll` reports its end."""
        for command in self.stop_commands():
            run_command(command)

    def close(self) -> None:
        """Releases the resources of this launcher."""
        if self.stream is not None and self.stream.process.poll() is None:
            self.stream.process.terminate()
            self.stream.process.wait()

    def is_due(self, seconds: float) -> bool:
        """Whether this last returned True at least `seconds` ago."""
        time_now = time.monotonic()
        if time_now - self.last_poll < seconds:
            return False
        self.last_poll = time_now
        return True

    def query(self, read_state: Callable[[], Any], job: str) -> Any:
        """Returns read_state(), or None if it raised ValueError, as a scheduler may for a while.

        Raises the error after MAX_FAILURES in a row.
        """
        try:
            state = read_state()
        except ValueError as error:
            self.failures += 1
            if self.failures == MAX_FAILURES:
                advice = f'The {job} is still running; repeat the same command to follow it.'
                raise ValueError(f'{error}. {advice}') from None
            return None
        self.failures = 0
        return state


class JobEngine(NamedTuple):
    """A way to start a job.

    options: dataclass of its flags. launch: the class of a job in progress. check: raises
    ValueError for bad options. script: returns the commands that would run.
    """

    options: Any
    launch: type[JobLaunch]
    check: Callable[[Job, Any], None]
    script: Callable[[Job, Any], str]


class LaunchInterrupted(Exception):
    """A signal came while the job waited for its hosts."""


def option(description: str, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of an engine's options, and its flag; required if it has no default."""
    return dataclasses.field(default=default, metadata={'words': description})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """Options of engines that request TPU slices of Google Cloud; each adds its own `zone`."""

    if TYPE_CHECKING:
        zone: str  # each engine has its own help text

    accelerator_type: str = option(
        'TPU version, and chips or cores, such as v6e-16 or v5litepod-256.'
    )
    project: str = option('Google Cloud project; default: the one that gcloud is set to.', '')
    slices: int = option('Number of slices that train one run together.', 1)
    spot: bool = option('Use cheaper slices that may be preempted at any time.', False)
    submit_flags: str = option('Additional flags for queued-resources or xpk workload create.', '')

    def location_flags(self) -> list[str]:
        """Returns the flags of zone and project."""
        zone = [f'--zone={self.zone}'] if self.zone else []
        return [*zone, *([f'--project={self.project}'] if self.project else [])]

    def chips(self) -> Chips:
        """Returns the chips of all slices."""
        return Chips(self.accelerator_type, self.slices)

    def extra_flags(self, *flags: str) -> list[str]:
        """Returns `flags` between --spot and the flags given by the user."""
        return [*(['--spot'] if self.spot else []), *flags, *shlex.split(self.submit_flags)]


def read_options(engine: str, options: Any, flag_values: Mapping[str, Any]) -> Any:
    """Parses the options of an engine.

    Args:
      engine: its name, for errors.
      options: its dataclass of options.
      flag_values: values of the flags that are set.

    Returns:
      The options.

    Raises:
      ValueError: for a missing or an unknown flag.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    for name in flag_values:
        if name not in fields:
            raise ValueError(
                f'--{name} is not read by --engine={engine}, which reads '
                f'{", ".join(f"--{field}" for field in fields)}.{suggest_nearest(name, fields)}'
            )
    missing = [
        f'--{name} ({field.metadata["words"].rstrip(".")})'
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in flag_values
    ]
    if missing:
        raise ValueError(f'--engine={engine} needs {", ".join(missing)}')
    return options(**flag_values)


def check_installed(engine: str, launch: type[JobLaunch]) -> None:
    """Raises ValueError for a missing program or package, with the way to install it."""
    absent = [
        requirement for requirement in launch.programs if shutil.which(requirement[0]) is None
    ]
    absent += [
        requirement
        for requirement in launch.packages
        if importlib.util.find_spec(requirement[0]) is None
    ]
    if absent:
        needs = '; '.join(
            f'{program}, which is not installed here: {advice}' for program, advice in absent
        )
        raise ValueError(f'--engine={engine} runs {needs}. --dry_run prints what would run.')


def check_name(flag: str, name: str) -> None:
    """Raises ValueError for a name that some engine refuses; xpk's limit is the shortest."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f'{flag} must be at most {MAX_NAME_LENGTH} lowercase letters, digits and dashes, '
            f'and begin with a letter; got {name!r}.'
        )


def check_flags(job: Job) -> None:
    """Raises ValueError if the flags of train.py identify a host, as the engine does this."""
    host_flags = sorted(select_flags(job.flags, HOST_FLAGS))
    if host_flags:
        raise ValueError(
            f'--{host_flags[0]} identifies a host, which the launcher does itself. Leave it out of '
            'the command after --.'
        )


def check_workdir(job: Job, engine: str) -> None:
    """Raises ValueError without --workdir, as a preempted host loses its own disk."""
    if not any(flag.lstrip('-').partition('=')[0] == 'workdir' for flag in job.flags):
        raise ValueError(
            f'--engine={engine} needs train.py --workdir=... on storage that all hosts share and '
            'that outlives them, as every restart goes on from the checkpoints there.'
        )


def check_training(job: Job, chips: Chips, say: Callable[[str], None]) -> None:
    """Checks a training in a separate process (`tpu.check_training`).

    Args:
      job: the job.
      chips: chips of all hosts.
      say: receives a message on facts that could not be checked.

    Raises:
      ValueError: for a training that the hosts would refuse.
    """
    if importlib.util.find_spec('jax') is None:
        say('JAX is not installed here: what train.py would refuse is left to the hosts')
        return
    chips_json = json.dumps(dataclasses.asdict(chips))
    status, message, error = run_command(
        [sys.executable, '-m', 'tpu.check_training', chips_json, *job.flags]
    )
    if status:
        raise ValueError(error.strip().removeprefix('error: ') or f'it ended with {status}')
    if message:
        say(message.strip())


def check_positive(options: Any, *names: str) -> None:
    """Raises ValueError for an option below 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f'--{name} must be at least 1; got {getattr(options, name)}.')


def is_resumable(status: int) -> bool:
    """Whether the same command may continue after this exit status.

    A host was lost (42), or a signal ended it (above 128), as in a preemption. Bad input, a
    diverged loss and a command that cannot run (126, 127) would end the same way again.
    """
    return status == RESUME or status > SIGNALLED


def combine_statuses(statuses: Sequence[int]) -> int:
    """Returns the exit status of a job from its hosts or containers: the smallest but 0.

    Final statuses (1, 2) take precedence over statuses of hosts that end because another host
    failed (42, 128 + n).
    """
    return min((status for status in statuses if status != DONE), default=DONE)


def supervise(launch: JobLaunch, caught: list[int], say: Callable[[str], None]) -> int:
    """Submits the job until it is done, cannot continue, or was restarted launch.restarts times.

    A signal, in `caught`, stops the job; this function still waits for its end.

    Args:
      launch: the job in progress.
      caught: signals that came.
      say: receives messages.

    Returns:
      The exit status of the job.
    """
    restarts = 0
    try:
        while True:
            launch.submit()
            if restarts == 0:
                command = ' && '.join(map(shlex.join, launch.stop_commands()))
                say(f'Ctrl-C stops it after a checkpoint; so does: {command}')
            status = wait_for_exit(launch, caught, say)
            if caught:
                # Final statuses stay; any other end is due to the signal.
                return status if status in (DONE, BAD_INPUT, DIVERGED) else SIGNALLED + caught[0]
            if not is_resumable(status):
                return status
            if restarts == launch.restarts:
                if launch.restarts:
                    say(f'status {status} after {restarts} restarts (--max_restarts): it ends')
                return status
            restarts += 1
            say(f'status {status}: restart {restarts} of at most {launch.restarts}')
            interruptible_sleep(PAUSE_SEC, caught)
    except LaunchInterrupted:
        return SIGNALLED + caught[0]
    finally:
        launch.close()


def wait_for_exit(launch: JobLaunch, caught: list[int], say: Callable[[str], None]) -> int:
    """Waits for the submitted job, and stops it after a signal, once.

    Args:
      launch: the job in progress.
      caught: signals that came.
      say: receives messages.

    Returns:
      The exit status of the job.
    """
    is_stopping = False
    while (status := launch.poll()) is None:
        if caught and not is_stopping:
            is_stopping = True
            say('stopping: the hosts save a checkpoint; a second signal leaves them to it')
            launch.stop()
        time.sleep(POLL_SEC)
    return status


def interruptible_sleep(seconds: float, caught: list[int]) -> None:
    """Sleeps. Raises LaunchInterrupted as soon as a signal came."""
    end = time.monotonic() + seconds
    while not caught and time.monotonic() < end:
        time.sleep(min(POLL_SEC, seconds))
    if caught:
        raise LaunchInterrupted


def shell_lines(*lines: str | Sequence[str]) -> str:
    """Returns lines for a shell; a line given as words is quoted."""
    return ''.join(f'{line if isinstance(line, str) else shlex.join(line)}\n' for line in lines)


def run_command(command: Sequence[str], text: str | None = None) -> tuple[int, str, str]:
    """Returns (exit status, stdout, stderr) of a short command, which Ctrl-C does not reach."""
    # Ctrl-C goes to the terminal's process group, which a new session leaves.
    process = subprocess.run(
        command, input=text or '', capture_output=True, text=True, start_new_session=True
    )
    return process.returncode, process.stdout, process.stderr


def read_output(command: Sequence[str], text: str | None = None) -> str:
    """Returns the stdout of a short command. Raises ValueError with its message if it fails."""
    status, stdout, error = run_command(command, text)
    if status:
        message = (error or stdout).strip() or 'it said nothing'
        raise ValueError(f'{shlex.join(command)} ended with status {status}: {message}')
    return stdout


class Stream:
    """A running command; its lines are forwarded to stdout unless `is_hidden` selects them.

    Ctrl-C does not reach it: the engine decides when it stops.
    """

    def __init__(
        self, command: Sequence[str], is_hidden: Callable[[str], bool] = lambda line: False
    ):
        self.is_hidden = is_hidden
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors='replace',
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Forwards lines until the command closes its output."""
        assert self.process.stdout is not None  # a pipe
        for line in self.process.stdout:
            if not self.is_hidden(line):
                sys.stdout.write(line)
                sys.stdout.flush()

    def poll(self) -> int | None:
        """Returns the exit status once the command has ended and its output was forwarded."""
        if self.process.poll() is None:
            return None
        self.reader.join(READ_SEC)
        code = self.process.returncode
        return code if code >= 0 else SIGNALLED - code

    def wait(self, seconds: float) -> None:
        """Waits for the command to end, and for its last lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.reader.join(READ_SEC)
