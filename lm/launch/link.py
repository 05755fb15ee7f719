"""What the parents of a job say to each other: who is there, and how it ended. Standard library
only.

That of process 0 is the Hub (`lm.launch.coordinator`); each of the others, a Spoke (`lm.launch.member`), has one
connection with it.
"""

import signal
import socket
import sys
import time
from collections.abc import Sequence

from lm.launch.exit_status import SIGNALLED, Ended
from lm.launch.this_host import Host

PING_SEC = 5.0
# A machine without power or network breaks no connection. Less than JAX's own heartbeat
# (`lm.launch.distributed`), whose time-out ends a process without a word.
SILENT_SEC = 25.0
# When a child has ended badly: the runtime of another may have noticed before its parent, and ends
# it within a second. Who was first is known when all have told.
COLLECT_SEC = 2.0
RETRY_SEC = 0.5


class Link:
    """What a Hub and a Spoke have in common; both raise Ended, from `__init__` where the job cannot
    begin. asked: signals that this process has been sent.

    apart: whether the child has said that it needs no other host. Then each goes on until its own
    child has ended, and where it was asked to end, no longer.
    """

    apart = False
    job: str  # a name that no other job has

    def __init__(self, host: Host, arguments: Sequence[str], asked: list[int]):
        self.host, self.arguments, self.asked = host, list(arguments), asked
        self.names = {host.process_id: named(host.process_id, socket.gethostname())}
        self._pinged = time.monotonic()

    def say(self, text: str) -> None:
        print(f'host {self.host.process_id}: {text}', file=sys.stderr, flush=True)

    def name_of(self, process_id: int) -> str:
        return self.names.get(process_id) or self.host.name_of(process_id)

    def _stop_if_asked(self) -> None:
        if self.asked:
            name = signal.Signals(self.asked[0]).name
            where = self.name_of(self.host.process_id)
            raise Ended(SIGNALLED + self.asked[0], f'{where}: {name}: it had not begun')

    def _is_time_to_ping(self) -> bool:
        if time.monotonic() - self._pinged < PING_SEC:
            return False
        self._pinged = time.monotonic()
        return True


def named(process_id: int, name: str) -> str:
    return f'host {process_id} ({name})'
