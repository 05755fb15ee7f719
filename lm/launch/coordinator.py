"""The supervisor of process 0, which decides how the job ends. Standard library only."""

import math
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import BAD_INPUT, DIVERGED, DONE, RESUME, SIGNALLED, JobEnded, job_status
from lm.launch.link import (
    COLLECT_SEC,
    MAX_NAME,
    RETRY_SEC,
    SILENT_SEC,
    Link,
    LinkClosed,
    Links,
    Supervisor,
    local_addresses,
    open_server,
    sanitize,
)
from lm.launch.secret import make_certificate, seal
from lm.launch.this_host import Host

# Once one child has succeeded, its records are closed. The other children may take longer, by at
# most the time-out of JAX's shutdown, and imported libraries need time to exit.
LEAVE_SEC = 60.0
LINGER_SEC = 10.0  # how long late hosts are told why the start was refused


class Coordinator(Supervisor):
    """The supervisor of process 0. Construction returns once all hosts have joined."""

    def __init__(self, host: Host, arguments: Sequence[str], received_signals: list[int]):
        super().__init__(host, arguments, received_signals)
        self.ends: dict[int, tuple[float, int | None]] = {}  # (when, exit code; None if lost)
        self._members: dict[int, Link] = {}
        self._has_begun = False
        addresses = local_addresses(host.watch_address[0]) or ['']
        # Tries JAX's port now, since JAX would fail with a traceback once all hosts have joined.
        for address in addresses:
            _open_server(address, host.port, '--coordinator').close()
        servers = [_open_server(address, host.watch_port, '--watch_port') for address in addresses]
        self._secret = self.secret.write()
        self.links = Links(self._secret, servers)
        try:
            self._gather_members()
        except JobEnded as ended:
            self._refuse(ended)
            self.close()
            raise

    def _gather_members(self) -> None:
        """Waits for all hosts. Raises JobEnded if hosts are missing, or differ."""
        deadline = time.monotonic() + self.host.timeout
        while len(self._members) < self.host.num_processes - 1:
            self._stop_if_signalled()
            if time.monotonic() > deadline:
                present, absent = [self.host_name(0)], []
                for process_id in range(1, self.host.num_processes):
                    hosts = present if process_id in self._members else absent
                    hosts.append(self.host_name(process_id))
                raise JobEnded(
                    RESUME,
                    f'not connected within {self.host.timeout:g} s (--host_timeout): '
                    f'{", ".join(absent)}. Connected: {", ".join(present)}.',
                )
            for link, message in self.links.wait(RETRY_SEC):
                if message is None:
                    self._on_link_lost(link)
                elif 'hello' in message:
                    self._admit(link, message['hello'])
                elif 'ended' in message and link in self._members.values():
                    status = job_status(message['ended'])
                    assert link.process_id is not None  # a member has said hello
                    raise JobEnded(
                        status, f'{self.host_name(link.process_id)} left before the job began'
                    )
            self._ping()
        self._has_begun = True
        self.job, self.certificate = secrets.token_hex(8), make_certificate()
        names = {str(process_id): name for process_id, name in self.names.items()}
        for link in list(self._members.values()):
            # The links are not encrypted, and the certificate holds a private key.
            sealed_certificate = seal(self._secret, self.certificate)
            self._send(link, start=names, job=self.job, certificate=sealed_certificate)

    def _admit(self, link: Link, hello: dict[str, Any]) -> None:
        """Makes a host that has said hello a member. Raises JobEnded if it does not fit the job."""
        match hello:
            case {
                'process_id': int(process_id),
                'num_processes': int(count),
                'name': str(name),
                'arguments': [*arguments],
            } if all(isinstance(argument, str) for argument in arguments):
                label = f'host {process_id} ({sanitize(name, MAX_NAME)})'
            case _:
                return self.links.drop(link)  # a supervisor of another version
        if count != self.host.num_processes:
            raise JobEnded(
                BAD_INPUT,
                f'{label} was started as one of {count} processes, but {self.host_name(0)} as one '
                f'of {self.host.num_processes}',
            )
        if not 0 <= process_id < count:
            raise JobEnded(BAD_INPUT, f'the id of {label} must be from 0 to {count - 1}')
        # A member whose link broke before the start is no member any more, and may come again under
        # its id.
        if process_id in self.names and (process_id == 0 or process_id in self._members):
            pair = f'{self.names[process_id]} and {label}'
            raise JobEnded(BAD_INPUT, f'two processes have the id {process_id}: {pair}')
        if arguments != self.arguments:
            own_arguments, their_arguments = (
                ' '.join(argument for argument in first if argument not in second)
                or 'the same arguments in another order'
                for first, second in [(self.arguments, arguments), (arguments, self.arguments)]
            )
            raise JobEnded(
                BAD_INPUT,
                f'the command must be the same on all hosts: {self.host_name(0)} has '
                f'{own_arguments}, {label} has {their_arguments}',
            )
        link.process_id = process_id
        self.names[process_id], self._members[process_id] = label, link

    def _refuse(self, ended: JobEnded) -> None:
        """Sends the reason to all connected hosts and, after bad input, to hosts that connect
        later.
        """
        informed = [link for link in self.links.open_links if link.is_trusted]
        for link in informed:
            self._send(link, ended=ended.status, text=ended.text)
        deadline = time.monotonic() + (LINGER_SEC if ended.status == BAD_INPUT else 0)
        while len(informed) < self.host.num_processes - 1 and time.monotonic() < deadline:
            for link, message in self.links.wait(RETRY_SEC):
                if message and 'hello' in message and link not in informed:
                    self._send(link, ended=ended.status, text=ended.text)
                    informed.append(link)

    def on_child_exit(self, code: int) -> None:
        """Records the exit code of this host's child."""
        self.ends[0] = time.monotonic(), code

    def step(self, seconds: float) -> None:
        """Listens for `seconds`, then decides. Raises JobEnded when the job is over."""
        for link, message in self.links.wait(seconds):
            if link.process_id is None:
                if message and 'hello' in message:  # from a job that is to follow this one
                    self._send(link, busy=True)
            elif message is None:
                self._on_link_lost(link)
            elif 'ended' in message:
                self.ends.setdefault(link.process_id, (time.monotonic(), message['ended']))
        for link in list(self.links.open_links):
            if time.monotonic() - link.heard_at > SILENT_SEC:
                self.links.drop(link)
                self._on_link_lost(link)
        self._ping()
        self._decide_end()

    def _on_link_lost(self, link: Link) -> None:
        """Records a lost host, unless the job has not begun: it may then come back."""
        if not self._has_begun:  # it may come back
            self._members.pop(link.process_id, None)
        elif link.process_id is not None:
            if self.is_independent and link.process_id not in self.ends:
                self.say(
                    f'{self.host_name(link.process_id)} was lost; the other hosts train their cells'
                )
            # A member reports its end before it closes the link, and this report stays.
            self.ends.setdefault(link.process_id, (time.monotonic(), None))

    def _decide_end(self) -> None:
        """Raises JobEnded if the job is over, after informing the others."""
        all_ended = len(self.ends) == self.host.num_processes
        if not self.ends or (not all_ended and time.monotonic() < self._collect_deadline()):
            return
        codes = [code for _, code in self.ends.values()]
        if self.is_independent:
            status, effect = job_status(*codes), 'train the remaining cells'
            ends = sorted((i, code) for i, (_, code) in self.ends.items() if code != DONE)
            reason = '; '.join(f'{self.host_name(i)} {describe_exit(code)}' for i, code in ends)
            if not all_ended:  # the others go on without this host
                raise JobEnded(status, reason)
        else:
            # The first of several errors counts: the others may follow from it.
            first_id = min(self.ends, key=lambda i: blame_rank(i, *self.ends[i]))
            code = self.ends[first_id][1]
            status, effect = job_status(code), 'resume'
            is_plain = status not in (BAD_INPUT, RESUME) and all_ended and len(set(codes)) == 1
            reason = '' if is_plain else f'{self.host_name(first_id)} {describe_exit(code)}'
        text = f'{reason}; all hosts end with status {status}' if reason else ''
        if status == RESUME:
            text += f'. Run the same command to {effect}.'
        for link in list(self._members.values()):
            self._send(link, ended=status, text=text)
        raise JobEnded(status, text)

    def _collect_deadline(self) -> float:
        """Returns when this host stops waiting for other children to end, by `time.monotonic`."""
        if self.is_independent:
            return (
                self.ends[0][0] + COLLECT_SEC
                if 0 in self.ends and self.received_signals
                else math.inf
            )
        # An error ends the others soon; an end by intent leaves them time to finish.
        waits = {DONE: LEAVE_SEC, DIVERGED: LEAVE_SEC}
        return min(when + waits.get(code, COLLECT_SEC) for when, code in self.ends.values())

    def close(self) -> None:
        """Closes all links and removes the secret."""
        super().close()
        self.secret.remove()
        if self.links.strangers:
            self.say(f'connections closed that did not belong to this job: {self.links.strangers}')

    def _ping(self) -> None:
        """Sends a sign of life to all members, if one is due."""
        if self._is_ping_due():
            for link in list(self._members.values()):
                self._send(link, ping=True)

    def _send(self, link: Link, **message: Any) -> None:
        """Sends a message to a member."""
        try:
            link.send(**message)
        except LinkClosed:
            self.links.drop(link)
            self._on_link_lost(link)


def _open_server(address: str, port: int, flag: str) -> socket.socket:
    """Returns a listening socket. Raises JobEnded if the port is taken."""
    try:
        return open_server(address, port)
    except OSError as error:
        raise JobEnded(
            BAD_INPUT,
            f'cannot listen on port {port} of {flag} ({error}). Is another process 0 running on '
            'this host? Otherwise choose other ports, the same on all hosts.',
        ) from error


def describe_exit(code: int | None) -> str:
    """Returns a child's end in words. code: its exit code; None if its host was lost."""
    if code is None:
        return 'was lost (its connection broke or was silent)'
    if code < 0:
        return f'was ended by {signal_name(-code)}'
    return f'ended with status {code}'


def signal_name(number: int) -> str:
    """Returns the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f'signal {number}'


def blame_rank(process_id: int, when: float, code: int | None) -> tuple[int, bool, float]:
    """Returns a key that sorts the end that caused the others first.

    A child never aborts on its own: the runtime aborts it when another child is lost. A child that
    has finished its work ends no other. Among errors known at the same time, process 0's is first:
    it reported LAST_WORDS_SEC before it ended (`lm.launch.distributed`), and the others may have
    failed because its service had ended.

    Args:
      process_id: id of the process.
      when: when it ended, by `time.monotonic`.
      code: its exit code; None if its host was lost.

    Returns:
      The key.
    """
    if code is None or (code < 0 and -code != signal.SIGABRT):
        return 0, False, when
    kind = {-signal.SIGABRT: 2, SIGNALLED + signal.SIGABRT: 2, DONE: 3}.get(code, 1)
    return kind, kind == 1 and process_id > 0, when
