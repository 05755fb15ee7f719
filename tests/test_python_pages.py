"""Property: every public name of the Python API documents its arguments, values and errors."""

import importlib
import types

import pytest

from docs import python_pages


@pytest.mark.parametrize('room', python_pages.ROOMS)
def test_docstrings_are_complete(room):
    assert not list(python_pages.faults(importlib.import_module(room)))


def whole(x, *rows, **numbers) -> int:
    """Adds what is given.

    Args:
      x: the first.
      *rows: the others.
      **numbers: by name.

    Returns:
      The sum.

    Raises:
      ValueError: always.
    """
    raise ValueError('never called')


def silent() -> None:
    raise NotImplementedError


class Partly:
    """A class with methods and fields that say too little."""

    told: int  #: beside it
    #: Above it.
    told_above: int = 0
    untold: int = 0

    def of(self, x) -> int:
        """Returns x."""
        return x

    @property
    def size(self) -> int:
        return 0

    @classmethod
    def made(cls, x) -> None:
        """Makes one.

        Args:
          y: what it is made of.
        """

    def _of(self, x):
        return x


def test_complete_docstring_has_no_faults():
    assert not list(python_pages.lacks(whole))


@pytest.mark.parametrize(
    ('line', 'fault'),
    [
        ('  x: the first.\n', 'has no entry in Args for x'),
        ('  *rows: the others.\n', 'has no entry in Args for rows'),
        ('  **numbers: by name.\n', 'has no entry in Args for numbers'),
        ('Returns:\n', 'does not document its return value'),
        ('Raises:\n', 'does not document in Raises what it raises'),
    ],
)
def test_each_fault_is_named(line, fault, monkeypatch):
    text = '\n'.join(row.removeprefix('    ') for row in whole.__doc__.split('\n'))
    assert line in text
    monkeypatch.setattr(whole, '__doc__', text.replace(line, ''))
    assert list(python_pages.lacks(whole)) == [fault]


def test_faults_name_the_function_or_constant():
    room = types.ModuleType('room')
    room.Partly, room.silent = Partly, silent
    assert list(python_pages.faults(room)) == ['room has no __all__']
    room.__all__ = ['Partly', 'silent']
    assert list(python_pages.faults(room)) == [
        'room.Partly.untold has no comment "#: " beside or above it',
        'room.Partly.of has no entry in Args for x',
        'room.Partly.size has no docstring',
        'room.Partly.made has no entry in Args for x',
        'room.Partly.made documents a parameter y that it does not have',
        'room.silent has no docstring',
    ]


def test_build_stops_at_a_fault(monkeypatch):
    monkeypatch.setattr(python_pages, 'lacks', lambda function: ['lacks words'])
    with pytest.raises(ValueError, match=r'modules\.optim\.unbox_state lacks words'):
        python_pages.pages()


def test_tables_link_to_cards_and_constants_have_comments():
    page = python_pages.page(importlib.import_module('modules.kernels'))
    assert '``kernels.softmax`` can name; see their :doc:`cards <../parts/kernels.softmax>`' in page
    assert 'OPERATIONS\n\n   The table of kernels of each operation.\n' in page
    assert '.. autofunction:: modules.kernels.kernels_for\n' in page
