"""The supervisor of each process in a job of several. Standard library only.

When a process is lost, JAX's runtime ends all others without a reason, or waits for it for ever. So
each `train.py` starts itself again as a child that trains, and supervises it. The members keep a
link to the coordinator. When a child ends, or a link breaks, all hosts learn which host it was, end
their own children and exit with the same status.

If the cells of a sweep are dealt to hosts (`lm.study.train.hosts`), the children declare that they
are independent: a host that ends, or is lost, then ends no other, and the job ends when all have.
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
from lm.launch.link import print_line
from lm.launch.member import Member
from lm.launch.secret import mtls_env
from lm.launch.signals import preserve_handlers
from lm.launch.this_host import CHILD, JOB, TELL, Host, child_host, detect_host, shared_arguments

POLL_SEC = 0.1  # between looks at the child
# When the job has ended, a child may still have a line to write; anything it waits for is lost.
GRACE_SEC = 5.0
PR_SET_PDEATHSIG = 1


def supervise_if_several() -> None:
    """Supervises a child if this is one process of several; does not return then."""
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
    """Runs `command` once all hosts have joined; returns the exit status, the same on all hosts.

    Args:
      host: this process of the job.
      command: command of the child.
      argv: the flags, which all hosts must share except those that identify a host.

    Returns:
      The exit status of the job.
    """
    received_signals: list[int] = []
    role = Member if host.process_id else Coordinator
    with preserve_handlers(lambda number, _: received_signals.append(number)):
        try:
            with (
                contextlib.closing(
                    role(host, shared_arguments(argv), received_signals)
                ) as supervisor,
                mtls_env(supervisor.certificate) as mtls,
            ):
                # The child writes to this pipe once it needs no other host; reads must not block.
                read_end, write_end = os.pipe()
                os.set_blocking(read_end, False)
                env = {JOB: supervisor.job, TELL: str(write_end), **mtls}
                child = start_child(host, command, env, write_end)
                # The child then holds the only end for writing, so that the pipe ends with it.
                os.close(write_end)
                _watch_child(supervisor, child, read_end)
        except JobEnded as ended:
            if ended.text:
                print_line(host, ended.text)
            return ended.status


def _watch_child(
    supervisor: Coordinator | Member, child: subprocess.Popen, declaration: int
) -> NoReturn:
    """Forwards signals to the child until the job has ended. Raises JobEnded."""
    reported, n_forwarded = False, 0
    try:
        while True:
            for number in supervisor.received_signals[n_forwarded:]:
                n_forwarded += 1
                child.send_signal(number)
            has_ended = child.poll() is not None
            supervisor.is_independent = supervisor.is_independent or _is_child_independent(
                declaration
            )
            if has_ended and not reported:
                reported = True
                # Once. The job may go on for a while, as other children still have to end.
                supervisor.on_child_exit(child.returncode)
            supervisor.step(POLL_SEC)
    except JobEnded:
        os.close(declaration)
        try:
            child.wait(GRACE_SEC)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def _is_child_independent(declaration: int) -> bool:
    """Whether the child has declared that it needs no other host."""
    with contextlib.suppress(BlockingIOError):  # nothing has been said yet
        # At the end of the pipe, when the child has ended, `read` returns b'': no declaration.
        return bool(os.read(declaration, 1))
    return False


def start_child(
    host: Host, command: Sequence[str], env: Mapping[str, str], descriptor: int
) -> subprocess.Popen:
    """Starts the child. On Linux it ends with this process, even if this process is killed.

    Args:
      host: this process of the job, for the child's environment.
      command: command of the child.
      env: variables added to its environment.
      descriptor: file descriptor that the child may write to.

    Returns:
      The child.
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
