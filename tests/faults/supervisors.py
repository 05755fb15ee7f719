"""Supervisors of a job of two hosts, with a message from the other host, which knows the secret."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm.launch import coordinator as coordinators
from lm.launch.coordinator import Coordinator
from lm.launch.exit_status import JobEnded
from lm.launch.link import LinkClosed, Links, Supervisor
from lm.launch.member import Member
from lm.launch.this_host import Host

SECRET = 'the secret of this job'
PATIENCE_SEC = 0.01  # for hosts to join: all messages have arrived before
MESSAGES = (
    b'{"hello": {"process_id": 1, "num_processes": 2, "name": "b", "arguments": ["--x"]}}\n'
    b'{"ping": true}\n{"ended": 0}\n',
    b'{"hello": {"process_id": 1, "num_processes": 2, "name": "b", "arguments": []}}\n',
    b'{"start": {"0": "a", "1": "b"}, "job": "x", "certificate": ""}\n{"ended": 0}\n',
    b'{"busy": true}\n{"ended": -15, "text": "SIGTERM"}\n',
)


@contextlib.contextmanager
def open_links(content: bytes) -> Iterator[Links]:
    """Yields links that hold one link. Its other end knows the secret and has sent the content."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        far_end = socket.create_connection(server.getsockname(), timeout=1.0)
        near_end, _ = server.accept()
    links = Links(SECRET)
    with far_end, contextlib.closing(links):
        link = links.add(near_end)
        link.is_trusted = True
        with contextlib.suppress(OSError):  # more than fits a buffer
            far_end.sendall(content[: 1 << 16])
        far_end.shutdown(socket.SHUT_WR)
        yield links


def make_supervisor(kind: type[Supervisor], process_id: int, folder: Path) -> Supervisor:
    """Returns a supervisor that has no links yet."""
    supervisor = kind.__new__(kind)
    host = Host('h0:1234', 2, process_id, 1235, PATIENCE_SEC)
    Supervisor.__init__(supervisor, host, [f'--workdir={folder}'], [])
    return supervisor


def send_to_coordinator(content: bytes, folder: Path) -> None:
    """Lets process 0 read the content while it waits for hosts, and after the job has begun."""
    coordinator = make_supervisor(Coordinator, 0, folder)
    coordinator.ends, coordinator._members, coordinator._has_begun = {}, {}, False
    coordinator._secret = SECRET
    with pytest.MonkeyPatch.context() as patch, open_links(content) as coordinator.links:
        patch.setattr(coordinators, 'make_certificate', lambda: '')
        patch.setattr(coordinators, 'RETRY_SEC', PATIENCE_SEC / 2)
        with contextlib.suppress(JobEnded, LinkClosed):
            coordinator._gather_members()
            coordinator.step(0.0)


def send_to_member(content: bytes, folder: Path) -> None:
    """Lets process 1 read the content as the answer to its greeting, and while it trains."""
    member = make_supervisor(Member, 1, folder)
    member._exit_code, member._is_alone = None, False
    with open_links(content) as member.links:
        (member._link,) = member.links.open_links
        with contextlib.suppress(JobEnded, LinkClosed):
            if member._handshake(SECRET):
                member.step(0.0)
