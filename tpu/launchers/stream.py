"""A command of this machine whose output is passed on while it runs."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from lm.run.statuses import SIGNALLED

READ_SEC = 5.0  # for what it left unread; a child of its own may hold the pipe for ever


class Stream:
    """Starts `command`; its lines go to stdout as they come, but those that `keep` returns True
    for. A Ctrl-C of this terminal does not reach it: the engine says who is to stop.
    """

    def __init__(self, command: Sequence[str], keep: Callable[[str], bool] = lambda line: False):
        self.keep = keep
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
        for line in self.process.stdout:
            if not self.keep(line):
                sys.stdout.write(line)
                sys.stdout.flush()

    def poll(self) -> int | None:
        """The exit status, once it has ended and all it said was passed on."""
        if self.process.poll() is None:
            return None
        self.reader.join(READ_SEC)
        code = self.process.returncode
        return code if code >= 0 else SIGNALLED - code

    def wait(self, seconds: float) -> None:
        """For it to end, and for its last lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.reader.join(READ_SEC)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
