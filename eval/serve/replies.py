"""Answers in the format of OpenAI's interface: whole responses, stream chunks, errors."""

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from eval.serve.requests import AnyBody, Refusal
from eval.serve.scheduler import Chunk, Generation
from lm.data.tokenizers import BYTES, ByteTokenizer, Tokenizer
from lm.inference.engine import Token
from lm.inference.text import REPLACEMENT

MIN_LOG_P = -9999.0  # replaces minus infinity, which JSON lacks, as in OpenAI's reference


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
      name: the name of its workdir.
      step: the step of its checkpoint.
      digest: a hash of its weights.
      created: Unix time of its checkpoint.
      capacity: tokens of a prompt with its completion.
    """

    name: str
    step: int
    digest: str
    created: int
    capacity: int

    @property
    def fingerprint(self) -> str:
        return f'fp_{self.digest[:12]}'

    def to_record(self) -> dict[str, Any]:
        """Returns the entry of the model in /v1/models."""
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
    """Builds the response to a request from the chunks of its texts."""

    prefix, whole_object, chunk_object = '', '', ''

    def __init__(
        self, served: ServedModel, tokenizer: Tokenizer, body: AnyBody, generation: Generation
    ):
        self.body, self.generation = body, generation
        self._tokenizer = tokenizer
        self._started: set[int] = set()
        self._offsets = [0] * len(generation.rows)  # characters of the tokens so far
        self._n_sent = 0  # tokens
        self._head = {
            'id': f'{self.prefix}-{secrets.token_hex(12)}',
            'object': self.whole_object,
            'created': int(time.time()),
            'model': served.name,
            'system_fingerprint': served.fingerprint,
        }

    def build_response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Returns the response without streaming."""
        self._n_sent = sum(len(chunk.tokens) for chunk in chunks)
        choices = [
            self.choice(join_chunks([chunk for chunk in chunks if chunk.text_index == place]))
            for place in range(len(self.generation.rows))
        ]
        return self._head | {'choices': choices, 'usage': self.usage()}

    def stream_records(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yields the stream records of a chunk."""
        self._n_sent += len(chunk.tokens)
        choice = self.delta(chunk)
        if chunk.text or chunk.finish or choice.get('logprobs') or choice.get('text'):
            yield self._build_record([choice])

    def final_records(self) -> Iterator[dict[str, Any]]:
        """Yields the record after the texts, if the client asked for it."""
        if self.body.stream_options.get('include_usage'):
            yield self._build_record([]) | {'usage': self.usage()}

    def _build_record(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {'usage': None} if self.body.stream_options.get('include_usage') else {}
        return self._head | {'object': self.chunk_object, 'choices': choices} | usage

    def usage(self) -> dict[str, int]:
        """Returns the tokens of the prompts, each counted once, and the tokens sent so far."""
        n_prompt_tokens = sum(len(row.tokens) for row in self.generation.rows[:: self.body.n])
        return {
            'prompt_tokens': n_prompt_tokens,
            'completion_tokens': self._n_sent,
            'total_tokens': n_prompt_tokens + self._n_sent,
        }

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        """Returns a text of a response without streaming."""
        raise NotImplementedError

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        """Returns the addition to a text in a stream record."""
        raise NotImplementedError

    def spell_token(self, token: int) -> str:
        """Returns a token as a string: its text, or a name for a token without text."""
        if token in (self._tokenizer.bos_id, self._tokenizer.eos_id):
            return special_names(self._tokenizer)[token == self._tokenizer.eos_id]
        if isinstance(self._tokenizer, ByteTokenizer) and 128 <= token < BYTES:
            return f'bytes:\\x{token:02x}'
        return self._tokenizer.decode([token])


class CompletionReply(Reply):
    """Responses of /v1/completions."""

    prefix, whole_object, chunk_object = 'cmpl', 'text_completion', 'text_completion'

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        is_first = chunk.text_index not in self._started
        self._started.add(chunk.text_index)
        text, entries = chunk.text, [*chunk.tokens]
        if self.body.echo and is_first:
            prompt, ids = self.generation.echoes[chunk.text_index]
            text = prompt + text
            scored = chunk.prompt or []
            # If the client's prompt begins with BOS, BOS is echoed too, without a score.
            unscored = [Token(token, math.nan, ()) for token in ids[: len(ids) - len(scored)]]
            entries = [*unscored, *scored, *entries] if chunk.prompt is not None else entries
        return {
            'index': chunk.text_index,
            'text': text,
            'logprobs': None
            if self.body.top is None
            else self._build_logprobs(chunk.text_index, entries),
            'finish_reason': chunk.finish or None,
        }

    # A chunk of a stream has the same form as a whole choice.
    delta = choice

    def _build_logprobs(self, index: int, entries: Sequence[Token]) -> dict[str, Any] | None:
        if not entries:
            return None
        names = [self.spell_token(token.id) for token in entries]
        offsets = []
        for name in names:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(name)
        return {
            'tokens': names,
            'token_logprobs': [
                None if math.isnan(t.log_p) else clip_log_p(t.log_p) for t in entries
            ],
            'top_logprobs': [
                None if math.isnan(t.log_p) else self._top_logprobs(t) for t in entries
            ],
            'text_offset': offsets,
        }

    def _top_logprobs(self, token: Token) -> dict[str, float]:
        """Returns {spelling: log-probability} of the likeliest tokens and of the token itself.

        If several tokens have the same spelling, the likeliest counts.
        """
        logprobs: dict[str, float] = {}
        for token_id, log_p in (*token.top, (token.id, token.log_p)):
            logprobs.setdefault(self.spell_token(token_id), clip_log_p(log_p))
        return logprobs


class ChatReply(Reply):
    """Responses of /v1/chat/completions."""

    prefix, whole_object = 'chatcmpl', 'chat.completion'
    chunk_object = 'chat.completion.chunk'

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        message = {'role': 'assistant', 'content': chunk.text, 'refusal': None}
        return {
            'index': chunk.text_index,
            'message': message,
            'logprobs': self._build_logprobs(chunk),
            'finish_reason': chunk.finish or None,
        }

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        return {
            'index': chunk.text_index,
            'delta': {'content': chunk.text} if chunk.text else {},
            'logprobs': self._build_logprobs(chunk),
            'finish_reason': chunk.finish or None,
        }

    def stream_records(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if chunk.text_index not in self._started:
            self._started.add(chunk.text_index)
            delta = {'role': 'assistant', 'content': ''}
            first = {
                'index': chunk.text_index,
                'delta': delta,
                'logprobs': None,
                'finish_reason': None,
            }
            yield self._build_record([first])
        yield from super().stream_records(chunk)

    def _build_logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        if self.body.top is None or not chunk.tokens:
            return None
        content = [
            self._build_entry(token.id, token.log_p)
            | {'top_logprobs': [self._build_entry(*alternative) for alternative in token.top]}
            for token in chunk.tokens
        ]
        return {'content': content, 'refusal': None}

    def _build_entry(self, token: int, log_p: float) -> dict[str, Any]:
        name = self.spell_token(token)
        # A token with a part of a character decodes to REPLACEMENT, which hides its bytes.
        utf8 = None if REPLACEMENT in name else [*name.encode()]
        if isinstance(self._tokenizer, ByteTokenizer) and token < BYTES:
            utf8 = [token]
        return {'token': name, 'logprob': clip_log_p(log_p), 'bytes': utf8}


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Joins all chunks of a text."""
    prompts = [chunk.prompt for chunk in chunks if chunk.prompt is not None]
    return Chunk(
        chunks[0].text_index,
        ''.join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.tokens],
        chunks[-1].finish,
        prompts[0] if prompts else None,
    )


def special_names(tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns the spelling of BOS and EOS for clients; text is never encoded as either."""
    if tokenizer.bos_id == tokenizer.eos_id:
        return '<|endoftext|>', '<|endoftext|>'
    return '<|bos|>', '<|endoftext|>'


def clip_log_p(log_p: float) -> float:
    """Returns a log-probability that JSON can represent."""
    return max(log_p, MIN_LOG_P) if math.isfinite(log_p) else MIN_LOG_P


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Returns the body of an error response."""
    return {
        'error': {
            'message': refusal.message,
            'type': refusal.kind,
            'param': None,
            'code': refusal.code,
        }
    }


def format_event(record: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event with a record, or with a word."""
    text = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
    return f'data: {text}\n\n'.encode()
