"""A test is run once more by a new process if its process has died.

A process that has compiled hundreds of programs dies in native code when it may map no more memory
(`room_for_programs` in conftest.py frees memory in time). Its test passes in another process. A
test that kills two processes fails, and so does the run.
"""

import collections
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

_deaths: collections.Counter[str] = collections.Counter()


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no other process
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Removes the first failure: with --dist loadgroup xdist has put the test into its queue."""
    _deaths[crashitem] += 1
    if _deaths[crashitem] == 1:
        report.outcome = 'rerun'


class Scheduling(LoadGroupScheduling):
    """Gives a replacement process two tests at once, as all processes get at the start.

    A process runs its last test when it learns the next, or that none is left. xdist gives it
    only one group, which may have one test, or none that has not passed before the other process
    died: it would wait for ever, and the run too.
    """

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Takes back the remaining tests of the process. xdist would also take back passed tests,
        and give them to another process as an empty group, which would wait for ever.
        """
        work = self.assigned_work[node]
        for group in [name for name, tests in work.items() if all(tests.values())]:
            del work[group]
        return super().remove_node(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    """Replaces xdist's scheduler if tests are scheduled by groups."""
    return Scheduling(config, log) if config.getoption('dist') == 'loadgroup' else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests with a crashed process."""
    for name, count in _deaths.items():
        terminalreporter.write_line(f'{count} x the process of a test died: {name}')
