"""Options of parts, each declared once, in the part's own signature.

    eps: Annotated[float, Option('added under the root', 0, 1)] = 1e-6

An option is a field of a class, or a keyword of a function, with such an annotation; its default is
the published one. Config sections, their checks, `train.py --choices` and the tables of docs/ are
all read from there. Two parts that mean the same by a name share the annotation.
"""

import ast
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from modules.choices import choose, suggest_nearest

LARGEST_INT = 2**31 - 1  # the bound of int options without one: programs hold 32 bits


@dataclasses.dataclass(frozen=True)
class Option:
    """Description of an option besides its type and default."""

    description: str = ''  # one line that says what it is
    minimum: float = -math.inf  # bounds are included; NaN is never within them
    maximum: float = math.inf
    choices: tuple[str, ...] = ()  # the values that a str may have; empty: any
    # 'steps' or 'updates' (one a microbatch) if it is a time in a run, which a short run may not
    # reach (`lm.run.describe.notes_of`).
    time_unit: str = ''
    off_value: float | None = (
        None  # a value of a traced field that leaves it out of the program, as None
    )
    traced: bool = False  # whether runs that differ in it share one program, which takes it as data
    is_observer: bool = False  # whether it only looks at a run, and is no part of its identity

    def check(self, path: str, value: Any) -> None:
        """Raises ValueError if `value`, of the config field `path`, is out of bounds or unknown."""
        if self.choices:
            choose(dict.fromkeys(self.choices), value, path)
            return
        is_open = type(value) is int and self.maximum == math.inf
        most = LARGEST_INT if is_open else self.maximum
        if not isinstance(value, bool | str) and not self.minimum <= value <= most:
            raise ValueError(f'{path} must be between {self.minimum} and {most}; got {value}')


@dataclasses.dataclass(frozen=True)
class OptionDeclaration:
    """An option as a part declares it; `types` are those of its values, NoneType included."""

    types: tuple[type, ...]
    option: Option
    default: Any


def declared_options(part: Any) -> Mapping[str, OptionDeclaration]:
    """Returns the options of a class, a function, or the fields of a row that is a record."""
    return (
        {} if isinstance(part, Mapping) else _declared_options(part)
    )  # a mapping names other rows


@functools.cache
def _declared_options(part: Any) -> Mapping[str, OptionDeclaration]:
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        held = [getattr(part, field.name) for field in dataclasses.fields(part)]
        of_held = [declared_options(one) for one in held if callable(one)]
        names = [name for of_one in of_held for name in of_one]
        if len(set(names)) < len(names):
            raise TypeError(f'two functions of {part} have options of one name, of {names}')
        return {name: declared for of_one in of_held for name, declared in of_one.items()}
    if not isinstance(part, type | types.FunctionType):
        return {}
    function = part if isinstance(part, type) else inspect.unwrap(part)
    hints = typing.get_type_hints(function, include_extras=True)
    if isinstance(part, type):
        fields = getattr(part, '__dataclass_fields__', {})
        defaults = {name: field.default for name, field in fields.items()}
    else:
        parameters = inspect.signature(function).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
    found = {}
    for name, default in defaults.items():
        metadata = getattr(hints.get(name), '__metadata__', ())
        option = next((m for m in metadata if isinstance(m, Option)), None)
        if option is not None and default in (inspect.Parameter.empty, dataclasses.MISSING):
            raise TypeError(f'the option {name!r} of {part} has no default, the published value')
        if option is not None:
            found[name] = OptionDeclaration(annotation_types(hints[name]), option, default)
    return found


def annotation_types(annotation: Any) -> tuple[type, ...]:
    """Returns (float, NoneType) for Annotated[float | None, ...]; (float,) for float."""
    if hasattr(annotation, '__metadata__'):
        annotation = annotation.__origin__
    return typing.get_args(annotation) or (annotation,)


def make_section(base: type, *tables: Mapping[str, Any]) -> type:
    """Returns the frozen dataclass `own` with a field for each option of each part in the tables.

    Such a field is None unless given; None stands for the default in the part's signature. Raises
    TypeError if two parts mean different things by one name.
    """
    found: dict[str, OptionDeclaration] = {}
    owners: dict[str, str] = {field.name: base.__name__ for field in dataclasses.fields(base)}
    for table in tables:
        for row, part in table.items():
            for name, declared in declared_options(part).items():
                first = found.setdefault(name, declared)
                meaning = (set(first.types) - {types.NoneType}, first.option)
                if (set(declared.types) - {types.NoneType}, declared.option) != meaning or (
                    owners.setdefault(name, row) == base.__name__
                ):
                    raise TypeError(
                        f'the option {name!r} of {row} means another thing than that of '
                        f'{owners[name]}; give one of them another name, or both one annotation'
                    )
    fields = [
        (name, typing.Annotated[typing.Union[(*declared.types, None)], declared.option], None)
        for name, declared in found.items()
    ]
    made = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, module=base.__module__
    )
    made.__doc__ = base.__doc__
    return made


def build_part(part: Any, option_values: Mapping[str, Any], **wiring: Any) -> Any:
    """Returns part(...) with the given options and the entries of `wiring` that are its fields."""
    known = set(getattr(part, '__dataclass_fields__', ()))
    return part(**option_values, **{name: value for name, value in wiring.items() if name in known})


def parse_part(path: str, text: str) -> tuple[str, dict[str, Any]]:
    """Returns ('rmsnorm', {'scale': False}) for 'rmsnorm:scale=False'; several options with commas.

    path: the config field that has the text, such as 'model.norm'. Raises ValueError if the text
    has another form, or a value is no Python literal.
    """
    name, colon, rest = text.partition(':')
    given: dict[str, Any] = {}
    for pair in rest.split(',') if colon else []:
        match = re.fullmatch(r'\s*(\w+)\s*=\s*(\S+)\s*', pair)
        try:
            if match is None or match[1] in given:
                raise ValueError
            given[match[1]] = ast.literal_eval(match[2])
        except (SyntaxError, TypeError, ValueError):
            raise ValueError(
                f'{path}: options follow a name as NAME:OPTION=VALUE,OPTION=VALUE; got {text!r}'
            ) from None
    return name, given


def coerce_type(path: str, value: Any, allowed: Iterable[type]) -> Any:
    """Returns the value, an int as a float if only float is allowed; ValueError for other types."""
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
    """Returns the options written behind the name of a part, typed and checked.

    None stands for the published default, as in a section: such an option is left out. Raises
    ValueError for an option that the part does not have.
    """
    known, checked = declared_options(part), {}
    for option, value in option_values.items():
        where = f'{path}={name}:{option}'
        if option not in known:
            raise ValueError(
                f'{where}: {name} has no such option, only {", ".join(known) or "none"}.'
                f'{suggest_nearest(option, known)}'
            )
        value = coerce_type(where, value, known[option].types)
        if value is not None:
            known[option].option.check(where, value)
            checked[option] = value
    return checked
