"""Links between the Coordinator and the Members: JSON lines. Standard library only."""

import json
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import SIGNALLED, Ended
from lm.launch.this_host import Host

MOST_BYTES = 1 << 18  # of one message: the arguments of a command; whoever sends more is a stranger
SEND_SEC = 5.0  # messages are small: a peer whose buffers are full for so long is not there
PING_SEC = 5.0
# A machine without power or network breaks no connection. Less than JAX's own heartbeat
# (`lm.launch.distributed`), whose time-out ends a process without a word.
SILENT_SEC = 25.0
# When a child has ended badly, the runtime of another may notice before its supervisor does, and
# end it within a second. Who was first is known when all have reported.
COLLECT_SEC = 2.0
RETRY_SEC = 0.5


class Gone(OSError):
    """The other end has closed the connection, or it broke."""


class Link:
    """A connection, whose methods raise Gone."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SEND_SEC)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._begun = connection, b''
        self.process_id: int | None = None  # of the other end, once it has said hello
        self.heard = time.monotonic()  # when the other end last spoke

    def send(self, **message: Any) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b'\n')
        except OSError as error:
            raise Gone(str(error)) from error

    def read(self) -> list[dict[str, Any]]:
        """Returns the messages that have come; to be called when there is something to read."""
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._begun = (self._begun + data).split(b'\n')
            if not data or len(self._begun) > MOST_BYTES:
                raise Gone('closed')
            self.heard = time.monotonic()
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:  # ValueError: the other end speaks something else
            raise Gone(str(error)) from error
        if not all(isinstance(message, dict) for message in messages):
            raise Gone('no messages')
        return messages


class Links:
    """Links that are waited on at once; `server` accepts new ones."""

    def __init__(self, server: socket.socket | None = None):
        self._selector, self._server = selectors.DefaultSelector(), server
        self.open: list[Link] = []
        if server:
            self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: socket.socket) -> Link:
        link = Link(connection)
        self.open.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def drop(self, link: Link) -> None:
        if link in self.open:
            self.open.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()

    def wait(self, seconds: float) -> list[tuple[Link, dict[str, Any] | None]]:
        """Returns (link, message) for what comes; None for a link that is gone, and is dropped."""
        found: list[tuple[Link, dict[str, Any] | None]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self.add(self._server.accept()[0])
                continue
            try:
                found += [(key.data, message) for message in key.data.read()]
            except Gone:
                self.drop(key.data)
                found.append((key.data, None))
        return found

    def close(self) -> None:
        for link in list(self.open):
            self.drop(link)
        if self._server:
            self._server.close()
        self._selector.close()


class Supervisor:
    """The part that Coordinator and Member share. Both raise Ended: `__init__` where the job cannot
    begin, `child_ended` and `step` when it is over. asked: signals that this process has received.
    """

    # Whether the child has said that it needs no other host: each host then goes on until its own
    # child has ended, or until it is signalled.
    apart = False
    job: str  # a name that no other job has
    links: Links

    def __init__(self, host: Host, arguments: Sequence[str], asked: list[int]):
        self.host, self.arguments, self.asked = host, list(arguments), asked
        self.names = {host.process_id: f'host {host.process_id} ({socket.gethostname()})'}
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

    def close(self) -> None:
        self.links.close()
