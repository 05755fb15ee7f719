"""Exit statuses of a process, and of a job of several processes. Standard library only."""

import signal

DONE, BAD_INPUT, DIVERGED, SIGNALLED = 0, 1, 2, 128
# Asks for a restart: launchers restart for 42 (xpk for 42 and 127 to 255), and none does for 1.
RESUME = 42
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DELIBERATE = (DONE, BAD_INPUT, DIVERGED, *(SIGNALLED + number for number in STOP_SIGNALS))


class JobEnded(Exception):
    """The job is over, with the same status on all hosts. text: the reason, for the log."""

    def __init__(self, status: int, text: str = ''):
        super().__init__(text)
        self.status, self.text = status, text


def job_status(*codes: int | None) -> int:
    """Returns RESUME, or the largest status, from the exit codes of all children; None: a lost
    host.
    """
    signalled = {-number: SIGNALLED + number for number in STOP_SIGNALS}
    statuses = [signalled.get(code, code) for code in codes]
    deliberate = [code for code in statuses if code is not None and code in DELIBERATE]
    return max(deliberate) if len(deliberate) == len(statuses) else RESUME
