"""Conversations to tokens, with the spans of tokens that are learned: answers and their ends.

The text of a conversation is encoded once, as a whole, so that its tokens are those of the model's
own chat template. Spans of characters become spans of tokens by the offsets of the encoding.
"""

import bisect
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm.data import template_worker
from lm.data.chat_template import (
    PLAIN_STOP,
    ChatTemplate,
    compile_template,
    list_special_tokens,
    load_special_library,
    make_variables,
)
from lm.data.conversations import Conversation, parse_document
from lm.data.templates import TemplateFailure
from lm.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer, check_token_ids

GENERATION_TAG = re.compile(r'{%[-+]?\s*generation\s*[-+]?%}')
EXCERPT = 80  # characters of a conversation in an error
MARKS = re.compile(f'[{template_worker.BEGIN}{template_worker.END}]')

# Why a conversation is left out. The texts are counted, and end a NOTE.
NO_ANSWER = 'have no answer'
NO_TEXT = 'have a message without a role or a text'
SPECIAL = 'spell a special token in a message'
REFUSED = 'are refused by the chat template'


class LeftOut(Exception):
    """A conversation cannot be used. The text is one of the reasons above."""


@dataclasses.dataclass(frozen=True)
class EncodedChat:
    """The tokens of a conversation.

    Attributes:
      tokens: [n].
      targets: [S, 2], the first token of each span to learn, and the token behind its last.
      n_bytes: UTF-8 bytes of the text to learn; special tokens have none.
    """

    tokens: np.ndarray
    targets: np.ndarray
    n_bytes: int


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


class ChatEncoder:
    """Encodes conversations for a tokenizer: by its chat template, or else as lines of roles."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        """Args:
          tokenizer: bytes, or subwords.
          template: of the tokenizer, if it has one.

        Raises:
          ValueError: if the template is invalid.
        """
        self._tokenizer, self._template, self._process = tokenizer, template, None
        if isinstance(tokenizer, SubwordTokenizer):
            # A post-processor adds nothing here, but takes spaces off the offsets of tokens.
            fields = json.loads(tokenizer.library.to_str()) | {'post_processor': None}
            self._plain_library = load_special_library(json.dumps(fields))
            self._plain_library.encode_special_tokens = True
            self._library = load_special_library(json.dumps(fields))
            self._specials = list_special_tokens(self._library)
            self._end_ids = {*self._specials, tokenizer.eos_id}
            if template is not None:
                self._process = compile_template(template.text)
                self._has_marks = bool(GENERATION_TAG.search(template.text))

    def close(self) -> None:
        """Ends the processes that render."""
        if self._process is not None:
            self._process.close()

    def encode_batch(self, documents: Sequence[str]) -> list[EncodedChat | str]:
        """Returns the tokens of each document, or the reason to leave it out.

        Raises ValueError if the end of an answer cannot be told.
        """
        texts = [self._format_document(document) for document in documents]
        encodings = {
            is_rendered: self._encode_texts(texts, is_rendered) for is_rendered in (False, True)
        }
        chats: list[EncodedChat | str] = []
        for document, text in zip(documents, texts, strict=True):
            if isinstance(text, ChatText):
                tokens, offsets = next(encodings[text.is_rendered])
                chats.append(self._mark_targets(document, text, tokens, offsets))
            else:
                chats.append(text)
        return chats

    def _encode_texts(self, texts: Sequence[ChatText | str], is_rendered: bool) -> Iterator[tuple]:
        """Yields (tokens, offsets [n, 2] in characters) of the texts that are rendered, or not."""
        chosen = [t.text for t in texts if isinstance(t, ChatText) and t.is_rendered == is_rendered]
        if isinstance(self._tokenizer, ByteTokenizer):
            for text in chosen:
                lengths = [len(character.encode()) for character in text]
                starts = np.repeat(np.arange(len(text)), lengths)
                yield self._tokenizer.encode(text), np.stack([starts, starts + 1], 1)
            return
        library = self._library if is_rendered else self._plain_library
        for encoding in library.encode_batch(chosen, add_special_tokens=False):
            check_token_ids(encoding.ids, self._tokenizer.vocab_size, library)
            yield encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def _format_document(self, document: str) -> ChatText | str:
        conversation = parse_document(document)
        try:
            if not conversation.messages:
                return _join_completion(conversation)
            _check_messages(conversation)
            if self._process is None:
                return format_plain(conversation)
            return self._render(document, conversation)
        except LeftOut as reason:
            return str(reason)

    def _render(self, document: str, conversation: Conversation) -> ChatText:
        spellings = (*self._specials.values(), template_worker.BEGIN, template_worker.END)
        if any(special in text for text in _list_texts(conversation) for special in spellings):
            raise LeftOut(SPECIAL)
        assert self._template is not None and self._process is not None
        messages, tools, names = conversation.messages, conversation.tools, self._template.names
        prompts = [make_variables(messages, names, tools=tools)]
        if self._has_marks:
            prompts.append(prompts[0] | {template_worker.MARK_ANSWERS: True})
        else:
            prompts += [
                make_variables(messages[:i], names, tools=tools, add_generation_prompt=True)
                for i in conversation.answers
            ]
        try:
            text, *others = self._process.render_all(prompts)
        except TemplateFailure:
            raise LeftOut(REFUSED) from None
        if self._has_marks:
            return ChatText(
                text, _read_marks(document, conversation, text, *others), (), False, True
            )
        for prompt in others:
            if not text.startswith(prompt):
                raise _mark_error(document, 'an answer does not follow its prompt')
        contents = [messages[i]['content'].strip() for i in conversation.answers]
        return ChatText(text, [(len(prompt), None) for prompt in others], contents, False, True)

    def _mark_targets(
        self, document: str, chat: ChatText, ids: Sequence[int], offsets: np.ndarray
    ) -> EncodedChat:
        """Returns the tokens of a text, with the spans of tokens that its spans of characters are.

        Args:
          document: the conversation, for errors.
          chat: its text.
          ids: tokens of the text.
          offsets: [n, 2], first character of each token, and the character behind its last.
        """
        starts, stops = offsets[:, 0].tolist(), offsets[:, 1].tolist()
        specials = self._specials if chat.is_rendered else {}
        spans, n_bytes = [], 0
        for number, (start, stop) in enumerate(chat.spans):
            # A token that holds the end of the prompt and the start of the answer is learned.
            first = bisect.bisect_right(stops, start)
            # The first token has none before it, and a token is in a single span.
            first = max(first, spans[-1][1] if spans else int(chat.is_rendered))
            if stop is None:
                last = self._find_end(document, chat, number, ids, starts)
            else:
                last = bisect.bisect_left(starts, stop) - 1
            if last < first:
                continue
            spans.append((first, last + 1))
            n_bytes += len(chat.text[start : stops[last]].encode())
            within = (i for i in range(first, last + 1) if ids[i] in specials)
            n_bytes -= sum(
                len(chat.text[max(start, starts[i]) : stops[i]].encode()) for i in within
            )
        tokens, targets = np.asarray(ids, np.int64), np.array(spans, np.int64).reshape(-1, 2)
        if not chat.is_rendered:
            tokens = np.concatenate([[self._tokenizer.bos_id], tokens, [self._tokenizer.eos_id]])
            targets += 1
            if chat.has_end:
                targets[-1, 1] = len(tokens)
        return EncodedChat(tokens, targets, n_bytes)

    def _find_end(
        self,
        document: str,
        chat: ChatText,
        number: int,
        ids: Sequence[int],
        starts: Sequence[int],
    ) -> int:
        """Returns the index of the special token that ends an answer."""
        start, content = chat.spans[number][0], chat.contents[number]
        limits = [*(span[0] for span in chat.spans[number + 1 :]), len(chat.text)]
        # Where a template changes the content, the first special token ends the answer.
        place = chat.text.find(content, start, limits[0])
        content_end = start if place < 0 else place + len(content)
        for i in range(bisect.bisect_left(starts, content_end), len(ids)):
            if starts[i] >= limits[0]:
                break
            if ids[i] in self._end_ids:
                if place >= 0 and content and chat.text[content_end : starts[i]].strip():
                    break
                return i
        raise _mark_error(document, 'no special token ends an answer')


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


def _join_completion(conversation: Conversation) -> ChatText:
    prompt, text = conversation.prompt, conversation.prompt + conversation.completion
    if not conversation.completion:
        raise LeftOut(NO_ANSWER)
    return ChatText(text, [(len(prompt), len(text))], has_end=True)


def _check_messages(conversation: Conversation) -> None:
    """Raises LeftOut for messages without text, or no answer."""
    for message in conversation.messages:
        if not all(isinstance(message.get(field), str) for field in ('role', 'content')):
            raise LeftOut(NO_TEXT)
    if not conversation.answers:
        raise LeftOut(NO_ANSWER)


def _list_texts(value: Any) -> Iterator[str]:
    """Yields every text within a value of JSON."""
    match value:
        case str():
            yield value
        case Conversation():
            yield from _list_texts([*value.messages, value.tools])
        case Mapping():
            yield from _list_texts([*value, *value.values()])
        case list() | tuple():
            for element in value:
                yield from _list_texts(element)


def _read_marks(
    document: str, conversation: Conversation, text: str, marked: str
) -> list[tuple[int, int]]:
    """Returns the spans that the template's {% generation %} tags mark.

    Args:
      document: the conversation, for errors.
      conversation: its messages.
      text: the rendering.
      marked: the rendering with BEGIN and END.
    """
    edges = [match.start() - number for number, match in enumerate(MARKS.finditer(marked))]
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if MARKS.sub('', marked) != text:
        raise _mark_error(document, 'its text depends on whether answers are marked')
    if conversation.first_answer:
        if len(spans) != sum(message['role'] == 'assistant' for message in conversation.messages):
            raise _mark_error(document, 'the chat template does not mark every answer once')
        spans = spans[len(spans) - len(conversation.answers) :]
    if not spans:
        raise LeftOut(NO_ANSWER)
    return spans  # ty: ignore[invalid-return-type]


def _mark_error(document: str, reason: str) -> ValueError:
    return ValueError(
        f"the chat template does not tell which text is the model's: {reason}, in the conversation "
        f'{document[:EXCERPT]}. Put {{% generation %}} and {{% endgeneration %}} around the answer '
        'and its end in the template, or leave such conversations out.'
    )
