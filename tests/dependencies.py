"""The files that each file of the project reads, from its source alone: nothing is imported or run.

A file reads the modules that it imports, with the `__init__` of every package on the way, and the
file that defines each name it takes from a package. A test also reads the programs, modules and
data that its strings name, and the fixtures of a conftest.py that it uses.
"""

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

TESTS = 'tests/'
INTERPRETERS = {'python', 'python3', 'sys.executable', 'uv'}


@functools.cache
def _within(top: ast.AST) -> tuple[ast.AST, ...]:
    """Returns ast.walk without meaningless nodes, such as the contexts load and store."""
    nodes = [top]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    nodes.append(child)
    return tuple(nodes)


def within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Returns the nodes, and all nodes below them."""
    return (node for top in nodes for node in _within(top))


@functools.cache
def _texts(top: ast.AST) -> tuple[str, ...]:
    statements = {id(node.value) for node in _within(top) if isinstance(node, ast.Expr)}
    constants = [node for node in _within(top) if isinstance(node, ast.Constant)]
    return tuple(
        node.value
        for node in constants
        if isinstance(node.value, str) and id(node) not in statements
    )


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Returns every string in a source except docstrings."""
    return (text for top in nodes for text in _texts(top))


def dotted_name(node: ast.AST) -> str:
    """Returns 'a.b.c' for such an expression, or ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f'{owner}.{node.attr}'
    return ''


def arguments(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names of all arguments of all functions."""
    return {node.arg for node in within(nodes) if isinstance(node, ast.arg)}


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
    """

    def __init__(self, root: Path, paths: Iterable[str]):
        self.root, self.paths = root, sorted(set(paths))
        self.python = [path for path in self.paths if path.endswith('.py')]
        self.modules = {
            path.removesuffix('.py').removesuffix('/__init__').replace('/', '.'): path
            for path in self.python
        }
        self.rooms = {path.split('/')[0] for path in self.python if '/' in path}
        self.text = functools.cache(self._text)
        self.tree = functools.cache(self._tree)
        self.imported = functools.cache(self._find_imports)
        self.files_of = functools.cache(self._list_files)

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

    def _find_imports(self, path: str) -> dict[str, str]:
        """Returns {name: dotted name that it stands for} of all imports of a file, also inside
        functions.
        """
        names = {}
        for node in within(self.tree(path).body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split('.')[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f'{node.module}.{alias.name}'
        return names

    def split(self, name: str) -> tuple[str, list[str]]:
        """Returns (longest module that a dotted name begins with, rest); '' without a module."""
        parts = name.split('.')
        for n in range(len(parts), 0, -1):
            if '.'.join(parts[:n]) in self.modules:
                return '.'.join(parts[:n]), parts[n:]
        return '', parts

    def origin(self, name: str, visited: tuple[str, ...] = ()) -> tuple[str, str]:
        """Returns (file that defines the object of a dotted name, its name there).

        Returns ('', '') outside the project. The name is '' for a module.
        """
        module, attributes = self.split(name)
        if not module:
            return '', ''
        path = self.modules[module]
        meant = self.imported(path).get(attributes[0]) if attributes else None
        if meant is None or name in visited or not self.split(meant)[0]:
            return path, '.'.join(attributes)
        return self.origin('.'.join([meant, *attributes[1:]]), (*visited, name))

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

    def named_in(self, text: str) -> set[str]:
        """Returns the files that a string names: by a path or its end, or as modules.

        Tests are left out, since strings that name tests are for people. A program at the root,
        such as train.py, counts only behind an interpreter, because launchers pass its name on.
        """
        files = set()
        is_command = bool(INTERPRETERS & set(text.split()))
        for word in re.findall(r'[\w./-]+', text):
            word = word.strip('/').removesuffix('.')
            if word not in self.python or '/' in word or is_command:
                files |= self._by_ending.get(word, set())
            if '.' in word and '/' not in word and word.split('.')[0] in self.rooms:
                files |= self.files_of(word) | self.find_program(word)
        return {path for path in files if not is_test(path)}


class Dependencies:
    """The files that each file of a project reads."""

    def __init__(self, sources: Sources):
        self.sources = sources
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
        text, nodes = self.sources.text(path), self.sources.tree(path).body
        parameters = arguments(nodes) | set(texts(nodes))
        if path.endswith('conftest.py'):
            nodes = [node for node in nodes if not is_fixture(node)]
            parameters = arguments(node for node in nodes if _is_autouse(node))
        files = self._read_by(path, nodes)
        if '__file__' in text:  # a file that asks where it lies reads the data beside it
            folder = PurePosixPath(path).parent
            files |= _data(
                file for file in self.sources.paths if PurePosixPath(file).parent == folder
            )
        if is_test(path) or 'pytest.fixture' in text:
            files |= self._fixtures(path, parameters)
        if 'runpy.' in text:  # the commands of the pages that it reads
            pages = ' '.join(self.sources.text(file) for file in files if file.endswith('.md'))
            named = self.sources.named_in(f'python {pages}')
            files |= {file for file in named if "'__main__'" in self.sources.text(file)}
        return files - {path}

    def _fixtures(self, path: str, parameters: set[str]) -> set[str]:
        """Returns the conftest.py files above a file, and the files of their fixtures that it
        requests.
        """
        above = {f'{folder}/conftest.py' for folder in PurePosixPath(path).parents}
        files = set()
        for conftest in above & set(self.sources.paths):
            tree = self.sources.tree(conftest)
            defined = {node.name for node in tree.body if is_fixture(node)}
            files |= {conftest} | {f'{conftest}::{name}' for name in defined & parameters}
        return files

    def _read_by_fixtures(self, conftest: str) -> dict[str, set[str]]:
        by_fixture = {}
        for node in filter(is_fixture, self.sources.tree(conftest).body):
            parameters = arguments([node]) | set(texts([node]))
            files = self._read_by(conftest, [node]) | self._fixtures(conftest, parameters)
            by_fixture[f'{conftest}::{node.name}'] = files - {f'{conftest}::{node.name}'}
        return by_fixture

    def _read_by(self, path: str, nodes: Iterable[ast.AST]) -> set[str]:
        """Returns the files that nodes read by imports and strings.

        Strings of the product name only data, since it starts no program but itself.
        """
        files, meant = set(), self.sources.imported(path)
        files_of = self.sources.files_of
        for node in within(nodes):
            if isinstance(node, ast.Import):
                files |= {file for alias in node.names for file in files_of(alias.name)}
            elif isinstance(node, ast.ImportFrom):
                names = [f'{node.module}.{alias.name}' for alias in node.names]
                files |= {file for name in names for file in files_of(name)}
            elif isinstance(node, ast.Attribute):
                first, _, attributes = dotted_name(node).partition('.')
                if first in meant:
                    files |= files_of(f'{meant[first]}.{attributes}')
        named = self._named_by(nodes)
        return files | (named if path.startswith(TESTS) else _data(named))

    def _named_by(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Returns the files that strings name: alone, in paths and in commands."""
        sources, inner = self.sources, set()
        files = {path for text in texts(nodes) for path in sources.named_in(text)}
        for text in set(texts(nodes)) & sources.rooms:  # -m eval
            files |= sources.find_program(text)
        for node in within(nodes):
            if isinstance(node, ast.BinOp) and id(node) not in inner:
                files |= self._named_by_path(node, inner)
            elif isinstance(node, ast.Dict | ast.List | ast.Set | ast.Tuple):
                elements = node.keys if isinstance(node, ast.Dict) else node.elts
                words = {
                    getattr(element, 'value', '')
                    for element in elements
                    if isinstance(element, ast.Constant)
                }
                words |= {
                    dotted_name(element)
                    for element in elements
                    if isinstance(element, ast.Attribute)
                }
                if INTERPRETERS & words:
                    files |= words & set(sources.python)
                if len(sources.rooms & words) > 1:  # whole rooms, as of a copy of the project
                    files |= {path for path in sources.paths if path.split('/')[0] in words}
        return files

    def _named_by_path(self, node: ast.BinOp, inner: set[int]) -> set[str]:
        """Returns the files that FOLDER / 'b' / 'c' names; `inner` gets its subexpressions.

        A single 'b' is a program or a package of the project if FOLDER is a constant.
        """
        sources, parts = self.sources, []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            inner.add(id(node))
            if not isinstance(node.right, ast.Constant):
                return set()
            parts.insert(0, str(node.right.value))
            node = node.left
        if len(parts) == 1 and (dotted_name(node).isupper() or '__file__' in ast.unparse(node)):
            (name,) = parts
            return {path for path in sources.paths if name in (path, path.split('/')[0])}
        return sources.named_in('/'.join(parts))


def _data(paths: Iterable[str]) -> set[str]:
    return {path for path in paths if not path.endswith('.py')}
