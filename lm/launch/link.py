"""Links between the Coordinator and the Members: a greeting in which both prove that they know the
secret of the job, then JSON lines. Standard library only.

Whoever connects is a stranger until then. Nothing that a stranger sends is parsed as JSON, answered
but by a nonce, or written to the log; strangers are counted.

`multiprocessing.connection` would not do, because its reads and writes have no time-out: a
stranger that connects and says nothing holds `Listener.accept` in the challenge, and no member is
greeted until it has gone. Half a message holds `recv_bytes` though `poll` has returned True, and a
peer that reads nothing holds `send_bytes`. With a time-out on the socket, `recv_bytes` raises
BlockingIOError where it would have waited.
"""

import contextlib
import json
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import SIGNALLED, JobEnded
from lm.launch.secret import Secret, is_proof, proof
from lm.launch.this_host import Host

MAX_BYTES = 1 << 18  # of a message: the arguments of a command
MAX_GREETING = 128  # bytes of a line of the greeting
GREET_SEC = 5.0  # a greeting takes two round trips
MAX_STRANGERS = 64  # at once; beyond, the one that has been there longest is closed
MAX_NAME = 255  # characters of a host's name, as in DNS
SEND_SEC = 5.0  # messages are small: a peer whose buffers are full for so long is not there
PING_SEC = 5.0
# A machine without power or network breaks no connection. Less than JAX's own heartbeat
# (`lm.launch.distributed`), whose time-out ends a process without a word.
SILENT_SEC = 25.0
# When a child has ended badly, the runtime of another may notice before its supervisor does, and
# end it within a second. Who was first is known when all have reported.
COLLECT_SEC = 2.0
RETRY_SEC = 0.5
TYPES = {  # of a message's values
    'hello': dict,
    'start': dict,
    'job': str,
    'certificate': str,
    'ended': int,
    'text': str,
    'busy': bool,
    'ping': bool,
}


class LinkClosed(OSError):
    """The other end has closed the connection, or it broke, or it is a stranger."""


class Link:
    """A connection, whose methods raise Gone.

    Greeting: the coordinator sends its nonce a; the member answers with its nonce b and the proof
    of (member, a, b); the coordinator sends the proof of (coordinator, a, b).
    """

    def __init__(self, connection: socket.socket, secret: str, *, accepted: bool):
        self.socket, self._partial_line = connection, b''
        self._secret, self._accepted = secret, accepted
        self._nonce, self._peer_nonce = secrets.token_hex(16), ''
        self.is_trusted = False  # the other end knows the secret
        self.process_id: int | None = None  # of the other end, once it has said hello
        self.opened_at = self.heard_at = time.monotonic()  # `heard`: when the other end last spoke
        try:
            connection.settimeout(SEND_SEC)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if accepted:
            self._write(self._nonce)

    def send(self, **message: Any) -> None:
        self._write(json.dumps(message))

    def _write(self, line: str) -> None:
        try:
            self.socket.sendall(line.encode() + b'\n')
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def read(self) -> list[dict[str, Any]]:
        """Returns the messages that have come; to be called when there is something to read."""
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._partial_line = (self._partial_line + data).split(b'\n')
            messages = []
            for line in lines:
                if self.is_trusted:
                    messages.append(parse_message(line))
                else:
                    self._greet(line)
        except (OSError, ValueError, RecursionError) as error:  # it speaks something else
            raise LinkClosed(str(error)) from error
        if not data or len(self._partial_line) > (MAX_BYTES if self.is_trusted else MAX_GREETING):
            raise LinkClosed('closed')
        self.heard_at = time.monotonic()
        return messages

    def _greet(self, line: bytes) -> None:
        """Takes a line of the greeting. Raises ValueError for what is none."""
        if len(line) > MAX_GREETING:
            raise ValueError('too long')
        words, secret = line.decode('ascii').split(' '), self._secret
        if self._accepted:
            theirs, told = words
            nonces = self._nonce, theirs
            if not is_proof(told, secret, 'member', *nonces):
                raise ValueError('another secret')
            self._write(proof(secret, 'coordinator', *nonces))
        elif not self._peer_nonce:
            (self._peer_nonce,) = words
            nonces = self._peer_nonce, self._nonce
            self._write(f'{self._nonce} {proof(secret, "member", *nonces)}')
            return
        elif not is_proof(words[0], secret, 'coordinator', self._peer_nonce, self._nonce):
            raise ValueError('another secret')
        self.is_trusted = True


def parse_message(line: bytes) -> dict[str, Any]:
    """Returns the message in a line. Raises ValueError or RecursionError for what is none."""
    message = json.loads(line)
    if not isinstance(message, dict) or any(
        type(value) is not TYPES.get(key) for key, value in message.items()
    ):
        raise ValueError('no message of a supervisor')
    return message


class Links:
    """Links that are waited on at once; `servers` accept new ones. strangers: how many connections
    were closed that did not know the secret.
    """

    def __init__(self, secret: str, servers: Sequence[socket.socket] = ()):
        self._selector, self._servers, self._secret = selectors.DefaultSelector(), servers, secret
        self.open_links: list[Link] = []
        self.strangers = 0
        for server in servers:
            server.setblocking(False)  # who connects may have gone before it is accepted
            self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: socket.socket, *, accepted: bool = False) -> Link:
        link = Link(connection, self._secret, accepted=accepted)
        self.open_links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def drop(self, link: Link) -> None:
        if link in self.open_links:
            self.strangers += not link.is_trusted
            self.open_links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()

    def wait(self, seconds: float) -> list[tuple[Link, dict[str, Any] | None]]:
        """Returns (link, message) for what comes; None for a link that is gone, and is dropped."""
        found: list[tuple[Link, dict[str, Any] | None]] = []
        for key, _ in self._selector.select(seconds):
            link = key.data
            if link is None:
                self._accept_connection(key.fileobj)
            elif link in self.open_links:
                try:
                    found += [(link, message) for message in link.read()]
                except LinkClosed:
                    self.drop(link)
                    found.append((link, None))
        late = time.monotonic() - GREET_SEC
        for link in [one for one in self.open_links if not one.is_trusted and one.opened_at < late]:
            self.drop(link)
            found.append((link, None))
        return found

    def _accept_connection(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone already
            connection, _ = server.accept()
            try:
                self.add(connection, accepted=True)
            except LinkClosed:
                self.strangers += 1
                connection.close()
        strangers = [link for link in self.open_links if not link.is_trusted]
        if len(strangers) > MAX_STRANGERS:
            self.drop(strangers[0])

    def close(self) -> None:
        for link in list(self.open_links):
            self.drop(link)
        for server in self._servers:
            server.close()
        self._selector.close()


def local_addresses(name: str) -> list[str]:
    """Returns the addresses of this machine that a name of it resolves to; [] for all it has: where
    the name is that of a gateway, or stands for the loopback here alone (Debian's 127.0.1.1).
    """
    try:
        infos = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    if all(map(_is_loopback, addresses)) and not (name == 'localhost' or _is_loopback(name)):
        return []
    return [address for address in addresses if _is_local(address)]


def _is_loopback(address: str) -> bool:
    return address == '::1' or address.startswith('127.')


def _is_local(address: str) -> bool:
    with contextlib.suppress(OSError), open_server(address, 0):
        return True
    return False


def open_server(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at one address, or at all for ''."""
    if address == '' and socket.has_dualstack_ipv6():
        return socket.create_server(('', port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def sanitize(text: str, max_chars: int | None = None) -> str:
    """Returns text for a terminal: what another host has sent moves no cursor."""
    return ''.join(one if one.isprintable() else '?' for one in text)[:max_chars]


def print_line(host: Host, text: str) -> None:
    print(f'host {host.process_id}: {sanitize(text)}', file=sys.stderr, flush=True)


class Supervisor:
    """The part that Coordinator and Member share. Both raise Ended: `__init__` where the job cannot
    begin, `on_child_exit` and `step` when it is over. asked: signals that this process has received.
    """

    # Whether the child has said that it needs no other host: each host then goes on until its own
    # child has ended, or until it is signalled.
    is_independent = False
    job: str  # a name that no other job has
    certificate = ''  # by which JAX's processes know each other, as PEM; '' without
    links: Links

    def __init__(self, host: Host, arguments: Sequence[str], received_signals: list[int]):
        self.host, self.arguments, self.received_signals = host, list(arguments), received_signals
        self.secret = Secret(host, arguments)
        self.names = {host.process_id: f'host {host.process_id} ({socket.gethostname()})'}
        self._pinged = time.monotonic()

    def say(self, text: str) -> None:
        print_line(self.host, text)

    def host_name(self, process_id: int) -> str:
        return self.names.get(process_id) or self.host.host_name(process_id)

    def _stop_if_signalled(self) -> None:
        if self.received_signals:
            name = signal.Signals(self.received_signals[0]).name
            where = self.host_name(self.host.process_id)
            raise JobEnded(
                SIGNALLED + self.received_signals[0], f'{where}: {name}: it had not begun'
            )

    def _is_ping_due(self) -> bool:
        if time.monotonic() - self._pinged < PING_SEC:
            return False
        self._pinged = time.monotonic()
        return True

    def close(self) -> None:
        self.links.close()
