"""Connections of the server: cuts idle connections, and ends the server cleanly after a signal."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

CHECK_SEC = 15  # a connection in which nothing moves between two checks is cut
MAX_CONNECTIONS = 1000
FILES_BESIDE = 100  # open files that are no connections
DRAIN_SEC = 20  # for running answers when the server is told to end


class Connection(H11Protocol):
    """A connection that is cut if its client sends no request, or does not read the response.

    The scope of its requests has `abort` in its state.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, 'abort': transport.abort}
        self._last_activity: Any = None
        self._check_later()
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._check_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP; while a response is being sent, it cuts the connection instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _check_later(self) -> None:
        self._check_timer = self.loop.call_later(CHECK_SEC, self._check)

    def _check(self) -> None:
        """Cuts the connection if it has made no progress since the last check.

        It has made none if the same request is still awaited, or if the same number of bytes still
        waits for the client to read.
        """
        unsent_bytes = self.transport.get_write_buffer_size()
        is_idle = self.cycle is None or self.cycle.response_complete
        # A response that is being computed, with no bytes to send, keeps the connection busy.
        activity = (self.cycle, unsent_bytes) if is_idle or unsent_bytes else None
        if activity is not None and activity == self._last_activity:
            self.transport.abort()
        else:
            self._last_activity = activity
            self._check_later()


class HttpServer(uvicorn.Server):
    """A server that, after a signal, gives running answers DRAIN_SEC and then ends.

    A second signal ends it at once.

    Attributes:
      on_start: called when it listens.
      end_signal: the signal that ended it.
    """

    def __init__(self, config: uvicorn.Config, refuse_active: Callable[[], None]):
        super().__init__(config)
        self._refuse_active = refuse_active
        self.on_start: Callable[[], None] = lambda: None
        self.end_signal: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits for running responses; after DRAIN_SEC they end with a refusal, not a cut.
        asyncio.get_running_loop().call_later(DRAIN_SEC, self._refuse_active)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        del frame
        if self.should_exit:
            # A second signal: running answers are cut, which uvicorn would log as errors.
            self.force_exit = True
            logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL)
        self.should_exit, self.end_signal = True, sig

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Catches the signals that end the server while it serves.

        Only the main thread receives signals; in others this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def build_http_server(app: ASGIApp, refuse_active: Callable[[], None]) -> HttpServer:
    """Returns the server of an application; it logs only its own errors."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws='none',
        loop='asyncio',
        log_config=None,
        log_level='error',
        access_log=False,
        server_header=False,
        # After the drain, clients that do not read their refusal are cut by two idle checks.
        timeout_graceful_shutdown=DRAIN_SEC + 2 * CHECK_SEC,
    )
    return HttpServer(config, refuse_active)


def abort_connection(scope: Scope) -> None:
    """Cuts the connection of a request."""
    scope['state']['abort']()


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address.

    It does not listen yet, so that early clients are refused.

    Raises:
      ValueError: if the address is in use, or invalid.
    """
    try:
        family, _, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f'--host={host} is not an address: {error.strerror}') from None
    # asyncio sets TCP_NODELAY only on sockets that were created with the protocol number of TCP.
    # Without it, a small response waits some 40 ms for the acknowledgement of its head.
    sock = socket.socket(family, socket.SOCK_STREAM, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ValueError(
            f'cannot listen on --port={port} of {host}: {error.strerror}. Choose another port, or '
            '--port=0 for any free one.'
        ) from None
    return sock


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def raise_file_limit() -> None:
    """Raises the limit of open files of this process to the number that the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < needed:
            print(
                f'WARNING: this process may open only {limit} files (ulimit -n), so it may run '
                'out of connections',
                file=sys.stderr,
            )


# Scripts of users import the earlier names.
bind, server_of = bind_socket, build_http_server
