"""Chat templates, rendered by processes with limits of time, memory and output.

A template is a program by a stranger: it may loop for ever, or allocate all memory. The process
that serves or prepares data, which holds JAX's threads and the devices, neither compiles nor
renders it.
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
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lm.data import template_worker as worker

START_SEC = 30.0  # for an interpreter to start, on a machine that is busy
# For a compile, or a prompt. A process that computes is ended before, by worker.CPU_SEC.
RENDER_SEC = 3.0
# Prompts of a conversation, in JSON; one prompt has MAX_CHARACTERS at most.
MAX_ANSWER_BYTES = 16 * worker.MAX_CHARACTERS
ENVIRONMENT = (  # needed by the interpreter; without keys and the malloc settings of training
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
    """A template cannot be compiled or rendered within the limits; the text gives the reason."""


class TemplateLimitExceeded(TemplateFailure):
    """A template took too much time or memory, which may depend on the machine."""


class Template:
    """A Jinja template in the sandbox of `lm.data.template_worker`. Any thread may render.

    Each concurrent prompt uses a separate process. Processes are kept for later prompts.
    """

    def __init__(self, text: str):
        """Compiles a template.

        Args:
          text: the template.

        Raises:
          TemplateFailure: if it is invalid, or takes too much time or memory.
        """
        self._text = text
        self._idle = collections.deque([_WorkerProcess(text)])

    def render(self, **variables: Any) -> str:
        """Returns the text for variables that JSON can represent. Raises TemplateFailure."""
        (text,) = self.render_all([variables])
        return text

    def render_all(self, prompts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the text for the variables of each prompt. The limits are those of a single one.

        Raises TemplateFailure, or TemplateLimitExceeded if the process had to end.
        """
        process, is_reusable = self._take_process(), False
        try:
            answer, is_reusable = process.ask(json.dumps(prompts))
        finally:
            if is_reusable:
                self._idle.append(process)
            else:
                process.end()
        if answer.startswith(worker.OK):
            return json.loads(answer[1:])
        is_limit = answer.startswith(worker.ENDED)
        raise (TemplateLimitExceeded if is_limit else TemplateFailure)(answer[1:].decode())

    def _take_process(self) -> '_WorkerProcess':
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _WorkerProcess(self._text)
            if process.is_alive():  # unless the system has killed it meanwhile
                return process

    def close(self) -> None:
        """Ends the idle processes."""
        while self._idle:
            self._idle.pop().end()


class _WorkerProcess:
    """A worker that has compiled the template. Raises TemplateFailure if that fails."""

    def __init__(self, text: str):
        self._connection, worker_connection = multiprocessing.Pipe()
        with worker_connection:
            self._process = subprocess.Popen(
                # -P: otherwise this folder would come first on the path, and its tokenizers.py
                # would hide the package of that name.
                [sys.executable, '-P', str(Path(worker.__file__))],
                stdin=worker_connection.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # so that Ctrl-C reaches its parent alone
            )
        # A finalizer, so that the process also ends when its template is garbage-collected.
        self.end = weakref.finalize(self, _end_process, self._process, self._connection)
        answer, is_reusable = self._receive(START_SEC)
        if is_reusable:
            answer, is_reusable = self.ask(text)
        if not is_reusable:
            self.end()
            raise TemplateFailure(answer[1:].decode())

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: str) -> tuple[bytes, bool]:
        """Returns (the worker's answer, whether the worker can be asked again)."""
        with contextlib.suppress(OSError):  # `_receive` reports a worker that has ended
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
        """Returns the reason for the end of the worker."""
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
    process.wait()  # otherwise a zombie remains
