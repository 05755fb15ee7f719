"""Chat templates of tokenizers: where their text is, and the special tokens that they write."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.data.tokenizer_files import (
    CONFIG_FILE,
    SPECIAL_TOKENS,
    SPECIALS_FILE,
    TEMPLATE_FILE,
    special_token_text,
)
from lm.storage.files import UnreadableFile, open_regular, read_json

if TYPE_CHECKING:
    from lm.data.templates import Template

MAX_TEMPLATE_BYTES = 1 << 20  # bytes; long templates have 20,000
# A conversation without a template has lines 'role: content'. An answer ends where the user begins.
PLAIN_STOP = '\nuser:'

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The Jinja template of a tokenizer.

    Attributes:
      text: the template.
      names: the spelling of special tokens, as `bos_token` and `eos_token`.
    """

    text: str
    names: Mapping[str, str]

    @property
    def identity(self) -> bytes:
        """Determines the text of a conversation."""
        return json.dumps([self.text, sorted(self.names.items())]).encode()


def find_template(folder: Path) -> ChatTemplate | None:
    """Returns the template beside a tokenizer, or None.

    Args:
      folder: holds the tokenizer's files.

    Raises:
      ValueError: if the template is no text.
    """
    config = {}
    for file in (SPECIALS_FILE, CONFIG_FILE):
        if (folder / file).is_file():
            config |= read_json(folder / file)
    template = read_template(folder, config)
    if template is None:
        return None
    spellings = {
        f'{name}_token': special_token_text(config.get(f'{name}_token')) for name in SPECIAL_TOKENS
    }
    # As for transformers, a token that the model does not have is not defined.
    names = {name: text for name, text in spellings.items() if text is not None}
    return ChatTemplate(template, names)


def compile_template(template: str) -> 'Template':
    """Returns a template that can be rendered.

    Raises:
      ValueError: if it is invalid.
    """
    from lm.data.templates import Template, TemplateFailure  # Jinja delays the start of training

    try:
        return Template(template)
    except TemplateFailure as error:
        raise ValueError(f"the model's chat template cannot be read: {error}") from None


def make_variables(messages: Messages, names: Mapping[str, str], **settings: Any) -> dict[str, Any]:
    """Returns the variables of a prompt, as transformers sets them.

    Args:
      messages: {role, content} each.
      names: the spelling of special tokens.
      **settings: variables that differ from their defaults.
    """
    defaults = {'add_generation_prompt': False, 'tools': None, 'documents': None}
    return {'messages': list(messages), **defaults, **names, **settings}


def format_lines(messages: Messages) -> str:
    """Returns lines 'role: content', which stand for a template."""
    return ''.join(f'{message["role"]}: {message["content"]}\n' for message in messages)


def load_special_library(library_text: str) -> Any:
    """Returns a tokenizer of the `tokenizers` library that encodes special tokens as tokens.

    The run's own tokenizer encodes their spelling as text.

    Args:
      library_text: the content of tokenizer.json.
    """
    import tokenizers as library

    loaded = library.Tokenizer.from_str(library_text)
    # tokenizer.json may set both; a prompt must be neither cut nor filled.
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = False
    return loaded


def list_special_tokens(library: Any) -> dict[int, str]:
    """Returns {id: spelling} of the special tokens of a tokenizer of the `tokenizers` library."""
    added = library.get_added_tokens_decoder().items()
    return {i: token.content for i, token in added if token.special and token.content}


def read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns the text of a model's template; of several named templates, the default.

    Args:
      folder: holds the tokenizer's files.
      config: the content of tokenizer_config.json.

    Raises:
      ValueError: if the template is no text.
    """
    if (path := folder / TEMPLATE_FILE).is_file():
        with open_regular(path) as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) > MAX_TEMPLATE_BYTES:
            raise UnreadableFile(
                f'{path} is not a chat template: it has more than {MAX_TEMPLATE_BYTES:,} bytes'
            )
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise UnreadableFile(f'{path} is not a chat template: {error}') from None
    match config.get('chat_template'):
        case None:
            return None
        case str(text):
            return text
        case [*entries] if all(map(is_named_template, entries)):
            templates = {entry['name']: entry['template'] for entry in entries}
            return templates.get('default')
        case template:
            raise ValueError(
                f'chat_template of {folder / CONFIG_FILE} must be a string, or a list of {{"name", '
                f'"template"}}; got {type(template).__name__} {str(template)[:60]}'
            )


def is_named_template(value: Any) -> bool:
    """Whether a value is an entry in a list of named templates."""
    match value:
        case {'name': str(), 'template': str()}:
            return True
    return False
