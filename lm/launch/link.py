"""Links between Coordinator and Members: a greeting that proves the job's secret, then JSON lines.
Standard library only.

Until both ends have proved the secret, the other end is a stranger. Nothing from a stranger is
parsed as JSON, answered with more than a nonce, or logged; strangers are counted.

`multiprocessing.connection` is unsuitable, because its reads and writes have no time-out: a
stranger that connects and sends nothing holds `Listener.accept` in the challenge, and no member is
greeted until it leaves. Half a message holds `recv_bytes` although `poll` has returned True, and a
peer that reads nothing holds `send_bytes`. With a time-out on the socket, `recv_bytes` raises
BlockingIOError instead of waiting.
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
from typing import Any, cast

from lm.launch.exit_status import SIGNALLED, JobEnded
from lm.launch.secret import Secret, is_proof, proof
from lm.launch.this_host import Host

MAX_BYTES = 1 << 18  # bytes of a message, which may hold the arguments of a command
MAX_GREETING = 128  # bytes of a line of the greeting
GREET_SEC = 5.0  # a greeting takes two round trips
MAX_STRANGERS = 64  # concurrent strangers; the oldest is closed if there are more
MAX_NAME = 255  # characters of a host's name, as in DNS
SEND_SEC = 5.0  # messages are small: a peer with full buffers for so long is lost
PING_SEC = 5.0
EXIT_CODES = range(-signal.NSIG, 256)  # of a child; negative: the signal that ended it
# Without power or network a machine does not break its connections, so silence has a limit. It is
# below JAX's own heartbeat (`lm.launch.distributed`), which ends a process without a reason.
SILENT_SEC = 25.0
# When a child has failed, the runtime of another child may notice before its supervisor does, and
# end it within a second. Which child failed first is known once all have reported.
COLLECT_SEC = 2.0
RETRY_SEC = 0.5
TYPES = {  # types of a message's values
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
    """The other end has closed the connection, the connection broke, or the other end is a
    stranger.
    """


class Link:
    """A connection. Its methods raise LinkClosed.

    Greeting: the coordinator sends its nonce a; the member answers with its nonce b and the proof
    of (member, a, b); the coordinator sends the proof of (coordinator, a, b).
    """

    def __init__(self, connection: socket.socket, secret: str, *, accepted: bool):
        self.socket, self._partial_line = connection, b''
        self._secret, self._accepted = secret, accepted
        self._nonce, self._peer_nonce = secrets.token_hex(16), ''
        self.is_trusted = False  # the other end knows the secret
        self.process_id: int | None = None  # id of the other end, once it has said hello
        self.opened_at = self.heard_at = time.monotonic()  # heard_at: last message received
        try:
            connection.settimeout(SEND_SEC)
            # Messages are small: Nagle's algorithm would hold them back for an acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if accepted:
            self._write(self._nonce)

    def send(self, **message: Any) -> None:
        """Sends a message."""
        self._write(json.dumps(message))

    def _write(self, line: str) -> None:
        try:
            self.socket.sendall(line.encode() + b'\n')
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def read(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived. Call it when the socket is readable."""
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
        """Handles a line of the greeting. Raises ValueError if it is not valid."""
        if len(line) > MAX_GREETING:
            raise ValueError('too long')
        fields, secret = line.decode('ascii').split(' '), self._secret
        if self._accepted:
            peer_nonce, peer_proof = fields
            nonces = self._nonce, peer_nonce
            if not is_proof(peer_proof, secret, 'member', *nonces):
                raise ValueError('another secret')
            self._write(proof(secret, 'coordinator', *nonces))
        elif not self._peer_nonce:
            (self._peer_nonce,) = fields
            nonces = self._peer_nonce, self._nonce
            self._write(f'{self._nonce} {proof(secret, "member", *nonces)}')
            return
        elif not is_proof(fields[0], secret, 'coordinator', self._peer_nonce, self._nonce):
            raise ValueError('another secret')
        self.is_trusted = True


def parse_message(line: bytes) -> dict[str, Any]:
    """Returns the message in a line. Raises ValueError or RecursionError if it is not valid."""
    message = json.loads(line)
    if not isinstance(message, dict) or any(
        # `type`, not isinstance, since a bool is an int for isinstance.
        type(value) is not TYPES.get(key)
        for key, value in message.items()
    ):
        raise ValueError('no message of a supervisor')
    if message.get('ended', 0) not in EXIT_CODES:
        raise ValueError('no exit code')
    return message


class Links:
    """Links that are waited on together; `servers` accept new links.

    strangers: number of closed connections that did not know the secret.
    """

    def __init__(self, secret: str, servers: Sequence[socket.socket] = ()):
        self._selector, self._servers, self._secret = selectors.DefaultSelector(), servers, secret
        self.open_links: list[Link] = []
        self.strangers = 0
        for server in servers:
            server.setblocking(False)  # who connects may have gone before it is accepted
            self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: socket.socket, *, accepted: bool = False) -> Link:
        """Adds a link over a connection. accepted: whether a server has accepted the connection."""
        link = Link(connection, self._secret, accepted=accepted)
        self.open_links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def drop(self, link: Link) -> None:
        """Closes a link."""
        if link in self.open_links:
            self.strangers += not link.is_trusted
            self.open_links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()

    def wait(self, seconds: float) -> list[tuple[Link, dict[str, Any] | None]]:
        """Returns (link, message) for each message; (link, None) for a link that is lost, and is
        dropped.
        """
        messages: list[tuple[Link, dict[str, Any] | None]] = []
        for key, _ in self._selector.select(seconds):
            link = key.data
            # A server is registered without a link.
            if link is None:
                self._accept_connection(cast(socket.socket, key.fileobj))
            # An earlier event of the same turn may have dropped it.
            elif link in self.open_links:
                try:
                    messages += [(link, message) for message in link.read()]
                except LinkClosed:
                    self.drop(link)
                    messages.append((link, None))
        greeting_deadline = time.monotonic() - GREET_SEC
        for link in [
            link
            for link in self.open_links
            if not link.is_trusted and link.opened_at < greeting_deadline
        ]:
            self.drop(link)
            messages.append((link, None))
        return messages

    def _accept_connection(self, server: socket.socket) -> None:
        """Accepts a connection, and drops the oldest stranger if there are too many."""
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
        """Closes all links and servers."""
        for link in list(self.open_links):
            self.drop(link)
        for server in self._servers:
            server.close()
        self._selector.close()


def local_addresses(name: str) -> list[str]:
    """Resolves a name of this machine to addresses that this machine has.

    Returns [], for all addresses, if the name belongs to a gateway, or stands for the loopback only
    on this machine (Debian's 127.0.1.1).
    """
    try:
        entries = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if all(map(_is_loopback, addresses)) and not (name == 'localhost' or _is_loopback(name)):
        return []
    return [address for address in addresses if _is_local(address)]


def _is_loopback(address: str) -> bool:
    return address == '::1' or address.startswith('127.')


def _is_local(address: str) -> bool:
    """Whether this machine has the address."""
    with contextlib.suppress(OSError), open_server(address, 0):
        return True
    return False


def open_server(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at one address, or at all addresses for ''."""
    if address == '' and socket.has_dualstack_ipv6():  # one socket for IPv4 and IPv6
        return socket.create_server(('', port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def sanitize(text: str, max_chars: int | None = None) -> str:
    """Returns text for a terminal, without control characters that another host may have sent."""
    return ''.join(character if character.isprintable() else '?' for character in text)[:max_chars]


def print_line(host: Host, text: str) -> None:
    """Prints a line with the number of this host to standard error."""
    print(f'host {host.process_id}: {sanitize(text)}', file=sys.stderr, flush=True)


class Supervisor:
    """The common part of Coordinator and Member.

    Both raise JobEnded: `__init__` if the job cannot begin, `on_child_exit` and `step` when it is
    over. received_signals: signals that this process has received.
    """

    # Whether the child has declared that it needs no other host. Each host then runs until its own
    # child has ended, or until it receives a signal.
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
        """Prints a line with the number of this host."""
        print_line(self.host, text)

    def host_name(self, process_id: int) -> str:
        """Returns the name of a process's host, from its greeting or from the launcher."""
        return self.names.get(process_id) or self.host.host_name(process_id)

    def _stop_if_signalled(self) -> None:
        """Raises JobEnded if a signal has arrived before the job has begun."""
        if self.received_signals:
            name = signal.Signals(self.received_signals[0]).name
            label = self.host_name(self.host.process_id)
            raise JobEnded(
                SIGNALLED + self.received_signals[0],
                f'{label}: {name}: stopped before the job began',
            )

    def _is_ping_due(self) -> bool:
        """Whether a sign of life is due; resets the clock if so."""
        if time.monotonic() - self._pinged < PING_SEC:
            return False
        self._pinged = time.monotonic()
        return True

    def close(self) -> None:
        """Closes the links."""
        self.links.close()
