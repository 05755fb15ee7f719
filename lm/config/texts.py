"""Held-out texts by name: the syntax of `eval.texts`.

    {'wiki': 'text:wiki/*.txt', 'chats': 'chat:chats.jsonl'}

names sources, each spelt as in data.source. The bits per byte of a text are recorded as
text_NAME_bits_per_byte.
"""

from collections.abc import Mapping

from lm.config.mixture import NAME, parse_dict

EXAMPLE = "{'wiki': 'text:wiki/*.txt', 'code': 'text:code/**/*.txt'}"


def parse_texts(text: str) -> dict[str, str]:
    """Returns {name: source} of `eval.texts`, in its order.

    Raises ValueError for another form, a name that no record can have, and a duplicate source.
    """
    return parse_names('eval.texts', text, 'a source', EXAMPLE)


def parse_names(path: str, text: str, noun: str, example: str) -> dict[str, str]:
    """Returns the dict of strings that the value of a field describes.

    Args:
      path: the field, for errors.
      text: its value.
      noun: of the strings, for errors.
      example: a valid value.

    Raises:
      ValueError: for another form, a name that no record can have, and a duplicate string.
    """
    advice = f'For example: --config.{path}="{example}".'
    values = parse_dict(path, text, advice)
    for name, value in values.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f'a name in {path} must be one word of letters, digits and _, because its numbers '
                f'are recorded under this name; got {name!r}. {advice}'
            )
        if not isinstance(value, str) or not value:
            raise ValueError(
                f'{path} must have {noun} after each name; got {value!r} after {name!r}. {advice}'
            )
    _check_unique(path, values)
    return values


def _check_unique(path: str, values: Mapping[str, str]) -> None:
    names: dict[str, str] = {}
    for name, value in values.items():
        if value in names:
            raise ValueError(
                f'{path} has {value!r} both as {names[value]!r} and as {name!r}. List it once.'
            )
        names[value] = name
