"""Suggestions in error messages: the field, value or sweep that was probably meant."""

import ast
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.other_programs import absent, foreign, is_of_many_runs, preset
from modules.choices import closest, did_you_mean, nearest

MANY_RUNS = ('sweep', 'tune')  # what a config has besides sections: of several runs
EXAMPLE = {'optim.lr': (1e-3, 3e-3)}
TUNE_EXAMPLE = {'optim.lr': None}


def field_hint(path: str, known: Collection[str]) -> str:
    """Returns ' Did you mean X?' for a path that is not in `known`, or '' where nothing is near.

    The same name in another section and other programs' names come first, then what is said of a
    name that stands for nothing here, then the nearest name of the same section, then of all.
    """
    section, _, name = str(path).rpartition('.')
    by_name: dict[str, list[str]] = {}
    for field in known:
        by_name.setdefault(field.rpartition('.')[2], []).append(field)
    synonyms = foreign().fields
    usual = synonyms.get(str(path).lower()) or synonyms.get(name, ())
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


def tune_flag(tune: Mapping[str, Any]) -> str:
    """Returns the flag that sets config.tune, quoted for a shell."""
    return f'--config.tune="{dict(tune)!r}"'


def sweep_hint(text: str, known: Collection[str]) -> str:
    """Suggests a flag for a --config.sweep that is no Python literal, such as
    {optim.lr: (1e-3, 3e-3)} or optim.lr=1e-3,3e-3.
    """
    match = re.fullmatch(r'\s*\{?\s*([\w.]+)\s*[:=]\s*[\[(]?([^()\[\]{}:=]+)[\])]?\s*\}?\s*', text)
    if match and match[1] in known:
        return f'Did you mean {sweep_flag({match[1]: listed(match[2])})}?'
    meant = literal(_quoted(text))
    if isinstance(meant, dict):
        return f'Did you mean {sweep_flag(meant)}?'
    return f'Such as {sweep_flag(EXAMPLE)}.'


def tune_hint(given: Any, known: Collection[str]) -> str:
    """Suggests a flag for a config.tune that is no dict, such as optim.lr, ('optim.lr',) or
    {optim.lr: None}.
    """
    meant = None
    if isinstance(given, str):
        meant = literal(f'{{{_quoted(given).strip("{}")}}}')
        given = given.strip('{[()]}').split(',')
    if not isinstance(meant, dict):
        names = given if isinstance(given, list | tuple | set) else ()
        fields = [_only_field(str(name).strip(' \'"'), known) for name in names]
        meant = dict.fromkeys(fields) if fields and all(fields) else None
    return f'Did you mean {tune_flag(meant)}?' if meant else f'Such as {tune_flag(TUNE_EXAMPLE)}.'


def _quoted(text: str) -> str:
    """Puts the fields of a dict in quotes, and colons behind them."""
    return re.sub(r"(?<![\w.'\"])([a-z]\w*\.\w+)\s*[:=]", r"'\1':", text)


def _only_field(name: str, known: Collection[str]) -> str:
    """The field of a name, with or without its section; '' for none or several."""
    found = [field for field in known if name in (field, field.rpartition('.')[2])]
    return found[0] if len(found) == 1 else ''


def _part_of_a_dict(parts: Mapping[str, str], known: Collection[str]) -> str:
    """Says what to write in place of --config.tune.optim.lr=None, or --config.sweep.optim.lr=1,2.
    parts: {'tune.optim.lr': 'None'}, and 'tune' where it is given whole too.
    """
    name = next(path for path in parts if '.' in path).partition('.')[0]
    whole = literal(parts.get(name, ''))
    meant = whole if isinstance(whole, dict) else {}
    for path, text in parts.items():
        if path.startswith(f'{name}.'):
            inner = path.partition('.')[2]
            value = listed(text.strip('()[]')) if name == 'sweep' else literal(text)
            meant = meant | {_only_field(inner, known) or inner: value}
    if name == 'tune' and not any(path in known for path in meant):
        meant = TUNE_EXAMPLE | meant
    flag = {'sweep': sweep_flag, 'tune': tune_flag}[name](meant)
    return f'config.{name} is one dict, which a flag sets whole. Did you mean {flag}?'


def listed(text: str) -> tuple[Any, ...]:
    """Returns (0.001, 0.003) for '1e-3, 3e-3'; words that are no Python literals stay text."""
    return tuple(literal(word.strip()) for word in text.split(',') if word.strip())


def literal(word: str) -> Any:
    """Returns the value of a Python literal; another word stays text."""
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
    parts = {}  # of config.sweep or config.tune
    for flag, following in zip(argv, [*argv[1:], ''], strict=True):
        name, is_whole, text = flag.lstrip('-').partition('=')
        if not flag.startswith('-') or name.split('.')[0] != 'config':
            continue
        path = name.partition('.')[2]
        if not path:
            file = (text if is_whole else following).partition(':')[0]  # an argument may follow
            place = Path(os.path.expanduser(file))
            if not place.is_file():
                hint = nearest(file, map(str, place.parent.glob('*.py')))
                raise ValueError(
                    f'--config={file} is no file. Give a Python file with get_config(), such as '
                    f'configs/{preset(file)}.py.{hint}'
                )
        elif any(field.startswith(f'{path}.') for field in known):
            raise ValueError(f'{path} is a section of the config; set its fields one by one')
        elif path.split('.')[0] in MANY_RUNS:
            parts[path] = text if is_whole else following
        elif path in known:
            continue
        elif re.fullmatch(r'[\w.]+', path):
            hint = nearest(path, MANY_RUNS) if is_of_many_runs(path) else field_hint(path, known)
            raise ValueError(f'the config has no field {path}.{hint}')
    if any('.' in path for path in parts):
        raise ValueError(_part_of_a_dict(parts, known))
