"""Collects tests in another process, which imports what most tests import while it waits.

That takes seconds, in which `tests.touched` reads the sources. The process reads the names of files
from standard input and prints a Report.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

# The first one says which devices JAX uses.
COMMON = ('tests.conftest', 'optax', 'lm.config.resolve', 'lm.model.transformer')
SUCCESS = (0, 5)  # statuses of pytest that end well: with tests and without any


@dataclasses.dataclass(frozen=True)
class CollectedTest:
    """A test that pytest has collected. texts: strings in its parameters."""

    nodeid: str
    texts: tuple[str, ...]
    is_full: bool


class Collection:
    """Processes that collect tests once, side by side; as a context, all end on exit.

    Args:
      root: folder of the project.
      imports: modules to import before the files are known.
      count: number of processes.
    """

    def __init__(self, root: Path, imports: Iterable[str] = COMMON, count: int = 2):
        search_path = filter(None, [str(root), os.environ.get('PYTHONPATH')])
        self.processes = [
            subprocess.Popen(
                [sys.executable, '-P', __file__, *imports],  # -P: its folder has other modules
                cwd=root,
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(search_path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def collect(self, files: Iterable[str]) -> list[CollectedTest]:
        """Returns the tests in some files. Raises SystemExit with pytest's output if it cannot
        read one.
        """
        if not (files := sorted(files)):
            return []
        parts = [files[i :: len(self.processes)] for i in range(len(self.processes))]
        with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
            tests = [*itertools.chain(*pool.map(collect_part, self.processes, parts))]
        return sorted(tests, key=lambda test: files.index(test.nodeid.split('::')[0]))


def collect_part(process: subprocess.Popen, files: list[str]) -> list[CollectedTest]:
    """Returns the tests in some files. Raises SystemExit with pytest's output if it cannot read
    one.
    """
    printed, _ = process.communicate('\n'.join(files))
    status, output, tests = json.loads(printed) if printed else (process.wait(), '', [])
    if status not in SUCCESS:
        raise SystemExit(f'{output}\npytest cannot collect the tests; see its output above')
    return [CollectedTest(nodeid, tuple(texts), is_full) for nodeid, texts, is_full in tests]


class Collector:
    """A plugin that keeps the collected tests."""

    def __init__(self):
        self.tests: list[CollectedTest] = []

    def pytest_collection_finish(self, session):
        for test in session.items:
            texts = strings_in(getattr(getattr(test, 'callspec', None), 'params', {}))
            is_full = test.get_closest_marker('full') is not None
            self.tests.append(CollectedTest(test.nodeid, tuple(texts), is_full))


def strings_in(value: Any, depth: int = 4) -> list[str]:
    """Returns the strings in a parameter of a test: in containers, in fields, as names."""
    if isinstance(value, str):
        return [value]
    if depth and isinstance(value, Mapping):
        return strings_in([*value, *value.values()], depth - 1)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [text for element in value for text in strings_in(element, depth - 1)]
    if depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return strings_in(list(vars(value).values()), depth - 1)
    return [getattr(value, '__name__', '')]


def main() -> None:
    printed, sys.stdout = sys.stdout, io.StringIO()  # imports and conftest.py may print
    for module in sys.argv[1:]:
        with contextlib.suppress(Exception):  # pytest reports what cannot be imported
            importlib.import_module(module)
    if not (files := sys.stdin.read().splitlines()):
        return
    import pytest

    collector = Collector()
    options = ['--collect-only', '-q', '-n', '0', '-m', 'not product']
    status = pytest.main([*options, *files], plugins=[collector])
    tests = [dataclasses.astuple(test) for test in collector.tests]
    json.dump([int(status), sys.stdout.getvalue(), tests], printed)
    printed.flush()
    os._exit(0)  # to free every module takes another second


if __name__ == '__main__':
    main()
