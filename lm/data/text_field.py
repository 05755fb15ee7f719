"""The field of a record that holds the text: data.text_field, and errors where it holds none."""

import re
from collections.abc import Iterable
from typing import Any

from modules.choices import closest_names

USUAL_NAMES = ('text', 'content', 'document', 'body', 'raw_content', 'article', 'story')
DUCKDB_FILE = re.compile(r'\.(parquet|jsonl?(\.gz|\.zst)?)$')  # that it reads by their names
CHAT_FIELDS = ({'messages'}, {'conversations'}, {'conversation'}, {'prompt', 'completion'})


def check_field(
    name: str, fields: Iterable[str], location: str, texts: Iterable[str] | None = None
) -> None:
    """Checks that the field with the text exists.

    Args:
      name: data.text_field.
      fields: the fields of the record or file.
      location: the record or file, for the error.
      texts: the fields that hold text; None if that is not known.

    Raises:
      ValueError: if it is missing, with the likeliest field.
    """
    fields = [*fields]
    if name in fields:
        return
    names = ', '.join(map(repr, fields)) or 'none'
    message = f'{location} has no field {name!r}; its fields are {names}.'
    if any(chat <= {*fields} for chat in CHAT_FIELDS):
        raise ValueError(f'{message} {_suggest_chat()}')
    texts = fields if texts is None else [*texts]
    usual = [field for field in USUAL_NAMES if field in texts]
    closest = closest_names(name, texts)
    candidates = usual + closest if name in USUAL_NAMES else closest + usual
    likely = texts if len(texts) == 1 else candidates
    choice = f'={likely[0]}' if likely else ' to one' if texts else ''
    advice = f'Set data.text_field{choice}.' if choice else 'None of them has text.'
    raise ValueError(f'{message} {advice}' if fields else message)


def _suggest_chat() -> str:
    return (
        'For chats, replace text: with chat: in data.source; to read one of its fields as plain '
        'text, set data.text_field.'
    )


def explain_type(name: str, location: str, kind: str) -> str:
    """Returns the error for a field that is no text.

    Args:
      name: data.text_field.
      location: the record or file.
      kind: the type of its value.
    """
    message = f'field {name!r} of {location} must be text; got {kind}.'
    if any(name in chat for chat in CHAT_FIELDS if len(chat) == 1):
        return f'{message} For chats, replace text: with chat: in data.source.'
    expression = ''
    if kind.startswith(('list', 'large_list', 'fixed_size_list')):
        expression = f'array_to_string({name}, chr(10))'
    elif kind.startswith(('struct', 'dict')):
        expression = f'{name}.FIELD'
    file = re.sub(r'(:\d+|\[\d+\])$', '', location)
    if not expression or not name.isidentifier() or not DUCKDB_FILE.search(file):
        return message
    return (
        f'{message} Write a file with a text column, for example with python -c "import duckdb; '
        f"duckdb.sql(\\\"COPY (SELECT {expression} AS text FROM '{file}') TO 'new.parquet'\\\")\"."
    )


def to_bytes(value: Any, name: str, location: str) -> bytes:
    """Returns the text of a record as bytes.

    Args:
      value: the value of the field.
      name: the name of the field, for errors.
      location: the record, for errors.

    Raises:
      ValueError: if it is no text.
    """
    if isinstance(value, str):
        try:
            return value.encode('utf-8', 'surrogateescape')
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, and it stays invalid
            return value.encode('utf-8', 'surrogatepass')
    if isinstance(value, bytes):
        return value
    raise ValueError(explain_type(name, location, type(value).__name__))
