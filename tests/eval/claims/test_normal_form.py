"""Property: code that changes a number of a measure changes its digest, in helpers too; texts and
names do not.
"""

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
# What may change, and how: the module, what stands there => what stands there instead.
TELLING = r'''
mine: """A measure.""" => """Other words."""
mine: """Returns a mean.""" => """Returns the mean of all."""
mine: # of all => # of each
mine: -> dict => -> list
mine: total => whole
mine: row => one
mine: add( => join(
mine: [x * x for x in rows if (lambda y: y > 1)(x)] => [y * y for y in rows if (lambda x: x > 1)(y)]
mine: error => problem
mine: SEEDS => COUNT
mine: 3, 4 => 3, 5
mine: return UNUSED => return 0
mine: scale as by => scale as times; by( => times(
helper: """Scales x.""" => """Multiplies."""
helper: FACTOR => SHARE
helper: (x) => (y); * x => * y
helper: count => number
helper: factor => two
helper: self => this
helper: return 1 => return 2
'''
COUNTING = r"""
mine: 'mean', => 'median',
mine: trains=False => trains=True
mine: 0.0, helper => 1.0, helper
mine: 3, 4 => 5, 4
mine: rate=0.1 => rate=0.2
mine: total + by(row) => row + by(total)
mine: entropy => cross_entropy
mine: Kind(size=2) => Kind()
mine: y > 1 => x > 1
mine: jnp.mean => jnp.sum
helper: FACTOR = 2.0 => FACTOR = 3.0
helper: FACTOR * x => FACTOR + x
helper: 'small': 1 => 'small': 2
helper: rate * one => one
helper: factor = 2 => factor = 3
"""


def digest_with(line=''):
    """Returns the digest of the sources after a change."""
    sources = dict(SOURCES)
    module, _, changes = line.partition(': ')
    for change in changes.split('; ') if line else ():
        before, after = change.split(' => ')
        assert before in SOURCES[f'eval.claims.{module}']
        sources[f'eval.claims.{module}'] = sources[f'eval.claims.{module}'].replace(before, after)
    return digest('eval.claims.mine', 'mine', sources.__getitem__)


@pytest.mark.parametrize('line', TELLING.strip().splitlines())
def test_texts_do_not_change_digest(line):
    assert digest_with(line) == digest_with()


@pytest.mark.parametrize('line', COUNTING.strip().splitlines())
def test_numbers_change_digest(line):
    assert digest_with(line) != digest_with()


def test_swapped_arguments_change_digest():
    """Both arguments are passed by keyword, so that numbering the arguments would hide the swap."""
    text = 'def mine():\n    return less(a=1, b=2)\ndef less({}):\n    return {} - {}\n'
    same, swapped = (text.format(*names) for names in (('a, b', 'a', 'b'), ('b, a', 'b', 'a')))
    digests = {
        digest('eval.claims.mine', 'mine', lambda module, text=text: text)
        for text in (same, swapped)
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ('module', 'fragment', 'replacement', 'expected'),
    [
        ('lab', '(gain / shape[0]) ** 0.5', '(gain / shape[1]) ** 0.5', {'norms_alone'}),
        ('measures.tiny', 'SYMBOLS, 16, 8, 50', 'SYMBOLS, 16, 8, 60', {'merged_starts'}),
        ('lab', 'is_wrong', 'is_other', set()),
        ('lab', '"""Draws a matrix', '"""Returns a matrix', set()),
        ('measures.tiny', 'tokens_SBT', 'batches_SBT', set()),
    ],
)
def test_changed_helper_changes_digest(module, fragment, replacement, expected):
    """Two helpers of measures: initial weights in the laboratory, and a stage of tiny models."""
    module = f'eval.claims.{module}'

    def read(name):
        source = read_source(name)
        return source.replace(fragment, replacement) if name == module else source

    measures = {name: MEASURES[name].function for name in ('norms_alone', 'merged_starts')}
    noticed = {
        name
        for name, function in measures.items()
        if digest(function.__module__, name, read) != digest(function.__module__, name)
    }
    assert noticed == expected
