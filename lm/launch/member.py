"""The parent of a process other than 0, which holds a connection with that of process 0. Standard
library only.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from lm.launch.exit_status import ON_PURPOSE, RESUME, Ended, status_of, status_of_all
from lm.launch.link import RETRY_SEC, SILENT_SEC, Link
from lm.launch.this_host import Host
from lm.launch.wire import Gone, Wire


class Spoke(Link):
    """The parent of another process, once all hosts are there."""

    def __init__(self, host: Host, arguments: Sequence[str], asked: list[int]):
        super().__init__(host, arguments, asked)
        self._code: int | None = None  # of the child, when it has ended
        self._is_alone = False  # process 0 has gone, which this host does not need
        deadline = time.monotonic() + host.timeout
        while not self._join():
            if time.monotonic() > deadline:
                address, port = host.watch_address
                raise Ended(
                    RESUME,
                    f'{self.name_of(0)} does not answer at {address}, port {port}, for '
                    f'{host.timeout:g} s (--host_timeout). Does process 0 run, and is that its '
                    'address?',
                )
            self._stop_if_asked()
            time.sleep(RETRY_SEC)

    def _join(self) -> bool:
        """Whether the job has begun; False: to be tried again. Raises Ended where it is refused."""
        try:
            connection = socket.create_connection(self.host.watch_address, timeout=RETRY_SEC * 4)
        except OSError:
            return False
        self._wire = Wire()
        hub = self._hub = self._wire.add(connection)
        me = {
            'process_id': self.host.process_id,
            'num_processes': self.host.num_processes,
            'name': socket.gethostname(),
            'arguments': self.arguments,
        }
        try:
            hub.send(hello=me)
            while time.monotonic() - hub.heard < SILENT_SEC:
                for _, message in self._wire.wait(RETRY_SEC):
                    if message is None or 'busy' in message:
                        return self._not_yet()
                    if 'ended' in message:
                        raise Ended(message['ended'], message['text'])
                    if 'start' in message:
                        self.names = {int(i): name for i, name in message['start'].items()}
                        self.job = message['job']
                        return True
                if self.asked:
                    hub.send(ended=-self.asked[0])
                    self._stop_if_asked()
        except Gone:
            pass
        return self._not_yet()

    def _not_yet(self) -> bool:
        self._wire.close()
        return False

    def child_ended(self, code: int) -> None:
        self._code = code
        self._say(ended=code)
        if self.apart and (self.asked or self._is_alone):
            self._leave()

    def step(self, seconds: float) -> None:
        """Hears the hub for so long. Raises Ended when the job has."""
        for _, message in self._wire.wait(seconds):
            if message is None:
                self._lost('its connection broke')
            elif 'ended' in message:
                raise Ended(message['ended'], message['text'])
        if self._is_alone:
            return
        if time.monotonic() - self._hub.heard > SILENT_SEC:
            self._lost(f'it was silent for {SILENT_SEC:g} s')
        if self._is_time_to_ping():
            self._say(ping=True)

    def _leave(self) -> None:
        """Raises Ended, apart from the others: for a signal, or as process 0 has gone."""
        if self.asked:
            raise Ended(status_of(self._code))
        raise Ended(
            status_of_all([self._code, None]),
            f'{self.name_of(0)} has gone: the same command trains the cells that are left',
        )

    def _say(self, **message: Any) -> None:
        if self._is_alone:
            return
        with contextlib.suppress(Gone):  # it may have said why it ends, which is still to be read
            self._hub.send(**message)

    def _lost(self, why: str) -> None:
        if self.apart:
            self._wire.drop(self._hub)
            self._is_alone = True
            if self._code is not None:
                self._leave()
            return self.say(f'{self.name_of(0)} has gone ({why}); this host trains its cells')
        if self._code in ON_PURPOSE:  # this host's part was done
            raise Ended(self._code, f'{self.name_of(0)} has gone ({why})')
        raise Ended(
            RESUME,
            f'{self.name_of(0)} has gone ({why}); all hosts end with status {RESUME}: the same '
            'command goes on',
        )

    def close(self) -> None:
        self._wire.close()
