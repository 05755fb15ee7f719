"""The routes of the server: validated requests, JSON responses, and an error for every failure."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from eval.serve.answers import Answer
from eval.serve.chat import PlainChat, TemplateChat
from eval.serve.replies import ChatReply, CompletionReply, Reply, ServedModel, error_body
from eval.serve.replies import special_names as specials
from eval.serve.requests import (
    AnyBody,
    ChatBody,
    CompletionBody,
    Refusal,
    invalid_value,
    is_text,
    is_token_ids,
    parse_body,
    quote_value,
)
from eval.serve.scheduler import Generation, Scheduler, request_failed, server_closed
from lm.data.tokenizers import Tokenizer
from lm.inference.engine import Request as Row

READERS = 2  # threads that turn prompts into tokens
CHAT_READERS = 2  # a separate pool: a template may take seconds, and other prompts must not wait
LONGEST_TOKEN = 256  # characters; a text of more, times the capacity, is refused without encoding


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes:
      timeout_sec: time limit from its arrival to the end of its answer.
      longest_scored: tokens of a prompt that can have log-probabilities.
      body_sec: time limit for the arrival of its body.
      body_bytes: largest size of its body.
    """

    timeout_sec: float
    longest_scored: int
    body_sec: float = 30.0
    body_bytes: int = 4 << 20


class Service:
    """A checkpoint behind the routes."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        chat: PlainChat | TemplateChat,
        scheduler: Scheduler,
        check: Callable[[Row], None],
        limits: Limits,
        key: str | None,
        abort: Callable[[Scope], None],
    ):
        """Args:
        served: the model as clients see it.
        tokenizer: the run's.
        chat: turns messages into tokens.
        scheduler: does the work; started and closed with the routes.
        check: raises ValueError for a row that the engine can never accept.
        limits: bounds of each request.
        key: the key that clients must send; None: no key is needed.
        abort: cuts the connection of a client.
        """
        self._served, self._tokenizer, self._chat = served, tokenizer, chat
        self._scheduler, self._check, self._limits, self._abort = scheduler, check, limits, abort
        self._key = None if key is None else digest_key(key)
        self._answers: set[Answer] = set()
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS)
        self._chat_readers = concurrent.futures.ThreadPoolExecutor(CHAT_READERS)

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        completions = functools.partial(
            self._answer, body_type=CompletionBody, reply_type=CompletionReply
        )
        chats = functools.partial(self._answer, body_type=ChatBody, reply_type=ChatReply)
        handlers: dict[Any, Any] = {
            Refusal: handle_refusal,
            HTTPException: handle_http_error,
            ClientDisconnect: handle_disconnect,
            Exception: handle_crash,
        }
        return Starlette(
            routes=[
                Route('/v1/completions', completions, methods=['POST']),
                Route('/v1/chat/completions', chats, methods=['POST']),
                Route('/v1/models', self.models, methods=['GET']),
                Route('/v1/models/{name:path}', self.model, methods=['GET']),
                Route('/health', self.health, methods=['GET']),
                Route('/tokenizer_info', self.tokenizer_info, methods=['GET']),
                Route('/tokenize', self.tokenize, methods=['POST']),
                Route('/detokenize', self.detokenize, methods=['POST']),
            ],
            exception_handlers=handlers,
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        del app
        self._scheduler.start()
        yield
        self._scheduler.close()
        for pool in (self._readers, self._chat_readers):
            pool.shutdown(wait=False)
        self._chat.close()

    def refuse_active(self) -> None:
        """Refuses the answers that are still running."""
        for answer in {*self._answers}:  # a copy, as answers remove themselves
            answer.put(server_closed())

    async def models(self, request: Request) -> JSONResponse:
        self._authorise(request)
        return JSONResponse({'object': 'list', 'data': [self._served.to_record()]})

    async def model(self, request: Request) -> JSONResponse:
        self._authorise(request)
        self._check_model(request.path_params['name'])
        return JSONResponse(self._served.to_record())

    async def health(self, request: Request) -> JSONResponse:
        del request
        state = self._scheduler.state()
        return JSONResponse(state, 200 if state['status'] == 'ok' else 503)

    async def tokenizer_info(self, request: Request) -> JSONResponse:
        self._authorise(request)
        bos, eos = specials(self._tokenizer)
        kind = type(self._tokenizer).__name__
        return JSONResponse({'tokenizer_class': kind, 'bos_token': bos, 'eos_token': eos})

    async def tokenize(self, request: Request) -> JSONResponse:
        """Answers {prompt, add_special_tokens} with {tokens}.

        A prompt that equals the spelling of a special token becomes that token.
        """
        raw = await self._read_json(request)
        text = raw.get('prompt')
        if not is_text(text):
            raise invalid_value('prompt', text, 'text')
        # Clients learn the spellings from /tokenizer_info, and get their ids here.
        names = dict(zip(specials(self._tokenizer), self._special_ids(), strict=True))
        if text in names:
            ids = [names[text]]
        else:
            encode = self._tokenizer.encode
            ids = await self._run_in_thread(self._readers, self._encode_text, text, encode)
        with_bos = raw.get('add_special_tokens', True) and text not in names
        ids = [self._tokenizer.bos_id, *ids] if with_bos else ids
        longest = self._served.capacity
        return JSONResponse({'tokens': ids, 'count': len(ids), 'max_model_len': longest})

    async def detokenize(self, request: Request) -> JSONResponse:
        ids = (await self._read_json(request)).get('tokens')
        if not is_token_ids(ids):
            raise invalid_value('tokens', ids, 'a list of token ids')
        self._check_ids(ids)
        return JSONResponse({'prompt': self._tokenizer.decode(ids)})

    def _special_ids(self) -> tuple[int, int]:
        return self._tokenizer.bos_id, self._tokenizer.eos_id

    async def _answer(
        self, request: Request, body_type: type[AnyBody], reply_type: type[Reply]
    ) -> Answer:
        body = body_type.parse(await self._read_json(request))
        self._check_model(body.model)
        pool = self._chat_readers if body_type is ChatBody else self._readers
        generation = await self._run_in_thread(pool, self.prepare_generation, body)
        reply = reply_type(self._served, self._tokenizer, body, generation)
        timeout_sec = self._limits.timeout_sec
        return Answer(self._scheduler, reply, timeout_sec, self._answers, self._abort)

    async def _run_in_thread(
        self, pool: concurrent.futures.Executor, function: Callable, *arguments: Any
    ) -> Any:
        """Calls a possibly slow function on text in a thread, while other requests are answered."""
        future = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        try:
            return await asyncio.wait_for(future, self._limits.timeout_sec)
        except TimeoutError:
            # A thread cannot be stopped: it runs to its end, and the result is dropped.
            message = f'the prompt was not processed within {self._limits.timeout_sec:g} seconds'
            raise Refusal(504, 'queue_timeout', message) from None

    def prepare_generation(self, body: AnyBody) -> Generation:
        """Returns the texts that a request asks for, grouped by prompt. Raises Refusal."""
        if isinstance(body, ChatBody):
            prompts, stops = [self._read_chat(body)], (*body.stops, *self._chat.stops)
        else:
            prompts, stops = [self._read_prompt(prompt) for prompt in body.prompts], body.stops
        is_scored = body.echo and body.top is not None
        rows = []
        for _, tokens in prompts:
            self._check_length(body, tokens, is_scored)
            for _ in range(body.n):
                rows.append(self._build_row(body, tokens, len(rows)))
        echoes = [echo_text for echo_text, _ in prompts for _ in range(body.n)]
        return Generation(rows, self._tokenizer, stops, self._chat.end_tokens, is_scored, echoes)

    def _read_chat(self, body: ChatBody) -> tuple[tuple[str, list[int]], list[int]]:
        """Returns the prompt that the messages of a chat make, in the form of `_read_prompt`."""
        assert body.messages is not None  # `ChatBody.parse` refuses it
        self._check_characters(sum(len(message['content']) for message in body.messages))
        text = self._chat.format_prompt(body.messages)
        self._check_characters(len(text))  # again, because a template may add text
        tokens = self._encode_text(text, self._chat.encode)
        return (text, tokens), tokens

    def _read_prompt(self, prompt: str | list[int]) -> tuple[tuple[str, list[int]], list[int]]:
        """Returns ((text, ids), tokens) of a prompt; the tokens always begin with BOS."""
        if isinstance(prompt, str):
            self._check_characters(len(prompt))
            ids, text = self._encode_text(prompt, self._tokenizer.encode), prompt
        else:
            self._check_ids(prompt)
            ids, text = prompt, self._tokenizer.decode(prompt)
        bos = self._tokenizer.bos_id
        return (text, ids), ids if prompt[:1] == [bos] else [bos, *ids]

    def _build_row(self, body: AnyBody, tokens: list[int], index: int) -> Row:
        max_tokens = body.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._served.capacity - len(tokens))
        row = Row(tuple(tokens), max_tokens, body.make_sampling(index), body.top or 0)
        try:
            # The engine has no row of 0 new tokens; such a text is only scored or echoed.
            self._check(dataclasses.replace(row, max_tokens=max(1, max_tokens)))
        except ValueError as error:
            raise Refusal(400, 'invalid_value', str(error)) from None
        return row

    def _encode_text(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        try:
            return encode(text)
        except ValueError as error:
            raise Refusal(400, 'invalid_value', f'prompt: {error}') from None

    def _check_length(self, body: AnyBody, tokens: list[int], is_scored: bool) -> None:
        limit, subject = self._served.capacity, 'a prompt'
        if is_scored and self._limits.longest_scored < limit:
            limit, subject = self._limits.longest_scored, 'a prompt with log-probabilities'
        if len(tokens) > limit:
            raise prompt_too_long(f'{len(tokens):,}', limit, subject)
        if body.max_tokens is not None and body.max_tokens > self._served.capacity:
            expected = f'at most {self._served.capacity:,}, the capacity of this server in tokens'
            raise invalid_value('max_tokens', body.max_tokens, expected)

    def _check_characters(self, count: int) -> None:
        if count > LONGEST_TOKEN * self._served.capacity:
            raise prompt_too_long(f'{count:,} characters', self._served.capacity, 'a prompt')

    def _check_ids(self, ids: list[int]) -> None:
        size = self._tokenizer.vocab_size
        invalid_id = next((token for token in ids if not 0 <= token < size), None)
        if invalid_id is not None:
            raise invalid_value('a token id', invalid_id, f'from 0 to {size - 1:,}')

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served.name):
            raise Refusal(
                404,
                'model_not_found',
                f'no model {quote_value(name)} here; this server has {self._served.name!r}',
            )

    def _authorise(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, key = request.headers.get('authorization', '').partition(' ')
        if kind.lower() != 'bearer' or not hmac.compare_digest(digest_key(key), self._key):
            message = 'the header "Authorization: Bearer KEY" is missing or has a wrong key'
            raise Refusal(401, 'invalid_api_key', message)

    async def _read_json(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object that an authorised client sends. Raises Refusal."""
        self._authorise(request)
        return parse_body(await read_body(request, self._limits))


def prompt_too_long(length: str, limit: int, subject: str) -> Refusal:
    """Returns the refusal of a prompt that does not fit.

    Args:
      length: the length of the prompt, for the message.
      limit: tokens that fit.
      subject: begins the message.
    """
    message = (
        f'{subject} must have at most {limit:,} tokens, including BOS; got {length}. Remove text '
        'from its beginning.'
    )
    return Refusal(400, 'context_length_exceeded', message)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns the body of a request. Raises Refusal if it is too large, or arrives too slowly."""
    too_large = Refusal(
        413, 'body_too_large', f'a request must have at most {limits.body_bytes:,} bytes'
    )
    length = request.headers.get('content-length', '0')
    if not length.isdecimal():
        raise Refusal(
            400, 'invalid_value', f'content-length must be a number; got {quote_value(length)}'
        )
    # The number of digits comes first: int() refuses more than 4,300.
    if len(length) > len(str(limits.body_bytes)) or int(length) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_sec):
            async for part in request.stream():
                body += part
                # Again, because a chunked body has no content-length.
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        message = f'the body did not arrive within {limits.body_sec:g} seconds'
        raise Refusal(408, 'request_timeout', message) from None
    return bytes(body)


def digest_key(key: str) -> bytes:
    """Returns a digest of a key; comparing digests hides the key's length from timing."""
    return hashlib.sha256(key.encode(errors='replace')).digest()


async def handle_refusal(request: Request, refusal: Refusal) -> JSONResponse:
    del request
    headers = {}
    if refusal.retry_after is not None:
        headers['retry-after'] = str(refusal.retry_after)
    if refusal.status == 401:
        headers['www-authenticate'] = 'Bearer'
    if refusal.status == 408:
        headers['connection'] = 'close'  # the rest of the body may still arrive
    return JSONResponse(error_body(refusal), refusal.status, headers)


async def handle_http_error(request: Request, exception: HTTPException) -> Response:
    headers = {name.lower(): value for name, value in (exception.headers or {}).items()}
    if exception.status_code == 405:
        methods = {*headers['allow'].split(', '), 'OPTIONS'}
        headers['allow'] = ', '.join(sorted(methods))
        if request.method == 'OPTIONS':
            # Without further headers, a browser does not let pages of other sites send requests.
            return Response(status_code=204, headers=headers)
    code = {404: 'not_found', 405: 'method_not_allowed'}.get(exception.status_code, 'http_error')
    message = f'{request.method} {request.url.path}: {exception.detail}'
    response = await handle_refusal(request, Refusal(exception.status_code, code, message))
    response.headers.update(headers)
    return response


async def handle_crash(request: Request, error: Exception) -> JSONResponse:
    """Answers a request after its route has failed; uvicorn logs the error."""
    del error
    return await handle_refusal(request, request_failed())


async def handle_disconnect(request: Request, exception: ClientDisconnect) -> Response:
    """Answers a client that has left; nobody reads the response."""
    del request, exception
    return Response(status_code=400)
