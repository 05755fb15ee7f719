"""The supervisor that each process of a job of several has. Standard library only.

JAX's runtime ends all processes without a word when one is gone, or waits for it for ever. So each
`train.py` starts itself again as a child that trains, and supervises it: the members hold a link
with the coordinator, and when a child ends, or a link breaks, all are told who it was, end their
own children and leave with one status.

The children of a sweep whose cells are dealt to hosts (`lm.study.train.hosts`) say that they are
apart: then a host that ends, or is lost, ends no other, and the job ends when all have.
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
from collections.abc import Mapping, Sequence
from typing import NoReturn

from lm.launch.coordinator import Coordinator
from lm.launch.exit_status import BAD_INPUT, JobEnded
from lm.launch.link import Supervisor, print_line
from lm.launch.member import Member
from lm.launch.secret import mtls_env
from lm.launch.signals import preserve_handlers
from lm.launch.this_host import CHILD, JOB, TELL, Host, child_host, detect_host, shared_arguments

POLL_SEC = 0.1  # between looks at the child
# A child whose job has ended may still have a line to write; what it waits for will not come.
GRACE_SEC = 5.0
PR_SET_PDEATHSIG = 1


def supervise_if_several() -> None:
    """Supervises a child from here on, where this is one process of several; never returns then."""
    if child_host() is not None:  # this is the child
        return
    try:
        host = detect_host(sys.argv[1:])
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(BAD_INPUT)
    if host is not None:
        sys.exit(supervise(host, [sys.executable, *sys.orig_argv[1:]], sys.argv[1:]))


def supervise(host: Host, command: Sequence[str], argv: Sequence[str] = ()) -> int:
    """Runs `command` once all hosts are there; returns the exit status, the same on all.

    argv: the flags, which all hosts must share but for those that say which host one is.
    """
    asked: list[int] = []
    role = Member if host.process_id else Coordinator
    with preserve_handlers(lambda number, _: asked.append(number)):
        try:
            with (
                contextlib.closing(role(host, shared_arguments(argv), asked)) as supervisor,
                mtls_env(supervisor.certificate) as mtls,
            ):
                heard, told = os.pipe()
                os.set_blocking(heard, False)
                env = {JOB: supervisor.job, TELL: str(told), **mtls}
                child = start_child(host, command, env, told)
                os.close(told)
                _watch_child(supervisor, child, heard)
        except JobEnded as ended:
            if ended.text:
                print_line(host, ended.text)
            return ended.status


def _watch_child(supervisor: Supervisor, child: subprocess.Popen, heard: int) -> NoReturn:
    """Passes signals on to the child until the job has ended. Raises Ended."""
    reported, passed_on = False, 0
    try:
        while True:
            for number in supervisor.received_signals[passed_on:]:
                passed_on += 1
                child.send_signal(number)
            has_ended = child.poll() is not None
            supervisor.is_independent = supervisor.is_independent or _is_child_independent(heard)
            if has_ended and not reported:
                reported = True
                supervisor.on_child_exit(child.returncode)
            supervisor.step(POLL_SEC)
    except JobEnded:
        os.close(heard)
        try:
            child.wait(GRACE_SEC)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def _is_child_independent(heard: int) -> bool:
    with contextlib.suppress(BlockingIOError):  # nothing has been said yet
        return bool(os.read(heard, 1))
    return False


def start_child(
    host: Host, command: Sequence[str], env: Mapping[str, str], descriptor: int
) -> subprocess.Popen:
    """Starts the child, with `env` added to its environment and `descriptor` to write to. On Linux
    it ends with this process, even if that is killed.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if platform.system() == 'Linux' else None

    def end_with_parent():
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent was killed before prctl
                os._exit(1)

    return subprocess.Popen(
        command,
        env={**os.environ, CHILD: json.dumps(dataclasses.asdict(host)), **env},
        pass_fds=(descriptor,),
        preexec_fn=end_with_parent,  # this process has one thread
    )
