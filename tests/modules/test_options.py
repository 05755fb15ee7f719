"""Contract: options are read from the signatures of parts, checked, and passed to the part."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated

import pytest

from modules.options import (
    Option,
    OptionDeclaration,
    annotation_types,
    build_part,
    check_inline_options,
    coerce_type,
    declared_options,
    make_section,
    parse_part,
)

RATE = Option('how fast', 0, 1, traced=True)
MODE = Option('which way', choices=('left', 'right'))
Rate = Annotated[float, RATE]
DECLARED_RATE = OptionDeclaration((float,), RATE, 0.5)


@dataclasses.dataclass
class Part:
    width: int
    rate: Rate = 0.5
    mode: Annotated[str, MODE] = 'left'
    site: str = 'here'


@dataclasses.dataclass
class Child(Part):
    rate: Rate = 0.25
    groups: Annotated[int | None, Option('of them', 1)] = None


def function(x, *, rate: Rate = 0.5, count: int = 3):
    return x, rate, count


def with_option(declared_type, option, name='rate'):
    """Makes a part with a single option."""
    annotation = Annotated[declared_type, option]
    return dataclasses.make_dataclass('Made', [(name, annotation, None)])


def wrap(wrapped):
    @functools.wraps(wrapped)
    def wrapper(x, extra, **numbers):
        return wrapped(x, **numbers), extra

    return wrapper


@dataclasses.dataclass(frozen=True)
class Record:
    summary: str
    first: Callable
    second: type | None = None


def test_class_options_are_annotated_fields():
    """Catches fields that the model fills in, taken for options."""
    assert declared_options(Part) == {
        'rate': DECLARED_RATE,
        'mode': OptionDeclaration((str,), MODE, 'left'),
    }


def test_subclass_inherits_options():
    options = declared_options(Child)
    assert list(options) == ['rate', 'mode', 'groups']
    assert options['rate'] == OptionDeclaration((float,), RATE, 0.25)
    assert options['groups'].types == (int, type(None))
    assert options['groups'].default is None
    assert declared_options(Part)['rate'].default == 0.5


def test_decorated_function_keeps_options():
    assert declared_options(function) == {'rate': DECLARED_RATE}
    assert declared_options(wrap(wrap(function))) == {'rate': DECLARED_RATE}


def test_record_has_part_options():
    options = declared_options(Record('words', function, with_option(int, RATE, 'groups')))
    assert options == {'rate': DECLARED_RATE, 'groups': OptionDeclaration((int,), RATE, None)}
    assert declared_options(Record('words', function)) == {'rate': DECLARED_RATE}


@pytest.mark.parametrize('part', [None, 3, 'text', math.sin, lambda x: x, Record('', math.sin)])
def test_part_without_annotations_has_no_options(part):
    assert declared_options(part) == {}


def test_annotation_types_are_listed():
    assert annotation_types(float) == (float,)
    assert annotation_types(Annotated[float, RATE]) == (float,)
    assert annotation_types(Annotated[float | None, RATE]) == (float, type(None))


@pytest.mark.parametrize('value', [0, 1, 0.5, 0.0])
def test_bounds_are_included(value):
    RATE.check('norm.rate', value)


@pytest.mark.parametrize('value', [-1e-9, 1.5, math.nan, math.inf, -math.inf])
def test_out_of_bounds_value_is_refused(value):
    with pytest.raises(ValueError, match=r'norm.rate must be between 0 and 1; got'):
        RATE.check('norm.rate', value)


@pytest.mark.parametrize(
    ('option', 'value', 'bounds'),
    [
        (Option('', 1), 0, 'at least 1'),
        (Option('', 1), 2**31, 'between 1 and 2147483647'),
        (Option('', 1e-37, sys.float_info.max), 0.0, 'above 0 and finite'),
        (Option('', 0, 1 - 1e-7), 1.0, 'at least 0 and below 1'),
        (Option('', -sys.float_info.max, sys.float_info.max), math.inf, 'finite'),
    ],
)
def test_error_names_the_bounds(option, value, bounds):
    with pytest.raises(ValueError, match=f'^x must be {bounds}; got {value}$'):
        option.check('x', value)


def test_open_bounds_include_infinity_but_not_nan():
    Option().check('x', math.inf)
    Option('', 0).check('x', math.inf)
    with pytest.raises(ValueError, match='x must be a number; got nan'):
        Option().check('x', math.nan)


def test_texts_and_truth_values_have_no_bounds():
    Option('', 5, 6).check('x', True)
    Option('', 5, 6).check('x', 'text')


def test_text_must_be_a_choice():
    MODE.check('norm.mode', 'left')
    with pytest.raises(ValueError, match=r"norm.mode must be .* Did you mean 'right'\?"):
        MODE.check('norm.mode', 'rigth')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    """Its words."""

    name: str


def test_section_fields_default_to_none():
    """Catches a section that uses the default of the first part for all parts."""
    section = make_section(Own, {'part': Part, 'child': Child}, {'function': function})
    fields = {field.name: field for field in dataclasses.fields(section)}
    assert list(fields) == ['name', 'rate', 'mode', 'groups']
    assert {fields[name].default for name in ('rate', 'mode', 'groups')} == {None}
    assert section(name='x') == section(name='x', rate=None, mode=None, groups=None)
    assert section(name='x').rate is None
    assert declared_options(section)['rate'] == OptionDeclaration((float, type(None)), RATE, None)
    assert declared_options(section)['groups'].types == (int, type(None))
    assert (section.__name__, section.__doc__, section.__module__) == (
        'Own',
        'Its words.',
        __name__,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        section(name='x').rate = 1.0
    with pytest.raises(TypeError):
        section(0.5, name='x')  # by name alone


@pytest.mark.parametrize(
    'part',
    [
        with_option(int, RATE),
        with_option(float, Option('how far', 0, 1, traced=True)),
        with_option(float, Option('how fast', 0, 2, traced=True)),
        with_option(float, Option('how fast', 0, 1)),
    ],
)
def test_option_name_has_one_meaning(part):
    with pytest.raises(TypeError, match=r"'rate' of other has another meaning than that of part"):
        make_section(Own, {'part': Part, 'other': part})
    with pytest.raises(TypeError, match=r"'rate' of other has another meaning than that of part"):
        make_section(Own, {'part': Part}, {'other': part})


def test_optional_annotation_is_the_same_option():
    section = make_section(Own, {'part': Part, 'other': with_option(float | None, RATE)})
    assert declared_options(section)['rate'].types == (float, type(None))


def test_option_cannot_shadow_section_field():
    section = dataclasses.make_dataclass('Own', [('rate', Rate)], frozen=True, kw_only=True)
    with pytest.raises(TypeError, match=r"'rate' of part has another meaning than that of Own"):
        make_section(section, {'part': Part})


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('rmsnorm', ('rmsnorm', {})),
        ('rmsnorm:scale=False', ('rmsnorm', {'scale': False})),
        ('n:a=1,b=2.5, c = None ', ('n', {'a': 1, 'b': 2.5, 'c': None})),
        ("n:a='left',b=-1e-3", ('n', {'a': 'left', 'b': -1e-3})),
        ('n:a=left,b=True', ('n', {'a': 'left', 'b': True})),
        ('', ('', {})),
    ],
)
def test_inline_options_are_parsed(text, expected):
    assert parse_part('model.norm', text) == expected


@pytest.mark.parametrize(
    'text',
    [
        'n:',
        'n:a',
        'n:a=',
        'n:=1',
        'n:a=1,',
        'n:a=1,a=2',
        'n:a=left-right',
        'n:a=1=2',
        'n:a=f()',
        'n:a b=1',
        'n:a=1 2',
    ],
)
def test_malformed_inline_options_are_refused(text):
    with pytest.raises(ValueError, match='NAME:OPTION=VALUE,OPTION=VALUE; got') as error:
        parse_part('model.norm', text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ('value', 'allowed', 'expected'),
    [
        (0.5, (float,), 0.5),
        (2, (float,), 2.0),
        (2, (int,), 2),
        (2, (int, float), 2),
        (None, (float, type(None)), None),
        (True, (bool,), True),
        ('x', (str,), 'x'),
    ],
)
def test_value_is_coerced_to_its_type(value, allowed, expected):
    actual = coerce_type('norm.x', value, iter(allowed))
    assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize(
    ('value', 'allowed', 'names'),
    [
        (True, (int,), 'int'),
        (True, (float,), 'float'),
        (1, (bool,), 'bool'),
        (2.0, (int,), 'int'),
        ('2', (int, type(None)), 'int or None'),
        (None, (float,), 'float'),
    ],
)
def test_value_with_wrong_type_is_refused(value, allowed, names):
    """Catches True taken for 1."""
    with pytest.raises(ValueError, match=rf'norm.x must be {names}; got .* of type'):
        coerce_type('norm.x', value, allowed)


def test_inline_options_are_coerced():
    options = check_inline_options('model.norm', Child, 'child', {'rate': 1, 'groups': None})
    assert options == {'rate': 1.0} and type(options['rate']) is float  # None: as published
    assert check_inline_options('model.norm', None, 'auto', {}) == {}


@pytest.mark.parametrize(
    ('part', 'options', 'message'),
    [
        (Part, {'rat': 1.0}, r"norm=p:rat: p has no such option, only rate, mode.* mean 'rate'\?"),
        (Part, {'width': 1}, 'p has no such option, only rate, mode'),
        (None, {'rate': 1.0}, 'p has no options'),
        (Part, {'rate': 'fast'}, 'norm=p:rate must be float; got'),
        (Part, {'rate': None}, 'norm=p:rate must be float; got None'),
        (Part, {'rate': 2.0}, 'norm=p:rate must be between 0 and 1; got 2.0'),
        (Part, {'mode': 'up'}, 'norm=p:mode must be one of left, right'),
        (Child, {'groups': 0}, 'norm=p:groups must be at least 1; got 0'),
    ],
)
def test_invalid_inline_options_are_refused(part, options, message):
    with pytest.raises(ValueError, match=message):
        check_inline_options('norm', part, 'p', options)


def test_part_gets_options_and_matching_wiring():
    """Catches wiring passed to a part without a field of that name."""
    part = build_part(Part, {'rate': 0.1}, width=8, site='there', order=3)
    assert part == Part(width=8, rate=0.1, mode='left', site='there')


def test_function_gets_no_wiring():
    with pytest.raises(TypeError):
        build_part(function, {'rate': 0.1}, x=1)  # wiring is for fields
    assert build_part(functools.partial(function, 1), {'rate': 0.1}, count=7) == (1, 0.1, 3)


def test_part_refuses_unknown_option():
    with pytest.raises(TypeError, match='unknown'):
        build_part(Part, {'unknown': 1}, width=8)
