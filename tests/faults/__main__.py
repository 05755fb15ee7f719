"""python -m tests.faults [--results=FILE] [PYTEST ARGUMENTS]: every case in its long form, or those
of the paths among the arguments.

Prints a table of trials. With --results, outcomes are appended to a file of JSON lines; the same
command skips the trials that have passed, so that it can be interrupted.
"""

import argparse
import collections
import json
import sys
from pathlib import Path

import pytest


class Trials:
    """Records the outcome of each trial, and skips the trials that have passed."""

    def __init__(self, path: Path | None):
        self.path = path
        self.outcomes: dict[str, str] = {}
        if path and path.exists():
            lines = path.read_text().splitlines()
            self.outcomes = {row['trial']: row['outcome'] for row in map(json.loads, lines)}

    def pytest_collection_modifyitems(self, config, items):
        passed = [test for test in items if self.outcomes.get(test.nodeid) == 'passed']
        items[:] = [test for test in items if test not in passed]
        config.hook.pytest_deselected(items=passed)

    def pytest_runtest_logreport(self, report):
        if report.when != 'call' and report.outcome == 'passed':
            return
        self.outcomes[report.nodeid] = report.outcome
        if self.path:
            row = {'trial': report.nodeid, 'outcome': report.outcome}
            with self.path.open('a') as file:
                file.write(json.dumps(row) + '\n')

    def markdown(self) -> str:
        counts_by_case = collections.defaultdict(collections.Counter)
        for trial, outcome in self.outcomes.items():
            counts_by_case[trial.split('[')[0].removeprefix('tests/faults/')][outcome] += 1
        lines = ['| case | tried | held |', '|---|---|---|']
        for case, counts in sorted(counts_by_case.items()):
            file, _, name = case.partition('::')
            subject = file.removeprefix('test_').removesuffix('.py')
            words = name.removeprefix('test_').replace('_', ' ')
            lines.append(f'| {subject}: {words} | {counts.total()} | {counts["passed"]} |')
        return '\n'.join(lines)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(prog='python -m tests.faults')
    parser.add_argument('--results', type=Path, help='JSON lines, one per trial')
    flags, arguments = parser.parse_known_args()
    trials = Trials(flags.results)
    has_path = any(Path(argument.split('::')[0]).exists() for argument in arguments)
    # The options of pyproject.toml would leave out the full tier.
    options = ('--long', '-n', '0', '-m', 'full or not full')
    selection = [*(() if has_path else ('tests/faults',)), *options, *arguments]
    status = pytest.main(selection, plugins=[trials])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and trials.outcomes:
        status = pytest.ExitCode.OK  # all have passed before
    print(trials.markdown())
    sys.exit(status)
