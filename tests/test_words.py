"""Contract: names and docstrings stay those of the field (docs/words.md, tests/words.py)."""

import ast
import functools

import pytest

from tests.words import Counts, count_words, read_sources

PRODUCT = ('lm', 'modules', 'eval', 'tpu', 'configs', 'train.py')
LAUNCHERS = {'Launch', 'Options'}  # each launcher has both, in a module of its own
MANY_ARGUMENTS = 3
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources(roots: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(read_sources(roots))


@functools.cache
def counts(roots: tuple[str, ...]) -> Counts:
    return count_words(sources(roots))


def test_counts_do_not_rise():
    """The limits are the counts of the day on which they were last lowered, rounded up."""
    product = counts(PRODUCT)
    assert product.empty_per_1000_lines <= 0.5, product.empty
    assert product.usual_per_1000_lines <= 2.5, product.usual
    assert product.participle_percent <= 0.5, product.participles
    assert product.of_percent <= 0.3, product.with_of
    assert product.what_per_1000_words <= 0.3


def test_test_counts_do_not_rise():
    tests = counts(('tests',))
    assert tests.empty_per_1000_lines <= 5, tests.empty.most_common(20)
    assert tests.participle_percent <= 2, tests.participles
    assert tests.of_percent <= 2, tests.with_of


def test_a_class_name_has_one_definition():
    twice = counts(PRODUCT).defined_twice
    assert twice.keys() <= LAUNCHERS, twice


def public_functions(source: str):
    """Yields (name, node) of the functions and methods of a module that others may call."""
    for node in ast.parse(source).body:
        owner = f'{node.name}.' if isinstance(node, ast.ClassDef) else ''
        if not isinstance(node, DEFINITIONS) or node.name.startswith('_'):
            continue
        for function in node.body if owner else [node]:
            is_function = isinstance(function, DEFINITIONS) and hasattr(function, 'args')
            if is_function and not function.name.startswith('_'):
                yield f'{owner}{function.name}', function


def arguments(function: ast.FunctionDef) -> list[str]:
    every = function.args
    names = [a.arg for a in [*every.posonlyargs, *every.args, *every.kwonlyargs]]
    return [name for name in names if name not in ('self', 'cls')]


@pytest.mark.parametrize('check', ['return type', 'Args'])
def test_public_functions_say_what_they_take_and_return(check):
    lacking = []
    for path, source in sources(PRODUCT):
        for name, function in public_functions(source):
            docstring = ast.get_docstring(function) or ''
            if check == 'return type':
                lacks = function.returns is None
            else:
                lacks = len(arguments(function)) >= MANY_ARGUMENTS and 'Args:' not in docstring
            if lacks:
                lacking.append(f'{path}:{function.lineno} {name}')
    assert not lacking, '\n'.join(lacking)


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
