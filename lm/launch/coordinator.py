"""The supervisor of process 0, which decides how the job ends. Standard library only."""

import math
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import BAD_INPUT, DIVERGED, DONE, RESUME, SIGNALLED, Ended, job_status
from lm.launch.link import (
    COLLECT_SEC,
    MOST_NAME,
    RETRY_SEC,
    SILENT_SEC,
    Gone,
    Link,
    Links,
    Supervisor,
    listening,
    own_addresses,
    plain,
)
from lm.launch.secret import certificate, sealed
from lm.launch.this_host import Host

# When one child has ended well, its records are closed. Those of the others may be behind, by the
# time-out of JAX's shutdown at most, and imported libraries take their time to end.
LEAVE_SEC = 60.0
LINGER_SEC = 10.0  # how long hosts that come late to a refused start are told the reason


class Coordinator(Supervisor):
    """The supervisor of process 0; there once all hosts are."""

    def __init__(self, host: Host, arguments: Sequence[str], asked: list[int]):
        super().__init__(host, arguments, asked)
        self.ends: dict[int, tuple[float, int | None]] = {}  # when, and exit code; None: gone
        self._members: dict[int, Link] = {}
        self._begun = False
        addresses = own_addresses(host.watch_address[0]) or ['']
        for address in addresses:  # JAX's would fail with a traceback, when all hosts are there
            _listening(address, host.port, '--coordinator').close()
        servers = [_listening(one, host.watch_port, '--watch_port') for one in addresses]
        self._secret = self.secret.write()
        self.links = Links(self._secret, servers)
        try:
            self._gather()
        except Ended as ended:
            self._refuse(ended)
            self.close()
            raise

    def _gather(self) -> None:
        """Waits for all hosts. Raises Ended where hosts do not come, or differ."""
        deadline = time.monotonic() + self.host.timeout
        while len(self._members) < self.host.num_processes - 1:
            self._stop_if_asked()
            if time.monotonic() > deadline:
                there, absent = [self.name_of(0)], []
                for i in range(1, self.host.num_processes):
                    (there if i in self._members else absent).append(self.name_of(i))
                raise Ended(
                    RESUME,
                    f'did not come within {self.host.timeout:g} s (--host_timeout): '
                    f'{", ".join(absent)}. There: {", ".join(there)}.',
                )
            for link, message in self.links.wait(RETRY_SEC):
                if message is None:
                    self._lost(link)
                elif 'hello' in message:
                    self._welcome(link, message['hello'])
                elif 'ended' in message and link in self._members.values():
                    status = job_status(message['ended'])
                    raise Ended(status, f'{self.name_of(link.process_id)} left before it began')
            self._ping()
        self._begun = True
        self.job, self.certificate = secrets.token_hex(8), certificate()
        names = {str(i): name for i, name in self.names.items()}
        for link in list(self._members.values()):
            hidden = sealed(self._secret, self.certificate)
            self._tell(link, start=names, job=self.job, certificate=hidden)

    def _welcome(self, link: Link, hello: dict[str, Any]) -> None:
        match hello:
            case {
                'process_id': int(number),
                'num_processes': int(count),
                'name': str(name),
                'arguments': [*arguments],
            } if all(isinstance(argument, str) for argument in arguments):
                who = f'host {number} ({plain(name, MOST_NAME)})'
            case _:
                return self.links.drop(link)  # a supervisor of another version
        if count != self.host.num_processes:
            raise Ended(
                BAD_INPUT,
                f'{who} was started as one of {count} processes, and {self.name_of(0)} as one of '
                f'{self.host.num_processes}',
            )
        if not 0 <= number < count:
            raise Ended(BAD_INPUT, f'{who} has no id from 0 to {count - 1}')
        if number in self.names and (number == 0 or number in self._members):
            others = f'{self.names[number]} and {who}'
            raise Ended(BAD_INPUT, f'two processes have the id {number}: {others}')
        if arguments != self.arguments:
            own, theirs = (
                ' '.join(one for one in these if one not in those) or 'the same in another order'
                for these, those in [(self.arguments, arguments), (arguments, self.arguments)]
            )
            raise Ended(
                BAD_INPUT,
                f'the command must be the same on all hosts: {self.name_of(0)} has {own}, '
                f'{who} has {theirs}',
            )
        link.process_id = number
        self.names[number], self._members[number] = who, link

    def _refuse(self, ended: Ended) -> None:
        """Tells the reason to all that are there and, after bad input, to those that still come."""
        told = [link for link in self.links.open if link.trusted]
        for link in told:
            self._tell(link, ended=ended.status, text=ended.text)
        deadline = time.monotonic() + (LINGER_SEC if ended.status == BAD_INPUT else 0)
        while len(told) < self.host.num_processes - 1 and time.monotonic() < deadline:
            for link, message in self.links.wait(RETRY_SEC):
                if message and 'hello' in message and link not in told:
                    self._tell(link, ended=ended.status, text=ended.text)
                    told.append(link)

    def child_ended(self, code: int) -> None:
        self.ends[0] = time.monotonic(), code

    def step(self, seconds: float) -> None:
        """Listens for `seconds`, then decides. Raises Ended when the job is over."""
        for link, message in self.links.wait(seconds):
            if link.process_id is None:
                if message and 'hello' in message:  # from a job that is to follow this one
                    self._tell(link, busy=True)
            elif message is None:
                self._lost(link)
            elif 'ended' in message:
                self.ends.setdefault(link.process_id, (time.monotonic(), message['ended']))
        for link in list(self.links.open):
            if time.monotonic() - link.heard > SILENT_SEC:
                self.links.drop(link)
                self._lost(link)
        self._ping()
        self._decide()

    def _lost(self, link: Link) -> None:
        if not self._begun:  # it may come back
            self._members.pop(link.process_id, None)
        elif link.process_id is not None:
            if self.apart and link.process_id not in self.ends:
                self.say(f'{self.name_of(link.process_id)} has gone; the others train their cells')
            self.ends.setdefault(link.process_id, (time.monotonic(), None))

    def _decide(self) -> None:
        """Raises Ended where the job is over, after telling the others."""
        all_ended = len(self.ends) == self.host.num_processes
        if not self.ends or (not all_ended and time.monotonic() < self._due()):
            return
        codes = [code for _, code in self.ends.values()]
        if self.apart:
            status, goes_on = job_status(*codes), 'trains the cells that are left'
            ends = sorted((i, code) for i, (_, code) in self.ends.items() if code != DONE)
            reason = '; '.join(f'{self.name_of(i)} {how(code)}' for i, code in ends)
            if not all_ended:  # the others go on without this host
                raise Ended(status, reason)
        else:
            # The first of several errors counts: the others may follow from it.
            who = min(self.ends, key=lambda i: blame(i, *self.ends[i]))
            code = self.ends[who][1]
            status, goes_on = job_status(code), 'goes on'
            is_plain = status not in (BAD_INPUT, RESUME) and all_ended and len(set(codes)) == 1
            reason = '' if is_plain else f'{self.name_of(who)} {how(code)}'
        text = f'{reason}; all hosts end with status {status}' if reason else ''
        if status == RESUME:
            text += f': the same command {goes_on}'
        for link in list(self._members.values()):
            self._tell(link, ended=status, text=text)
        raise Ended(status, text)

    def _due(self) -> float:
        """When this host stops waiting for the ends of other children, by `time.monotonic`."""
        if self.apart:
            return self.ends[0][0] + COLLECT_SEC if 0 in self.ends and self.asked else math.inf
        waits = {DONE: LEAVE_SEC, DIVERGED: LEAVE_SEC}
        return min(when + waits.get(code, COLLECT_SEC) for when, code in self.ends.values())

    def close(self) -> None:
        super().close()
        self.secret.remove()
        if self.links.strangers:
            self.say(f'connections of strangers to this job, closed: {self.links.strangers}')

    def _ping(self) -> None:
        if self._is_time_to_ping():
            for link in list(self._members.values()):
                self._tell(link, ping=True)

    def _tell(self, link: Link, **message: Any) -> None:
        try:
            link.send(**message)
        except Gone:
            self.links.drop(link)
            self._lost(link)


def _listening(address: str, port: int, flag: str) -> socket.socket:
    """Raises Ended where a port is taken."""
    try:
        return listening(address, port)
    except OSError as error:
        raise Ended(
            BAD_INPUT,
            f'port {port} of this host, that of {flag}, cannot be listened at ({error}). Is '
            'another process 0 here? Or give other ports, the same on all hosts.',
        ) from error


def how(code: int | None) -> str:
    """The end of a child, in words."""
    if code is None:
        return 'has gone (its connection broke, or was silent)'
    if code < 0:
        return f'was ended by {signal.Signals(-code).name}'
    return f'ended with status {code}'


def blame(process_id: int, when: float, code: int | None) -> tuple[int, bool, float]:
    """A key that sorts first the end that caused the others.

    A child does not kill itself, but the runtime aborts it when another has gone; a child that has
    done its work ends nobody. Among errors that are known together, process 0's is first: it
    reported LAST_WORDS_SEC before it ended (`lm.launch.distributed`), and the others may have
    failed because its service had ended.
    """
    if code is None or (code < 0 and -code != signal.SIGABRT):
        return 0, False, when
    kind = {-signal.SIGABRT: 2, SIGNALLED + signal.SIGABRT: 2, DONE: 3}.get(code, 1)
    return kind, kind == 1 and process_id > 0, when
