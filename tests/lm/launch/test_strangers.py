"""Strangers, who do not know the secret, at a port of a job: with stub children, without JAX."""

import contextlib
import os
import random
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

from lm.launch import link as links
from lm.launch.exit_status import BAD_INPUT, DONE, RESUME, JobEnded
from lm.launch.link import Link, LinkClosed, Links, local_addresses, parse_message, sanitize
from lm.launch.member import Member
from lm.launch.secret import Secret, make_certificate, mtls_env, seal, unseal
from lm.launch.this_host import Host
from tests import strangers
from tests.lm.launch.test_supervisor import (  # noqa: F401
    ENDS,
    assert_ended,
    connect,
    job,
    let_end,
    ports,
    wait_begun,
    wait_for_end,
)

THE = 'the secret of this job'
HOST = Host('h0:1234', 2, 0, 1235)


@pytest.fixture
def pair():
    """pair(theirs) returns (Links of a coordinator, link of a member that knows `theirs`)."""
    opened_here = []

    def make(theirs=THE):
        server = socket.create_server(('127.0.0.1', 0))
        coordinator = Links(THE, [server])
        member = Link(socket.create_connection(server.getsockname()), theirs, accepted=False)
        opened_here.append((coordinator, member))
        return coordinator, member

    yield make
    for coordinator, member in opened_here:
        coordinator.close()
        member.socket.close()


def greet(coordinator, member):
    """Reads until both trust each other, or the member's link is closed."""
    coordinator.wait(1.0)
    member.read()
    coordinator.wait(1.0)
    member.read()


def test_both_ends_prove_the_secret(pair):
    coordinator, member = pair()
    greet(coordinator, member)
    assert member.is_trusted and coordinator.open_links[0].is_trusted and coordinator.strangers == 0
    member.send(ended=3)
    assert coordinator.wait(1.0) == [(coordinator.open_links[0], {'ended': 3})]


def test_wrong_secret_is_closed_and_counted(pair):
    coordinator, member = pair(theirs=THE + '!')
    with pytest.raises(LinkClosed):
        greet(coordinator, member)
    assert not member.is_trusted and coordinator.strangers == 1 and not coordinator.open_links


def test_member_trusts_no_other_coordinator():
    """The other end receives a nonce, answers, and gets a proof that only the secret gives."""
    near_end, far_end = socket.socketpair()
    near_end.close()
    with socket.create_server(('127.0.0.1', 0)) as server:
        member = Link(socket.create_connection(server.getsockname()), THE, accepted=False)
        false, _ = server.accept()
        false.sendall(b'ab' * 16 + b'\n')
        assert member.read() == [] and not member.is_trusted
        answer = false.recv(999).split()[1]
        false.sendall(answer + b'\n{"ended": 0}\n')  # the member's own proof, sent back
        with pytest.raises(LinkClosed):
            member.read()
        assert not member.is_trusted
        false.close()
        member.socket.close()
    far_end.close()


def test_proof_is_valid_for_one_connection(pair):
    coordinator, member = pair()
    greet(coordinator, member)
    greeting = f'{member._nonce} {links.proof(THE, "member", member._peer_nonce, member._nonce)}\n'
    with connect(coordinator._servers[0].getsockname()[1]) as replayed:
        coordinator.wait(1.0)
        replayed.sendall(greeting.encode())
        coordinator.wait(1.0)
        assert coordinator.strangers == 1 and len(coordinator.open_links) == 1


def test_strangers_are_limited_in_time_and_number(pair, monkeypatch):
    coordinator, member = pair()
    greet(coordinator, member)
    monkeypatch.setattr(links, 'MAX_STRANGERS', 3)
    port = coordinator._servers[0].getsockname()[1]
    idle = [connect(port) for _ in range(7)]
    for _ in range(7):
        coordinator.wait(0.1)
    assert len(coordinator.open_links) == 1 + 3 and coordinator.strangers == 4
    monkeypatch.setattr(links, 'GREET_SEC', -1.0)
    coordinator.wait(0.0)
    assert (
        coordinator.open_links
        == [connection for connection in coordinator.open_links if connection.is_trusted]
        and coordinator.strangers == 7
    )
    for link in idle:
        link.close()


@pytest.mark.parametrize('kind', strangers.KINDS)
def test_no_stranger_message_is_accepted(pair, kind):
    coordinator, member = pair()
    greet(coordinator, member)
    with connect(coordinator._servers[0].getsockname()[1]) as stranger:
        coordinator.wait(1.0)
        sender = threading.Thread(target=send_all, args=(stranger, strangers.KINDS[kind]))
        sender.start()
        while sender.is_alive():
            assert not [message for _, message in coordinator.wait(0.01) if message is not None]
        assert not [message for _, message in coordinator.wait(0.01) if message is not None]
        assert [link.is_trusted for link in coordinator.open_links if link.is_trusted] == [True]


def send_all(connection, payload):
    with contextlib.suppress(OSError):
        connection.sendall(payload)


@pytest.mark.parametrize(
    'line',
    [
        *(b'[]', b'null', b'{"ended": "x"}', b'{"ended": true}', b'{"hello": []}', b'{"other": 1}'),
        *(b'{"ended": 256}', b'{"ended": -999}', b'{"ended": 1' + b'0' * 20 + b'}'),
        *(b'{"hello": {"a": ' + b'[' * 100_000, b'{"ended": 1', b'\xff'),
    ],
)
def test_message_types_are_checked(line):
    with pytest.raises((ValueError, RecursionError)):
        parse_message(line)


@contextlib.contextmanager
def coordinator_that_sends(**message):
    """Yields the port of a process 0 that greets all who know the secret, and answers a hello."""
    server, has_ended = socket.create_server(('127.0.0.1', 0)), threading.Event()
    links_of_members = Links(THE, [server])

    def answer():
        while not has_ended.is_set():
            for link, received in links_of_members.wait(0.01):
                if received:
                    link.send(**message)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        has_ended.set()
        thread.join()
        links_of_members.close()


@pytest.mark.parametrize(
    'message',
    [
        {'start': {'0': 'a'}},
        {'start': {'first': 'a'}, 'job': 'j', 'certificate': seal(THE, '')},
        {'start': {'0': 'a'}, 'job': 'j', 'certificate': 'not sealed'},
        {'start': {'0': 'a'}, 'job': 'j', 'certificate': seal('another secret', '')},
    ],
    ids=['missing', 'name', 'text', 'secret'],
)
def test_unreadable_start_ends_member(monkeypatch, message):
    monkeypatch.setenv('EVENKEEL_JOB_SECRET', THE)
    with coordinator_that_sends(**message) as port, pytest.raises(JobEnded) as ended:
        Member(Host('127.0.0.1:1', 2, 1, port, timeout=5.0), ['--config=c'], [])
    assert ended.value.status == BAD_INPUT and 'Run the same version' in ended.value.text


def test_refusal_without_reason_ends_member(monkeypatch):
    monkeypatch.setenv('EVENKEEL_JOB_SECRET', THE)
    with coordinator_that_sends(ended=BAD_INPUT) as port, pytest.raises(JobEnded) as ended:
        Member(Host('127.0.0.1:1', 2, 1, port, timeout=5.0), ['--config=c'], [])
    assert (ended.value.status, ended.value.text) == (BAD_INPUT, '')


@pytest.mark.parametrize('number', [2, 77, -1])
def test_out_of_range_process_id_is_refused(job, number):  # noqa: F811
    first = job(0)
    second = job(number)
    assert_ended((first, second), BAD_INPUT, f'host {number} (', 'must be from 0 to')


def test_host_with_wrong_secret_times_out(job):  # noqa: F811
    """A silent peer times out too: neither delays a host beyond --host_timeout."""
    first = job(0)
    stranger = job(1, secret='this is another one', timeout=1.0)
    assert_ended([stranger], RESUME, 'or the job secret differs')
    assert first.poll() is None
    wait_begun(job(1), first)


def test_mute_peer_delays_host_within_limits(job, ports):  # noqa: F811
    with socket.create_server(('127.0.0.1', ports[1])):
        assert_ended([job(1, timeout=1.0)], RESUME, 'within 1 s (--host_timeout)')


def test_taken_jax_port_is_reported(job, ports):  # noqa: F811
    with socket.create_server(('127.0.0.1', ports[0])):
        status, log = wait_for_end(job(0))
    assert status == BAD_INPUT and f'port {ports[0]} of --coordinator' in log
    assert 'Traceback' not in log


@pytest.mark.parametrize(
    'count', [200, pytest.param(10_000, marks=pytest.mark.full(reason='20 s of connections'))]
)
def test_port_scan_disturbs_no_job(job, ports, count):  # noqa: F811
    """Scans while hosts gather and while they train; the log has one line, the count."""
    child = ENDS.format(then='sys.exit()')
    first = job(0, child)
    connect(ports[1]).close()
    address, rng = ('127.0.0.1', ports[1]), random.Random(0)
    accepted = 1 + strangers.send(address, strangers.kinds(count // 2), rng)
    second = job(1, child)
    wait_begun(first, second)
    accepted += strangers.send(address, strangers.kinds(count // 2), rng)
    assert first.poll() is None and second.poll() is None
    let_end(first, second)
    assert wait_for_end(second) == (DONE, '')
    status, log = wait_for_end(first)
    assert status == DONE and accepted > count * 0.9
    match = re.fullmatch(
        r'host 0: connections closed that did not belong to this job: (\d+)\n', log
    )
    assert match and accepted - 70 <= int(match[1]) <= accepted, (log, accepted)


def test_secret_is_a_file_written_by_process_0(tmp_path):
    arguments = ['--config=c', f'--workdir={tmp_path / "run"}']
    first, second = Secret(HOST, arguments, {}), Secret(HOST, arguments, {})
    assert second.read() == ''
    text = first.write()
    assert second.read() == text and len(text) == 32
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert Secret(HOST, arguments, {}).write() != text  # the next job has another
    first.remove()  # which it leaves
    assert second.read()
    assert list((tmp_path / 'run').iterdir()) == [first.path]
    last = Secret(HOST, arguments, {})
    last.write()
    last.remove()
    assert not (tmp_path / 'run').exists()  # nothing else was in it


def test_pipe_as_secret_file_does_not_block(tmp_path):
    secret = Secret(HOST, [f'--workdir={tmp_path}'], {})
    os.mkfifo(secret.path)
    assert secret.read() == ''


def test_configured_secret_is_used(tmp_path, monkeypatch):
    file = tmp_path / 'secret'
    file.write_text(f'  {THE}\n')
    by_file = Host('h0:1', 2, 0, 2, secret_file=str(file))
    bucket = ['--workdir=gs://bucket/run']
    assert Secret(by_file, bucket, {}).write() == THE
    assert Secret(HOST, bucket, {'EVENKEEL_JOB_SECRET': THE}).read() == THE
    file.write_text('short')
    with pytest.raises(JobEnded, match=r'at least 16 characters; --job_secret_file has 5'):
        Secret(by_file, bucket, {})
    with pytest.raises(
        JobEnded, match=r'without a shared disk need a job secret, and gs://bucket/run'
    ):
        Secret(HOST, bucket, {})


def test_unseal_requires_the_secret():
    text = 'a key\n' * 100
    hidden = seal(THE, text)
    assert unseal(THE, hidden) == text and 'key' not in bytes.fromhex(hidden.split()[1]).decode(
        'latin-1'
    )
    assert seal(THE, text) != hidden
    for wrong_secret in (THE + '!', ''):
        with pytest.raises(ValueError):
            unseal(wrong_secret, hidden)
    nonce, sealed, tag = hidden.split()
    with pytest.raises(ValueError):
        unseal(THE, f'{nonce} {int(sealed[:2], 16) ^ 1:02x}{sealed[2:]} {tag}')


def test_child_receives_certificate_for_jax():
    pem = make_certificate()
    with mtls_env(pem) as env:
        assert set(env) == {
            f'JAX_MTLS_{name}' for name in ('CERT_FILE', 'KEY_FILE', 'CA_FILE', 'PEER_URI_PREFIX')
        }
        file = Path(env['JAX_MTLS_KEY_FILE'])
        assert 'PRIVATE KEY' in file.read_text() and 'CERTIFICATE' in file.read_text()
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not file.exists()
    with mtls_env('') as env:
        assert env == {}


@pytest.mark.parametrize(
    ('name', 'resolved', 'expected'),
    [
        ('node0', ['127.0.0.1'], []),  # Debian's 127.0.1.1: others resolve it to another address
        ('localhost', ['127.0.0.1'], ['127.0.0.1']),
        ('127.0.0.1', ['127.0.0.1'], ['127.0.0.1']),
        ('gateway', ['192.0.2.1'], []),  # of no interface of this machine
        ('both', ['192.0.2.1', '127.0.0.1'], ['127.0.0.1']),
    ],
)
def test_ports_listen_at_local_addresses(monkeypatch, name, resolved, expected):
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, '', (address, 0)) for address in resolved]
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: infos)
    assert local_addresses(name) == expected


def test_sanitize_host_names():
    assert sanitize('\x1b[2Jnode\n1', 255) == '?[2Jnode?1' and sanitize('ß', 1) == 'ß'
