"""The supervisor of a process other than 0, linked to the Coordinator. Standard library only."""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import BAD_INPUT, DELIBERATE, RESUME, JobEnded, job_status
from lm.launch.link import RETRY_SEC, SILENT_SEC, LinkClosed, Links, Supervisor
from lm.launch.secret import unseal
from lm.launch.this_host import Host


class Member(Supervisor):
    """The supervisor of a process other than 0. Construction returns once all hosts have joined."""

    def __init__(self, host: Host, arguments: Sequence[str], received_signals: list[int]):
        super().__init__(host, arguments, received_signals)
        self._exit_code: int | None = None  # exit code of the child, once it has ended
        self._is_alone = False  # process 0 is lost, and this host continues
        self._deadline, self._last_problem = time.monotonic() + host.timeout, 'it does not answer'
        while not self._join():
            if time.monotonic() > self._deadline:
                address = '{}, port {}'.format(*host.watch_address)
                raise JobEnded(
                    RESUME,
                    f'no {self.host_name(0)} at {address} within {host.timeout:g} s '
                    f'(--host_timeout): {self._last_problem}. Check that process 0 is running and '
                    'that this is its address.',
                )
            self._stop_if_signalled()
            time.sleep(RETRY_SEC)

    def _join(self) -> bool:
        """Returns True when the job begins, False to try again. Raises JobEnded when refused."""
        if not (secret := self.secret.read()):
            self._last_problem = f'{self.secret.path}, which it writes, does not exist here'
            return False
        try:
            connection = socket.create_connection(self.host.watch_address, timeout=RETRY_SEC * 4)
        except OSError:
            return False
        self.links = Links(secret)
        with contextlib.suppress(LinkClosed):
            self._link = self.links.add(connection)
            if self._handshake(secret):
                return True
        self.links.close()
        return False

    def _handshake(self, secret: str) -> bool:
        """Says hello to process 0, and waits for the other hosts; returns False if it is busy."""
        link = self._link
        self._last_problem = 'another program answers, or the job secret differs'
        while not link.is_trusted:
            self._receive(RETRY_SEC)
            self._stop_if_signalled()
            if time.monotonic() > self._deadline:
                return False
        identity = {'process_id': self.host.process_id, 'num_processes': self.host.num_processes}
        link.send(hello=identity | {'name': socket.gethostname(), 'arguments': self.arguments})
        while time.monotonic() - link.heard_at < SILENT_SEC:
            for message in self._receive(RETRY_SEC):
                if 'busy' in message:
                    return False
                if 'ended' in message:
                    raise JobEnded(message['ended'], message.get('text', ''))
                if 'start' in message:
                    self._begin(message, secret)
                    return True
            if self.received_signals:
                # Tells process 0, which would otherwise wait for this host until its time-out.
                link.send(ended=-self.received_signals[0])
                self._stop_if_signalled()
        return False

    def _begin(self, message: dict[str, Any], secret: str) -> None:
        """Takes over the names and the certificate of a job. Raises JobEnded if it cannot."""
        try:
            self.names = {int(i): str(name) for i, name in message['start'].items()}
            self.job, self.certificate = message['job'], unseal(secret, message['certificate'])
        except (KeyError, ValueError):
            raise JobEnded(
                BAD_INPUT,
                f'{self.host_name(0)} sent what this version cannot read. Run the same version on '
                'all hosts.',
            ) from None

    def _receive(self, seconds: float) -> list[dict[str, Any]]:
        """Returns the messages of process 0 within some time. Raises LinkClosed."""
        events = self.links.wait(seconds)
        messages = [message for _, message in events if message is not None]
        if len(messages) < len(events):
            raise LinkClosed('closed')
        return messages

    def on_child_exit(self, code: int) -> None:
        """Reports the exit code of this host's child."""
        self._exit_code = code
        self._send(ended=code)
        if self.is_independent and (self.received_signals or self._is_alone):
            self._end_alone()

    def step(self, seconds: float) -> None:
        """Listens to the coordinator for `seconds`. Raises JobEnded when the job is over."""
        for _, message in self.links.wait(seconds):
            if message is None:
                self._on_link_lost('its connection broke')
            elif 'ended' in message:
                raise JobEnded(message['ended'], message.get('text', ''))
        if self._is_alone:
            return
        if time.monotonic() - self._link.heard_at > SILENT_SEC:
            self._on_link_lost(f'it was silent for {SILENT_SEC:g} s')
        if self._is_ping_due():
            self._send(ping=True)

    def _end_alone(self) -> None:
        """Raises JobEnded for this host alone: after a signal, or if process 0 is lost."""
        if self.received_signals:
            raise JobEnded(job_status(self._exit_code))
        raise JobEnded(
            job_status(self._exit_code, None),
            f'{self.host_name(0)} was lost. Run the same command to train the remaining cells.',
        )

    def _send(self, **message: Any) -> None:
        """Sends a message to process 0, if it is not lost."""
        with contextlib.suppress(LinkClosed):  # its reason for ending may still be there to be read
            if not self._is_alone:
                self._link.send(**message)

    def _on_link_lost(self, cause: str) -> None:
        """Raises JobEnded, or continues alone if the child needs no other host."""
        reason = f'{self.host_name(0)} was lost ({cause})'
        if self.is_independent:
            self.links.drop(self._link)
            self._is_alone = True
            if self._exit_code is not None:
                self._end_alone()
            return self.say(f'{reason}; this host continues to train its cells')
        if self._exit_code in DELIBERATE:  # this host's part was done
            raise JobEnded(self._exit_code, reason)
        raise JobEnded(
            RESUME,
            f'{reason}; all hosts end with status {RESUME}. Run the same command to resume.',
        )
