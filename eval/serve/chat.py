"""Chats as prompts: by the model's chat template, or else as lines of roles."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from eval.serve.refusal import Refusal
from lm.data.chat_template import (
    PLAIN_STOP,
    compile_template,
    find_template,
    format_lines,
    list_special_tokens,
    load_special_library,
    make_variables,
)
from lm.data.templates import TemplateFailure
from lm.data.tokenizers import (
    LIBRARY_FILE,
    SubwordTokenizer,
    Tokenizer,
    check_token_ids,
    read_end_tokens,
)

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
        return f'{format_lines(messages)}assistant:'

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

    def __init__(self, template: str, folder: Path, names: Mapping[str, str], vocab_size: int):
        """Args:
          template: the text of the template.
          folder: holds the tokenizer's files.
          names: the spelling of special tokens, as `bos_token` and `eos_token`.
          vocab_size: rows of the model's embedding.

        Raises:
          ValueError: if the template is invalid.
        """
        self._template = compile_template(template)
        self._names, self._vocab_size = names, vocab_size
        self._library = load_special_library((folder / LIBRARY_FILE).read_text('utf-8'))
        self._specials = [*list_special_tokens(self._library).values()]
        self.end_tokens = read_end_tokens(folder)

    def format_prompt(self, messages: Messages) -> str:
        """Returns the prompt. Raises Refusal if the template refuses the messages."""
        for i, message in enumerate(messages):
            for special in self._specials:
                if special in message['content']:
                    raise Refusal(
                        400,
                        'invalid_value',
                        f'messages[{i}].content contains the special token {special!r}, which '
                        'could end its turn. Leave it out.',
                    )
        try:
            return self._template.render(
                **make_variables(messages, self._names, add_generation_prompt=True)
            )
        except TemplateFailure as error:
            raise Refusal(
                400, 'invalid_value', f"the model's chat template rejected the messages: {error}"
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


def build_chat(tokenizer: Tokenizer, folder: Path) -> PlainChat | TemplateChat:
    """Returns the chat format of a model.

    Args:
      tokenizer: the run's.
      folder: WORKDIR/tokenizer, where an import keeps the files of its model.

    Raises:
      ValueError: if there is an invalid template.
    """
    template = find_template(folder)
    if template is None or not isinstance(tokenizer, SubwordTokenizer):
        return PlainChat(tokenizer, read_end_tokens(folder))
    return TemplateChat(template.text, folder, template.names, tokenizer.vocab_size)


# Scripts of users import the earlier names.
compiled, chat_of, ends_in = compile_template, build_chat, read_end_tokens
