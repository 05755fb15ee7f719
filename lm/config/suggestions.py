"""Suggestions in error messages: the field, value or sweep that was probably meant."""

import ast
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.other_programs import SYNONYMS, absent, preset
from modules.choices import closest, did_you_mean, nearest

MANY_RUNS = ('sweep', 'tune')  # what a config has besides sections: of several runs
EXAMPLE = {'optim.lr': (1e-3, 3e-3)}


def field_hint(path: str, known: Collection[str]) -> str:
    """Returns ' Did you mean X?' for a path that is not in `known`, or '' where nothing is near.

    The same name in another section and other programs' names come first, then what is said of a
    name that stands for nothing here, then the nearest name of the same section, then of all.
    """
    section, _, name = str(path).rpartition('.')
    by_name: dict[str, list[str]] = {}
    for field in known:
        by_name.setdefault(field.rpartition('.')[2], []).append(field)
    usual = SYNONYMS.get(str(path).lower()) or SYNONYMS.get(name, ())
    usual = [field for field in usual if field in known]
    found = [*dict.fromkeys([*by_name.get(name, ()), *usual])]
    if not found and (said := absent(name)):
        return f' {said[0].upper()}{said[1:]}.'
    if section:
        found = found or closest(path, [f for f in known if f.startswith(f'{section}.')])
    found = found or closest(path, known)
    if not section and not found:
        found = [field for near in closest(name, by_name) for field in by_name[near]]
    return did_you_mean(found)


def sweep_flag(sweep: Mapping[str, Any]) -> str:
    """Returns the flag that sets config.sweep, quoted for a shell."""
    return f'--config.sweep="{dict(sweep)!r}"'


def sweep_hint(text: str, known: Collection[str]) -> str:
    """Suggests a flag for a --config.sweep that is no Python literal, such as
    {optim.lr: (1e-3, 3e-3)} or optim.lr=1e-3,3e-3.
    """
    match = re.fullmatch(r'\s*\{?\s*([\w.]+)\s*[:=]\s*[\[(]?([^()\[\]{}:=]+)[\])]?\s*\}?\s*', text)
    if match and match[1] in known:
        return f'Did you mean {sweep_flag({match[1]: listed(match[2])})}?'
    quoted = re.sub(r"(?<![\w.'\"])([a-z]\w*\.\w+)\s*:", r"'\1':", text)
    try:
        meant = ast.literal_eval(quoted)
    except (SyntaxError, ValueError):
        meant = None
    if isinstance(meant, dict):
        return f'Did you mean {sweep_flag(meant)}?'
    return f'Such as {sweep_flag(EXAMPLE)}.'


def listed(text: str) -> tuple[Any, ...]:
    """Returns (0.001, 0.003) for '1e-3, 3e-3'; words that are no Python literals stay text."""
    return tuple(_literal(word.strip()) for word in text.split(',') if word.strip())


@functools.lru_cache(1024)  # each name of each cell of a sweep goes through here, many times
def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def flag_refusal(path: str, text: str, types: Collection[type]) -> str:
    """Says why --config.PATH=TEXT is none of `types`, and what to write instead."""
    kinds = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text'}
    wanted = ' or '.join(kinds[kind] for kind in types if kind in kinds)
    said = f'{path} must be {wanted}; got {text!r}.'
    values = listed(text.strip('()[]'))
    numbers = all(isinstance(value, int | float) for value in values)
    if numbers and (len(values) > 1 or text[:1] in ('(', '[')):
        return f'{said} Several values are a sweep: {sweep_flag({path: values})}'
    if text == 'None' and type(None) in types:
        return f'{said} Leave the flag out for None.'
    if int in types and len(values) == 1 and numbers and float(values[0]).is_integer():
        return f'{said} Write {int(values[0])}.'
    return said


def check_flags(argv: Sequence[str], known: Collection[str]) -> None:
    """Raises ValueError for a --config that is no file and a --config.PATH that is no field; absl
    and `flag_refusal` check the values.
    """
    for flag, following in zip(argv, [*argv[1:], ''], strict=True):
        name, is_whole, text = flag.lstrip('-').partition('=')
        if not flag.startswith('-') or name.split('.')[0] != 'config':
            continue
        path = name.partition('.')[2]
        if not path:
            file = (text if is_whole else following).partition(':')[0]  # an argument may follow
            if not Path(file).is_file():
                hint = nearest(file, map(str, Path(file).parent.glob('*.py')))
                raise ValueError(
                    f'--config={file} is no file. Give a Python file with get_config(), such as '
                    f'configs/{preset(file)}.py.{hint}'
                )
        elif any(field.startswith(f'{path}.') for field in known):
            raise ValueError(f'{path} is a section of the config; set its fields one by one')
        elif path.split('.')[0] in MANY_RUNS or path in known:
            continue
        elif re.fullmatch(r'[\w.]+', path):
            raise ValueError(f'the config has no field {path}.{field_hint(path, known)}')
