"""Contract: names and docstrings stay those of the field (docs/words.md, tests/words.py)."""

import ast
import functools

from tests.words import Counts, count_words, read_sources

PRODUCT = ('lm', 'modules', 'eval', 'tpu', 'configs', 'train.py')
MANY_ARGUMENTS = 3
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = ast.ClassDef | FUNCTIONS


@functools.cache
def sources(roots: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(read_sources(roots))


@functools.cache
def counts(roots: tuple[str, ...]) -> Counts:
    return count_words(sources(roots))


def test_counts_do_not_rise():
    """The limits are today's counts, so that one more name fails. Lower them when a count falls."""
    product = counts(PRODUCT)
    assert product.empty.total() <= 11, product.empty
    assert product.usual.total() <= 45, product.usual
    assert len(product.participles) <= 3, product.participles
    assert len(product.with_of) <= 4, product.with_of
    assert product.what <= 17


def test_test_counts_do_not_rise():
    tests = counts(('tests',))
    assert tests.empty.total() <= 5, tests.empty
    assert tests.usual.total() <= 59, tests.usual
    assert len(tests.participles) <= 2, tests.participles
    assert len(tests.with_of) <= 12, tests.with_of
    assert tests.what <= 0
    assert not (twice := tests.defined_twice), twice


def test_a_class_name_has_one_definition():
    assert not (twice := counts(PRODUCT).defined_twice), twice


@functools.cache
def table_rows() -> frozenset[str]:
    """Names of functions in the tables of the product.

    Arguments that all rows of a table take are documented with the table, and options in the
    signature of the row (`modules.options`).
    """
    tables = ast.Dict | ast.List | ast.Tuple
    names = set()
    for _, source in sources(PRODUCT):
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, tables):
                names |= {child.id for child in ast.walk(node.value) if isinstance(child, ast.Name)}
    return frozenset(names)


@functools.cache
def documented_methods() -> frozenset[str]:
    """Names of methods that some class documents for its subclasses."""
    return frozenset(
        name.rpartition('.')[2]
        for _, source in sources(PRODUCT)
        for name, function in public_functions(source)
        if '.' in name and 'Args:' in (ast.get_docstring(function) or '')
    )


@functools.cache
def subclasses() -> frozenset[str]:
    return frozenset(
        node.name
        for _, source in sources(PRODUCT)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.bases
    )


def public_functions(source: str):
    """Yields (name, node) of the functions and methods of a module that others may call."""
    for node in ast.parse(source).body:
        if not isinstance(node, DEFINITIONS) or node.name.startswith('_'):
            continue
        is_class = isinstance(node, ast.ClassDef)
        for function in node.body if is_class else [node]:
            is_public = isinstance(function, FUNCTIONS) and not function.name.startswith('_')
            if is_public:
                yield f'{node.name}.{function.name}' if is_class else node.name, function


def arguments(function: ast.FunctionDef) -> list[str]:
    every = function.args
    names = [a.arg for a in [*every.posonlyargs, *every.args, *every.kwonlyargs]]
    return [name for name in names if name not in ('self', 'cls')]


def lacking(lacks) -> list[str]:
    """Places of the public functions for which lacks(name, function) holds."""
    return [
        f'{path}:{function.lineno} {name}'
        for path, source in sources(PRODUCT)
        for name, function in public_functions(source)
        if lacks(name, function)
    ]


def test_public_functions_have_return_types():
    assert not (places := lacking(lambda name, function: function.returns is None)), places


def test_public_functions_of_many_arguments_document_them():
    def lacks(name, function):
        docstring = ast.get_docstring(function) or ''
        if len(arguments(function)) < MANY_ARGUMENTS or 'Args:' in docstring:
            return False
        owner, _, method = name.rpartition('.')
        if owner in subclasses():
            return method not in documented_methods()
        return name not in table_rows()

    assert not (places := lacking(lacks)), places


BAD = '''
class Twice:
    """A thing of what was asked."""
class Twice:
    def drawn(self, found):
        """What it is."""
        result = [one for one in found]
def rows_of(_): ...
'''


def test_counting():
    """Catches a count that is blind: each fault of a module of faults is counted once."""
    bad = count_words([('bad.py', BAD)])
    assert bad.empty == {'found': 1, 'one': 1} and bad.usual == {'result': 1}
    assert [place.split()[1] for place in bad.participles] == ['drawn']
    assert [place.split()[1] for place in bad.with_of] == ['rows_of']
    assert bad.what == 2 and bad.defined_twice == {'Twice': ['bad.py', 'bad.py']}
