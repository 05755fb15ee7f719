"""Finds the tests that a change can break, in the default tier and in the full one.

    uv run python -m tests.touched [COMMIT] [--run] [--tier=default]
    uv run python -m tests.touched --files lm/run/wave.py [...] [--count]
    uv run python -m tests.touched --of lm/run/wave.py [...]

A change is the set of files, including new ones, that differ from COMMIT (default: the last
commit). A change to a file selects the tests that read it, directly or through other files
(`tests.dependencies`). If the file defines a part in a table, such as a norm, then of the tests
that read it only through its table those about its rows are selected (`tests.rows`), unless every
run uses that row by default. A table that only gains rows and imports selects the tests about the
new rows. A file of another kind selects the tests that name it or its folder. --files selects all
tests that a file can break; --of names the tests written for it (`tests.nearest`).

The selection depends on source code only, so it can miss a test that decides at run time what it
reads. Use it while editing; run `uv run pytest` before a commit. CI runs everything.
"""

import argparse
import ast
import collections
import dataclasses
import functools
import gc
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests import ROOT
from tests.collect import SUCCESS, CollectedTest, Collection
from tests.dependencies import Dependencies, Sources, is_test
from tests.nearest import Nearest
from tests.rows import ChoiceTable, Definitions, Tables
from tests.summaries import Store, words_in

SETTINGS = ('pyproject.toml', '.python-version', 'tests/conftest.py', '.ci/')
SUMMARIES = '.pytest_cache/summaries.pickle'
TIERS = {'default': 'not full and not product', 'full': 'full and not product'}


@dataclasses.dataclass(frozen=True)
class Touched:
    """The tests that one file touches.

    Attributes:
      files: test files that it touches as a whole.
      rows: names of rows of `tables`; their tests in `named` are touched, too.
      why: one line.
      fields: what the rows are about, if no run without them reads them.
    """

    files: frozenset[str]
    why: str
    rows: frozenset[str] = frozenset()
    tables: tuple[ChoiceTable, ...] = ()
    named: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()


class Selector:
    """Finds the tests of a project that a file touches.

    Args:
      root: folder of the project.
      paths: its files.
      store: where summaries of files are kept; None keeps none.
    """

    def __init__(self, root: Path, paths: Iterable[str], store: Store | None = None):
        self.sources = Sources(root, paths, store)
        self.tests = frozenset(
            path for path in self.sources.paths if is_test(path) and (root / path).is_file()
        )
        self.dependencies = Dependencies(self.sources)
        self.tables = Tables(self.sources)
        self.definitions = Definitions(self.sources)
        self.words = functools.cache(self._words)
        self.nearest = Nearest(self.dependencies, self.tests)

    def touched_by(self, file: str, is_new: bool = False) -> Touched:
        """Returns the tests that a change of a file touches.

        Args:
          file: path of the file.
          is_new: whether nothing could read it before.
        """
        if file.startswith(SETTINGS):
            return Touched(self.tests, 'affects every test')
        reached, rows, tables = self._without_tables(file)
        files = frozenset(reached & self.tests)
        by_imports = f'read by {_count(files, "test file")}'
        if not rows:
            is_read = files or reached > {file}
            return Touched(files, by_imports if is_read else 'no file reads or names it')
        names = frozenset(self.tables.with_users(rows))
        candidates = (self.dependencies.follow([file]) & self.tests) - files
        named = frozenset(
            path for path in candidates if self.definitions.may_name(path, set(names), tables)
        )
        why = f'{by_imports}; {_count(named, "more")} may test {", ".join(sorted(rows))}'
        fields = frozenset().union(*map(self.tables.list_fields, names if is_new else ()))
        return Touched(files, why, names, tuple(tables), named, fields)

    def touched_by_added_rows(self, file: str, before: str) -> Touched | None:
        """Returns the tests that the rows added to the tables of a file touch.

        Returns None if the file differs by anything else.

        Args:
          file: path of the file.
          before: its source before the change.
        """
        added = list_added_rows(before, self.sources.text(file)) if before else {}
        tables = tuple(
            table for table in self.tables.all if table.file == file and added.get(table.name)
        )
        names = frozenset(name for table in tables for name in added[table.name])
        if (
            not names
            or set(added) != {table.name for table in tables}
            or names & self.tables.defaults
        ):
            return None
        candidates = self.dependencies.follow([file]) & self.tests
        named = frozenset(
            path for path in candidates if self.definitions.may_name(path, set(names), tables)
        )
        why = f'only adds {", ".join(sorted(names))}; {_count(named, "test file")} may test it'
        fields = frozenset().union(*map(self.tables.list_fields, names))
        return Touched(frozenset(), why, names, tables, named, fields)

    def _without_tables(self, file: str) -> tuple[set[str], set[str], list[ChoiceTable]]:
        """Returns (files that read a file, rows that come from these, tables of the rows).

        If every run has such a row by default, the files that read its table are included, and so
        are the configs and data that name a row, with the files that read them.
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
        """Returns configs, stored data and commands on pages that name a row."""
        return {path for path in self.sources.paths if rows & self.words(path)}

    def _words(self, path: str) -> set[str]:
        if path.startswith('configs/') and path.endswith('.py'):
            return self.sources.summary(path).body.words
        text = self.sources.text(path) if path.endswith(('.json', '.md')) else ''
        return words_in(text) if path.endswith('.json') else set(re.findall(r'=(\w+)', text))


def list_added_rows(before: str, after: str) -> dict[str, set[str]]:
    """Returns {table: names of the rows added to it}, or {} if anything else differs.

    A table is a dict at the top of a file. Added imports, comments and the docstring do not count.

    Args:
      before: the source before the change.
      after: the source after it.
    """
    earlier, present = Outline.read(before), Outline.read(after)
    if earlier.statements != present.statements or not earlier.imports <= present.imports:
        return {}
    added = {}
    for name, rows in present.tables.items():
        names = rows.keys() - earlier.tables[name].keys()
        if [row for row in rows.items() if row[0] not in names] != [*earlier.tables[name].items()]:
            return {}
        added[name] = names
    return {name: names for name, names in added.items() if names}


@dataclasses.dataclass(frozen=True)
class Outline:
    """A source file.

    Attributes:
      tables: {name: {key: value}} of the dicts at its top, values as text.
      imports: (module, name) of each import.
      statements: the others, as text; of a table its name alone.
    """

    tables: dict[str, dict[str, str]]
    imports: set[tuple[str, str]]
    statements: list[str]

    @classmethod
    def read(cls, source: str) -> 'Outline':
        outline = cls({}, set(), [])
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, 'module', '') or ''
                outline.imports.update((module, ast.unparse(alias)) for alias in node.names)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                pairs = zip(node.value.keys, node.value.values, strict=True)
                rows = {_read_key(key): ast.unparse(value) for key, value in pairs}
                outline.tables[ast.unparse(target)] = rows
                outline.statements.append(ast.unparse(target))
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                outline.statements.append(ast.unparse(node))
        return outline


def _read_key(key: ast.expr | None) -> str:
    is_text = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return key.value if is_text else f'({ast.unparse(key)})' if key else '**'


def _count(items: Sequence | frozenset, noun: str) -> str:
    return f'{len(items)} {noun}{"" if len(items) == 1 or noun == "more" else "s"}'


# The project.


def git(root: Path, *arguments: str) -> list[str]:
    """Returns the lines that git prints. Raises SystemExit with its first line if it fails."""
    done = subprocess.run(['git', *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'git {shlex.join(arguments)}: {done.stderr.strip().splitlines()[0]}')
    return done.stdout.splitlines()


def list_changed_files(root: Path, commit: str) -> list[str]:
    """Returns the files that differ from a commit, including files that git does not know."""
    names = [f'{commit}^{{commit}}']
    inside = subprocess.run(
        ['git', 'rev-parse', '--verify', '--quiet', *names], cwd=root, capture_output=True
    )
    if inside.returncode:
        raise SystemExit(
            f'{commit} is no commit of this project; list commits with git log --oneline'
        )
    differ = git(root, 'diff', '--name-only', '--no-renames', '--relative', commit)
    return sorted({*differ, *git(root, 'ls-files', '--others', '--exclude-standard')})


def read_at_commit(root: Path, commit: str, path: str) -> str:
    """Returns a Python file as it was at a commit, or '' if it was not there or is none."""
    process = subprocess.run(['git', 'show', f'{commit}:./{path}'], cwd=root, capture_output=True)
    exists = path.endswith('.py') and not process.returncode
    return process.stdout.decode() if exists else ''


def list_files(root: Path) -> list[str]:
    """Returns all files of the project except those that git ignores."""
    return git(root, 'ls-files', '--cached', '--others', '--exclude-standard')


def read_project(changed: Iterable[str] = ()) -> Selector:
    """Returns a selector for this project. `changed` may name deleted files."""
    selector = Selector(ROOT, [*list_files(ROOT), *changed], Store(ROOT / SUMMARIES))
    selector.sources.store.save()
    return selector


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tests that several files touch: all tests of `files`, and single tests of others."""

    files: frozenset[str]
    tests: tuple[CollectedTest, ...]

    @classmethod
    def select(
        cls, touched: Iterable[Touched], definitions: Definitions, collection: Collection
    ) -> 'Selection':
        """Returns the tests of changes.

        Args:
          touched: for each changed file, the tests that it touches.
          definitions: names in tests.
          collection: collects the tests of files of which not all tests may be touched.
        """
        touched = list(touched)
        files = frozenset().union(*(touch.files for touch in touched))
        looked_at = frozenset().union(*(touch.named for touch in touched)) - files
        selected = {
            test.nodeid: test
            for test in collection.collect(looked_at)
            for touch in touched
            if test.nodeid.split('::')[0] in touch.named
            and definitions.is_touched(
                test.nodeid, test.texts, touch.rows, touch.tables, touch.fields
            )
        }
        return cls(files, tuple(selected.values()))

    @property
    def arguments(self) -> list[str]:
        """Returns the arguments of pytest."""
        return [*sorted(self.files), *(test.nodeid for test in self.tests)]

    def lines(self) -> list[str]:
        """Returns the same for people, with the cases of one test in one line."""
        cases = collections.Counter(item.nodeid.partition('[')[0] for item in self.tests)
        tests = [f'{test}  ({n} cases)' if n > 1 else test for test, n in sorted(cases.items())]
        return [*sorted(self.files), *tests]

    @property
    def files_with_tests(self) -> set[str]:
        return {*self.files, *(test.nodeid.split('::')[0] for test in self.tests)}

    def counts(self) -> dict[str, int]:
        """Returns {tier: number of tests}, for which all files are collected."""
        with Collection(ROOT) as collection:
            tests = [*self.tests, *collection.collect(self.files)]
        full = sum(test.is_full for test in tests)
        return {'default': len(tests) - full, 'full': full}


def run(selection: Selection, tiers: Iterable[str], pytest_arguments: Sequence[str]) -> int:
    """Returns the status of pytest for the first tier that fails, so that cheap failures come
    early.
    """
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
            if status not in SUCCESS:
                return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='tests.touched', description=__doc__.splitlines()[0])
    parser.add_argument('commit', nargs='?', default='HEAD', help='commit to compare with')
    parser.add_argument('--files', nargs='+', help='changed files, instead of a comparison')
    parser.add_argument('--of', nargs='+', help='name the tests of these files of the product')
    parser.add_argument('--run', action='store_true', help='run the tests')
    parser.add_argument('--count', action='store_true', help='count the tests, which takes longer')
    parser.add_argument('--tier', choices=[*TIERS, 'all'], default='all', help='tests to run')
    parser.add_argument('--pytest', default='', help="arguments for pytest, as --pytest='-x -n 2'")
    options = parser.parse_args(argv)
    gc.disable()  # to look for garbage among the trees of all files takes as long as to make them
    files = options.of or options.files or list_changed_files(ROOT, options.commit)
    named = options.of or options.files or []
    if unknown := sorted({*named} - {*list_files(ROOT)} if named else ()):
        raise SystemExit(
            f'paths must be files of the project, relative to its root; got {", ".join(unknown)}'
        )
    if options.of:
        nearest = read_project(files).nearest
        for file in files:
            print(f'{file}:', *nearest.rank_tests(file) or ['no test uses it'])
        return 0
    with Collection(ROOT) as collection:
        selector = read_project(files)
        touched = {}
        for file in files:
            before = '' if options.files else read_at_commit(ROOT, options.commit, file)
            by_rows = selector.touched_by_added_rows(file, before)
            is_new = not options.files and not before
            touched[file] = by_rows or selector.touched_by(file, is_new)
            print(f'{file}: {touched[file].why}', flush=True)
        selection = Selection.select(touched.values(), selector.definitions, collection)
    print(*selection.lines(), sep='\n')
    share = len(selection.files_with_tests) / max(1, len(selector.tests))
    print(
        f'{_count(selection.files, "whole file")} and {_count(selection.tests, "test")} of other '
        f'files; {share:.0%} of {_count(selector.tests, "test file")} are affected'
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
