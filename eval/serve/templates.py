"""Chat templates, each rendered by processes with limits of time, memory and output.

A template is a program that a stranger wrote: it may loop for ever, or ask for all memory. The
process of the server, which holds JAX's threads and the devices, neither compiles nor renders it.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eval.serve import template_worker as worker

START_SEC = 30.0  # for an interpreter to start, on a machine that is busy
# For a compile, or a prompt. A process that computes is ended before, by worker.CPU_SEC.
RENDER_SEC = 3.0
MAX_ANSWER_BYTES = 4 * worker.MAX_CHARACTERS + 1  # bytes
ENVIRONMENT = (  # what the interpreter needs: neither keys nor the malloc settings of a trainer
    'HOME',
    'LANG',
    'LC_ALL',
    'LD_LIBRARY_PATH',
    'PATH',
    'PYTHONHOME',
    'PYTHONPATH',
    'PYTHONUSERBASE',
    'TZ',
)


class TemplateFailure(ValueError):
    """A template cannot be compiled or rendered within the limits; the text says why."""


class Template:
    """A Jinja template in the sandbox of `eval.serve.template_worker`. Any thread may render.

    Prompts that are rendered at the same time have a process each, which is kept for later ones.
    """

    def __init__(self, text: str):
        """Compiles a template.

        Args:
          text: of the template.

        Raises:
          TemplateFailure: where it is none, or takes too long or too much memory.
        """
        self._text = text
        self._idle = collections.deque([_WorkerProcess(text)])

    def render(self, **variables: Any) -> str:
        """Returns the text for variables that JSON can hold. Raises TemplateFailure."""
        process, is_kept = self._take_process(), False
        try:
            answer, is_kept = process.ask(json.dumps(variables))
        finally:
            if is_kept:
                self._idle.append(process)
            else:
                process.end()
        if answer.startswith(worker.OK):
            return answer[1:].decode()
        raise TemplateFailure(answer[1:].decode())

    def _take_process(self) -> '_WorkerProcess':
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _WorkerProcess(self._text)
            if process.is_alive():  # the system may have killed it meanwhile
                return process

    def close(self) -> None:
        """Ends the processes that are idle."""
        while self._idle:
            self._idle.pop().end()


class _WorkerProcess:
    """A worker that has compiled the template. Raises TemplateFailure where it cannot."""

    def __init__(self, text: str):
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, '-P', str(Path(worker.__file__))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C lets the server end what is under way
            )
        self.end = weakref.finalize(self, _end_process, self._process, self._connection)
        answer, is_kept = self._receive(START_SEC)
        if is_kept:
            answer, is_kept = self.ask(text)
        if not is_kept:
            self.end()
            raise TemplateFailure(answer[1:].decode())

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: str) -> tuple[bytes, bool]:
        """Returns (the worker's answer, whether it can be asked again)."""
        with contextlib.suppress(OSError):  # its end is read below
            self._connection.send_bytes(message.encode(errors='surrogatepass'))
        return self._receive(RENDER_SEC)

    def _receive(self, timeout_sec: float) -> tuple[bytes, bool]:
        try:
            if not self._connection.poll(timeout_sec):
                reason = f'it takes more than {timeout_sec:g} seconds'
                return worker.ENDED + reason.encode(), False
            answer = self._connection.recv_bytes(MAX_ANSWER_BYTES)
        except (EOFError, OSError):
            return worker.ENDED + self._describe_exit().encode(), False
        return answer, not answer.startswith(worker.ENDED)

    def _describe_exit(self) -> str:
        """Returns why the worker has ended."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return 'its process does not answer'
        if status == -signal.SIGPROF:
            return f'it takes more than {worker.CPU_SEC:g} seconds'
        return f'its process ended with status {status}'


def _end_process(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
