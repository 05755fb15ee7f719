"""Summaries of source files: the names, strings and imports that `tests.touched` looks at.

To parse and walk all files takes seconds, so the summary of a file is stored under the digest of
its text: after an edit, only the edited files are parsed again.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

INTERPRETERS = {'python', 'python3', 'sys.executable', 'uv'}


@functools.cache
def _list_fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Returns the fields of a kind of node that may hold nodes, except contexts and operators."""
    return tuple(name for name in kind._fields if name not in ('ctx', 'op', 'ops'))


def list_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes right below a node, except contexts and operators."""
    for name in _list_fields(type(node)):
        value = getattr(node, name, None)
        if isinstance(value, list):
            yield from (child for child in value if isinstance(child, ast.AST))
        elif isinstance(value, ast.AST):
            yield value


@functools.cache
def _within(top: ast.AST) -> tuple[ast.AST, ...]:
    nodes = [top]
    for node in nodes:
        nodes.extend(list_children(node))
    return tuple(nodes)


def within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Returns the nodes, and all nodes below them."""
    return (node for top in nodes for node in _within(top))


def list_strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Returns every string in a source except docstrings."""
    return (text for top in nodes for text in _list_strings(top))


@functools.cache
def _list_strings(top: ast.AST) -> tuple[str, ...]:
    statements = {id(node.value) for node in _within(top) if isinstance(node, ast.Expr)}
    constants = [node for node in _within(top) if isinstance(node, ast.Constant)]
    return tuple(
        node.value
        for node in constants
        if isinstance(node.value, str) and id(node) not in statements
    )


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


def words_in(text: str) -> set[str]:
    """Returns the names in a text: for 'model.norm=batchnorm:eps=1' model.norm, batchnorm, eps and
    1.
    """
    return set(re.findall(r'\w+(?:\.\w+)*', text))


def path_words_in(text: str) -> set[str]:
    """Returns the parts of a text that may be paths or modules."""
    return {word.strip('/').removesuffix('.') for word in re.findall(r'[\w./-]+', text)}


def assigned_values(nodes: Iterable[ast.stmt]) -> dict[str, ast.expr]:
    """Returns {name: value} of the assignments at the top of a file."""
    values = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            values |= {
                target.id: node.value for target in node.targets if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            values[node.target.id] = node.value
    return values


@dataclasses.dataclass(slots=True)
class Mentions:
    """Names and strings in some nodes of a source; docstrings do not count.

    Attributes:
      imports: dotted names that are imported.
      imported: {name: dotted name that it stands for} of the same.
      names: {dotted name: uses}.
      subscripts: {dotted name: uses as `name[...]`}.
      arguments: names of the arguments of functions.
      strings: strings that are a single word, such as the name of a fixture or a package.
      words: names in strings, as `words_in` returns them.
      path_words: parts of strings that may be paths or modules.
      command_words: the same for strings that name an interpreter.
      containers: the strings of each dict, list, set or tuple that has two or more.
      entries: the name in each CONSTANT / 'name'.
      defaults: strings that are the default of a field or stand in place of 'auto'.
    """

    imports: set[str] = dataclasses.field(default_factory=set)
    imported: dict[str, str] = dataclasses.field(default_factory=dict)
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    subscripts: dict[str, int] = dataclasses.field(default_factory=dict)
    arguments: set[str] = dataclasses.field(default_factory=set)
    strings: set[str] = dataclasses.field(default_factory=set)
    words: set[str] = dataclasses.field(default_factory=set)
    path_words: set[str] = dataclasses.field(default_factory=set)
    command_words: set[str] = dataclasses.field(default_factory=set)
    containers: set[frozenset[str]] = dataclasses.field(default_factory=set)
    entries: set[str] = dataclasses.field(default_factory=set)
    defaults: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def read(cls, nodes: Iterable[ast.AST]) -> 'Mentions':
        """Returns the names and strings in nodes and in all nodes below them."""
        mentions, visited, path_tails = cls(), list(nodes), set()
        for node in visited:
            kind = type(node)
            if kind is ast.Name:
                mentions._add_name(node.id)
            elif kind is ast.Constant:
                mentions._add_text(node.value)
            elif kind is not ast.Expr or type(node.value) is not ast.Constant:
                if add := ADDING.get(kind):
                    add(mentions, node)
                elif kind is ast.BinOp and id(node) not in path_tails:
                    mentions._add_path(node, path_tails)
                visited.extend(list_children(node))
        return mentions

    @classmethod
    def merge(cls, parts: Iterable['Mentions']) -> 'Mentions':
        """Returns the names and strings of several parts of a source."""
        merged = cls()
        for part in parts:
            for name in SETS:
                if added := getattr(part, name):
                    getattr(merged, name).update(added)
            merged.imported.update(part.imported)
            for name in ('names', 'subscripts'):
                counts = getattr(merged, name)
                for key, count in getattr(part, name).items():
                    counts[key] = counts.get(key, 0) + count
        return merged

    def _add_name(self, name: str) -> None:
        self.names[name] = self.names.get(name, 0) + 1

    def _add_text(self, text: object) -> None:
        if not isinstance(text, str):
            return
        if re.fullmatch(r'[\w.-]+', text):
            self.strings.add(text)
        self.words |= words_in(text)
        self.path_words |= path_words_in(text)
        if INTERPRETERS & set(text.split()):
            self.command_words |= path_words_in(text)

    def _add_attribute(self, node: ast.Attribute) -> None:
        if name := dotted_name(node):
            self._add_name(name)

    def _add_subscript(self, node: ast.Subscript) -> None:
        name = dotted_name(node.value)
        self.subscripts[name] = self.subscripts.get(name, 0) + 1

    def _add_argument(self, node: ast.arg) -> None:
        self.arguments.add(node.arg)

    def _add_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imports.add(alias.name)
            first = alias.name.split('.')[0]
            self.imported[alias.asname or first] = alias.name if alias.asname else first

    def _add_import_from(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f'{node.module}.{alias.name}'
            self.imports.add(name)
            self.imported[alias.asname or alias.name] = name

    def _add_container(self, node: ast.Dict | ast.List | ast.Set | ast.Tuple) -> None:
        elements = node.keys if isinstance(node, ast.Dict) else node.elts
        constants = [element.value for element in elements if isinstance(element, ast.Constant)]
        words = {value for value in constants if isinstance(value, str)}
        words |= {
            dotted_name(element) for element in elements if isinstance(element, ast.Attribute)
        }
        if len(words) > 1:
            self.containers.add(frozenset(words))

    def _add_path(self, node: ast.BinOp, path_tails: set[int]) -> None:
        """Adds FOLDER / 'b' / 'c'; 'b' alone is an entry if FOLDER is a constant."""
        parts, folder = [], node
        while isinstance(folder, ast.BinOp) and isinstance(folder.op, ast.Div):
            path_tails.add(id(folder))
            if not isinstance(folder.right, ast.Constant):
                return
            parts.insert(0, str(folder.right.value))
            folder = folder.left
        is_entry = len(parts) == 1 and (
            dotted_name(folder).isupper() or '__file__' in ast.unparse(folder)
        )
        if is_entry:
            self.entries.add(parts[0])
        else:
            self.path_words |= path_words_in('/'.join(parts))

    def _add_field_defaults(self, node: ast.ClassDef) -> None:
        fields = [field.value for field in node.body if isinstance(field, ast.AnnAssign)]
        constants = [value for value in fields if isinstance(value, ast.Constant)]
        self.defaults.update(list_strings(constants))

    def _add_resolved_auto(self, node: ast.If | ast.IfExp) -> None:
        names = {dotted_name(part) for part in within([node.test])}
        if 'AUTO' in names or 'auto' in list_strings([node.test]):
            self.defaults.update(
                list_strings(node.body if isinstance(node, ast.If) else [node.body])
            )


SETS = [field.name for field in dataclasses.fields(Mentions) if field.default_factory is set]
ADDING = {
    ast.Attribute: Mentions._add_attribute,
    ast.Subscript: Mentions._add_subscript,
    ast.arg: Mentions._add_argument,
    ast.Import: Mentions._add_import,
    ast.ImportFrom: Mentions._add_import_from,
    ast.Dict: Mentions._add_container,
    ast.List: Mentions._add_container,
    ast.Set: Mentions._add_container,
    ast.Tuple: Mentions._add_container,
    ast.ClassDef: Mentions._add_field_defaults,
    ast.If: Mentions._add_resolved_auto,
    ast.IfExp: Mentions._add_resolved_auto,
}


@dataclasses.dataclass(slots=True)
class Summary:
    """Names and strings of a source file.

    Attributes:
      body: those of the whole file.
      definitions: {name: those of a definition at the top of the file}, without its decorators;
        'Class.test' for methods.
    """

    body: Mentions
    definitions: dict[str, Mentions]

    @classmethod
    def read(cls, tree: ast.Module) -> 'Summary':
        values, parts = assigned_values(tree.body), []
        definitions = {name: Mentions.read([value]) for name, value in values.items()}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                parts += _read_function(node, node.name, definitions)
            elif isinstance(node, ast.ClassDef):
                parts += _read_class(node, definitions)
            else:
                parts.append(Mentions.read([node]))
        return cls(Mentions.merge(parts), definitions)


def _read_function(
    node: ast.FunctionDef, name: str, definitions: dict[str, Mentions]
) -> list[Mentions]:
    """Returns the names and strings inside a function and around it, as in its decorators.

    `definitions` gets those inside.
    """
    inside = [node.args, *node.body]
    definitions[name] = Mentions.read(inside)
    return [definitions[name], Mentions.read(_list_around(node, inside))]


def _read_class(node: ast.ClassDef, definitions: dict[str, Mentions]) -> list[Mentions]:
    """Returns the same for a class. `definitions` gets those inside it and inside its methods."""
    definitions[node.name], parts = Mentions(), []
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            parts += _read_function(member, f'{node.name}.{member.name}', definitions)
        else:
            parts.append(Mentions.read([member]))
    definitions[node.name] = Mentions.merge(parts)
    around = Mentions.read(_list_around(node, node.body))
    around._add_field_defaults(node)
    return [definitions[node.name], around]


def _list_around(node: ast.AST, inside: list) -> list[ast.AST]:
    ids = {id(child) for child in inside}
    return [child for child in list_children(node) if id(child) not in ids]


class Store:
    """Summaries by the digest of their file's text, kept in a file between calls.

    The store is empty at first if the file is absent, damaged or of another version of this module.

    Args:
      file: its path; None keeps nothing.
    """

    def __init__(self, file: Path | None = None):
        self.file, self.stored, self.used = file, {}, {}
        self.version = _digest(f'{Path(__file__).read_text()}{sys.version}')
        if file is not None:
            with contextlib.suppress(Exception):  # of a damaged file unpickling raises any
                version, summaries = pickle.loads(file.read_bytes())
                self.stored = summaries if version == self.version else {}

    def summarize(self, text: str, parse: Callable[[], ast.Module]) -> Summary:
        """Returns the summary of a text, which `parse` parses unless the store has it."""
        digest = _digest(text)
        if digest not in self.used:
            self.used[digest] = self.stored.get(digest) or Summary.read(parse())
        return self.used[digest]

    def save(self) -> None:
        """Writes the summaries that were used, unless the file has them all."""
        if self.file is None or self.used.keys() <= self.stored.keys():
            return
        written = self.file.with_name(f'{self.file.name}.{os.getpid()}')
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next call parses
            self.file.parent.mkdir(parents=True, exist_ok=True)
            written.write_bytes(pickle.dumps((self.version, self.used), pickle.HIGHEST_PROTOCOL))
            written.replace(self.file)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
