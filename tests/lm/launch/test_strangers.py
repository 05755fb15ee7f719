"""A port of a job under strangers, who do not know its secret: with stub children, without JAX."""

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
from lm.launch.secret import Secret, make_certificate, mtls_env, seal, unseal
from lm.launch.this_host import Host
from tests import strangers
from tests.lm.launch.test_supervisor import (  # noqa: F401
    ENDS,
    assert_ended,
    connected,
    ended,
    job,
    let_end,
    ports,
    wait_begun,
)

THE = 'the secret of this job'
HOST = Host('h0:1234', 2, 0, 1235)


@pytest.fixture
def pair():
    """pair(theirs) -> (Links of a coordinator, the link of a member that knows `theirs`)."""
    opened_here = []

    def make(theirs=THE):
        server = socket.create_server(('127.0.0.1', 0))
        own = Links(THE, [server])
        member = Link(socket.create_connection(server.getsockname()), theirs, accepted=False)
        opened_here.append((own, member))
        return own, member

    yield make
    for own, member in opened_here:
        own.close()
        member.socket.close()


def greet(own, member):
    """Until both trust each other, or the member's link is gone."""
    own.wait(1.0)
    member.read()
    own.wait(1.0)
    member.read()


def test_both_ends_prove_the_secret(pair):
    own, member = pair()
    greet(own, member)
    assert member.is_trusted and own.open_links[0].is_trusted and own.strangers == 0
    member.send(ended=3)
    assert own.wait(1.0) == [(own.open_links[0], {'ended': 3})]


def test_another_secret_is_closed_and_counted(pair):
    own, member = pair(theirs=THE + '!')
    with pytest.raises(LinkClosed):
        greet(own, member)
    assert not member.is_trusted and own.strangers == 1 and not own.open_links


def test_a_member_trusts_no_other_coordinator():
    """It hears a nonce, answers, and gets a proof that only the secret gives."""
    one, other = socket.socketpair()
    one.close()
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
    other.close()


def test_a_proof_of_one_connection_is_none_of_another(pair):
    own, member = pair()
    greet(own, member)
    said = f'{member._nonce} {links.proof(THE, "member", member._peer_nonce, member._nonce)}\n'
    with connected(own._servers[0].getsockname()[1]) as replayed:
        own.wait(1.0)
        replayed.sendall(said.encode())
        own.wait(1.0)
        assert own.strangers == 1 and len(own.open_links) == 1


def test_strangers_have_a_time_and_a_number(pair, monkeypatch):
    own, member = pair()
    greet(own, member)
    monkeypatch.setattr(links, 'MAX_STRANGERS', 3)
    port = own._servers[0].getsockname()[1]
    idle = [connected(port) for _ in range(7)]
    for _ in range(7):
        own.wait(0.1)
    assert len(own.open_links) == 1 + 3 and own.strangers == 4
    monkeypatch.setattr(links, 'GREET_SEC', -1.0)
    own.wait(0.0)
    assert (
        own.open_links == [one for one in own.open_links if one.is_trusted] and own.strangers == 7
    )
    for one in idle:
        one.close()


@pytest.mark.parametrize('kind', strangers.KINDS)
def test_no_kind_of_message_is_taken_for_a_host(pair, kind):
    own, member = pair()
    greet(own, member)
    with connected(own._servers[0].getsockname()[1]) as stranger:
        own.wait(1.0)
        sender = threading.Thread(target=send_all, args=(stranger, strangers.KINDS[kind]))
        sender.start()
        while sender.is_alive():
            assert not [message for _, message in own.wait(0.01) if message is not None]
        assert not [message for _, message in own.wait(0.01) if message is not None]
        assert [one.is_trusted for one in own.open_links if one.is_trusted] == [True]


def send_all(connection, data):
    with contextlib.suppress(OSError):
        connection.sendall(data)


@pytest.mark.parametrize(
    'line',
    [
        *(b'[]', b'null', b'{"ended": "x"}', b'{"ended": true}', b'{"hello": []}', b'{"other": 1}'),
        *(b'{"hello": {"a": ' + b'[' * 100_000, b'{"ended": 1', b'\xff'),
    ],
)
def test_what_a_host_says_has_its_types(line):
    with pytest.raises((ValueError, RecursionError)):
        parse_message(line)


@pytest.mark.parametrize('number', [2, 77, -1])
def test_an_id_beyond_the_processes_is_refused_on_all(job, number):  # noqa: F811
    first = job(0)
    other = job(number)
    assert_ended((first, other), BAD_INPUT, f'host {number} (', 'has no id from')


def test_who_has_another_secret_is_told_in_time(job):  # noqa: F811
    """A peer that says nothing, too: neither holds a host beyond --host_timeout."""
    first = job(0)
    stranger = job(1, secret='this is another one', timeout=1.0)
    assert_ended([stranger], RESUME, 'or has another secret of the job')
    assert first.poll() is None
    wait_begun(job(1), first)


def test_a_mute_peer_holds_a_host_no_longer_than_it_may(job, ports):  # noqa: F811
    with socket.create_server(('127.0.0.1', ports[1])):
        assert_ended([job(1, timeout=1.0)], RESUME, 'within 1 s (--host_timeout)')


def test_the_port_of_jax_is_taken(job, ports):  # noqa: F811
    with socket.create_server(('127.0.0.1', ports[0])):
        status, said = ended(job(0))
    assert status == BAD_INPUT and f'port {ports[0]} of this host, that of --coordinator' in said
    assert 'Traceback' not in said


@pytest.mark.parametrize(
    'count', [200, pytest.param(10_000, marks=pytest.mark.full(reason='20 s of connections'))]
)
def test_a_scan_disturbs_no_job(job, ports, count):  # noqa: F811
    """While hosts gather and while they train; the log has one line, the count."""
    child = ENDS.format(then='sys.exit()')
    first = job(0, child)
    connected(ports[1]).close()
    address, rng = ('127.0.0.1', ports[1]), random.Random(0)
    accepted = 1 + strangers.send(address, strangers.kinds(count // 2), rng)
    second = job(1, child)
    wait_begun(first, second)
    accepted += strangers.send(address, strangers.kinds(count // 2), rng)
    assert first.poll() is None and second.poll() is None
    let_end(first, second)
    assert ended(second) == (DONE, '')
    status, said = ended(first)
    assert status == DONE and accepted > count * 0.9
    found = re.fullmatch(r'host 0: connections of strangers to this job, closed: (\d+)\n', said)
    assert found and accepted - 70 <= int(found[1]) <= accepted, (said, accepted)


def test_the_secret_is_a_file_of_process_0_in_the_workdir(tmp_path):
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


def test_a_pipe_in_place_of_the_secret_holds_nobody_up(tmp_path):
    one = Secret(HOST, [f'--workdir={tmp_path}'], {})
    os.mkfifo(one.path)
    assert one.read() == ''


def test_the_secret_that_is_given(tmp_path, monkeypatch):
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
        JobEnded, match=r'share no disk need a secret of the job, and gs://bucket/run'
    ):
        Secret(HOST, bucket, {})


def test_what_is_sealed_opens_with_the_secret_alone():
    text = 'a key\n' * 100
    hidden = seal(THE, text)
    assert unseal(THE, hidden) == text and 'key' not in bytes.fromhex(hidden.split()[1]).decode(
        'latin-1'
    )
    assert seal(THE, text) != hidden
    for other in (THE + '!', ''):
        with pytest.raises(ValueError):
            unseal(other, hidden)
    nonce, data, tag = hidden.split()
    with pytest.raises(ValueError):
        unseal(THE, f'{nonce} {int(data[:2], 16) ^ 1:02x}{data[2:]} {tag}')


def test_the_certificate_reaches_the_child_as_jax_reads_it():
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
    ('name', 'resolved', 'found'),
    [
        ('node0', ['127.0.0.1'], []),  # Debian's 127.0.1.1: others resolve it to another address
        ('localhost', ['127.0.0.1'], ['127.0.0.1']),
        ('127.0.0.1', ['127.0.0.1'], ['127.0.0.1']),
        ('gateway', ['192.0.2.1'], []),  # of no interface of this machine
        ('both', ['192.0.2.1', '127.0.0.1'], ['127.0.0.1']),
    ],
)
def test_where_the_ports_listen(monkeypatch, name, resolved, found):
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, '', (one, 0)) for one in resolved]
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: infos)
    assert local_addresses(name) == found


def test_names_move_no_cursor():
    assert sanitize('\x1b[2Jnode\n1', 255) == '?[2Jnode?1' and sanitize('ß', 1) == 'ß'
