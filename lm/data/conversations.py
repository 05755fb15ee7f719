"""Conversations: records of several forms to one, and the JSON that stands for each as a document.

The document of a conversation is the JSON of {'messages', ...} or {'prompt', 'completion'}, so that
scanning and splitting treat it as any text.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.data import formats
from lm.data.chat_template import PLAIN_STOP
from lm.data.formats import Documents
from lm.storage.files import first_line

MESSAGES, PROMPT, COMPLETION = 'messages', 'prompt', 'completion'
LISTS = (MESSAGES, 'conversations', 'conversation')  # names of the field with messages
FIELDS = (*LISTS, PROMPT, COMPLETION, 'tools', 'system')
FORMS = f"'{MESSAGES}', 'conversations', or '{PROMPT}' and '{COMPLETION}'"
ANSWER = 'assistant'  # the role that a model learns
# Roles of ShareGPT, whose messages have `from` and `value`.
SHARE_ROLES = {'human': 'user', 'gpt': ANSWER}
VERSION = 1  # raise it when another document is written for the same record


# Why a conversation is left out. The texts are counted, and end a NOTE.
NO_ANSWER = 'have no answer'
NO_TEXT = 'have a message without a role or a text'
SPECIAL = 'spell a special token in a message'
REFUSED = 'are refused by the chat template'


class LeftOut(Exception):
    """A conversation cannot be used. The text is one of the reasons above."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation, or a prompt with its completion.

    Attributes:
      messages: {'role', 'content', ...} each; empty for a prompt that is a text.
      first_answer: the index of the first message that may be an answer to learn.
      tools: for the chat template.
      prompt: the text before `completion`.
      completion: a text to learn.
    """

    messages: tuple[dict[str, Any], ...] = ()
    first_answer: int = 0
    tools: Any = None
    prompt: str = ''
    completion: str = ''

    @property
    def answers(self) -> list[int]:
        """The indices of the messages to learn."""
        indices = range(self.first_answer, len(self.messages))
        return [i for i in indices if self.messages[i]['role'] == ANSWER]


@dataclasses.dataclass(frozen=True)
class ChatText:
    """The text of a conversation.

    Attributes:
      text: the whole.
      spans: (start, stop) of the characters to learn. `stop` is None if the first special token
        behind `start` ends the answer.
      contents: the stripped text of each answer, if `stop` is None.
      has_end: whether EOS behind the text is learned, too.
      is_rendered: by the template, which writes special tokens, and BOS and EOS itself.
    """

    text: str
    spans: Sequence[tuple[int, int | None]]
    contents: Sequence[str] = ()
    has_end: bool = False
    is_rendered: bool = False


def read_conversations(files: Iterable[Path]) -> Documents:
    """Yields a document for each record of files.

    Raises ValueError, with file and row, for a file of text and for a record of another form.
    """
    for path in files:
        for location, record in formats.read_records(path, FIELDS):
            yield location, (encode_record(record, location),)


def encode_record(record: Mapping[str, Any], location: str) -> bytes:
    """Returns the document of a record.

    Args:
      record: of any of the forms.
      location: the record, for errors.

    Raises:
      ValueError: if it has another form.
    """
    fields = {name: value for name, value in record.items() if value is not None}
    prompt, completion = fields.get(PROMPT), fields.get(COMPLETION)
    if list_name := next((name for name in LISTS if name in fields), ''):
        document: dict[str, Any] = {MESSAGES: _read_messages(fields[list_name], location)}
        system = fields.get('system') if list_name != MESSAGES else None  # beside ShareGPT's
        if isinstance(system, str) and system:
            document[MESSAGES].insert(0, {'role': 'system', 'content': system})
    elif isinstance(prompt, str | bytes) and isinstance(completion, str | bytes):
        document = {PROMPT: _to_text(prompt), COMPLETION: _to_text(completion)}
    elif prompt is not None and completion is not None:
        messages = _read_messages(prompt, location)
        document = {'first_answer': len(messages)}
        document[MESSAGES] = messages + _read_messages(completion, location)
    else:
        texts = (repr(name) + ' (null)' * (record[name] is None) for name in record)
        names = ', '.join(texts) or 'none'
        raise ValueError(
            f'{location} is not a conversation: it must have {FORMS}; got the fields {names}. '
            'Rename its fields, or read it as plain text: data.source=text:GLOB with '
            'data.text_field.'
        )
    if fields.get('tools') and MESSAGES in document:
        document['tools'] = fields['tools']
    try:
        text = json.dumps(document, ensure_ascii=False, default=_to_text)
    except (RecursionError, TypeError) as error:
        raise ValueError(f'{location} is not a conversation: {first_line(error)}.') from error
    return text.encode('utf-8', 'surrogatepass')


def _read_messages(value: Any, location: str) -> list[dict[str, Any]]:
    """Returns messages with `role` and `content`, of which either may be missing."""
    if isinstance(value, str) and value.lstrip().startswith('['):  # a column of JSON
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):  # TFDS has a list for each field
        columns = zip(*value.values(), strict=True)
        value = [dict(zip(value, fields, strict=True)) for fields in columns]
    if not isinstance(value, str | bytes) and hasattr(value, '__iter__'):
        messages = [*value]
        if all(isinstance(message, Mapping) for message in messages):
            return [_rename_fields(message) for message in messages]
    raise ValueError(
        f"{location} is not a conversation: its messages must be a list of {{'role', 'content'}}; "
        f'got {str(value)[:60]!r}.'
    )


def _rename_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    # A parquet file has every field in every message, and null where a record has none.
    fields = {name: _to_text(value) for name, value in message.items() if value is not None}
    if 'role' not in fields and 'from' in fields:
        role = fields.pop('from')
        fields['role'] = SHARE_ROLES.get(role, role) if isinstance(role, str) else role
        fields |= {'content': fields.pop('value')} if 'value' in fields else {}
    return fields


def _to_text(value: Any) -> Any:
    """Returns bytes as text, arrays as lists, and anything else unchanged."""
    if isinstance(value, bytes):
        return value.decode('utf-8', 'replace')
    return value.tolist() if hasattr(value, 'tolist') else value


def parse_document(document: str) -> Conversation:
    """Returns the conversation of a document."""
    fields = json.loads(document)
    fields[MESSAGES] = tuple(fields.get(MESSAGES, ()))
    return Conversation(**fields)


def format_plain(conversation: Conversation) -> ChatText:
    """Returns lines 'role: content', as `eval.serve` writes them for a model without a template.

    An answer is learned from behind 'assistant:' on. Its end is PLAIN_STOP where the user goes on,
    and EOS behind the last message.
    """
    text, spans, messages = '', [], conversation.messages
    for i, message in enumerate(messages):
        text += f'{message["role"]}:'
        start, is_last = len(text), i == len(messages) - 1
        text += f' {message["content"]}' + ('' if is_last else '\n')
        goes_on = not is_last and messages[i + 1]['role'] == 'user'
        if i in conversation.answers:
            spans.append((start, len(text) + (len(PLAIN_STOP) - 1 if goes_on else 0)))
    return ChatText(text, spans, has_end=bool(spans) and spans[-1][1] == len(text))


def join_completion(conversation: Conversation) -> ChatText:
    prompt, text = conversation.prompt, conversation.prompt + conversation.completion
    if not conversation.completion:
        raise LeftOut(NO_ANSWER)
    return ChatText(text, [(len(prompt), len(text))], has_end=True)


def check_messages(conversation: Conversation) -> None:
    """Raises LeftOut for messages without text, or no answer."""
    for message in conversation.messages:
        if not all(isinstance(message.get(field), str) for field in ('role', 'content')):
            raise LeftOut(NO_TEXT)
    if not conversation.answers:
        raise LeftOut(NO_ANSWER)


def list_texts(value: Any) -> Iterator[str]:
    """Yields every text within a value of JSON."""
    match value:
        case str():
            yield value
        case Conversation():
            yield from list_texts([*value.messages, value.tools])
        case Mapping():
            yield from list_texts([*value, *value.values()])
        case list() | tuple():
            for part in value:
                yield from list_texts(part)
