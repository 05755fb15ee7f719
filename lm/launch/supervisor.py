"""The parent that each process of a job of several has. Standard library only.

JAX's runtime ends all processes without a word when one is gone, or waits for it for ever. So each
`train.py` starts itself again as a child that trains, and watches: parents hold a connection with
that of process 0, and when a child ends, or a connection breaks, all are told who it was, end their
own children and leave with one status.

The children of a sweep whose cells are dealt to hosts (`lm.sweep.hosts`) say that they are apart:
then a host that ends, or is lost, ends no other, and the job ends when all have.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from lm.launch.coordinator import Hub
from lm.launch.exit_status import BAD_INPUT, Ended
from lm.launch.link import Link
from lm.launch.member import Spoke
from lm.launch.this_host import CHILD, JOB, TELL, Host, child_host, shared_arguments, this_host

POLL_SEC = 0.1  # between looks at the child
# A child whose job has ended may still have a line to write; what it waits for will not come.
GRACE_SEC = 5.0
PR_SET_PDEATHSIG = 1


def watch_if_several() -> None:
    """Where this process is one of several: it is the parent from here on, and never returns. The
    child goes on, and so does a process that is alone.
    """
    if child_host() is not None:
        return
    try:
        host = this_host(sys.argv[1:])
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(BAD_INPUT)
    if host is not None:
        sys.exit(watch(host, [sys.executable, *sys.orig_argv[1:]], sys.argv[1:]))


def watch(host: Host, command: Sequence[str], argv: Sequence[str] = ()) -> int:
    """Runs `command` once all hosts are there; the exit status, the same on all.

    argv: what must be the same on all but for the flags that say which host one is.
    """
    with signals_caught() as asked:
        try:
            link = (Spoke if host.process_id else Hub)(host, shared_arguments(argv), asked)
        except Ended as ended:
            return _leave(host, ended)
        heard, told = os.pipe()
        os.set_blocking(heard, False)
        child = start(host, command, {JOB: link.job, TELL: str(told)}, told)
        os.close(told)
        try:
            return _attend(host, link, child, asked, heard)
        finally:
            link.close()
            os.close(heard)


def _attend(host: Host, link: Link, child: subprocess.Popen, asked: list[int], heard: int) -> int:
    """Until the job has ended; signals that this process is sent are sent on."""
    told, passed_on = False, 0
    while True:
        for number in asked[passed_on:]:
            passed_on += 1
            child.send_signal(number)
        has_ended = child.poll() is not None
        link.apart = link.apart or _says_apart(heard)
        try:
            if has_ended and not told:
                told = True
                link.child_ended(child.returncode)
            link.step(POLL_SEC)
        except Ended as ended:
            _end(child)
            return _leave(host, ended)


def _says_apart(heard: int) -> bool:
    with contextlib.suppress(BlockingIOError):  # it has said nothing yet
        return bool(os.read(heard, 1))
    return False


def _end(child: subprocess.Popen) -> None:
    try:
        child.wait(GRACE_SEC)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _leave(host: Host, ended: Ended) -> int:
    if ended.text:
        print(f'host {host.process_id}: {ended.text}', file=sys.stderr, flush=True)
    return ended.status


def start(
    host: Host, command: Sequence[str], env: Mapping[str, str], descriptor: int
) -> subprocess.Popen:
    """The child, which has `env` besides and may write to `descriptor`. On Linux it ends with this
    process, even if that is killed.
    """
    parent, libc = os.getpid(), None
    if platform.system() == 'Linux':
        libc = ctypes.CDLL(None, use_errno=True)

    def end_with_parent():
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it was killed before this was asked for
                os._exit(1)

    return subprocess.Popen(
        command,
        env={**os.environ, CHILD: json.dumps(dataclasses.asdict(host)), **env},
        pass_fds=(descriptor,),
        preexec_fn=end_with_parent,  # this process has one thread
    )


@contextlib.contextmanager
def signals_caught() -> Iterator[list[int]]:
    """A list of the numbers of SIGTERM and SIGINT as they come."""
    asked: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, frame: asked.append(number)) for n in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
