"""Property: what changes a number of a measure changes its digest, through helpers too; what only
tells does not.
"""

import ast

import pytest

from eval.claims.measures.rows import MEASURES
from eval.claims.normal_form import digest, read_source

SOURCES = {
    'eval.claims.mine': '''
"""A measure."""

import jax.numpy as jnp
from eval.claims import helper
from eval.claims.helper import Kind, scale as by
from modules.losses import entropy

SEEDS, UNUSED = 3, 4


@measure('mean', trains=False)
def mine() -> dict:
    """Returns a mean."""
    total, rows = 0.0, helper.draw(SEEDS, rate=0.1)  # of all

    def add(row, total):
        return total + by(row)

    for row in rows:
        total = add(row, total)
    try:
        squares = [x * x for x in rows if (lambda y: y > 1)(x)]
    except ValueError as error:
        squares = [error]
    return jnp.mean(total) + entropy(squares) + Kind(size=2).double()


def other():
    return UNUSED
''',
    'eval.claims.helper': '''
import dataclasses

SIZES = {'small': 1}
FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind."""

    size: int = 1

    def double(self):
        """Returns twice the size."""
        factor = 2
        return factor * self.size


def draw(count, *, rate):
    return [rate * one for one in range(count) if SIZES]


def scale(x):
    """Scales x."""
    return FACTOR * x


def unused():
    return 1
''',
    'eval.claims': '',
}
MINE, HELPER, _ = SOURCES
TELLING = [  # what may change, and how
    (MINE, '"""A measure."""', '"""Other words."""'),
    (MINE, '"""Returns a mean."""', '"""Returns the mean of all."""\n'),
    (MINE, '  # of all', ''),
    (MINE, ' -> dict', ''),
    (MINE, 'total', 'whole'),  # a local name and an argument
    (
        MINE,
        'def add(row, total):\n        return total + by(row)',
        'def add(one, so_far):\n        return so_far + by(one)',
    ),
    (MINE, 'add(', 'join('),
    (
        MINE,
        '[x * x for x in rows if (lambda y: y > 1)(x)]',
        '[y * y for y in rows if (lambda x: x > 1)(y)]',
    ),
    (MINE, 'error', 'problem'),
    (MINE, 'SEEDS', 'COUNT'),
    (MINE, '3, 4', '3, 5'),  # of another name alone
    (MINE, 'return UNUSED', 'return 0'),
    (MINE, 'scale as by', 'scale'),
    (HELPER, '"""Scales x."""', '"""Multiplies."""'),
    (
        HELPER,
        'def scale(x):\n    """Scales x."""\n    return FACTOR * x',
        'def scale(value):\n    return FACTOR * value',
    ),
    (HELPER, 'count', 'number'),
    (HELPER, '        factor = 2\n        return factor', '        two = 2\n        return two'),
    (HELPER, 'self', 'this'),
    (HELPER, 'FACTOR', 'SHARE'),
    (HELPER, 'return 1', 'return 2'),
]
COUNTING = [
    (MINE, "'mean', ", "'median', "),
    (MINE, 'trains=False', 'trains=True'),
    (MINE, '0.0, helper', '1.0, helper'),
    (MINE, '3, 4', '5, 4'),
    (MINE, 'rate=0.1', 'rate=0.2'),
    (MINE, 'return total + by(row)', 'return row + by(total)'),
    (MINE, 'entropy', 'cross_entropy'),  # another function of the product
    (MINE, 'Kind(size=2)', 'Kind()'),
    (MINE, 'y > 1', 'x > 1'),
    (MINE, 'jnp.mean', 'jnp.sum'),
    (HELPER, 'FACTOR = 2.0', 'FACTOR = 3.0'),
    (HELPER, 'FACTOR * x', 'FACTOR + x'),
    (HELPER, "'small': 1", "'small': 2"),
    (HELPER, 'rate * one', 'one'),
    (HELPER, 'factor = 2', 'factor = 3'),
]  # fmt: skip


def code(changed=None, instead='', at=MINE):
    sources = SOURCES
    if changed:
        assert changed in SOURCES[at]
        sources = SOURCES | {at: SOURCES[at].replace(changed, instead)}
        if changed == 'scale as by':
            sources[at] = sources[at].replace('by(', 'scale(')
        ast.parse(sources[at])
    return digest(MINE, 'mine', sources.__getitem__)


@pytest.mark.parametrize(('at', 'changed', 'instead'), TELLING)
def test_what_tells_is_no_other_measure(at, changed, instead):
    assert code(changed, instead, at) == code()


@pytest.mark.parametrize(('at', 'changed', 'instead'), COUNTING)
def test_what_counts_is_another_measure(at, changed, instead):
    assert code(changed, instead, at) != code()


def test_arguments_that_change_places_are_not_the_same():
    """Both are passed by name, so that an argument's number would hide it."""
    text = 'def mine():\n    return less(a=1, b=2)\ndef less({}):\n    return {} - {}\n'
    same, other = (text.format(*names) for names in (('a, b', 'a', 'b'), ('b, a', 'b', 'a')))
    found = {digest(MINE, 'mine', lambda module, text=text: text) for text in (same, other)}
    assert len(found) == 2


@pytest.mark.parametrize(
    ('module', 'changed', 'instead', 'is_noticed'),
    [
        ('lab', '(gain / shape[0]) ** 0.5', '(gain / shape[1]) ** 0.5', {'norms_alone'}),
        ('measures.tiny', 'SYMBOLS, 16, 8, 50', 'SYMBOLS, 16, 8, 60', {'merged_starts'}),
        ('lab', 'is_wrong', 'is_other', set()),
        ('lab', '"""Draws a matrix', '"""Returns a matrix', set()),
        ('measures.tiny', 'tokens_SBT', 'batches_SBT', set()),
    ],
)
def test_the_board_notices_a_helper(module, changed, instead, is_noticed):
    """Of the measures of two helpers: a start in the laboratory, and a stage of tiny models."""
    module = f'eval.claims.{module}'

    def read(name):
        source = read_source(name)
        return source.replace(changed, instead) if name == module else source

    measures = {name: MEASURES[name].function for name in ('norms_alone', 'merged_starts')}
    noticed = {
        name
        for name, of in measures.items()
        if digest(of.__module__, name, read) != digest(of.__module__, name)
    }
    assert noticed == is_noticed
