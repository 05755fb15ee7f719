"""Options of parts, each declared once, in the signature of its part.

    eps: Annotated[float, Option('small number added inside the denominator', 0, 1)] = 1e-6

An option is a field of a class, or a keyword of a function, with such an annotation. Its default is
the published value. Config sections, their checks, `train.py --choices` and the tables of docs/ are
all derived from these annotations. Two parts share an annotation if a name means the same in both.
"""

import ast
import dataclasses
import functools
import inspect
import keyword
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from modules.choices import choose, suggest_nearest

LARGEST_INT = 2**31 - 1  # the bound of int options without one: programs hold 32 bits
# Bounds are inclusive. These numbers stand for exclusive bounds and for any finite number.
_LOW_WORDS = {1e-37: 'above 0'}
_HIGH_WORDS = {1 - 1e-7: 'below 1', sys.float_info.max: 'finite'}


@dataclasses.dataclass(frozen=True)
class Option:
    """Description of an option besides its type and default."""

    description: str = ''  # one line
    minimum: float = -math.inf  # inclusive bounds; NaN is never within them
    maximum: float = math.inf
    choices: tuple[str, ...] = ()  # the values that a str may have; empty: any
    # 'steps' or 'updates' (one per microbatch) if the option is a time in a run, which a short run
    # may not reach (`lm.run.describe.list_config_notes`).
    time_unit: str = ''
    off_value: float | None = (
        None  # a value of a traced field that leaves it out of the program, as None
    )
    traced: bool = (
        False  # whether it is data to the program, so that runs with other values share it
    )
    is_observer: bool = (
        False  # whether it only observes a run, so that it is not part of the run's identity
    )

    def check(self, path: str, value: Any) -> None:
        """Raises ValueError if `value`, of the config field `path`, is out of bounds or unknown."""
        if self.choices:
            choose(dict.fromkeys(self.choices), value, path)
            return
        is_open = type(value) is int and self.maximum == math.inf
        maximum = LARGEST_INT if is_open else self.maximum
        # A bool is an int in Python, and has no bounds here.
        if not isinstance(value, bool | str) and not self.minimum <= value <= maximum:
            # The bound of all ints is named only if the value exceeds it.
            highest = maximum if value > maximum else self.maximum
            bounds = describe_bounds(self.minimum, highest, 'between {} and {}') or 'a number'
            raise ValueError(f'{path} must be {bounds}; got {value}')


def describe_bounds(minimum: float, maximum: float, span: str = '{} to {}') -> str:
    """Returns '0 to 1', 'at least 1', 'above 0 and finite'; '' for no bounds.

    Args:
      minimum: the smallest valid number.
      maximum: the largest valid number.
      span: the form of two plain bounds.
    """
    has_low, has_high = minimum not in (-math.inf, -sys.float_info.max), maximum != math.inf
    if has_low and has_high and minimum not in _LOW_WORDS and maximum not in _HIGH_WORDS:
        return span.format(minimum, maximum)
    low = _LOW_WORDS.get(minimum, f'at least {minimum}') if has_low else ''
    high = _HIGH_WORDS.get(maximum, f'at most {maximum}') if has_high else ''
    return ' and '.join(filter(None, (low, high)))


@dataclasses.dataclass(frozen=True)
class OptionDeclaration:
    """An option as its part declares it. `types` are the types of its values, NoneType included."""

    types: tuple[type, ...]
    option: Option
    default: Any


def declared_options(part: Any) -> Mapping[str, OptionDeclaration]:
    """Returns the options of a class, a function, or the fields of a row that is a record.

    A mapping has none: it names other rows.
    """
    return {} if isinstance(part, Mapping) else _declared_options(part)


@functools.cache
def _declared_options(part: Any) -> Mapping[str, OptionDeclaration]:
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        field_parts = [getattr(part, field.name) for field in dataclasses.fields(part)]
        options_by_part = [
            declared_options(field_part) for field_part in field_parts if callable(field_part)
        ]
        names = [name for field_options in options_by_part for name in field_options]
        if len(set(names)) < len(names):
            raise TypeError(f'two functions of {part} have options with the same name: {names}')
        return {
            name: declared
            for field_options in options_by_part
            for name, declared in field_options.items()
        }
    if not isinstance(part, type | types.FunctionType):
        return {}
    # Decorators such as `logits_loss` change the signature; the options are the wrapped function's.
    function = part if isinstance(part, type) else inspect.unwrap(part)
    hints = typing.get_type_hints(function, include_extras=True)
    if isinstance(part, type):
        fields = getattr(part, '__dataclass_fields__', {})
        defaults = {name: field.default for name, field in fields.items()}
    else:
        parameters = inspect.signature(function).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
    declarations = {}
    for name, default in defaults.items():
        metadata = getattr(hints.get(name), '__metadata__', ())
        option = next((m for m in metadata if isinstance(m, Option)), None)
        if option is not None and default in (inspect.Parameter.empty, dataclasses.MISSING):
            raise TypeError(
                f'the option {name!r} of {part} has no default. Give it the published value.'
            )
        if option is not None:
            declarations[name] = OptionDeclaration(annotation_types(hints[name]), option, default)
    return declarations


def annotation_types(annotation: Any) -> tuple[type, ...]:
    """Returns (float, NoneType) for Annotated[float | None, ...]; (float,) for float."""
    if hasattr(annotation, '__metadata__'):
        annotation = annotation.__origin__
    return typing.get_args(annotation) or (annotation,)


def make_section(base: Any, *tables: Mapping[str, Any]) -> type:
    """Returns the frozen dataclass `base` with a field for each option of each part in the tables.

    Such a field is None by default, which stands for the default in the part's signature. Raises
    TypeError if two parts mean different things by one name.
    """
    declarations: dict[str, OptionDeclaration] = {}
    owners: dict[str, str] = {field.name: base.__name__ for field in dataclasses.fields(base)}
    for table in tables:
        for row, part in table.items():
            for name, declared in declared_options(part).items():
                first = declarations.setdefault(name, declared)
                meaning = (set(first.types) - {types.NoneType}, first.option)
                if (set(declared.types) - {types.NoneType}, declared.option) != meaning or (
                    owners.setdefault(name, row) == base.__name__
                ):
                    raise TypeError(
                        f'the option {name!r} of {row} has another meaning than that of '
                        f'{owners[name]}. Rename one of them, or give both the same annotation.'
                    )
    union: Any = typing.Union  # its arguments are known at run time only
    fields = [
        (name, typing.Annotated[union[(*declared.types, None)], declared.option], None)
        for name, declared in declarations.items()
    ]
    section = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, module=base.__module__
    )
    section.__doc__ = base.__doc__
    return section


def build_part(part: Any, option_values: Mapping[str, Any], **wiring: Any) -> Any:
    """Returns part(...) with the given options, and with the entries of `wiring` that are its
    fields.
    """
    fields = set(getattr(part, '__dataclass_fields__', ()))
    return part(
        **option_values, **{name: value for name, value in wiring.items() if name in fields}
    )


def parse_part(path: str, text: str) -> tuple[str, dict[str, Any]]:
    """Returns ('rmsnorm', {'scale': False}) for 'rmsnorm:scale=False'; commas separate options.

    A value is a Python literal, or a word, which is a string. `path` is the config field of the
    text, such as 'model.norm'. Raises ValueError if the text has another form.
    """
    name, colon, pairs = text.partition(':')
    option_values: dict[str, Any] = {}
    for pair in pairs.split(',') if colon else []:
        match = re.fullmatch(r'\s*(\w+)\s*=\s*(\S+)\s*', pair)
        try:
            if match is None or match[1] in option_values:
                raise ValueError
            is_word = match[2].isidentifier() and not keyword.iskeyword(match[2])
            option_values[match[1]] = match[2] if is_word else ast.literal_eval(match[2])
        except (SyntaxError, TypeError, ValueError):
            raise ValueError(
                f'{path} must have the form NAME:OPTION=VALUE,OPTION=VALUE; got {text!r}'
            ) from None
    return name, option_values


def coerce_type(path: str, value: Any, allowed: Iterable[type]) -> Any:
    """Checks the type of a value.

    Args:
      path: the config field, for the error.
      value: the value.
      allowed: the types that it may have.

    Returns:
      The value; an int as a float if only float is allowed.

    Raises:
      ValueError: for another type.
    """
    allowed = tuple(allowed)
    if float in allowed and int not in allowed and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    if type(value) not in allowed:
        names = ' or '.join('None' if t is types.NoneType else t.__name__ for t in allowed)
        raise ValueError(f'{path} must be {names}; got {value!r} of type {type(value).__name__}')
    return value


def check_inline_options(
    path: str, part: Any, name: str, option_values: Mapping[str, Any]
) -> dict[str, Any]:
    """Checks options that are written behind the name of a part, as in 'rmsnorm:scale=False'.

    None stands for the published default, as in a section: such an option is left out.

    Args:
      path: the config field, for the error.
      part: the part.
      name: its name.
      option_values: the options as given.

    Returns:
      The options, with types checked.

    Raises:
      ValueError: for an option that the part does not have, and for values out of bounds.
    """
    declared, checked = declared_options(part), {}
    for option, value in option_values.items():
        option_path = f'{path}={name}:{option}'
        if option not in declared:
            has = f'no such option, only {", ".join(declared)}' if declared else 'no options'
            hint = suggest_nearest(option, declared)
            raise ValueError(f'{option_path}: {name} has {has}.{hint}')
        value = coerce_type(option_path, value, declared[option].types)
        if value is not None:
            declared[option].option.check(option_path, value)
            checked[option] = value
    return checked
