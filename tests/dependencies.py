"""The files that each file of the project reads, from its source alone: nothing is imported or run.

A file reads the modules that it imports, with the `__init__` of every package on the way, and the
file that defines each name it takes from a package. A test also reads the programs, modules and
data that its strings name, and the fixtures of a conftest.py that it uses.
"""

import ast
import functools
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from tests.summaries import (
    INTERPRETERS,
    Mentions,
    Store,
    Summary,
    path_words_in,
)

TESTS = 'tests/'


def is_test(path: str) -> bool:
    """Returns whether pytest looks for tests in the file."""
    return path.startswith(TESTS) and bool(re.search(r'/test_\w+\.py$', path))


def is_fixture(node: ast.AST) -> bool:
    """Returns whether it is a fixture that tests must request."""
    return 'fixture' in _decorators(node) and not _is_autouse(node)


def _is_autouse(node: ast.AST) -> bool:
    return 'autouse=True' in _decorators(node)


def _decorators(node: ast.AST) -> str:
    return ' '.join(map(ast.unparse, getattr(node, 'decorator_list', ())))


class Sources:
    """The files of a project, `paths` below `root`, and the meanings of names in them.

    A path may name a deleted file: files that still import it read it.

    Args:
      root: folder of the project.
      paths: its files.
      store: where summaries of files are kept.
    """

    def __init__(self, root: Path, paths: Iterable[str], store: Store | None = None):
        self.root, self.paths = root, sorted(set(paths))
        self.store = store or Store()
        self.python = [path for path in self.paths if path.endswith('.py')]
        self.modules = {
            path.removesuffix('.py').removesuffix('/__init__').replace('/', '.'): path
            for path in self.python
        }
        self.path_set, self.python_set = frozenset(self.paths), frozenset(self.python)
        self.rooms = {path.split('/')[0] for path in self.python if '/' in path}
        self.text = functools.cache(self._text)
        self.tree = functools.cache(self._tree)
        self.summary = functools.cache(self._summarize)
        self.split = functools.cache(self._split)
        self.origin = functools.cache(self._find_origin)
        self.files_of = functools.cache(self._list_files)
        self.named_by = functools.cache(self._list_named)

    def _text(self, path: str) -> str:
        file = self.root / path
        try:
            return file.read_text() if file.is_file() else ''
        except UnicodeDecodeError:
            return ''

    def _tree(self, path: str) -> ast.Module:
        try:
            return ast.parse(self.text(path))
        except SyntaxError as error:
            raise SystemExit(f'{path}:{error.lineno} is no Python: {error.msg}') from None

    def _summarize(self, path: str) -> Summary:
        return self.store.summarize(self.text(path), lambda: self.tree(path))

    def read_imports(self, path: str) -> dict[str, str]:
        """Returns {name: dotted name that it stands for} of all imports of a file, also inside
        functions.
        """
        return self.summary(path).body.imported

    def _split(self, name: str) -> tuple[str, list[str]]:
        """Returns (longest module that a dotted name begins with, rest); '' without a module."""
        parts = name.split('.')
        for n in range(len(parts), 0, -1):
            if '.'.join(parts[:n]) in self.modules:
                return '.'.join(parts[:n]), parts[n:]
        return '', parts

    def _find_origin(self, name: str, visited: tuple[str, ...] = ()) -> tuple[str, str]:
        """Returns (file that defines the object of a dotted name, its name there).

        Returns ('', '') outside the project. The name is '' for a module.
        """
        module, attributes = self.split(name)
        if not module:
            return '', ''
        path = self.modules[module]
        meant = self.read_imports(path).get(attributes[0]) if attributes else None
        if meant is None or name in visited or not self.split(meant)[0]:
            return path, '.'.join(attributes)
        return self._find_origin('.'.join([meant, *attributes[1:]]), (*visited, name))

    def _list_files(self, name: str) -> frozenset[str]:
        """Returns the files that are read to import a dotted name."""
        parts = self.split(name)[0].split('.')
        packages = ['.'.join(parts[:n]) for n in range(1, len(parts) + 1)]
        files = {self.modules[package] for package in packages if package in self.modules}
        return frozenset(files | {self.origin(name)[0]} - {''})

    def find_program(self, package: str) -> set[str]:
        """Returns the file that `python -m package` runs, in a set; the empty set without one."""
        return {
            self.modules[module] for module in [f'{package}.__main__'] if module in self.modules
        }

    @functools.cached_property
    def _by_ending(self) -> dict[str, set[str]]:
        """Returns {end of a path: files}.

        Ends have two names and more, and may name folders with all their files (only data in
        tests); or one name if a single file has it.
        """
        endings: dict[str, set[str]] = {}
        named: dict[str, set[str]] = {}
        for path in self.paths:
            parts = path.split('/')
            named.setdefault(parts[-1], set()).add(path)
            for stop in range(2, len(parts) + 1):
                if stop < len(parts) and path.startswith(TESTS) and path.endswith('.py'):
                    continue
                for start in range(stop - 1):
                    endings.setdefault('/'.join(parts[start:stop]), set()).add(path)
        return {name: files for name, files in named.items() if len(files) == 1} | endings

    @functools.cached_property
    def _by_top(self) -> dict[str, set[str]]:
        """Returns {first name of a path: files}."""
        tops: dict[str, set[str]] = {}
        for path in self.paths:
            tops.setdefault(path.split('/')[0], set()).add(path)
        return tops

    def named_in(self, words: Iterable[str], command_words: Iterable[str] = ()) -> set[str]:
        """Returns the files that words in strings name: by a path or its end, or as modules.

        Tests are left out, since strings that name tests are for people.

        Args:
          words: see `path_words_in`.
          command_words: words of strings that name an interpreter. Only they name programs at the
            root, such as train.py, because launchers pass such a name on.
        """
        files = {path for word in words for path in self.named_by(word)}
        return files | {word for word in command_words if word in self._programs}

    @functools.cached_property
    def _programs(self) -> set[str]:
        return {path for path in self.python_set if '/' not in path and path in self._by_ending}

    def _list_named(self, word: str) -> frozenset[str]:
        files = set()
        if word not in self.python_set or '/' in word:
            files |= self._by_ending.get(word, set())
        if '.' in word and '/' not in word and word.split('.')[0] in self.rooms:
            files |= self.files_of(word) | self.find_program(word)
        return frozenset(path for path in files if not is_test(path))

    def in_folders(self, names: Iterable[str]) -> set[str]:
        """Returns the files in folders at the root."""
        return set().union(*(self._by_top.get(name, ()) for name in names))

    def beside(self, path: str) -> set[str]:
        """Returns the files in the folder of a file."""
        return self._by_folder[PurePosixPath(path).parent]

    @functools.cached_property
    def _by_folder(self) -> dict[PurePosixPath, set[str]]:
        folders: dict[PurePosixPath, set[str]] = {}
        for path in self.paths:
            folders.setdefault(PurePosixPath(path).parent, set()).add(path)
        return folders


class Dependencies:
    """The files that each file of a project reads."""

    def __init__(self, sources: Sources):
        self.sources = sources
        self._conftests = functools.cache(self._list_conftests)
        self._defined_fixtures = functools.cache(self._list_fixtures)
        read_files = {path: self.reads(path) for path in sources.python}
        for path in sources.python:
            if path.endswith('conftest.py'):
                read_files |= self._read_by_fixtures(path)
        # {file: what reads it, directly}; '::name' follows a conftest.py for a fixture of it
        self.readers: dict[str, set[str]] = {}
        for reader, files in read_files.items():
            for file in files:
                self.readers.setdefault(file, set()).add(reader)

    def follow(self, paths: Iterable[str], but: Collection[tuple[str, str]] = ()) -> set[str]:
        """Returns the files, and all files that read them, directly or indirectly.

        Args:
          paths: files.
          but: pairs (reader, file) that do not count.
        """
        reached, frontier = set(), set(paths)
        while frontier:
            reached |= frontier
            pairs = [(reader, path) for path in frontier for reader in self.readers.get(path, ())]
            frontier = {pair[0] for pair in pairs if pair not in but} - reached
        return reached

    def reads(self, path: str) -> set[str]:
        """Returns the files that a Python file reads."""
        text, mentions = self.sources.text(path), self.sources.summary(path).body
        parameters = mentions.arguments | mentions.strings
        if path.endswith('conftest.py'):
            nodes = [node for node in self.sources.tree(path).body if not is_fixture(node)]
            mentions = Mentions.read(nodes)
            parameters = Mentions.read(node for node in nodes if _is_autouse(node)).arguments
        files = self._read_by(path, mentions)
        if '__file__' in text:  # a file that asks where it lies reads the data beside it
            files |= _data(self.sources.beside(path))
        if is_test(path) or 'pytest.fixture' in text:
            files |= self._fixtures(path, parameters)
        if 'runpy.' in text:  # the commands of the pages that it reads
            pages = [self.sources.text(file) for file in files if file.endswith('.md')]
            words = path_words_in(' '.join(pages))
            named = self.sources.named_in(words, words)
            files |= {file for file in named if "'__main__'" in self.sources.text(file)}
        return files - {path}

    def _fixtures(self, path: str, parameters: set[str]) -> set[str]:
        """Returns the conftest.py files above a file, and the files of their fixtures that it
        requests.
        """
        files = set()
        for conftest in self._conftests(PurePosixPath(path).parent):
            files |= {conftest} | {
                f'{conftest}::{name}' for name in self._defined_fixtures(conftest) & parameters
            }
        return files

    def _list_conftests(self, folder: PurePosixPath) -> list[str]:
        """Returns the conftest.py files in a folder and above it."""
        above = [f'{path}/conftest.py' for path in (folder, *folder.parents)]
        return [file for file in above if file in self.sources.path_set]

    def _list_fixtures(self, conftest: str) -> set[str]:
        return {node.name for node in self.sources.tree(conftest).body if is_fixture(node)}

    def _read_by_fixtures(self, conftest: str) -> dict[str, set[str]]:
        by_fixture = {}
        for node in filter(is_fixture, self.sources.tree(conftest).body):
            mentions = Mentions.read([node])
            parameters = mentions.arguments | mentions.strings
            files = self._read_by(conftest, mentions) | self._fixtures(conftest, parameters)
            by_fixture[f'{conftest}::{node.name}'] = files - {f'{conftest}::{node.name}'}
        return by_fixture

    def _read_by(self, path: str, mentions: Mentions) -> set[str]:
        """Returns the files that a file reads by imports and strings.

        Strings of the product name only data, since it starts no program but itself.

        Args:
          path: the file.
          mentions: its names and strings, or some of them.
        """
        meant, names = self.sources.read_imports(path), set(mentions.imports)
        for name in mentions.names:
            first, _, attributes = name.partition('.')
            if attributes and first in meant:
                names.add(f'{meant[first]}.{attributes}')
        files = {file for name in names for file in self.sources.files_of(name)}
        named = self._named_by(mentions)
        return files | (named if path.startswith(TESTS) else _data(named))

    def _named_by(self, mentions: Mentions) -> set[str]:
        """Returns the files that strings name: alone, in paths and in commands."""
        sources = self.sources
        files = sources.named_in(mentions.path_words, mentions.command_words)
        for text in mentions.strings & sources.rooms:  # -m eval
            files |= sources.find_program(text)
        for words in mentions.containers:
            if INTERPRETERS & words:
                files |= words & sources.python_set
            if len(sources.rooms & words) > 1:  # whole rooms, as of a copy of the project
                files |= sources.in_folders(words)
        # FOLDER / 'b' is a program or a package of the project.
        return files | sources.in_folders(mentions.entries) | mentions.entries & sources.path_set


def _data(paths: Iterable[str]) -> set[str]:
    return {path for path in paths if not path.endswith('.py')}
