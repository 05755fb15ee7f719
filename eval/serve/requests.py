"""Requests of clients: JSON in the form of OpenAI's interface, checked.

A field that would change the answer and is not served is refused by name, and one that is not known
too; those that change nothing, or stand at the value that changes nothing, are taken.
"""

import itertools
import json
import math
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Len
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
)

from lm.inference.engine import MOST_ALTERNATIVES
from lm.inference.sampling import SEEDS, Sampling
from modules.choices import nearest

MOST_CHOICES = 128  # texts that one request may ask for: its prompts times n
MOST_STOPS, LONGEST_STOP = 16, 1000  # stop strings of a request, characters of each
MOST_SHOWN = 60  # characters of what a client sent that an error repeats
LONGEST_MESSAGE = 1000  # characters of an error

KINDS = {  # of errors, by status; others are 'invalid_request_error'
    401: 'authentication_error',
    429: 'rate_limit_error',
    500: 'server_error',
    503: 'server_error',
    504: 'timeout_error',
}
NEUTRAL = {  # fields that are not served, and what they may be all the same
    'audio': (),
    'best_of': (1,),
    'frequency_penalty': (0,),
    'function_call': ('none', 'auto'),
    'functions': ([],),
    'ignore_eos': (False,),
    'length_penalty': (1,),
    'logit_bias': ({},),
    'min_tokens': (0,),
    'modalities': (['text'],),
    'prediction': (),
    'presence_penalty': (0,),
    'reasoning_effort': ('none',),
    'repetition_penalty': (1,),
    'response_format': ({'type': 'text'},),
    'store': (False,),
    'suffix': ('',),
    'tool_choice': ('none', 'auto'),
    'tools': ([],),
    'typical_p': (1,),
    'use_beam_search': (False,),
    'verbosity': ('medium',),
    'web_search_options': (),
}
IGNORED = {  # they say who asks, or how it is billed and cached
    'metadata',
    'parallel_tool_calls',
    'prompt_cache_key',
    'safety_identifier',
    'service_tier',
    'user',
}
ROLES = ('system', 'developer', 'user', 'assistant')


class Refusal(Exception):
    """An answer that is an error. code: a word that programs compare. retry_after: seconds."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code = status, code
        self.message = message[:LONGEST_MESSAGE].encode(errors='backslashreplace').decode()
        self.kind = KINDS.get(status, 'invalid_request_error')
        self.retry_after = retry_after


def described(words: str, default: Any = None, **bounds: Any) -> Any:
    """Returns a field; an error says in `words` what it may be."""
    return Field(default, description=words, **bounds)


def number(least: float, most: float, default: float) -> Any:
    return described(f'a number from {least:g} to {most:g}', default, ge=least, le=most)


def integer(least: int, most: int, default: int | None = None) -> Any:
    return described(f'a whole number from {least:,} to {most:,}', default, ge=least, le=most)


def flag() -> Any:
    return described('true or false', False)


def check_text(text: str) -> str:
    """Returns a text. Raises ValueError for halves of characters, which have no UTF-8 form."""
    text.encode()
    return text


def check_options(raw: Any) -> Any:
    if isinstance(raw, dict) and not raw.keys() <= {'include_usage', 'include_obfuscation'}:
        raise ValueError('an option of streams that is not known')
    return raw


# One error of a field is told. To make one for each entry of a megabyte takes seconds.
type Text = Annotated[str, AfterValidator(check_text)]
type Ids = Annotated[list[int], FailFast()]
type Some[T] = Annotated[list[T], FailFast(), Len(1)]
type Prompt = Annotated[
    Text | Some[Text] | Some[int] | Some[Ids], Field(union_mode='left_to_right')
]
type Stop = Annotated[Text, StringConstraints(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """Fields that both kinds of request have. A field that is null is one that is left out.

    Each kind has `top`, the likeliest tokens that are reported with each; None: no
    log-probabilities.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: Text | None = described('a string')
    temperature: float = number(0, 100, 1.0)
    top_p: float = described('a number above 0, of at most 1', 1.0, gt=0, le=1)
    top_k: int = integer(-1, 2**31 - 1, 0)
    min_p: float = number(0, 1, 0.0)
    n: int = integer(1, MOST_CHOICES, 1)
    seed: int | None = integer(-SEEDS // 2, SEEDS - 1)
    stop: Stop | Annotated[list[Stop], Len(0, MOST_STOPS)] = described(
        f'a string of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} such', []
    )
    stream: bool = flag()
    stream_options: Annotated[dict[str, bool], BeforeValidator(check_options)] = described(
        '{"include_usage": true or false}', {}
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Returns the request of a JSON object. Raises Refusal for the first field of it whose
        value is not served, and for what is missing or does not fit together.
        """
        given = {
            name: value
            for name, value in raw.items()
            if not (value is None or name in IGNORED or value in NEUTRAL.get(name, ()))
        }
        unknown = next((name for name in given if name not in cls.model_fields), None)
        before = itertools.takewhile(lambda name: name != unknown, given)
        try:
            body = cls.model_validate({name: given[name] for name in before})
        except ValidationError as error:
            wrong = {entry['loc'][0] for entry in error.errors(include_url=False)}
            name = next(name for name in given if name in wrong)
            raise invalid(name, given[name], cls.model_fields[name].description) from None
        if unknown in NEUTRAL:
            raise unsupported(unknown, given[unknown])
        if unknown is not None:
            hint = nearest(unknown, cls.model_fields) if len(unknown) <= MOST_SHOWN else ''
            message = f'there is no field {shown(unknown)} here.{hint}'
            raise Refusal(400, 'unknown_parameter', message)
        body._check()
        if body.seed is None:
            body.seed = secrets.randbits(32)
        return body

    def _check(self) -> None:
        """Raises Refusal where the fields do not fit together."""
        if self.stream_options and not self.stream:
            raise invalid('stream_options', self.stream_options, 'left out without stream')

    def sampling(self, place: int) -> Sampling:
        """Returns how the tokens of a text are drawn; each text of a request has another seed."""
        return Sampling(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + place,
        )


class Completion(Body):
    """The body of /v1/completions: prompts to go on from; with `echo` the answer repeats them."""

    prompt: Prompt | None = described(
        'a string, a list of strings, token ids, or a list of lists of them'
    )
    max_tokens: int = integer(0, 2**31 - 1, 16)
    echo: bool = flag()
    logprobs: int | None = integer(0, MOST_ALTERNATIVES)

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    @property
    def top(self) -> int | None:
        return self.logprobs

    def _check(self) -> None:
        if self.prompt is None:
            raise missing('prompt is missing: text to go on from')
        if self.max_tokens == 0 and not self.echo:
            raise invalid('max_tokens', 0, 'at least 1 without echo')
        super()._check()
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise Refusal(
                400,
                'too_many_choices',
                f'a request may ask for {MOST_CHOICES} texts; got {len(self.prompts)} prompts '
                f'times n={self.n}. Send several requests.',
            )


class Chat(Body):
    """The body of /v1/chat/completions: messages [{'role', 'content'}, ...] to answer.

    max_tokens: None for as many as fit.
    """

    messages: list[Any] | None = described('a list of messages', min_length=1)
    max_tokens: int | None = integer(1, 2**31 - 1)
    max_completion_tokens: int | None = integer(1, 2**31 - 1)
    logprobs: bool = flag()
    top_logprobs: int = integer(0, MOST_ALTERNATIVES, 0)
    echo: ClassVar[bool] = False

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def _check(self) -> None:
        if self.messages is None:
            raise missing('messages is missing: what to answer')
        if self.top_logprobs and not self.logprobs:
            raise invalid('top_logprobs', self.top_logprobs, '0 without logprobs')
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older not in (None, newer):
            words = f'max_completion_tokens, its newer name, which is {newer}'
            raise invalid('max_tokens', older, words)
        self.max_tokens = older if newer is None else newer
        self.messages = [parse_message(raw, i) for i, raw in enumerate(self.messages)]
        super()._check()


def parse_body(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises Refusal for anything else."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = 'it nests too deeply' if isinstance(error, RecursionError) else error
        raise Refusal(400, 'invalid_json', f'the body must be JSON: {reason}') from None
    if not isinstance(raw, dict):
        raise Refusal(400, 'invalid_json', f'the body must be a JSON object; got {shown(raw)}')
    return raw


def parse_message(raw: Any, place: int) -> dict[str, str]:
    """Returns {'role', 'content'} of a message of a chat. Raises Refusal."""
    name = f'messages[{place}]'
    if not isinstance(raw, dict):
        raise invalid(name, raw, '{"role": ..., "content": ...}')
    extra = {key for key, value in raw.items() if value not in (None, [], '')}
    if lacking := sorted(extra - {'role', 'content', 'name', 'type'}):
        raise unsupported(f'{name}.{lacking[0]}', raw[lacking[0]])
    role, content = raw.get('role'), raw.get('content')
    if role not in ROLES:
        raise invalid(f'{name}.role', role, f'one of {", ".join(ROLES)}')
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get('type') != 'text':
                raise unsupported(f'{name}.content', part)
        content = ''.join(part['text'] if is_text(part.get('text')) else '' for part in content)
    if not is_text(content):
        raise invalid(f'{name}.content', content, 'text')
    return {'role': role, 'content': content}


def is_text(value: Any) -> bool:
    """Whether a value is a string, without halves of characters, which have no UTF-8 form."""
    try:
        return isinstance(value, str) and check_text(value) == value
    except UnicodeEncodeError:
        return False


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def missing(message: str) -> Refusal:
    return Refusal(400, 'missing_required_parameter', message)


def invalid(name: str, value: Any, words: str) -> Refusal:
    return Refusal(400, 'invalid_value', f'{name} must be {words}; got {shown(value)}')


def unsupported(name: str, value: Any) -> Refusal:
    message = f'{name} is not served here; got {shown(value)}. Leave it out.'
    return Refusal(400, 'unsupported_parameter', message)


def shown(value: Any) -> str:
    """Returns a value as an error repeats it, cut to MOST_SHOWN characters."""
    if isinstance(value, list | dict):
        return f'a{"n object" if isinstance(value, dict) else " list"} of {len(value)}'
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f'{text[:MOST_SHOWN]}...'
