"""Property: over real connections, no client holds what others need, whatever it does or sends."""

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
from tests.eval.serve.test_app import unending


@contextlib.contextmanager
def talking(port: int):
    with socket.create_connection(('127.0.0.1', port), timeout=PATIENCE_SEC) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    found = b''
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            found += part
    return found


@pytest.fixture
def endless():
    engine = Letters(slots=2, step_sec=0.002, endless=True)
    engine.admit = unending(engine)
    return engine


def streamed(**more) -> bytes:
    return request(json.dumps({'prompt': 'a', 'stream': True} | more).encode())


def test_a_stream_comes_piece_by_piece():
    """The first piece is there long before the last one could be."""
    engine = Letters(slots=1, step_sec=0.05, endless=True)
    with on_loopback(engine) as port, talking(port) as sock:
        start = time.monotonic()
        sock.sendall(streamed(max_tokens=40))
        first = b''
        while b'data:' not in first:
            first += sock.recv(1000)
        assert time.monotonic() - start < 40 * 0.05 and engine.n_free == 0


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_closes_its_connection_frees_its_slots(endless, stream):
    with on_loopback(endless) as port:
        with talking(port) as sock:
            sock.sendall(streamed(stream=stream, n=2))
            wait_until(lambda: endless.n_free == 0, 'both texts have slots')
        wait_until(lambda: endless.n_free == 2, 'the slots are free')


def test_a_client_that_reads_nothing_is_cut_off(endless):
    """Pieces fill the buffers of both machines, then of the server, which gives it up."""
    endless.at_once, endless.step_sec = 50, 0
    with on_loopback(endless, send_buffer=4096) as port, talking(port) as sock:
        sock.sendall(streamed(logprobs=5))
        wait_until(lambda: endless.admitted, 'it has a slot')
        wait_until(lambda: endless.n_free == 2, 'it has lost it')
        assert b'[DONE]' not in read_all(sock)


def test_garbage_behind_a_request_does_not_keep_the_slot(endless):
    with on_loopback(endless) as port:
        with talking(port) as sock:
            sock.sendall(streamed() + b'\x00garbage\r\n\r\n')
            wait_until(lambda: endless.n_free == 1, 'it has a slot')
        wait_until(lambda: endless.n_free == 2, 'the slot is free')


@pytest.mark.parametrize('sent', [b'', b'POST /v1/completions HT', request(b'{"prompt": "a"}')])
def test_a_connection_in_which_nothing_moves_is_cut(sent, monkeypatch):
    """Without a request, within one, and behind an answer."""
    monkeypatch.setattr(connections, 'CHECK_SEC', 0.1)
    with on_loopback(Letters()) as port, talking(port) as sock:
        sock.sendall(sent)
        found = read_all(sock)  # ends
    assert (b'200 OK' in found) == sent.endswith(b'}')


def test_more_connections_than_may_be_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(connections, 'MAX_CONNECTIONS', 2)
    with on_loopback(Letters()) as port, talking(port) as one, talking(port) as two:
        one.sendall(request(b'{"prompt": "x"}'))
        assert b'200 OK' in one.recv(1000)
        two.sendall(request(b'{"prompt": "x"}'))
        assert b'200 OK' in two.recv(1000)
        with talking(port) as third:
            assert read_all(third) == b''


@pytest.mark.parametrize('i', range(len(NONSENSE)))
def test_nonsense_is_answered_as_a_mistake(i, one_server):
    """And leaves a server that serves, with no word in its log."""
    port, engine, records = one_server
    with talking(port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(NONSENSE[i])
        found = read_all(sock)
    has_text = b'"max_tokens": 2' in NONSENSE[i]
    is_cut = NONSENSE[i].startswith(b'GET /a')  # closed with bytes unread, which resets it
    assert found.startswith(b'HTTP/1.1 2' if has_text else b'HTTP/1.1 4') or (is_cut and not found)
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE_SEC)
    connection.request('GET', '/health')
    assert connection.getresponse().status == 200
    connection.close()
    wait_until(lambda: engine.n_free == engine.slots, 'all slots are free')
    assert not records


def test_garbage_behind_an_early_answer_cuts_the_connection(one_server):
    """In the body of a request that was answered before it came: no answer is left for it."""
    port, _, records = one_server
    with talking(port) as sock:
        sock.sendall(b'POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n')
        assert sock.recv(1000).startswith(b'HTTP/1.1 404')
        sock.sendall(b'zz\r\n')
        assert b'HTTP' not in read_all(sock)
    assert not records, [record.getMessage() for record in records]


@pytest.fixture(scope='module')
def one_server():
    """(port, engine, what it has logged) of a server for all nonsense."""
    engine = Letters(slots=2)
    with pytest.MonkeyPatch.context() as patch, logged() as records:
        patch.setattr(connections, 'CHECK_SEC', 0.1)
        with on_loopback(engine) as port:
            yield port, engine, records


@contextlib.contextmanager
def logged():
    """Lists what uvicorn and asyncio log as errors."""
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


def test_good_clients_get_their_texts_beside_bad_ones():
    """The benchmark in short: all of them at once, and an idle server at the end."""
    engine = Letters(slots=4, step_sec=0.002)
    engine.capacity = 256
    with on_loopback(engine, queue=64) as port, logged() as records:

        async def run():
            waits = await load(port, 12, 12, seconds=2, think_sec=0.2)
            return waits, await idle(port, engine.slots)

        waits, state = asyncio.run(run())
    assert not waits.failed and len(waits.whole) > 24
    assert waits.asked_by_others > 2 * len(BAD)
    assert state == {'status': 'ok', 'free_slots': 4, 'waiting': 0}
    assert not records, [record.getMessage() for record in records]


def test_an_address_that_is_in_use_or_none_is_one_line():
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=f'--port={port} of 127.0.0.1 cannot be had: .* in use'
        ):
            bind_socket('127.0.0.1', port)
    with pytest.raises(ValueError, match=r'--host=no\.such is no address'):
        bind_socket('no.such', 0)


@pytest.mark.parametrize('host', ['127.0.0.1', '::1'])
def test_a_connection_sends_small_answers_at_once(host, monkeypatch):
    """Its TCP_NODELAY is set, by asyncio where the socket has the protocol of TCP."""
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


def test_loopback_is_known_by_its_address():
    assert all(map(is_loopback, ('127.0.0.1', '127.9.9.9', '::1', 'localhost')))
    assert not any(map(is_loopback, ('0.0.0.0', '::', '10.0.0.1', 'example')))
