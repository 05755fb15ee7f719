"""Digests of measures: what would change a number changes them, and what only tells does not.

The digest of a measure is that of the normal form of its function with every function, class and
constant of `eval.claims` that it reaches by name. The normal form has no comments, docstrings,
annotations and places; local names, arguments and names of definitions are numbers, so that they
may be changed, and definitions may move from module to module. An argument that is passed by its
name anywhere in what is reached keeps it.

What the product computes (modules, lm, and the rest of eval) counts by its name alone: with its
code each commit would make every verdict stale. A product that gives other numbers is noticed by
numbers: tests compute the measures that take seconds, and compare them with those on record.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

INSIDE = 'eval.claims'  # the package whose definitions count by their code
IGNORED_FIELDS = {
    'annotation',
    'returns',
    'type_comment',
    'type_params',
    'ctx',
    'kind',
}  # fields of nodes
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SCOPES = COMPREHENSIONS | FUNCTIONS | ast.ClassDef

Definition = tuple[str, str]  # a module and a name of it; '' for the module
ReadSource = Callable[[str], str]


@functools.cache
def read_source(module: str) -> str:
    """Returns the source of a module, which need not be imported."""
    return Path(importlib.util.find_spec(module).origin).read_text()


def digest(module: str, function: str, load_source: ReadSource = read_source) -> str:
    """Returns the digest of a measure, a function of a module, whose source `read` returns."""
    return hashlib.sha256(repr(normal_form(module, function, load_source)).encode()).hexdigest()[
        :12
    ]


def normal_form(module: str, function: str, load_source: ReadSource = read_source) -> list[Any]:
    """Returns the normal forms of a measure and of all that it reaches in INSIDE."""
    first = _Reader(load_source, frozenset())
    first.read_all(module, function)
    return _Reader(load_source, frozenset(first.passed_keywords)).read_all(module, function)


@dataclasses.dataclass(frozen=True)
class Bindings:
    """Statements by the names that they bind, and the origin of imported names."""

    definitions: dict[str, list[ast.AST]]
    imports: dict[str, Definition]


@functools.cache
def parse_module(source: str) -> Bindings:
    """Reads the source of a module. Each name of `A, B = 1, 2` has its own number alone."""
    definitions, imports = {}, {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Import(names):
                for one in names:
                    name = one.name if one.asname else one.name.partition('.')[0]
                    imports[one.asname or name] = name, ''
            case ast.ImportFrom(origin, names):
                imports |= {one.asname or one.name: (origin, one.name) for one in names}
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                for target, value in zip(targets, values, strict=True):
                    definitions.setdefault(target.id, []).append(value)
            case _:
                for name in _bound_names([statement]):
                    definitions.setdefault(name, []).append(statement)
    return Bindings(definitions, imports)


def _bound_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yields the names that statements bind in the scope that they stand in."""
    for node in nodes:
        match node:
            case ast.Name(name, ast.Store()) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.alias(name, other):
                yield other or name
        if not isinstance(node, SCOPES):
            yield from _bound_names([*ast.iter_child_nodes(node)])


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Names of a function, a comprehension or a class, with the form of each."""

    names: dict[str, Any]
    is_class: bool = False


class _Reader:
    """Reads definitions. keep: names of arguments that stay, as they are passed by name."""

    def __init__(self, load_source: ReadSource, kept_keywords: frozenset[str]):
        self.load_source, self.kept_keywords = load_source, kept_keywords
        self.passed_keywords: set[str] = set()
        self.definition_ids: dict[Definition, int] = {}
        self.locals = itertools.count()

    def read_all(self, module: str, name: str) -> list[Any]:
        """Returns the forms of a measure and of what it reaches, in the order of mention. Of its
        decorator the values count; how they become estimates is for tests of `lab.Measure`.
        """
        self.definition_ids[module, name] = 0
        forms = []
        while len(forms) < len(self.definition_ids):
            self.module, name = list(self.definition_ids)[len(forms)]
            statements = self.parse(self.module).definitions[name]
            if not forms:
                (measure,) = statements
                values = [one.args + one.keywords for one in measure.decorator_list]
                bare = ast.FunctionDef(**dict(ast.iter_fields(measure)) | {'decorator_list': []})
                statements = [*itertools.chain(*values), bare]
            forms.append(self.form(statements, ()))
        return forms

    def parse(self, module: str) -> Bindings:
        return parse_module(self.load_source(module))

    def resolve_global(self, module: str, name: str) -> Any:
        """Resolves a global name: ('reached', i), ('module', its name), or a name outside."""
        found = self.parse(module)
        if name in found.definitions:
            return 'reached', self.definition_ids.setdefault(
                (module, name), len(self.definition_ids)
            )
        if name not in found.imports:
            return name
        source, name = found.imports[name]
        if not f'{source}.'.startswith(f'{INSIDE}.'):
            return name or source
        found = self.parse(source)
        if name in found.definitions or name in found.imports:
            return self.resolve_global(source, name)
        return 'module', f'{source}.{name}'.rstrip('.')

    def lookup(self, name: str, scopes: tuple[_Scope, ...]) -> Any:
        for i, scope in enumerate(scopes):  # the innermost first
            if name in scope.names and (i == 0 or not scope.is_class):
                return scope.names[name]
        return self.resolve_global(self.module, name)

    def form(self, node: Any, scopes: tuple[_Scope, ...]) -> Any:
        """The normal form of a node, a list of nodes, or a value in one."""
        match node:
            case list():
                return [self.form(one, scopes) for one in node]
            case ast.Name(name) | ast.arg(name):
                return self.lookup(name, scopes)
            case ast.Attribute(ast.Name(name), of):
                found = self.lookup(name, scopes)
                is_module = isinstance(found, tuple) and found[0] == 'module'
                return self.resolve_global(found[1], of) if is_module else (found, of)
            case ast.keyword(name, value):
                self.passed_keywords.add(name)
                return name, self.form(value, scopes)
            case ast.alias(name, other):
                return name, self.lookup(other or name, scopes)
            case ast.ExceptHandler(kind, str(name), body):
                return self.form([kind], scopes), self.lookup(name, scopes), self.form(body, scopes)
            case ast.AST() if isinstance(node, SCOPES):
                return self.scope_form(node, scopes)
            case ast.AST():
                fields = (
                    (name, x) for name, x in ast.iter_fields(node) if name not in IGNORED_FIELDS
                )
                return type(node).__name__, *((name, self.form(x, scopes)) for name, x in fields)
        return repr(node)

    def scope_form(self, node: ast.AST, scopes: tuple[_Scope, ...]) -> Any:
        """The form of what has names of its own."""
        kind = type(node).__name__, self.lookup(getattr(node, 'name', ''), scopes)
        outside = []
        if isinstance(node, COMPREHENSIONS):
            first, *others = node.generators
            outside = [self.form(first.iter, scopes)]
            results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            body = [first.target, *first.ifs, *others, *results]
            names = dict.fromkeys(_bound_names(body))
        elif isinstance(node, ast.ClassDef):
            outside = self.form([*node.decorator_list, *node.bases, *node.keywords], scopes)
            body = _without_docstring(node)
            names = {name: ('field', name) for name in _bound_names(body)}
            scope = _Scope(names, is_class=True)
            return kind, outside, self.form(body, (scope, *scopes))
        else:
            arguments = node.args
            outside = self.form(
                [*getattr(node, 'decorator_list', []), *arguments.defaults, *arguments.kw_defaults],
                scopes,
            )
            stars = [arguments.vararg, arguments.kwarg]
            by_kind = [arguments.posonlyargs, arguments.args, arguments.kwonlyargs]
            every = [*itertools.chain(*by_kind), *filter(None, stars)]
            outside += [[len(one) for one in by_kind], [one is not None for one in stars]]
            body = [node.body] if isinstance(node, ast.Lambda) else _without_docstring(node)
            names = dict.fromkeys([*(one.arg for one in every), *_bound_names(body)])
            names |= {
                name: ('argument', name) for name in self.kept_keywords & {one.arg for one in every}
            }
            body = [*every, *body]
        names = {name: of or ('local', next(self.locals)) for name, of in names.items()}
        return kind, outside, self.form(body, (_Scope(names), *scopes))


def _without_docstring(node: ast.AST) -> list[ast.AST]:
    return node.body[ast.get_docstring(node, clean=False) is not None :]
