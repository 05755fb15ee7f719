"""Conversations to tokens, with the spans of tokens that are learned: answers and their ends.

The text of a conversation is encoded once, as a whole, so that its tokens are those of the model's
own chat template. Spans of characters become spans of tokens by the offsets of the encoding.
"""

import bisect
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from lm.data import template_worker
from lm.data.chat_template import (
    ChatTemplate,
    compile_template,
    list_special_tokens,
    load_special_library,
    make_variables,
)
from lm.data.conversations import (
    ANSWER,
    NO_ANSWER,
    REFUSED,
    SPECIAL,
    ChatText,
    Conversation,
    LeftOut,
    check_messages,
    format_plain,
    join_completion,
    list_texts,
    parse_document,
)
from lm.data.templates import TemplateFailure, TemplateLimitExceeded
from lm.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer, check_token_ids

GENERATION_TAG = re.compile(r'{%[-+]?\s*generation\s*[-+]?%}')
EXCERPT = 80  # characters of a conversation in an error
MARKS = re.compile(f'[{template_worker.BEGIN}{template_worker.END}]')


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
                chat = self._mark_targets(document, text, tokens, offsets)
                chats.append(chat if len(chat.targets) else NO_ANSWER)
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
                return join_completion(conversation)
            check_messages(conversation)
            if self._process is None:
                return format_plain(conversation)
            return self._render(document, conversation)
        except LeftOut as reason:
            return str(reason)

    def _render(self, document: str, conversation: Conversation) -> ChatText:
        spellings = (*self._specials.values(), template_worker.BEGIN, template_worker.END)
        if any(special in text for text in list_texts(conversation) for special in spellings):
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
            text, *variants = self._process.render_all(prompts)
        except TemplateLimitExceeded as error:
            # Left out, it would be missing on a slow machine alone, in data of the same name.
            raise ValueError(
                f'the chat template could not render the conversation {document[:EXCERPT]}: '
                f'{error}. Run the command again, or remove the conversation.'
            ) from None
        except TemplateFailure:
            raise LeftOut(REFUSED) from None
        if self._has_marks:
            marks = _read_marks(document, conversation, text, *variants)
            return ChatText(text, marks, is_rendered=True)
        for prompt in variants:
            if not text.startswith(prompt):
                raise _mark_error(document, 'an answer does not follow its prompt')
        contents = [messages[i]['content'].strip() for i in conversation.answers]
        spans = [(len(prompt), None) for prompt in variants]
        return ChatText(text, spans, contents, is_rendered=True)

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
            first = bisect.bisect_right(stops, start)
            # A token may hold the end of the prompt and the start of the answer, and is learned,
            # but not the special token of a header, which may take the spaces behind it.
            if first < len(ids) and starts[first] < start and ids[first] in specials:
                first += 1
            # The first token has none before it, and a token is in a single span.
            first = max(first, spans[-1][1] if spans else int(chat.is_rendered))
            if stop is None:
                last = self._find_end(document, chat, number, ids, starts)
            else:
                last = bisect.bisect_left(starts, stop) - 1
            if last < first:
                continue
            spans.append((first, last + 1))
            end = stops[last] if stop is None else min(stop, stops[last])
            n_bytes += len(chat.text[start:end].encode())
            for i in range(first, last + 1):
                if ids[i] in specials:
                    n_bytes -= len(chat.text[max(start, starts[i]) : min(end, stops[i])].encode())
        tokens, targets = np.asarray(ids, np.int64), np.array(spans, np.int64).reshape(-1, 2)
        if not chat.is_rendered:
            tokens = np.concatenate([[self._tokenizer.bos_id], tokens, [self._tokenizer.eos_id]])
            targets += 1
            if chat.has_end and spans and targets[-1, 1] == len(tokens) - 1:
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
        ends = [
            i
            for i in range(bisect.bisect_left(starts, start), bisect.bisect_left(starts, limits[0]))
            if ids[i] in self._end_ids
        ]
        for i in ends:  # a template may write special tokens within an answer
            if chat.text[start : starts[i]].rstrip().endswith(content):
                return i
        if ends:  # the template changes the content, as one that cuts out thinking
            return ends[0]
        raise _mark_error(document, 'no special token ends an answer')


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
    spans = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    if MARKS.sub('', marked) != text:
        raise _mark_error(document, 'the text changes if answers are marked')
    if conversation.first_answer:
        if len(spans) != sum(message['role'] == ANSWER for message in conversation.messages):
            raise _mark_error(document, 'the chat template does not mark each answer exactly once')
        spans = spans[len(spans) - len(conversation.answers) :]
    if not spans:
        raise LeftOut(NO_ANSWER)
    return spans


def _mark_error(document: str, reason: str) -> ValueError:
    return ValueError(
        f"the chat template does not show which text is the model's: {reason}, in the conversation "
        f'{document[:EXCERPT]}. In the template, put {{% generation %}} and {{% endgeneration %}} '
        'around each answer and its end, or remove such conversations.'
    )
