"""Connections of the server: those in which nothing moves are cut, and signals end it cleanly."""

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
DRAIN_SEC = 20  # for answers under way when the server is told to end


class Connection(H11Protocol):
    """One that does not let a client hold it by silence, whether it sends no request or reads no
    answer. The scope of its requests has `abort` in its state.
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
        """Answers what is no HTTP; where an answer is under way, it cuts the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _check_later(self) -> None:
        self._check_timer = self.loop.call_later(CHECK_SEC, self._check)

    def _check(self) -> None:
        """Cuts the connection where nothing has moved since the last check: neither a request that
        is awaited, nor bytes that wait to be read.
        """
        unread = self.transport.get_write_buffer_size()
        is_idle = self.cycle is None or self.cycle.response_complete
        seen = (self.cycle, unread) if is_idle or unread else None
        if seen is not None and seen == self._last_activity:
            self.transport.abort()
        else:
            self._last_activity = seen
            self._check_later()


class HttpServer(uvicorn.Server):
    """Ends the answers that are under way DRAIN_SEC after a signal, and then itself.

    The second signal ends it at once. began: called when it listens.
    """

    def __init__(self, config: uvicorn.Config, refuse_active: Callable[[], None]):
        super().__init__(config)
        self._refuse_active = refuse_active
        self.on_start: Callable[[], None] = lambda: None
        self.end_signal: int | None = None  # the signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(DRAIN_SEC, self._refuse_active)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        del frame
        if self.should_exit:
            self.force_exit = True
            logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL)
        self.should_exit, self.end_signal = True, sig

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Catches the signals that end the server while it serves; in the main thread alone, which
        gets them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self.handle_exit) for one in caught}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def build_http_server(app: ASGIApp, refuse_active: Callable[[], None]) -> HttpServer:
    """Returns the server of an application, which logs nothing but what is wrong with itself."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws='none',
        loop='asyncio',
        log_config=None,
        log_level='error',
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SEC + 2 * CHECK_SEC,
    )
    return HttpServer(config, refuse_active)


def abort_connection(scope: Scope) -> None:
    """Cuts the connection that a request came by."""
    scope['state']['abort']()


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, which does not listen yet: who asks before is refused.

    Raises:
      ValueError: where the address is in use, or is none.
    """
    try:
        family, _, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f'--host={host} is no address: {error.strerror}') from None
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given as that of TCP; without it a
    # small answer waits some 40 ms for the acknowledgement of its head.
    found = socket.socket(family, socket.SOCK_STREAM, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise ValueError(
            f'--port={port} of {host} cannot be had: {error.strerror}. Give another port, or '
            '--port=0 for any that is free.'
        ) from None
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def raise_file_limit() -> None:
    """Raises the number of files that this process may open, where it is less than connections
    need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            print(f'WARNING: only {most} files may be open here (ulimit -n)', file=sys.stderr)
