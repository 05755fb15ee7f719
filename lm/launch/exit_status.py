"""What a process ends with, and what a job of several makes of how each of them ended. Standard
library only.
"""

import signal
from collections.abc import Iterable

DONE, BAD_INPUT, DIVERGED, SIGNALLED = 0, 1, 2, 128
# "Start me again": launchers do so for 42 (xpk: 42 and 127 to 255), and none does for 1.
RESUME = 42
ASKED = (signal.SIGTERM, signal.SIGINT)
ON_PURPOSE = (DONE, BAD_INPUT, DIVERGED, *(SIGNALLED + number for number in ASKED))


class Ended(Exception):
    """The job is over, with this status on all hosts. text: why, for those who read a log."""

    def __init__(self, status: int, text: str = ''):
        super().__init__(text)
        self.status, self.text = status, text


def status_of(code: int | None) -> int:
    """What the job ends with for what a child ended with; None: its host has gone."""
    if code is not None and -code in ASKED:
        return SIGNALLED - code
    return code if code in ON_PURPOSE else RESUME


def status_of_all(codes: Iterable[int | None]) -> int:
    """What a job ends with whose children were apart: what is to be done about it comes first."""
    found = {status_of(code) for code in codes}
    signalled = {status for status in found if status > SIGNALLED}
    if RESUME in found:
        return RESUME
    return max(signalled) if signalled else max(found)


def how(code: int | None) -> str:
    """A child's end in words."""
    if code is None:
        return 'has gone (its connection broke, or was silent)'
    if code < 0:
        return f'was ended by {signal.Signals(-code).name}'
    return f'ended with status {code}'


def blame(process_id: int, when: float, code: int | None) -> tuple[int, bool, float]:
    """Sorts first what the other ends follow from. A child does not kill itself, but the runtime
    aborts it when another has gone; one that has done its work ends nobody. Of errors that are
    known together, that of process 0 is the first: it told it LAST_WORDS_SEC before it ended
    (`lm.launch.distributed`), and with it the service that the others may then fail to reach.
    """
    if code is None or (code < 0 and -code != signal.SIGABRT):
        return 0, False, when
    kind = {-signal.SIGABRT: 2, SIGNALLED + signal.SIGABRT: 2, DONE: 3}.get(code, 1)
    return kind, kind == 1 and process_id > 0, when
