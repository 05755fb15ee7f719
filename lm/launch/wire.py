"""Lines of JSON between the parents of a job (`lm.launch.supervisor`). Standard library only."""

import json
import selectors
import socket
import time
from typing import Any

MOST_BYTES = 1 << 18  # of one message: the arguments of a command; whoever sends more is a stranger
SEND_SEC = 5.0  # messages are small: a peer whose buffers are full for so long is not there


class Gone(OSError):
    """The other end has closed the connection, or it broke."""


class Peer:
    """One connection. process_id: None until it has said who it is; heard: when it last spoke."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SEND_SEC)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.process_id = connection, None
        self.heard = time.monotonic()
        self._begun = b''

    def send(self, **message: Any) -> None:
        """Raises Gone."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b'\n')
        except OSError as error:
            raise Gone(str(error)) from error

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come, to be called when something has. Raises Gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise Gone(str(error)) from error
        *lines, self._begun = (self._begun + data).split(b'\n')
        if not data or len(self._begun) > MOST_BYTES:
            raise Gone('closed')
        self.heard = time.monotonic()
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:  # it speaks something else
            raise Gone(str(error)) from error
        if not all(isinstance(message, dict) for message in messages):
            raise Gone('no messages')
        return messages

    def close(self) -> None:
        self.socket.close()


class Wire:
    """Connections that are waited on together; `server` takes new ones."""

    def __init__(self, server: socket.socket | None = None):
        self._selector, self._server = selectors.DefaultSelector(), server
        self.peers: list[Peer] = []
        if server:
            self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: socket.socket) -> Peer:
        peer = Peer(connection)
        self.peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def drop(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self._selector.unregister(peer.socket)
            peer.close()

    def wait(self, seconds: float) -> list[tuple[Peer, dict[str, Any] | None]]:
        """(peer, message) for what comes within `seconds`; None for one that has gone, which is
        dropped.
        """
        found: list[tuple[Peer, dict[str, Any] | None]] = []
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
        for peer in list(self.peers):
            self.drop(peer)
        if self._server:
            self._server.close()
        self._selector.close()
