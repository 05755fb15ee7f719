"""Chats as prompts: by the template that came with the model, or else as lines of roles."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.serve.requests import Refusal
from lm.data.tokenizers import LIBRARY_FILE, SubwordTokenizer, Tokenizer
from lm.storage.files import read_json

TEMPLATE_FILE, CONFIG_FILE = 'chat_template.jinja', 'tokenizer_config.json'
GENERATION_FILE = 'generation_config.json'
PLAIN_STOP = '\nuser:'  # where a model without template begins to speak for the user

Messages = Sequence[dict[str, str]]


class PlainChat:
    """Lines 'role: content', then 'assistant:', for a model that has no template.

    The answer ends where the model begins a line of the user.
    """

    stops = (PLAIN_STOP,)
    ends = frozenset()

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def tokens(self, messages: Messages) -> list[int]:
        """Returns the prompt, which begins with BOS."""
        lines = [f'{one["role"]}: {one["content"]}\n' for one in messages]
        text = ''.join([*lines, 'assistant:'])
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text)]


class TemplateChat:
    """The Jinja template of an imported model, which also says where BOS stands.

    The template's own special tokens are read as tokens. A message that spells one is refused: it
    could end its turn and begin another's. ends: tokens that end the answer, beside EOS.
    """

    stops = ()

    def __init__(self, template: str, folder: Path, names: dict[str, str]):
        """Args:
          template: its text.
          folder: of the tokenizer's files.
          names: the spelling of `bos_token` and `eos_token`.

        Raises:
          ValueError: where the template is none.
        """
        import tokenizers as library

        self._template = compiled(template)
        self._names = names
        # The run's own tokenizer reads the spelling of a special token as text.
        self._library = library.Tokenizer.from_file(str(folder / LIBRARY_FILE))
        self._library.no_truncation()
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder().values()
        self._specials = [one.content for one in added if one.special]
        self.ends = ends_in(folder)

    def tokens(self, messages: Messages) -> list[int]:
        """Returns the prompt. Raises Refusal where the template takes no such messages."""
        from jinja2 import TemplateError

        for i, one in enumerate(messages):
            for special in self._specials:
                if special in one['content']:
                    raise Refusal(
                        400,
                        'invalid_value',
                        f'messages[{i}].content spells the special token {special!r}: it could '
                        'end its turn. Leave it out.',
                    )
        try:
            text = self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._names,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise Refusal(
                400, 'invalid_value', f"the model's chat template refuses the messages: {error}"
            ) from None
        return self._library.encode(text, add_special_tokens=False).ids


def chat_of(tokenizer: Tokenizer, folder: Path) -> PlainChat | TemplateChat:
    """Returns how the model reads a chat.

    Args:
      tokenizer: the run's.
      folder: WORKDIR/tokenizer, where an import keeps the files of its model.

    Raises:
      ValueError: where there is a template that cannot be read.
    """
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    template = template_in(folder, config)
    if template is None or not isinstance(tokenizer, SubwordTokenizer):
        return PlainChat(tokenizer)
    names = {name: spelled(config.get(name)) for name in ('bos_token', 'eos_token')}
    return TemplateChat(template, folder, names)


def template_in(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns the text of a model's template; of several that have names, the default one."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text()
    found = config.get('chat_template')
    if isinstance(found, list):
        named = {one['name']: one['template'] for one in found if {'name', 'template'} <= {*one}}
        found = named.get('default')
    return found if isinstance(found, str) else None


def spelled(token: Any) -> str:
    """Returns the text of a special token, which may be given as an object."""
    token = token.get('content') if isinstance(token, dict) else token
    return token if isinstance(token, str) else ''


def ends_in(folder: Path) -> frozenset[int]:
    """Returns the tokens that end a text, as the model's generation_config.json lists them."""
    path = folder / GENERATION_FILE
    found = read_json(path).get('eos_token_id') if path.is_file() else None
    return frozenset(one for one in (found if isinstance(found, list) else [found]) if one)


def compiled(text: str) -> Any:
    """Returns a Jinja template in a sandbox, with the functions that models' templates call.

    Raises:
      ValueError: where it is no template.
    """
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters['tojson'] = to_json
    environment.globals['raise_exception'] = refuse
    environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"the model's chat template cannot be read: {error}") from error
