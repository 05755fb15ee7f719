"""Property: over real connections, no client blocks others, whatever it does or sends."""

import asyncio
import contextlib
import http.client
import json
import logging
import queue
import socket
import time

import pytest

from eval.serve import connections
from eval.serve.connections import bind_socket, is_loopback
from tests.bench.serve_load import BAD, NONSENSE, idle, load, request
from tests.eval.serve.fakes import (
    PATIENCE_SEC,
    Letters,
    on_loopback,
    service,
    serving,
    wait_until,
)
from tests.eval.serve.test_app import make_unending


@contextlib.contextmanager
def connect(port: int):
    with socket.create_connection(('127.0.0.1', port), timeout=PATIENCE_SEC) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    received = b''
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            received += part
    return received


@pytest.fixture
def endless():
    engine = Letters(slots=2, step_sec=0.002, endless=True)
    engine.admit = make_unending(engine)
    return engine


def stream_request(**fields) -> bytes:
    return request(json.dumps({'prompt': 'a', 'stream': True} | fields).encode())


def test_stream_arrives_in_pieces():
    """The first piece arrives long before the last one could."""
    engine = Letters(slots=1, step_sec=0.05, endless=True)
    with on_loopback(engine) as port, connect(port) as sock:
        start = time.monotonic()
        sock.sendall(stream_request(max_tokens=40))
        first = b''
        while b'data:' not in first:
            first += sock.recv(1000)
        assert time.monotonic() - start < 40 * 0.05 and engine.n_free == 0


@pytest.mark.parametrize('stream', [False, True])
def test_closed_connection_frees_slots(endless, stream):
    with on_loopback(endless) as port:
        with connect(port) as sock:
            sock.sendall(stream_request(stream=stream, n=2))
            wait_until(lambda: endless.n_free == 0, 'both texts have slots')
        wait_until(lambda: endless.n_free == 2, 'the slots are free')


def test_client_that_reads_nothing_is_disconnected(endless):
    """Pieces fill the buffers of both machines, then the server's, which disconnects the client."""
    endless.at_once, endless.step_sec = 50, 0
    with on_loopback(endless, send_buffer=4096) as port, connect(port) as sock:
        sock.sendall(stream_request(logprobs=5))
        wait_until(lambda: endless.admitted, 'it has a slot')
        wait_until(lambda: endless.n_free == 2, 'it has lost it')
        assert b'[DONE]' not in read_all(sock)


def test_garbage_after_request_frees_the_slot(endless):
    with on_loopback(endless) as port:
        with connect(port) as sock:
            sock.sendall(stream_request() + b'\x00garbage\r\n\r\n')
            wait_until(lambda: endless.n_free == 1, 'it has a slot')
        wait_until(lambda: endless.n_free == 2, 'the slot is free')


@pytest.mark.parametrize(
    'bytes_sent', [b'', b'POST /v1/completions HT', request(b'{"prompt": "a"}')]
)
def test_idle_connection_is_cut(bytes_sent, monkeypatch):
    """The connection idles without a request, within a request, or after a response."""
    monkeypatch.setattr(connections, 'CHECK_SEC', 0.1)
    with on_loopback(Letters()) as port, connect(port) as sock:
        sock.sendall(bytes_sent)
        received = read_all(sock)  # ends
    assert (b'200 OK' in received) == bytes_sent.endswith(b'}')


def test_excess_connections_are_closed(monkeypatch):
    monkeypatch.setattr(connections, 'MAX_CONNECTIONS', 2)
    with on_loopback(Letters()) as port, connect(port) as first, connect(port) as second:
        first.sendall(request(b'{"prompt": "x"}'))
        assert b'200 OK' in first.recv(1000)
        second.sendall(request(b'{"prompt": "x"}'))
        assert b'200 OK' in second.recv(1000)
        with connect(port) as third:
            assert read_all(third) == b''


@pytest.mark.parametrize('i', range(len(NONSENSE)))
def test_nonsense_is_answered_with_an_error(i, one_server):
    """And the server keeps serving, and logs nothing."""
    port, engine, records = one_server
    with connect(port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(NONSENSE[i])
        received = read_all(sock)
    has_text = b'"max_tokens": 2' in NONSENSE[i]
    is_cut = NONSENSE[i].startswith(b'GET /a')  # closed with bytes unread, which resets it
    assert received.startswith(b'HTTP/1.1 2' if has_text else b'HTTP/1.1 4') or (
        is_cut and not received
    )
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE_SEC)
    connection.request('GET', '/health')
    assert connection.getresponse().status == 200
    connection.close()
    wait_until(lambda: engine.n_free == engine.slots, 'all slots are free')
    assert not records


def test_garbage_after_early_response_cuts_the_connection(one_server):
    """The body of a request is invalid, after the request was answered: no response is left."""
    port, _, records = one_server
    with connect(port) as sock:
        sock.sendall(b'POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n')
        assert sock.recv(1000).startswith(b'HTTP/1.1 404')
        sock.sendall(b'zz\r\n')
        assert b'HTTP' not in read_all(sock)
    assert not records, [record.getMessage() for record in records]


@pytest.fixture(scope='module')
def one_server():
    """(port, engine, logged records) of a server for all nonsense."""
    engine = Letters(slots=2)
    with pytest.MonkeyPatch.context() as patch, record_errors() as records:
        patch.setattr(connections, 'CHECK_SEC', 0.1)
        with on_loopback(engine) as port:
            yield port, engine, records


@contextlib.contextmanager
def record_errors():
    """Lists the errors that uvicorn and asyncio log."""
    records = []

    class Lists(logging.Handler):
        def emit(self, record):
            records.append(record)

    handler = Lists(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ('uvicorn.error', 'asyncio')]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield records
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def test_good_clients_are_served_beside_bad_ones():
    """The benchmark in short: all clients at once, and an idle server at the end."""
    engine = Letters(slots=4, step_sec=0.002)
    engine.capacity = 256
    with on_loopback(engine, queue=64) as port, record_errors() as records:

        async def run():
            waits = await load(port, 12, 12, seconds=2, think_sec=0.2)
            return waits, await idle(port, engine.slots)

        waits, state = asyncio.run(run())
    assert not waits.failed and len(waits.whole) > 24
    assert waits.asked_by_others > 2 * len(BAD)
    assert state == {'status': 'ok', 'free_slots': 4, 'waiting': 0}
    assert not records, [record.getMessage() for record in records]


def test_address_errors_are_one_line():
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ValueError, match=f'cannot listen on --port={port} of 127.0.0.1: .* in use'
        ):
            bind_socket('127.0.0.1', port)
    with pytest.raises(ValueError, match=r'--host=no\.such is not an address'):
        bind_socket('no.such', 0)


@pytest.mark.parametrize('host', ['127.0.0.1', '::1'])
def test_small_responses_are_sent_at_once(host, monkeypatch):
    """asyncio sets TCP_NODELAY if the socket has the protocol number of TCP."""
    try:
        sock = bind_socket(host, 0)
    except ValueError:
        pytest.skip('this machine has no IPv6')
    values = queue.SimpleQueue()

    class Recorded(connections.Connection):
        def connection_made(self, transport):
            super().connection_made(transport)
            accepted = transport.get_extra_info('socket')
            values.put(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(connections, 'Connection', Recorded)
    with (
        serving(service(Letters()), sock=sock),
        socket.create_connection(sock.getsockname()[:2], timeout=PATIENCE_SEC),
    ):
        assert values.get(timeout=PATIENCE_SEC) != 0


def test_is_loopback():
    assert all(map(is_loopback, ('127.0.0.1', '127.9.9.9', '::1', 'localhost')))
    assert not any(map(is_loopback, ('0.0.0.0', '::', '10.0.0.1', 'example')))
