"""The tests that a change can break, of the default tier and of the full one.

    uv run python -m tests.touched [COMMIT] [--run] [--tier=default]
    uv run python -m tests.touched --files lm/run/wave.py [...] [--count]
    uv run python -m tests.touched --of lm/run/wave.py [...]

A change is what the files here, new ones too, differ in from COMMIT; default: the last one. A test
is touched by a file that its own file reads (`tests.dependencies`). A part that is a row of a table
touches, of those that read it through its table alone, the tests of its rows (`tests.rows`), unless
a run has that row unasked. A file of another kind touches the tests that name it or its folder.
--of names the tests of a file, where --files names all that it can break (`tests.nearest`).

Sources alone are read, so that a test which learns what it reads as it runs may be missed: this is
for the time of editing. `uv run pytest` comes before a commit, and CI runs all.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests import ROOT
from tests.dependencies import Dependencies, Sources, is_test, texts
from tests.nearest import Nearest
from tests.rows import Definitions, Table, Tables, texts_in, words_in

SETTINGS = ('pyproject.toml', '.python-version', 'tests/conftest.py', '.ci/')
TIERS = {'default': 'not full and not product', 'full': 'full and not product'}


@dataclasses.dataclass(frozen=True)
class Touched:
    """What one file touches.

    files: the files of tests that do so whole. rows: names of rows of `tables`, of which the tests
    in `named`, too, are touched. why: one line.
    """

    files: frozenset[str]
    why: str
    rows: frozenset[str] = frozenset()
    tables: tuple[Table, ...] = ()
    named: frozenset[str] = frozenset()


class Selector:
    """Which tests of a project a file touches."""

    def __init__(self, root: Path, paths: Iterable[str]):
        self.sources = Sources(root, paths)
        self.tests = frozenset(
            path for path in self.sources.paths if is_test(path) and (root / path).is_file()
        )
        self.dependencies = Dependencies(self.sources)
        self.tables = Tables(self.sources)
        self.definitions = Definitions(self.sources)
        self.words = functools.cache(self._words)
        self.nearest = Nearest(self.dependencies, self.tests)

    def touched_by(self, file: str) -> Touched:
        """What a change of a file touches."""
        if file.startswith(SETTINGS):
            return Touched(self.tests, 'is read before any test: everything')
        reached, rows, tables = self._without_tables(file)
        files = frozenset(reached & self.tests)
        by_imports = f'read by {_count(files, "test file")}'
        if not rows:
            is_read = files or reached > {file}
            return Touched(files, by_imports if is_read else 'nothing reads it or names it')
        names = frozenset(self.tables.with_users(rows))
        candidates = (self.dependencies.follow([file]) & self.tests) - files
        named = frozenset(
            path for path in candidates if self.definitions.may_name(path, set(names), tables)
        )
        why = f'{by_imports}; {", ".join(sorted(rows))} may be of {_count(named, "more")}'
        return Touched(files, why, names, tuple(tables), named)

    def _without_tables(self, file: str) -> tuple[set[str], set[str], list[Table]]:
        """(the files that read a file, rows that come from these, tables of the rows).

        Where a run has such a row unasked, the files that read its table are among them, and so are
        the configs and data that name a row, with what reads them.
        """
        through, default = self.tables.readings, self.tables.defaults
        starts, rows, size = {file}, {}, -1
        while size < len(starts):
            size = len(starts)
            reached = self.dependencies.follow(starts, through)
            for table in self.tables.all:
                pairs = {path for path in reached if (table.file, path) in through}
                touched_rows = {row for row, files in table.rows.items() if pairs & files}
                if touched_rows & default:
                    starts |= {table.file}
                elif touched_rows:
                    rows[table.name] = (table, touched_rows)
                    starts |= self._naming(touched_rows)
        names = {
            row
            for table, touched_rows in rows.values()
            for row in touched_rows
            if table.file not in starts
        }
        return reached, names, [table for table, _ in rows.values() if table.file not in starts]

    def _naming(self, rows: set[str]) -> set[str]:
        """Configs, stored data and commands on pages that name a row."""
        return {path for path in self.sources.paths if rows & self.words(path)}

    def _words(self, path: str) -> set[str]:
        if path.startswith('configs/') and path.endswith('.py'):
            strings = texts(self.sources.tree(path).body)
            return {word for text in strings for word in words_in(text)}
        text = self.sources.text(path) if path.endswith(('.json', '.md')) else ''
        return words_in(text) if path.endswith('.json') else set(re.findall(r'=(\w+)', text))


def _count(items: Sequence | frozenset, noun: str) -> str:
    return f'{len(items)} {noun}{"" if len(items) == 1 or noun == "more" else "s"}'


# The project.


def git(root: Path, *arguments: str) -> list[str]:
    """The lines that git prints; SystemExit with its first line where it fails."""
    done = subprocess.run(['git', *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'git {shlex.join(arguments)}: {done.stderr.strip().splitlines()[0]}')
    return done.stdout.splitlines()


def changed(root: Path, commit: str) -> list[str]:
    """The files that differ from those of a commit, those that git does not know among them."""
    names = [f'{commit}^{{commit}}']
    inside = subprocess.run(
        ['git', 'rev-parse', '--verify', '--quiet', *names], cwd=root, capture_output=True
    )
    if inside.returncode:
        raise SystemExit(f'{commit} is no commit of this project; git log --oneline lists some')
    differ = git(root, 'diff', '--name-only', '--no-renames', '--relative', commit)
    return sorted({*differ, *git(root, 'ls-files', '--others', '--exclude-standard')})


def list_files(root: Path) -> list[str]:
    """All files of the project but those that git is to ignore."""
    return git(root, 'ls-files', '--cached', '--others', '--exclude-standard')


@dataclasses.dataclass(frozen=True)
class Item:
    """A test that pytest has collected. texts: those in its parameters."""

    nodeid: str
    texts: tuple[str, ...]
    is_full: bool


class Collector:
    """A plugin that keeps what is collected."""

    def __init__(self):
        self.items: list[Item] = []

    def pytest_collection_finish(self, session):
        for item in session.items:
            parameters = texts_in(getattr(getattr(item, 'callspec', None), 'params', {}))
            is_full = item.get_closest_marker('full') is not None
            self.items.append(Item(item.nodeid, tuple(parameters), is_full))


def collect_tests(files: Iterable[str]) -> list[Item]:
    """The tests in some files; SystemExit with what pytest says where it cannot read one."""
    if not files:
        return []
    collector, output, before = Collector(), io.StringIO(), dict(os.environ)
    command = ['--collect-only', '-q', '-n', '0', '-m', 'not product', *sorted(files)]
    with contextlib.redirect_stdout(output):
        status = pytest.main(command, plugins=[collector])
    os.environ.clear()  # conftest.py sets some, and pytest is started again
    os.environ.update(before)
    gc.unfreeze()  # conftest.py freezes what is collected; DuckDB complains of what is never freed
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f'{output.getvalue()}\npytest does not find all tests, as it says above')
    return collector.items


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tests that several files touch: all of `files`, and single ones of others."""

    files: frozenset[str]
    tests: tuple[Item, ...]

    @classmethod
    def of(cls, touched: Iterable[Touched], definitions: Definitions) -> 'Selection':
        touched = list(touched)
        files = frozenset().union(*(touch.files for touch in touched))
        looked_at = frozenset().union(*(touch.named for touch in touched)) - files
        selected = {
            item.nodeid: item
            for item in collect_tests(looked_at)
            for touch in touched
            if item.nodeid.split('::')[0] in touch.named
            and definitions.is_touched(item.nodeid, item.texts, touch.rows, touch.tables)
        }
        return cls(files, tuple(selected.values()))

    @property
    def arguments(self) -> list[str]:
        """Of pytest."""
        return [*sorted(self.files), *(item.nodeid for item in self.tests)]

    def lines(self) -> list[str]:
        """The same for people: cases of one test in one line."""
        cases = collections.Counter(item.nodeid.partition('[')[0] for item in self.tests)
        tests = [f'{test}  ({n} cases)' if n > 1 else test for test, n in sorted(cases.items())]
        return [*sorted(self.files), *tests]

    @property
    def files_with_tests(self) -> set[str]:
        return {*self.files, *(item.nodeid.split('::')[0] for item in self.tests)}

    def counts(self) -> dict[str, int]:
        """{tier: how many tests}; all files are collected for it."""
        items = [*self.tests, *collect_tests(self.files)]
        full = sum(item.is_full for item in items)
        return {'default': len(items) - full, 'full': full}


def run(selection: Selection, tiers: Iterable[str], pytest_arguments: Sequence[str]) -> int:
    """The status of pytest: of the first tier that fails, so that what is cheap fails early."""
    with tempfile.NamedTemporaryFile('w', suffix='.txt') as file:
        file.write('\n'.join(selection.arguments))
        file.flush()
        for tier in tiers:
            command = [
                sys.executable,
                '-m',
                'pytest',
                f'@{file.name}',
                '-m',
                TIERS[tier],
                *pytest_arguments,
            ]
            print(f'the {tier} tier:', flush=True)
            status = subprocess.run(command, cwd=ROOT).returncode
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='tests.touched', description=__doc__.splitlines()[0])
    parser.add_argument('commit', nargs='?', default='HEAD', help='what to compare with')
    parser.add_argument('--files', nargs='+', help='in place of what differs from a commit')
    parser.add_argument('--of', nargs='+', help='names the tests of files of the product')
    parser.add_argument('--run', action='store_true', help='runs the tests')
    parser.add_argument('--count', action='store_true', help='counts tests, which takes longer')
    parser.add_argument('--tier', choices=[*TIERS, 'all'], default='all')
    parser.add_argument('--pytest', default='', help="more arguments, such as --pytest='-x -n 2'")
    options = parser.parse_args(argv)
    gc.disable()  # to look for garbage among the trees of all files takes as long as to make them
    files = options.of or options.files or changed(ROOT, options.commit)
    tracked = list_files(ROOT)
    if (options.of or options.files) and (unknown := sorted(set(files) - set(tracked))):
        raise SystemExit(f'no file of the project: {", ".join(unknown)}; paths are from its root')
    selector = Selector(ROOT, [*tracked, *files])
    if options.of:
        for file in files:
            print(f'{file}:', *selector.nearest.rank_tests(file) or ['no test uses it'])
        return 0
    touched = {file: selector.touched_by(file) for file in files}
    for file, touch in touched.items():
        print(f'{file}: {touch.why}')
    selection = Selection.of(touched.values(), selector.definitions)
    print(*selection.lines(), sep='\n')
    share = len(selection.files_with_tests) / max(1, len(selector.tests))
    print(
        f'{_count(selection.files, "whole file")} and {_count(selection.tests, "test")} of others: '
        f'in {share:.0%} of {_count(selector.tests, "file")} of tests'
    )
    if options.count:
        counts = [f'{number:,} of the {tier} tier' for tier, number in selection.counts().items()]
        print(', '.join(counts))
    if not selection.arguments:
        print('no test is touched')
    elif options.run:
        return run(
            selection,
            TIERS if options.tier == 'all' else [options.tier],
            shlex.split(options.pytest),
        )
    return 0


if __name__ == '__main__':
    sys.exit(main())
