"""Answers in the shapes of OpenAI's interface: whole ones, chunks of a stream, errors."""

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from eval.serve.requests import Body, Refusal
from eval.serve.scheduler import Chunk, Generation
from lm.data.tokenizers import BYTES, ByteTokenizer, Tokenizer
from lm.inference.engine import Token
from lm.inference.text import UNFINISHED

LEAST_LOG_P = -9999.0  # in place of minus infinity, which JSON does not have


@dataclasses.dataclass(frozen=True)
class Served:
    """The model as clients see it. digest: of its weights. created: Unix time of its checkpoint.
    capacity: tokens of a prompt with its continuation.
    """

    name: str
    step: int
    digest: str
    created: int
    capacity: int

    @property
    def fingerprint(self) -> str:
        return f'fp_{self.digest[:12]}'

    def listing(self) -> dict[str, Any]:
        """Returns the model as /v1/models lists it."""
        return {
            'id': self.name,
            'object': 'model',
            'created': self.created,
            'owned_by': 'evenkeel',
            'step': self.step,
            'digest': self.digest,
            'max_model_len': self.capacity,
        }


class Reply:
    """Makes the answer to one request from the chunks of its texts."""

    prefix, whole_object, chunk_object = '', '', ''

    def __init__(self, served: Served, tokenizer: Tokenizer, body: Body, generation: Generation):
        self.body, self.generation = body, generation
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._offsets = [0] * len(generation.rows)  # characters of the tokens so far
        self._made = 0
        self._head = {
            'id': f'{self.prefix}-{secrets.token_hex(12)}',
            'object': self.whole_object,
            'created': int(time.time()),
            'model': served.name,
            'system_fingerprint': served.fingerprint,
        }

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        choices = [
            self.choice(joined([chunk for chunk in chunks if chunk.place == place]))
            for place in range(len(self.generation.rows))
        ]
        return self._head | {'choices': choices, 'usage': self.usage()}

    def records(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yields the records of a stream that a chunk makes."""
        choice = self.delta(chunk)
        if chunk.text or chunk.finish or choice.get('logprobs') or choice.get('text'):
            yield self._record([choice])

    def last_records(self) -> Iterator[dict[str, Any]]:
        """Yields the record behind the texts, if the client has asked for it."""
        if self.body.stream_options.get('include_usage'):
            yield self._record([]) | {'usage': self.usage()}

    def _record(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {'usage': None} if self.body.stream_options.get('include_usage') else {}
        return self._head | {'object': self.chunk_object, 'choices': choices} | more

    def usage(self) -> dict[str, int]:
        """Returns the tokens of the prompts, each counted once, and those made so far."""
        read = sum(len(row.tokens) for row in self.generation.rows[:: self.body.n])
        return {
            'prompt_tokens': read,
            'completion_tokens': self._made,
            'total_tokens': read + self._made,
        }

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        """Returns a text of an answer that is not streamed."""
        raise NotImplementedError

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        """Returns what a record of a stream adds to a text."""
        raise NotImplementedError

    def spelling(self, token: int) -> str:
        """Returns a token as a string: what it is decoded as, or the name of what is no text."""
        if token in (self._tokenizer.bos_id, self._tokenizer.eos_id):
            return special_names(self._tokenizer)[token == self._tokenizer.eos_id]
        if isinstance(self._tokenizer, ByteTokenizer) and 128 <= token < BYTES:
            return f'bytes:\\x{token:02x}'
        return self._tokenizer.decode([token])

    def ends(self, chunk: Chunk) -> str | None:
        self._made += len(chunk.tokens)
        return chunk.finish or None


class CompletionReply(Reply):
    """Answers of /v1/completions."""

    prefix, whole_object, chunk_object = 'cmpl', 'text_completion', 'text_completion'

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        is_first = chunk.place not in self._begun
        self._begun.add(chunk.place)
        text, entries = chunk.text, [*chunk.tokens]
        if self.body.echo and is_first:
            prompt, ids = self.generation.echoes[chunk.place]
            text = prompt + text
            scored = chunk.prompt or []
            # A prompt that itself begins with BOS shows it, and nothing was there to predict it.
            unscored = [Token(one, math.nan, ()) for one in ids[: len(ids) - len(scored)]]
            entries = [*unscored, *scored, *entries] if chunk.prompt is not None else entries
        return {
            'index': chunk.place,
            'text': text,
            'logprobs': None if self.body.top is None else self._logprobs(chunk.place, entries),
            'finish_reason': self.ends(chunk),
        }

    delta = choice

    def _logprobs(self, place: int, entries: Sequence[Token]) -> dict[str, Any] | None:
        if not entries:
            return None
        names = [self.spelling(token.id) for token in entries]
        offsets = []
        for name in names:
            offsets.append(self._offsets[place])
            self._offsets[place] += len(name)
        return {
            'tokens': names,
            'token_logprobs': [None if math.isnan(t.log_p) else finite(t.log_p) for t in entries],
            'top_logprobs': [None if math.isnan(t.log_p) else self._top(t) for t in entries],
            'text_offset': offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Returns the likeliest tokens by their spelling, of equal ones the likelier; and the token
        itself.
        """
        found: dict[str, float] = {}
        for one, log_p in (*token.top, (token.id, token.log_p)):
            found.setdefault(self.spelling(one), finite(log_p))
        return found


class ChatReply(Reply):
    """Answers of /v1/chat/completions."""

    prefix, whole_object = 'chatcmpl', 'chat.completion'
    chunk_object = 'chat.completion.chunk'

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        message = {'role': 'assistant', 'content': chunk.text, 'refusal': None}
        return {
            'index': chunk.place,
            'message': message,
            'logprobs': self._logprobs(chunk),
            'finish_reason': self.ends(chunk),
        }

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        return {
            'index': chunk.place,
            'delta': {'content': chunk.text} if chunk.text else {},
            'logprobs': self._logprobs(chunk),
            'finish_reason': self.ends(chunk),
        }

    def records(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if chunk.place not in self._begun:
            self._begun.add(chunk.place)
            delta = {'role': 'assistant', 'content': ''}
            first = {'index': chunk.place, 'delta': delta, 'logprobs': None, 'finish_reason': None}
            yield self._record([first])
        yield from super().records(chunk)

    def _logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        if self.body.top is None or not chunk.tokens:
            return None
        content = [
            self._entry(token.id, token.log_p)
            | {'top_logprobs': [self._entry(*one) for one in token.top]}
            for token in chunk.tokens
        ]
        return {'content': content, 'refusal': None}

    def _entry(self, token: int, log_p: float) -> dict[str, Any]:
        name = self.spelling(token)
        known = None if UNFINISHED in name else [*name.encode()]
        if isinstance(self._tokenizer, ByteTokenizer) and token < BYTES:
            known = [token]
        return {'token': name, 'logprob': finite(log_p), 'bytes': known}


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Returns the chunks of one text as one."""
    prompts = [chunk.prompt for chunk in chunks if chunk.prompt is not None]
    return Chunk(
        chunks[0].place,
        ''.join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.tokens],
        chunks[-1].finish,
        prompts[0] if prompts else None,
    )


def special_names(tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns how BOS and EOS are spelled to clients; text is never read as one of them."""
    if tokenizer.bos_id == tokenizer.eos_id:
        return '<|endoftext|>', '<|endoftext|>'
    return '<|bos|>', '<|endoftext|>'


def finite(log_p: float) -> float:
    return max(log_p, LEAST_LOG_P) if math.isfinite(log_p) else LEAST_LOG_P


def error(refusal: Refusal) -> dict[str, Any]:
    """Returns the body of an error."""
    return {
        'error': {
            'message': refusal.message,
            'type': refusal.kind,
            'param': None,
            'code': refusal.code,
        }
    }


def event(record: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event of a record, or of a word."""
    text = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
    return f'data: {text}\n\n'.encode()
