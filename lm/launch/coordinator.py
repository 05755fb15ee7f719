"""The parent of process 0: it knows who is there, and decides how the job ends. Standard library
only.
"""

import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import (
    BAD_INPUT,
    DIVERGED,
    DONE,
    RESUME,
    Ended,
    blame,
    how,
    status_of,
    status_of_all,
)
from lm.launch.link import COLLECT_SEC, RETRY_SEC, SILENT_SEC, Link, named
from lm.launch.this_host import Host
from lm.launch.wire import Gone, Peer, Wire

# When one has ended well, its records are closed; the others' may be behind, by the time-out of
# JAX's shutdown at most, and imported libraries have their own ends.
LEAVE_SEC = 60.0
LINGER_SEC = 10.0  # in which hosts that come late to a refused start are told why


class Hub(Link):
    """The parent of process 0, once all hosts are there."""

    def __init__(self, host: Host, arguments: Sequence[str], asked: list[int]):
        super().__init__(host, arguments, asked)
        self.ends: dict[int, tuple[float, int | None]] = {}  # when and how; None: it is not there
        self._members: dict[int, Peer] = {}
        self._begun = False
        self._wire = Wire(self._listening())
        try:
            self._gather()
        except Ended as ended:
            self._refuse(ended)
            self.close()
            raise

    def _listening(self) -> socket.socket:
        port = self.host.watch_port
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            return socket.create_server(('', port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise Ended(
                BAD_INPUT,
                f'port {port} of this host cannot be listened at ({error}). Is another process 0 '
                'here? Or give --watch_port, the same on all hosts.',
            ) from error

    def _gather(self) -> None:
        """Until all are there. Raises Ended for those that do not come, or differ."""
        deadline = time.monotonic() + self.host.timeout
        while len(self._members) < self.host.num_processes - 1:
            self._stop_if_asked()
            if time.monotonic() > deadline:
                raise Ended(RESUME, self._missing())
            for peer, message in self._wire.wait(RETRY_SEC):
                if message is None:
                    self._lost(peer)
                elif 'hello' in message:
                    self._welcome(peer, message['hello'])
                elif 'ended' in message and peer in self._members.values():
                    status = status_of(message['ended'])
                    raise Ended(status, f'{self.name_of(peer.process_id)} left before it began')
            self._ping()
        self._begun = True
        self.job = secrets.token_hex(8)
        names = {str(i): name for i, name in self.names.items()}
        for peer in list(self._members.values()):
            self._tell(peer, start=names, job=self.job)

    def _welcome(self, peer: Peer, hello: Any) -> None:
        match hello:
            case {
                'process_id': int(number),
                'num_processes': int(count),
                'name': str(name),
                'arguments': list(arguments),
            }:
                who = named(number, name)
            case _:
                return self._wire.drop(peer)  # no parent of ours
        if count != self.host.num_processes:
            raise Ended(
                BAD_INPUT,
                f'{who} was started as one of {count} processes, and {self.name_of(0)} as one of '
                f'{self.host.num_processes}',
            )
        if number in self.names and (number == 0 or number in self._members):
            others = f'{self.names[number]} and {who}'
            raise Ended(BAD_INPUT, f'two processes have the id {number}: {others}')
        if arguments != self.arguments:
            raise Ended(BAD_INPUT, self._difference(who, arguments))
        peer.process_id = number
        self.names[number], self._members[number] = who, peer

    def _difference(self, who: str, theirs: list[str]) -> str:
        mine = self.arguments
        lacking = ' '.join(one for one in mine if one not in theirs) or 'the same in another order'
        more = ' '.join(one for one in theirs if one not in mine) or 'the same in another order'
        return (
            f'the command must be the same on all hosts: {self.name_of(0)} has {lacking}, '
            f'{who} has {more}'
        )

    def _missing(self) -> str:
        absent = [i for i in range(self.host.num_processes) if i and i not in self._members]
        names = ', '.join(self.name_of(i) for i in absent)
        there = ', '.join(self.name_of(i) for i in (0, *sorted(self._members)))
        return (
            f'did not come within {self.host.timeout:g} s (--host_timeout): {names}. '
            f'There: {there}.'
        )

    def _refuse(self, ended: Ended) -> None:
        """Tells all that are there; and of a mistake, for a while, those that come."""
        told: list[Peer] = list(self._wire.peers)
        for peer in told:
            self._tell(peer, ended=ended.status, text=ended.text)
        deadline = time.monotonic() + (LINGER_SEC if ended.status == BAD_INPUT else 0)
        while len(told) < self.host.num_processes - 1 and time.monotonic() < deadline:
            for peer, message in self._wire.wait(RETRY_SEC):
                if message and 'hello' in message and peer not in told:
                    self._tell(peer, ended=ended.status, text=ended.text)
                    told.append(peer)

    def child_ended(self, code: int) -> None:
        self.ends[0] = time.monotonic(), code

    def step(self, seconds: float) -> None:
        """Hears the others for so long. Raises Ended when the job has."""
        for peer, message in self._wire.wait(seconds):
            if peer.process_id is None:
                if message and 'hello' in message:  # of a job that is to follow this one
                    self._tell(peer, busy=True)
            elif message is None:
                self._lost(peer)
            elif 'ended' in message:
                self.ends.setdefault(peer.process_id, (time.monotonic(), message['ended']))
        for peer in list(self._wire.peers):
            if time.monotonic() - peer.heard > SILENT_SEC:
                self._wire.drop(peer)
                self._lost(peer)
        self._ping()
        self._decide()

    def _lost(self, peer: Peer) -> None:
        if not self._begun:  # it may come again
            self._members.pop(peer.process_id, None)
        elif peer.process_id is not None:
            if self.apart and peer.process_id not in self.ends:
                self.say(f'{self.name_of(peer.process_id)} has gone; the others train their cells')
            self.ends.setdefault(peer.process_id, (time.monotonic(), None))

    def _decide(self) -> None:
        if not self.ends:
            return
        if self.apart:
            return self._decide_apart()
        since = {
            number: LEAVE_SEC if code in (DONE, DIVERGED) else COLLECT_SEC
            for number, (_, code) in self.ends.items()
        }
        due = min(when + since[number] for number, (when, _) in self.ends.items())
        if len(self.ends) < self.host.num_processes and time.monotonic() < due:
            return
        codes = {code for _, code in self.ends.values()}
        who = min(self.ends, key=lambda number: blame(number, *self.ends[number]))
        code = self.ends[who][1]
        status, text = status_of(code), ''
        # Of several errors the first counts: the others may be that it was gone.
        bad = status in (BAD_INPUT, RESUME)
        if bad or len(self.ends) < self.host.num_processes or len(codes) > 1:
            text = f'{self.name_of(who)} {how(code)}; all hosts end with status {status}'
        if status == RESUME:
            text += ': the same command goes on'
        self._end_all(status, text)

    def _decide_apart(self) -> None:
        asked_to_leave = 0 in self.ends and self.asked
        left = time.monotonic() - self.ends[0][0] if asked_to_leave else 0.0
        if len(self.ends) < self.host.num_processes and left < COLLECT_SEC:
            return
        status = status_of_all(code for _, code in self.ends.values())
        bad = [
            f'{self.name_of(number)} {how(code)}'
            for number, (_, code) in sorted(self.ends.items())
            if code != DONE
        ]
        if len(self.ends) < self.host.num_processes:  # the others go on without this host
            raise Ended(status, '; '.join(bad))
        text = '; '.join(bad) + f'; all hosts end with status {status}' if bad else ''
        if status == RESUME:
            text += ': the same command trains the cells that are left'
        self._end_all(status, text)

    def _end_all(self, status: int, text: str) -> None:
        for peer in list(self._members.values()):
            self._tell(peer, ended=status, text=text)
        raise Ended(status, text)

    def _ping(self) -> None:
        if self._is_time_to_ping():
            for peer in list(self._members.values()):
                self._tell(peer, ping=True)

    def _tell(self, peer: Peer, **message: Any) -> None:
        try:
            peer.send(**message)
        except Gone:
            self._wire.drop(peer)
            self._lost(peer)

    def close(self) -> None:
        self._wire.close()
