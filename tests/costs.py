"""The costs of tests: CPU-seconds of the process that runs each and of the processes it waits for.

At the end of a session a table shows them by folder. `--costs=FILE` writes one JSON object for each
test, {"test": id, "setup": seconds, "call": seconds, "teardown": seconds}.
"""

import collections
import json
import resource
import time
from pathlib import Path

import pytest

DEAREST = 5  # tests that are named


def cpu_sec() -> float:
    """Returns the CPU-seconds of this process and its ended children."""
    used = [
        resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def folder(test: str) -> str:
    """Returns the folder of a test: 'tests/lm' for tests/lm/run/test_wave.py::test; 'tests' at the
    top.
    """
    return '/'.join(test.split('::')[0].split('/')[:-1][:2])


class Meter:
    """Measures in the processes that run tests, and adds up in the process that reports."""

    def __init__(self, written: str | None):
        self.written = written
        self.started, self.last = time.monotonic(), cpu_sec()
        self.costs: dict[str, dict[str, float]] = collections.defaultdict(dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Leaves out the time between two tests, most of which is collection."""
        del item
        self.last = cpu_sec()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        del item, call
        report = yield
        used_sec = cpu_sec()
        report.cpu_sec, self.last = used_sec - self.last, used_sec
        return report

    def pytest_runtest_logreport(self, report):
        test = report.nodeid.split('@')[0]
        self.costs[test][report.when] = getattr(report, 'cpu_sec', 0.0)  # none where one crashed

    def pytest_terminal_summary(self, terminalreporter):
        total = {test: sum(phases.values()) for test, phases in self.costs.items()}
        rooms = collections.defaultdict(list)
        for test, seconds in total.items():
            rooms[folder(test)].append(seconds)
        say = terminalreporter.write_line
        if not total:
            return
        say('')
        say(f'{"CPU-minutes":>11} {"tests":>6}')
        for room, costs in sorted(rooms.items(), key=lambda folder_costs: -sum(folder_costs[1])):
            say(f'{sum(costs) / 60:11.1f} {len(costs):6,}  {room}')
        minutes = (time.monotonic() - self.started) / 60
        say(f'{sum(total.values()) / 60:11.1f} {len(total):6,}  in {minutes:.1f} minutes')
        for test in sorted(total, key=total.get, reverse=True)[:DEAREST]:
            say(f'{total[test]:9.0f} s         {test}')
        if self.written:
            lines = (json.dumps({'test': test} | phases) for test, phases in self.costs.items())
            Path(self.written).write_text('\n'.join(lines) + '\n')
