"""python -m tests.faults: runs every case in its long form, and prints a table of trials."""

import collections
import sys

import pytest


class TrialCounts:
    """Counts the trials of each case."""

    def __init__(self):
        self.held: dict[str, collections.Counter] = {}

    def pytest_runtest_logreport(self, report):
        if report.when == 'call' or report.outcome != 'passed':
            case = report.nodeid.split('[')[0].removeprefix('tests/faults/')
            self.held.setdefault(case, collections.Counter())[report.outcome] += 1

    def markdown(self) -> str:
        lines = ['| case | tried | held |', '|---|---|---|']
        for case, counts in sorted(self.held.items()):
            file, _, name = case.partition('::')
            subject = file.removeprefix('test_').removesuffix('.py')
            words = name.removeprefix('test_').replace('_', ' ')
            lines.append(f'| {subject}: {words} | {counts.total()} | {counts["passed"]} |')
        return '\n'.join(lines)


if __name__ == '__main__':
    table = TrialCounts()
    status = pytest.main(['tests/faults', '--long', *sys.argv[1:]], plugins=[table])
    print(table.markdown())
    sys.exit(status)
