"""Exit statuses of a process, and of a job of several. Standard library only."""

import signal

DONE, BAD_INPUT, DIVERGED, SIGNALLED = 0, 1, 2, 128
# "Start me again": launchers do so for 42 (xpk: 42 and 127 to 255), and none does for 1.
RESUME = 42
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DELIBERATE = (DONE, BAD_INPUT, DIVERGED, *(SIGNALLED + number for number in STOP_SIGNALS))


class JobEnded(Exception):
    """The job is over, with this status on all hosts. text: the reason, for the log."""

    def __init__(self, status: int, text: str = ''):
        super().__init__(text)
        self.status, self.text = status, text


def job_status(*codes: int | None) -> int:
    """RESUME, or the largest status, from the exit codes of all children; None: a lost host."""
    signalled = {-number: SIGNALLED + number for number in STOP_SIGNALS}
    found = [signalled.get(code, code) for code in codes]
    return max(found) if all(code in DELIBERATE for code in found) else RESUME
