"""A test whose process has died is run once more, by a process that takes its place.

A process that has compiled hundreds of programs dies in native code where it may map no more memory
(`room_for_programs` in conftest.py makes room in time). The test that it runs passes in another.
A test that ends two processes fails, and so does the run.
"""

import collections
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

_deaths: collections.Counter[str] = collections.Counter()


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no other process
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Takes the first failure back: with --dist loadgroup xdist has put the test into its queue."""
    _deaths[crashitem] += 1
    if _deaths[crashitem] == 1:
        report.outcome = 'rerun'


class Scheduling(LoadGroupScheduling):
    """Gives a process that takes another's place two tests at once, as all get at the start.

    A process runs its last test when it is told which comes next, or that none does. xdist gives
    one group alone to it, which may have one test, or none that has not passed before the other
    died: it would wait for ever, and the run too.
    """

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Takes back what the process has left. xdist would take back what has passed too, and give
        it to another process as a group of no test, with which that would wait for ever.
        """
        work = self.assigned_work[node]
        for group in [name for name, tests in work.items() if all(tests.values())]:
            del work[group]
        return super().remove_node(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    """Takes the place of xdist's own where tests are scheduled by groups."""
    return Scheduling(config, log) if config.getoption('dist') == 'loadgroup' else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests whose process has died."""
    for name, count in _deaths.items():
        terminalreporter.write_line(f'{count} x the process of a test died: {name}')
