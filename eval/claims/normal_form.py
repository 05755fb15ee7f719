"""Digests of measures, which change only with code that may change a number.

The digest of a measure covers the normal form of its function and of every function, class and
constant of `eval.claims` that it reaches by name. The normal form has no comments, docstrings,
annotations or positions. Local names, arguments and names of definitions are numbers, so they may
be renamed, and definitions may move between modules. An argument that is passed by keyword anywhere
in the reached code keeps its name.

Code outside of the package (modules, lm, and the rest of eval) counts by name alone: otherwise
every commit would make every verdict stale. If such code computes other numbers, tests fail: they
repeat the measures that take seconds, and compare the numbers with the record.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

INSIDE = 'eval.claims'  # the package whose definitions count by their code
# Fields of nodes that cannot change a number.
IGNORED_FIELDS = {'annotation', 'returns', 'type_comment', 'type_params', 'ctx', 'kind'}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SCOPES = COMPREHENSIONS | FUNCTIONS | ast.ClassDef

Definition = tuple[str, str]  # a module and a name of it; '' for the module
ReadSource = Callable[[str], str]


@functools.cache
def read_source(module: str) -> str:
    """Returns the source of a module without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin, module
    return Path(spec.origin).read_text()


def digest(module: str, function: str, load_source: ReadSource = read_source) -> str:
    """Returns the digest of a measure.

    Args:
      module: name of its module.
      function: name of its function.
      load_source: module name -> source.
    """
    return hashlib.sha256(repr(normal_form(module, function, load_source)).encode()).hexdigest()[
        :12
    ]


def normal_form(module: str, function: str, load_source: ReadSource = read_source) -> list[Any]:
    """Returns the normal forms of a measure and of all code that it reaches in INSIDE.

    Args:
      module: name of its module.
      function: name of its function.
      load_source: module name -> source.
    """
    # Only a first pass over all code finds which arguments are passed by keyword anywhere.
    first = _Reader(load_source, frozenset())
    first.read_all(module, function)
    return _Reader(load_source, frozenset(first.passed_keywords)).read_all(module, function)


@dataclasses.dataclass(frozen=True)
class Bindings:
    """Statements by the names that they bind, and the origin of imported names."""

    definitions: dict[str, list[Any]]  # nodes
    imports: dict[str, Definition]


@functools.cache
def parse_module(source: str) -> Bindings:
    """Returns the bindings of a module's source. In `A, B = 1, 2` each name has its own value."""
    definitions, imports = {}, {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Import(names):
                for alias in names:
                    name = alias.name if alias.asname else alias.name.partition('.')[0]
                    imports[alias.asname or name] = name, ''
            case ast.ImportFrom(origin, names):
                imports |= {alias.asname or alias.name: (origin, alias.name) for alias in names}
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                for target, value in zip(targets, values, strict=True):
                    definitions.setdefault(cast(ast.Name, target).id, []).append(value)
            case _:
                for name in _bound_names([statement]):
                    definitions.setdefault(name, []).append(statement)
    return Bindings(definitions, imports)


def _bound_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yields the names that statements bind in their own scope."""
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
    """The names of a function, a comprehension or a class, with the form of each."""

    names: dict[str, Any]
    is_class: bool = False


class _Reader:
    """Reads definitions.

    kept_keywords: arguments that keep their names, as they are passed by keyword.
    """

    def __init__(self, load_source: ReadSource, kept_keywords: frozenset[str]):
        self.load_source, self.kept_keywords = load_source, kept_keywords
        self.passed_keywords: set[str] = set()
        self.definition_ids: dict[Definition, int] = {}
        self.locals = itertools.count()

    def read_all(self, module: str, name: str) -> list[Any]:
        """Returns the forms of a measure and of all code that it reaches, in order of mention.

        Only the values of the measure's decorator count; `lab.Measure`, which makes estimates from
        numbers, has separate tests.
        """
        self.definition_ids[module, name] = 0
        forms = []
        while len(forms) < len(self.definition_ids):
            self.module, name = list(self.definition_ids)[len(forms)]
            statements = self.parse(self.module).definitions[name]
            if not forms:
                (measure,) = statements
                values = [
                    decorator.args + decorator.keywords for decorator in measure.decorator_list
                ]
                fields: dict[str, Any] = dict(ast.iter_fields(measure))
                fields['decorator_list'] = []
                undecorated = ast.FunctionDef(**fields)
                statements = [*itertools.chain(*values), undecorated]
            forms.append(self.form(statements, ()))
        return forms

    def parse(self, module: str) -> Bindings:
        return parse_module(self.load_source(module))

    def resolve_global(self, module: str, name: str) -> Any:
        """Resolves a global name: ('reached', i), ('module', its name), or a name outside."""
        bindings = self.parse(module)
        if name in bindings.definitions:
            return 'reached', self.definition_ids.setdefault(
                (module, name), len(self.definition_ids)
            )
        if name not in bindings.imports:
            return name
        source, name = bindings.imports[name]
        if not f'{source}.'.startswith(f'{INSIDE}.'):
            return name or source
        bindings = self.parse(source)
        if name in bindings.definitions or name in bindings.imports:
            return self.resolve_global(source, name)
        return 'module', f'{source}.{name}'.rstrip('.')

    def lookup(self, name: str, scopes: tuple[_Scope, ...]) -> Any:
        for i, scope in enumerate(scopes):  # the innermost first
            if name in scope.names and (i == 0 or not scope.is_class):
                return scope.names[name]
        return self.resolve_global(self.module, name)

    def form(self, node: Any, scopes: tuple[_Scope, ...]) -> Any:
        """Returns the normal form of a node, a list of nodes, or a value in a node."""
        match node:
            case list():
                return [self.form(child, scopes) for child in node]
            case ast.Name(name) | ast.arg(name):
                return self.lookup(name, scopes)
            case ast.Attribute(ast.Name(name), attribute):
                value_form = self.lookup(name, scopes)
                is_module = isinstance(value_form, tuple) and value_form[0] == 'module'
                return (
                    self.resolve_global(value_form[1], attribute)
                    if is_module
                    else (value_form, attribute)
                )
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

    def scope_form(self, node: Any, scopes: tuple[_Scope, ...]) -> Any:
        """Returns the normal form of a node with a separate scope."""
        kind = type(node).__name__, self.lookup(getattr(node, 'name', ''), scopes)
        outside = []
        if isinstance(node, COMPREHENSIONS):
            # Python evaluates the first iterable outside of the comprehension's scope.
            first, *generators = node.generators
            outside = [self.form(first.iter, scopes)]
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            body = [first.target, *first.ifs, *generators, *elements]
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
            parameters = [*itertools.chain(*by_kind), *filter(None, stars)]
            outside += [
                [len(parameter) for parameter in by_kind],
                [parameter is not None for parameter in stars],
            ]
            body = [node.body] if isinstance(node, ast.Lambda) else _without_docstring(node)
            names = dict.fromkeys(
                [*(parameter.arg for parameter in parameters), *_bound_names(body)]
            )
            names |= {
                name: ('argument', name)
                for name in self.kept_keywords & {parameter.arg for parameter in parameters}
            }
            body = [*parameters, *body]
        names = {name: form or ('local', next(self.locals)) for name, form in names.items()}
        return kind, outside, self.form(body, (_Scope(names), *scopes))


def _without_docstring(node: Any) -> list[ast.AST]:
    return node.body[ast.get_docstring(node, clean=False) is not None :]
