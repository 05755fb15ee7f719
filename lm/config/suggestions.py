"""Suggestions in error messages: the field, value or sweep that was probably meant."""

import ast
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.other_programs import (
    foreign_names,
    is_multi_run,
    is_near,
    replacement_hint,
    select_preset,
)
from modules.choices import closest_names, format_suggestion, suggest_nearest

MULTI_RUN_SECTIONS = ('sweep', 'tune')  # what a config has besides sections: of several runs
EXAMPLE = {'optim.lr': (1e-3, 3e-3)}
TUNE_EXAMPLE = {'optim.lr': None}


def field_hint(path: str, field_paths: Collection[str]) -> str:
    """Returns ' Did you mean X?' for a path that is not in `field_paths`, or '' without a close
    match.

    Candidates, in this order: the same name in another section and other programs' names for a
    field; the explanation of a name without counterpart here; the nearest name in the same section;
    the nearest name in any.
    """
    section, _, name = str(path).rpartition('.')
    by_name: dict[str, list[str]] = {}
    for field in field_paths:
        by_name.setdefault(field.rpartition('.')[2], []).append(field)
    synonyms = foreign_names().fields
    aliases = synonyms.get(str(path).lower()) or synonyms.get(name, ())
    aliases = [field for field in aliases if field in field_paths]
    matches = [*dict.fromkeys([*by_name.get(name, ()), *aliases])]
    if not matches and (replacement := replacement_hint(name)):
        return f' {replacement[0].upper()}{replacement[1:]}.'
    near_names = {n for n in by_name if is_near(name, n) or is_near(name, n, is_part=True)}
    near_fields = [field for field in field_paths if field.rpartition('.')[2] in near_names]
    if section:
        matches = matches or closest_names(
            path, [f for f in near_fields if f.startswith(f'{section}.')]
        )
    matches = matches or closest_names(path, near_fields)
    if not section and not matches:
        matches = [field for near in closest_names(name, near_names) for field in by_name[near]]
    return format_suggestion(matches)


def sweep_flag(sweep: Mapping[str, Any]) -> str:
    """Returns the flag that sets config.sweep, quoted for a shell."""
    return f'--config.sweep="{dict(sweep)!r}"'


def tune_flag(tune: Mapping[str, Any]) -> str:
    """Returns the flag that sets config.tune, quoted for a shell."""
    return f'--config.tune="{dict(tune)!r}"'


def sweep_hint(text: str, field_paths: Collection[str]) -> str:
    """Suggests a flag for a --config.sweep that is no Python literal, such as {optim.lr: (1e-3,
    3e-3)} or optim.lr=1e-3,3e-3.
    """
    match = re.fullmatch(r'\s*\{?\s*([\w.]+)\s*[:=]\s*[\[(]?([^()\[\]{}:=]+)[\])]?\s*\}?\s*', text)
    if match and match[1] in field_paths:
        return f'Did you mean {sweep_flag({match[1]: parse_values(match[2])})}?'
    sweep = parse_literal(_quote_fields(text))
    if isinstance(sweep, dict):
        return f'Did you mean {sweep_flag(sweep)}?'
    return f'For example: {sweep_flag(EXAMPLE)}'


def tune_hint(tune: Any, field_paths: Collection[str]) -> str:
    """Suggests a flag for a config.tune that is no dict, such as optim.lr, ('optim.lr',) or
    {optim.lr: None}.
    """
    suggestion = None
    if isinstance(tune, str):
        suggestion = parse_literal(f'{{{_quote_fields(tune).strip("{}")}}}')
        tune = tune.strip('{[()]}').split(',')
    if not isinstance(suggestion, dict):
        names = tune if isinstance(tune, list | tuple | set) else ()
        fields = [_find_unique_field(str(name).strip(' \'"'), field_paths) for name in names]
        suggestion = dict.fromkeys(fields) if fields and all(fields) else None
    return (
        f'Did you mean {tune_flag(suggestion)}?'
        if suggestion
        else f'For example: {tune_flag(TUNE_EXAMPLE)}'
    )


def _quote_fields(text: str) -> str:
    """Quotes the fields of a dict, and puts colons after them."""
    return re.sub(r"(?<![\w.'\"])([a-z]\w*\.\w+)\s*[:=]", r"'\1':", text)


def _find_unique_field(name: str, field_paths: Collection[str]) -> str:
    """Returns the only field with this name, with or without a section; '' for none or several."""
    matches = [field for field in field_paths if name in (field, field.rpartition('.')[2])]
    return matches[0] if len(matches) == 1 else ''


def _dict_flag_hint(parts: Mapping[str, str], field_paths: Collection[str]) -> str:
    """Suggests a replacement for --config.tune.optim.lr=None or --config.sweep.optim.lr=1,2.

    parts: {'tune.optim.lr': 'None'}, and 'tune' if it is also set as a whole.
    """
    name = next(path for path in parts if '.' in path).partition('.')[0]
    whole = parse_literal(parts.get(name, ''))
    suggestion = whole if isinstance(whole, dict) else {}
    for path, text in parts.items():
        if path.startswith(f'{name}.'):
            inner = path.partition('.')[2]
            value = parse_values(text.strip('()[]')) if name == 'sweep' else parse_literal(text)
            suggestion = suggestion | {_find_unique_field(inner, field_paths) or inner: value}
    if name == 'tune' and not any(path in field_paths for path in suggestion):
        suggestion = TUNE_EXAMPLE | suggestion
    flag = {'sweep': sweep_flag, 'tune': tune_flag}[name](suggestion)
    return f'config.{name} is one dict, which a flag must set as a whole. Did you mean {flag}?'


def parse_values(text: str) -> tuple[Any, ...]:
    """Returns (0.001, 0.003) for '1e-3, 3e-3'; words that are no Python literals stay text."""
    return tuple(parse_literal(word.strip()) for word in text.split(',') if word.strip())


def parse_literal(word: str) -> Any:
    """Returns the value of a Python literal, or the word itself."""
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def flag_type_error(path: str, text: str, types: Collection[type]) -> str:
    """Returns the error for --config.PATH=TEXT of the wrong type, with a suggestion.

    Args:
      path: the field.
      text: the value as given.
      types: the types that the field accepts.

    Returns:
      The message.
    """
    kinds = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'text'}
    expected = ' or '.join(kinds[kind] for kind in types if kind in kinds)
    message = f'{path} must be {expected}; got {text!r}.'
    values = parse_values(text.strip('()[]'))
    numbers = all(isinstance(value, int | float) for value in values)
    if numbers and (len(values) > 1 or text[:1] in ('(', '[')):
        return f'{message} To try several values, use a sweep: {sweep_flag({path: values})}'
    if text == 'None' and type(None) in types:
        return f'{message} For None, leave the flag out.'
    if int in types and len(values) == 1 and numbers and float(values[0]).is_integer():
        return f'{message} Write {int(values[0])}.'
    return message


def check_flags(argv: Sequence[str], field_paths: Collection[str]) -> None:
    """Checks the names of --config flags; absl and `flag_type_error` check the values.

    Raises ValueError if --config is no file or --config.PATH no field.
    """
    parts = {}  # of config.sweep or config.tune
    for flag, following in zip(argv, [*argv[1:], ''], strict=True):
        name, is_whole, text = flag.lstrip('-').partition('=')
        if not flag.startswith('-') or name.split('.')[0] != 'config':
            continue
        path = name.partition('.')[2]
        if not path:
            file = (text if is_whole else following).partition(':')[0]  # an argument may follow
            config_path = Path(os.path.expanduser(file))
            if not config_path.is_file():
                hint = suggest_nearest(file, map(str, config_path.parent.glob('*.py')))
                raise ValueError(
                    f'--config={file} is not a file. Pass a Python file with get_config(), such as '
                    f'configs/{select_preset(file)}.py.{hint}'
                )
        elif any(field.startswith(f'{path}.') for field in field_paths):
            raise ValueError(f'{path} is a section of the config. Set its fields one by one.')
        elif path.split('.')[0] in MULTI_RUN_SECTIONS:
            parts[path] = text if is_whole else following
        elif path in field_paths:
            continue
        elif re.fullmatch(r'[\w.]+', path):
            hint = (
                suggest_nearest(path, MULTI_RUN_SECTIONS)
                if is_multi_run(path)
                else field_hint(path, field_paths)
            )
            raise ValueError(f'the config has no field {path}.{hint}')
    if any('.' in path for path in parts):
        raise ValueError(_dict_flag_hint(parts, field_paths))
