"""The supervisor of another process than 0, linked to the Coordinator. Standard library only."""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import ON_PURPOSE, RESUME, Ended, job_status
from lm.launch.link import RETRY_SEC, SILENT_SEC, Gone, Links, Supervisor
from lm.launch.secret import opened
from lm.launch.this_host import Host


class Member(Supervisor):
    """The supervisor of another process than 0; there once all hosts are."""

    def __init__(self, host: Host, arguments: Sequence[str], asked: list[int]):
        super().__init__(host, arguments, asked)
        self._code: int | None = None  # the exit code of the child, when it has ended
        self._is_alone = False  # process 0 has gone, and this host goes on
        self._deadline, self._seen = time.monotonic() + host.timeout, 'it does not answer'
        while not self._join():
            if time.monotonic() > self._deadline:
                where = '{}, port {}'.format(*host.watch_address)
                raise Ended(
                    RESUME,
                    f'no {self.name_of(0)} at {where}, within {host.timeout:g} s (--host_timeout): '
                    f'{self._seen}. Does process 0 run, and is that its address?',
                )
            self._stop_if_asked()
            time.sleep(RETRY_SEC)

    def _join(self) -> bool:
        """Returns True when the job begins, False to try again. Raises Ended when refused."""
        if not (secret := self.secret.read()):
            self._seen = f'{self.secret.path}, which it writes, is not here'
            return False
        try:
            connection = socket.create_connection(self.host.watch_address, timeout=RETRY_SEC * 4)
        except OSError:
            return False
        self.links = Links(secret)
        with contextlib.suppress(Gone):
            self._link = self.links.add(connection)
            if self._agree(secret):
                return True
        self.links.close()
        return False

    def _agree(self, secret: str) -> bool:
        """Says hello to process 0, and waits with it for the others; False where it is busy."""
        link = self._link
        self._seen = 'what answers there is none, or has another secret of the job'
        while not link.trusted:
            self._heard(RETRY_SEC)
            self._stop_if_asked()
            if time.monotonic() > self._deadline:
                return False
        me = {'process_id': self.host.process_id, 'num_processes': self.host.num_processes}
        link.send(hello=me | {'name': socket.gethostname(), 'arguments': self.arguments})
        while time.monotonic() - link.heard < SILENT_SEC:
            for message in self._heard(RETRY_SEC):
                if 'busy' in message:
                    return False
                if 'ended' in message:
                    raise Ended(message['ended'], message['text'])
                if 'start' in message:
                    self.names = {int(i): name for i, name in message['start'].items()}
                    self.job = message['job']
                    self.certificate = opened(secret, message['certificate'])
                    return True
            if self.asked:
                link.send(ended=-self.asked[0])
                self._stop_if_asked()
        return False

    def _heard(self, seconds: float) -> list[dict[str, Any]]:
        """Returns what process 0 says within some time. Raises Gone."""
        messages = [message for _, message in self.links.wait(seconds)]
        if None in messages:
            raise Gone('closed')
        return messages

    def child_ended(self, code: int) -> None:
        self._code = code
        self._tell(ended=code)
        if self.apart and (self.asked or self._is_alone):
            self._leave()

    def step(self, seconds: float) -> None:
        """Listens to the coordinator for `seconds`. Raises Ended when the job is over."""
        for _, message in self.links.wait(seconds):
            if message is None:
                self._lost('its connection broke')
            elif 'ended' in message:
                raise Ended(message['ended'], message['text'])
        if self._is_alone:
            return
        if time.monotonic() - self._link.heard > SILENT_SEC:
            self._lost(f'it was silent for {SILENT_SEC:g} s')
        if self._is_time_to_ping():
            self._tell(ping=True)

    def _leave(self) -> None:
        """Raises Ended for this host alone: after a signal, or where process 0 has gone."""
        if self.asked:
            raise Ended(job_status(self._code))
        raise Ended(
            job_status(self._code, None),
            f'{self.name_of(0)} has gone: the same command trains the cells that are left',
        )

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(Gone):  # its reason for ending may still be there to be read
            if not self._is_alone:
                self._link.send(**message)

    def _lost(self, why: str) -> None:
        gone = f'{self.name_of(0)} has gone ({why})'
        if self.apart:
            self.links.drop(self._link)
            self._is_alone = True
            if self._code is not None:
                self._leave()
            return self.say(f'{gone}; this host trains its cells')
        if self._code in ON_PURPOSE:  # this host's part was done
            raise Ended(self._code, gone)
        raise Ended(RESUME, f'{gone}; all hosts end with status {RESUME}: the same command goes on')
