"""Chats as prompts: by the model's chat template, or else as lines of roles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.serve.requests import Refusal
from eval.serve.templates import Template, TemplateFailure
from lm.data.tokenizers import (
    CONFIG_FILE,
    LIBRARY_FILE,
    SPECIALS_FILE,
    SubwordTokenizer,
    Tokenizer,
    check_token_ids,
    read_end_tokens,
    special_token_text,
)
from lm.storage.files import UnreadableFile, open_regular, read_json

TEMPLATE_FILE = 'chat_template.jinja'
MAX_TEMPLATE_BYTES = 1 << 20  # bytes; long templates have 20,000
SPECIAL_TOKENS = ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')  # that a template may spell
PLAIN_STOP = '\nuser:'  # a model without template begins to speak for the user

Messages = Sequence[dict[str, str]]


class PlainChat:
    """Lines 'role: content', then 'assistant:', for a model without template.

    The answer ends when the model begins a line of the user.

    Attributes:
      end_tokens: tokens that end a text, besides EOS.
    """

    stops = (PLAIN_STOP,)

    def __init__(self, tokenizer: Tokenizer, end_tokens: frozenset[int] = frozenset()):
        self._tokenizer, self.end_tokens = tokenizer, end_tokens

    def format_prompt(self, messages: Messages) -> str:
        """Returns the prompt, without BOS."""
        lines = [f'{message["role"]}: {message["content"]}\n' for message in messages]
        return ''.join([*lines, 'assistant:'])

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, after BOS."""
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text)]

    def close(self) -> None:
        """Does nothing; `TemplateChat` has processes to end."""


class TemplateChat:
    """The Jinja template of an imported model, which also places BOS.

    Special tokens in the template are encoded as tokens. A message with the spelling of a special
    token is refused, because it could end its turn and begin another.

    Attributes:
      end_tokens: tokens that end a text, besides EOS.
    """

    stops = ()

    def __init__(self, template: str, folder: Path, names: dict[str, str], vocab_size: int):
        """Args:
          template: the text of the template.
          folder: holds the tokenizer's files.
          names: the spelling of special tokens, as `bos_token` and `eos_token`.
          vocab_size: rows of the model's embedding.

        Raises:
          ValueError: if the template is invalid.
        """
        import tokenizers as library

        self._template = compile_template(template)
        self._names, self._vocab_size = names, vocab_size
        # A second tokenizer, because the run's encodes the spelling of a special token as text.
        self._library = library.Tokenizer.from_file(str(folder / LIBRARY_FILE))
        # tokenizer.json may set both; a prompt must be neither cut nor filled.
        self._library.no_truncation()
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder().values()
        self._specials = [token.content for token in added if token.special and token.content]
        self.end_tokens = read_end_tokens(folder)

    def format_prompt(self, messages: Messages) -> str:
        """Returns the prompt. Raises Refusal if the template refuses the messages."""
        for i, message in enumerate(messages):
            for special in self._specials:
                if special in message['content']:
                    raise Refusal(
                        400,
                        'invalid_value',
                        f'messages[{i}].content spells the special token {special!r}: it could '
                        'end its turn. Leave it out.',
                    )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._names,
            )
        except TemplateFailure as error:
            raise Refusal(
                400, 'invalid_value', f"the model's chat template refuses the messages: {error}"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt. Raises ValueError if the model lacks one of them."""
        # Encoding a batch releases the GIL, so that other threads run meanwhile.
        (encoded,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        check_token_ids(encoded.ids, self._vocab_size, self._library)
        return encoded.ids

    def close(self) -> None:
        """Ends the processes that render."""
        self._template.close()


def compile_template(template: str) -> Template:
    """Returns a template that can be rendered.

    Raises:
      ValueError: if it is invalid.
    """
    try:
        return Template(template)
    except TemplateFailure as error:
        raise ValueError(f"the model's chat template cannot be read: {error}") from None


def build_chat(tokenizer: Tokenizer, folder: Path) -> PlainChat | TemplateChat:
    """Returns the chat format of a model.

    Args:
      tokenizer: the run's.
      folder: WORKDIR/tokenizer, where an import keeps the files of its model.

    Raises:
      ValueError: if there is an invalid template.
    """
    config = {}
    for file in (SPECIALS_FILE, CONFIG_FILE):
        if (folder / file).is_file():
            config |= read_json(folder / file)
    template = read_template(folder, config)
    if template is None or not isinstance(tokenizer, SubwordTokenizer):
        return PlainChat(tokenizer, read_end_tokens(folder))
    spellings = {
        f'{name}_token': special_token_text(config.get(f'{name}_token')) for name in SPECIAL_TOKENS
    }
    # As for transformers, a token that the model does not have is not defined.
    names = {name: text for name, text in spellings.items() if text is not None}
    return TemplateChat(template, folder, names, tokenizer.vocab_size)


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
                f'{path} is no chat template: it has more than {MAX_TEMPLATE_BYTES:,} bytes'
            )
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise UnreadableFile(f'{path} is no chat template: {error}') from None
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
                f'chat_template of {folder / CONFIG_FILE} must be a text, or a list of '
                f'{{"name", "template"}}; got {type(template).__name__} {str(template)[:60]}'
            )


def is_named_template(value: Any) -> bool:
    """Whether a value is an entry in a list of named templates."""
    match value:
        case {'name': str(), 'template': str()}:
            return True
    return False


# Scripts of users import the earlier names.
compiled, chat_of = compile_template, build_chat
