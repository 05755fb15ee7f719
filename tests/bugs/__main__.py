"""Which tier sees each bug made by hand, and in how many seconds.

    uv run python -m tests.bugs [NAME ...] [--jobs=2]

In a copy of the project each line is changed alone and the tests named beside it are run: those of
the default tier, and where they pass those of the full one. Prints a table; the exit status is 1
where a bug went unseen. Takes about half an hour on two cores; no test runs it.
"""

import argparse
import collections
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import ROOT
from tests.bugs import BUGS, Bug

LEFT_OUT = shutil.ignore_patterns('.git', '.venv', 'runs', '__pycache__', '*.egg-info')
TIERS = {'default': [], 'full': ['-m', 'full']}  # arguments of pytest
UNSEEN = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED


def broken(bug: Bug) -> str:
    """The text of its file with the bug. ValueError unless the line is there once."""
    text = (ROOT / bug.file).read_text()
    if text.count(bug.right) != 1:
        raise ValueError(f'{bug.file} has {text.count(bug.right)} times {bug.right!r}; wanted once')
    return text.replace(bug.right, bug.wrong)


def seen_by(bug: Bug, project: Path, cache: Path) -> str | None:
    """The first tier of which a test fails with the bug in the copy `project`, which is mended
    again; None where none does.

    cache: of compiled programs; most are those of the bug before.
    """
    path = project / bug.file
    text = path.read_text()
    path.write_text(broken(bug))
    command = [sys.executable, '-m', 'pytest', '-q', '-x', '-n', '0', '-p', 'no:cacheprovider']
    environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache)}
    try:
        for tier, chosen in TIERS.items():
            done = subprocess.run(
                [*command, *chosen, *shlex.split(bug.tests)],
                cwd=project,
                capture_output=True,
                text=True,
                env=environment,
            )
            if done.returncode == pytest.ExitCode.TESTS_FAILED:
                return tier
            if done.returncode not in UNSEEN:
                raise RuntimeError(f'{bug.tests}: {(done.stdout + done.stderr)[-2000:]}')
    finally:
        path.write_text(text)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog='tests.bugs', description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help=f'of {", ".join(BUGS)}; default: all')
    parser.add_argument('--jobs', type=int, default=2, help='tests at once')
    asked = parser.parse_args()
    if unknown := set(asked.names) - BUGS.keys():
        parser.error(f'there is no bug {", ".join(sorted(unknown))}')
    names, found = asked.names or list(BUGS), collections.Counter()
    print('| bug | in | seen by the tier | seconds |\n|---|---|---|---|')
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        projects = queue.SimpleQueue()
        for i in range(asked.jobs):
            projects.put(Path(folder) / f'project_{i}')
            shutil.copytree(ROOT, Path(folder) / f'project_{i}', ignore=LEFT_OUT)

        def looked_for(name):
            project, start = projects.get(), time.monotonic()
            try:
                tier = seen_by(BUGS[name], project, Path(folder) / 'cache')
                return name, tier, time.monotonic() - start
            finally:
                projects.put(project)

        for name, tier, took in pool.map(looked_for, names):
            found[tier] += 1
            print(f'| {name} | {BUGS[name].file} | {tier or "NONE"} | {took:.0f} |', flush=True)
    both = found['default'] + found['full']
    print(f'\nof {len(names)}, {found["default"]} seen by the default tier, {both} by both')
    return 1 if found[None] else 0


if __name__ == '__main__':
    sys.exit(main())
