"""What all launch engines share: the job, their options, and going on after a preemption.

Standard library only: JAX is for the hosts, and a launcher starts without it.
"""

import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lm.run.hosts import flags_of
from lm.run.statuses import BAD_INPUT, DIVERGED, DONE, RESUME, SIGNALLED
from modules.choices import nearest

POLL_SEC = 0.2  # between looks at what runs on this machine, and at signals that came
PAUSE_SEC = 30.0  # before the same job is submitted again
MOST_RESTARTS = 10  # default of --max_restarts, as of a sweep's groups on Ray
NAME = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')
MOST_NAME = 40


@dataclasses.dataclass(frozen=True)
class Job:
    """flags: of train.py, the same on every host. python: the words before train.py, '' for those
    that suit the engine. max_restarts: how often the job is started again.
    """

    name: str
    flags: tuple[str, ...]
    python: str = ''
    max_restarts: int = MOST_RESTARTS

    def words(self, python: str) -> list[str]:
        """What a host runs; python: where the job names none."""
        return [*shlex.split(self.python or python), 'train.py', *self.flags]

    def command(self, python: str) -> str:
        """`words` as a shell reads it, whatever is in them."""
        return shlex.join(self.words(python))


class Launch(Protocol):
    """One job under way. restarts: how often the launcher submits it again; 0 where the scheduler
    does that itself.
    """

    restarts: int

    def submit(self) -> None:
        """Until there is something to watch. Raises Stopped where a signal comes first."""

    def poll(self) -> int | None:
        """Passes on what the first host has said since; the job's exit status once it has ended."""

    def stop(self) -> None:
        """Asks the hosts to save a checkpoint and to end; `poll` then tells when they have."""

    def close(self) -> None:
        """Gives back what this launcher took."""

    def by_hand(self) -> str:
        """The command that stops the job without this launcher."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """options: a dataclass whose fields are flags (`option`). script(job, options): what would run.
    launch(job, options, caught, say): a Launch. check(job, options): ValueError for what cannot be.
    programs, packages: what this machine needs, and how each is installed.
    """

    options: type
    script: Callable[[Job, Any], str]
    launch: Callable[[Job, Any, list[int], Callable[[str], None]], Launch]
    check: Callable[[Job, Any], None]
    programs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Stopped(Exception):
    """A signal came while the job waited for its hosts."""


def option(words: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of an engine's options, which is a flag; without a default it must be given."""
    return dataclasses.field(default=default, metadata={'words': words})


def read_options(engine: str, options: type, given: Mapping[str, Any]) -> Any:
    """`options` of the flags that are given. ValueError for what is missing or not read."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    for name in given:
        if name not in fields:
            raise ValueError(
                f'--{name} is not read by --engine={engine}, which reads '
                f'{", ".join(f"--{known}" for known in fields)}.{nearest(name, fields)}'
            )
    missing = [
        f'--{name} ({field.metadata["words"].rstrip(".")})'
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in given
    ]
    if missing:
        raise ValueError(f'--engine={engine} needs {", ".join(missing)}')
    return options(**given)


def check_installed(name: str, engine: Engine) -> None:
    """ValueError that names what this machine lacks, and how it is installed."""
    absent = [(p, how) for p, how in engine.programs.items() if shutil.which(p) is None]
    for package, how in engine.packages.items():
        if importlib.util.find_spec(package) is None:
            absent.append((package, how))
    if absent:
        said = '; '.join(f'{what}, which is not installed here: {how}' for what, how in absent)
        raise ValueError(f'--engine={name} runs {said}. --dry_run prints what would run.')


def check_name(flag: str, name: str) -> None:
    """ValueError for what not every launcher takes; the longest is xpk's."""
    if not NAME.fullmatch(name) or len(name) > MOST_NAME:
        raise ValueError(
            f'{flag} must be at most {MOST_NAME} lowercase letters, digits and dashes, and begin '
            f'with a letter; got {name!r}.'
        )


def check_flags(job: Job) -> None:
    """ValueError where the command names a host, which the engine does."""
    named = sorted(flags_of(job.flags).keys() - {'host_timeout'})
    if named:
        raise ValueError(
            f'--{named[0]} says which host one is, and the hosts of a launch learn that from what '
            'starts them; leave it out of what follows --.'
        )


def check_workdir(job: Job, engine: str) -> None:
    """ValueError without a --workdir: hosts that a preemption takes keep no folder of their own."""
    if not any(flag.lstrip('-').partition('=')[0] == 'workdir' for flag in job.flags):
        raise ValueError(
            f'--engine={engine} needs train.py --workdir=... on storage that all hosts share and '
            'that outlives them, as every restart goes on from the checkpoints there.'
        )


def goes_on(status: int) -> bool:
    """Whether the same command goes on after this exit status: another host was lost (42), or a
    signal ended it (above 128), which is how a preemption shows. Bad input and a loss that diverged
    would only come again, and so would 126 and 127, a command that cannot be run.
    """
    return status == RESUME or status > SIGNALLED


def worst(statuses: Sequence[int]) -> int:
    """The status of a job of which several hosts, or containers, tell one each.

    The smallest but 0: what is final (1, 2) comes before what may go on (42, 128 + n), as those
    that are ended because another has failed tell the latter.
    """
    return min((status for status in statuses if status != DONE), default=DONE)


def supervise(
    launch: Launch, caught: list[int], say: Callable[[str], None], pause: float | None = None
) -> int:
    """Submits until the job is done, cannot go on, or was restarted launch.restarts times; its exit
    status.

    pause: seconds before it is submitted again, PAUSE_SEC. The first SIGINT or SIGTERM (`caught`)
    stops the job, which still is waited for.
    """
    restarts = 0
    try:
        while True:
            launch.submit()
            if restarts == 0:
                say(f'Ctrl-C stops it after a checkpoint; so does: {launch.by_hand()}')
            status = attend(launch, caught, say)
            if caught:
                return status if status in (DONE, BAD_INPUT, DIVERGED) else SIGNALLED + caught[0]
            if not goes_on(status):
                return status
            if restarts == launch.restarts:
                if launch.restarts:
                    say(f'status {status} after {restarts} restarts (--max_restarts): it ends')
                return status
            restarts += 1
            say(f'status {status}: restart {restarts} of at most {launch.restarts}')
            wait(PAUSE_SEC if pause is None else pause, caught)
    except Stopped:
        return SIGNALLED + caught[0]
    finally:
        launch.close()


def attend(launch: Launch, caught: list[int], say: Callable[[str], None]) -> int:
    """The status of what was submitted, once it has ended; a signal is passed on once."""
    asked = False
    while (status := launch.poll()) is None:
        if caught and not asked:
            asked = True
            say('stopping: the hosts save a checkpoint; a second signal leaves them to it')
            launch.stop()
        time.sleep(POLL_SEC)
    return status


def wait(seconds: float, caught: list[int]) -> None:
    """Raises Stopped as soon as a signal came."""
    end = time.monotonic() + seconds
    while not caught and time.monotonic() < end:
        time.sleep(min(POLL_SEC, seconds))
    if caught:
        raise Stopped


def answer(command: Sequence[str], text: str | None = None) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command of seconds, which a Ctrl-C here does not reach."""
    done = subprocess.run(
        command, input=text or '', capture_output=True, text=True, start_new_session=True
    )
    return done.returncode, done.stdout, done.stderr


def must(command: Sequence[str], text: str | None = None) -> str:
    """The stdout of `answer`; a ValueError with the command and what it said where it fails."""
    status, out, error = answer(command, text)
    if status:
        said = (error or out).strip() or 'it said nothing'
        raise ValueError(f'{shlex.join(command)} ended with status {status}: {said}')
    return out
