"""Requests of clients: JSON in the format of OpenAI's interface, validated.

Unknown fields, and unsupported fields that would change the answer, are refused by name. Fields
without effect, or with a neutral value, are accepted.
"""

import itertools
import json
import math
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeGuard, cast

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

from eval.serve.refusal import Refusal
from lm.inference.engine import MAX_ALTERNATIVES
from lm.inference.sampling import SEED_RANGE, Sampling
from modules.choices import suggest_nearest

MAX_CHOICES = 128  # texts that one request may ask for: its prompts times n
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000  # stop strings of a request, characters of each
MAX_QUOTED = 60  # characters of what a client sent that an error repeats

NEUTRAL = {  # {unsupported field: values without effect, which are accepted}
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
IGNORED = {  # fields about the user, billing and caching
    'metadata',
    'parallel_tool_calls',
    'prompt_cache_key',
    'safety_identifier',
    'service_tier',
    'user',
}
ROLES = ('system', 'developer', 'user', 'assistant')


def described_field(description: str, default: Any = None, **bounds: Any) -> Any:
    """Returns a pydantic field; errors use `description` for its valid values."""
    return Field(default, description=description, **bounds)


def number_field(minimum: float, maximum: float, default: float) -> Any:
    """Returns a field for a float.

    Args:
      minimum: smallest valid value.
      maximum: largest valid value.
      default: if the field is absent.
    """
    return described_field(
        f'a number from {minimum:g} to {maximum:g}', default, ge=minimum, le=maximum
    )


def integer_field(minimum: int, maximum: int, default: int | None = None) -> Any:
    """Returns a field for an integer.

    Args:
      minimum: smallest valid value.
      maximum: largest valid value.
      default: if the field is absent.
    """
    return described_field(
        f'a whole number from {minimum:,} to {maximum:,}', default, ge=minimum, le=maximum
    )


def flag_field() -> Any:
    return described_field('true or false', False)


def check_text(text: str) -> str:
    """Returns a text. Raises ValueError for lone surrogates, which have no UTF-8 form."""
    text.encode()
    return text


def check_options(raw: Any) -> Any:
    """Returns stream options. Raises ValueError for an unknown option."""
    if isinstance(raw, dict) and not raw.keys() <= {'include_usage', 'include_obfuscation'}:
        raise ValueError('unknown stream option')
    return raw


# Lists fail at their first error, because an error for each entry of a megabyte takes seconds.
type Text = Annotated[str, AfterValidator(check_text)]
type Ids = Annotated[list[int], FailFast()]
type Some[T] = Annotated[list[T], FailFast(), Len(1)]
type Prompt = Annotated[
    Text | Some[Text] | Some[int] | Some[Ids], Field(union_mode='left_to_right')
]
type Stop = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]


class Body(BaseModel):
    """Fields that both kinds of request have. null means that a field is absent.

    Each kind has `top`: the number of likeliest tokens reported with each token, or None for no
    log-probabilities.
    """

    model_config = ConfigDict(strict=True)

    model: Text | None = described_field('a string')
    temperature: float = number_field(0, 100, 1.0)
    top_p: float = described_field('a number above 0 and at most 1', 1.0, gt=0, le=1)
    top_k: int = integer_field(-1, 2**31 - 1, 0)
    min_p: float = number_field(0, 1, 0.0)
    n: int = integer_field(1, MAX_CHOICES, 1)
    seed: int | None = integer_field(-SEED_RANGE // 2, SEED_RANGE - 1)
    stop: Stop | Annotated[list[Stop], Len(0, MAX_STOPS)] = described_field(
        f'a string of 1 to {MAX_STOP_LENGTH} characters, or a list of at most {MAX_STOPS} strings',
        [],
    )
    stream: bool = flag_field()
    stream_options: Annotated[dict[str, bool], BeforeValidator(check_options)] = described_field(
        '{"include_usage": true or false}', {}
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Returns the request of a JSON object.

        Raises Refusal for the first field with an unsupported value, and for fields that are
        missing or inconsistent.
        """
        fields = {
            name: value
            for name, value in raw.items()
            if not (value is None or name in IGNORED or value in NEUTRAL.get(name, ()))
        }
        unknown = next((name for name in fields if name not in cls.model_fields), None)
        # Fields before the unknown one are validated first, so that the first error is reported.
        known_fields = itertools.takewhile(lambda name: name != unknown, fields)
        try:
            body = cls.model_validate({name: fields[name] for name in known_fields})
        except ValidationError as error:
            invalid_names = {entry['loc'][0] for entry in error.errors(include_url=False)}
            name = next(name for name in fields if name in invalid_names)
            expected = cls.model_fields[name].description or ''
            raise invalid_value(name, fields[name], expected) from None
        if unknown in NEUTRAL:
            raise unsupported_parameter(unknown, fields[unknown])
        if unknown is not None:
            hint = suggest_nearest(unknown, cls.model_fields) if len(unknown) <= MAX_QUOTED else ''
            message = f'unknown field {quote_value(unknown)}.{hint}'
            raise Refusal(400, 'unknown_parameter', message)
        body._check_consistency()
        # Drawn here, so that the texts of a request have consecutive seeds either way.
        if body.seed is None:
            body.seed = secrets.randbits(32)
        return body

    def _check_consistency(self) -> None:
        """Raises Refusal if the fields are inconsistent."""
        if self.stream_options and not self.stream:
            raise invalid_value('stream_options', self.stream_options, 'absent without stream')

    def make_sampling(self, index: int) -> Sampling:
        """Returns the sampling options of a text; each text of a request has another seed."""
        assert self.seed is not None  # `parse` sets it
        return Sampling(
            temperature=self.temperature,
            top_k=max(0, self.top_k),  # no limit is -1 in vLLM and 0 here
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + index,
        )


class CompletionBody(Body):
    """The body of /v1/completions: prompts to continue. With `echo` the answer repeats them."""

    prompt: Prompt | None = described_field(
        'a string, a list of strings, token ids, or a list of lists of them'
    )
    max_tokens: int = integer_field(0, 2**31 - 1, 16)
    echo: bool = flag_field()
    logprobs: int | None = integer_field(0, MAX_ALTERNATIVES)

    @property
    def prompts(self) -> list[str | list[int]]:
        assert self.prompt is not None  # `_check_consistency` refuses it
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(list[str | list[int]], [self.prompt] if is_one else self.prompt)

    @property
    def top(self) -> int | None:
        return self.logprobs

    def _check_consistency(self) -> None:
        if self.prompt is None:
            raise missing_parameter('the field prompt is missing: the text to continue')
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value('max_tokens', 0, 'at least 1 without echo')
        super()._check_consistency()
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise Refusal(
                400,
                'too_many_choices',
                f'a request must ask for at most {MAX_CHOICES} texts; got {len(self.prompts)} '
                f'prompts times n={self.n}. Send several requests.',
            )


class ChatBody(Body):
    """The body of /v1/chat/completions: messages [{'role', 'content'}, ...] to answer.

    max_tokens: None for the most that fit.
    """

    messages: list[Any] | None = described_field('a list of messages', min_length=1)
    max_tokens: int | None = integer_field(1, 2**31 - 1)
    max_completion_tokens: int | None = integer_field(1, 2**31 - 1)
    logprobs: bool = flag_field()
    top_logprobs: int = integer_field(0, MAX_ALTERNATIVES, 0)
    echo: ClassVar[bool] = False

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def _check_consistency(self) -> None:
        if self.messages is None:
            raise missing_parameter('the field messages is missing: the conversation to answer')
        if self.top_logprobs and not self.logprobs:
            raise invalid_value('top_logprobs', self.top_logprobs, '0 without logprobs')
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older not in (None, newer):
            words = f'equal to max_completion_tokens, its newer name ({newer})'
            raise invalid_value('max_tokens', older, words)
        self.max_tokens = older if newer is None else newer
        self.messages = [parse_message(raw, i) for i, raw in enumerate(self.messages)]
        super()._check_consistency()


type AnyBody = CompletionBody | ChatBody


def parse_body(content: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises Refusal for anything else."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = 'it nests too deeply' if isinstance(error, RecursionError) else error
        raise Refusal(400, 'invalid_json', f'the body must be JSON: {reason}') from None
    if not isinstance(raw, dict):
        raise Refusal(
            400, 'invalid_json', f'the body must be a JSON object; got {quote_value(raw)}'
        )
    return raw


def parse_message(raw: Any, index: int) -> dict[str, str]:
    """Returns {'role', 'content'} of a chat message. Raises Refusal."""
    name = f'messages[{index}]'
    if not isinstance(raw, dict):
        raise invalid_value(name, raw, '{"role": ..., "content": ...}')
    used = {key for key, value in raw.items() if value not in (None, [], '')}
    if unsupported := sorted(used - {'role', 'content', 'name', 'type'}):
        raise unsupported_parameter(f'{name}.{unsupported[0]}', raw[unsupported[0]])
    role, content = raw.get('role'), raw.get('content')
    if role not in ROLES:
        raise invalid_value(f'{name}.role', role, f'one of {", ".join(ROLES)}')
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get('type') != 'text':
                raise unsupported_parameter(f'{name}.content', part)
        content = ''.join(part['text'] if is_text(part.get('text')) else '' for part in content)
    if not is_text(content):
        raise invalid_value(f'{name}.content', content, 'text')
    return {'role': role, 'content': content}


def is_text(value: Any) -> TypeGuard[str]:
    """Returns whether a value is a string without lone surrogates, which have no UTF-8 form."""
    try:
        return isinstance(value, str) and check_text(value) == value
    except UnicodeEncodeError:
        return False


def is_token_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int for token in value)


def missing_parameter(message: str) -> Refusal:
    return Refusal(400, 'missing_required_parameter', message)


def invalid_value(name: str, value: Any, expected: str) -> Refusal:
    """Returns the refusal of a field's value.

    Args:
      name: the field.
      value: the value that the client sent.
      expected: describes the valid values.
    """
    return Refusal(400, 'invalid_value', f'{name} must be {expected}; got {quote_value(value)}')


def unsupported_parameter(name: str, value: Any) -> Refusal:
    message = f'{name} is not supported; got {quote_value(value)}. Leave it out.'
    return Refusal(400, 'unsupported_parameter', message)


def quote_value(value: Any) -> str:
    """Returns a value for an error message, cut to MAX_QUOTED characters."""
    if isinstance(value, list | dict):
        return f'a{"n object" if isinstance(value, dict) else " list"} of {len(value)}'
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= MAX_QUOTED else f'{text[:MAX_QUOTED]}...'
