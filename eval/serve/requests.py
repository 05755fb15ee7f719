"""Requests of clients: JSON in the form of OpenAI's interface, checked, as dataclasses.

A field that would change the answer and is not served is refused by name, and one that is not known
too; those that change nothing, or stand at the value that changes nothing, are taken.
"""

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

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


class Refusal(Exception):
    """An answer that is an error. code: a word that programs compare. retry_after: seconds."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code = status, code
        self.message = message[:LONGEST_MESSAGE].encode(errors='backslashreplace').decode()
        self.kind = KINDS.get(status, 'invalid_request_error')
        self.retry_after = retry_after


@dataclasses.dataclass(frozen=True)
class Asked:
    """The fields that both kinds of request have.

    top: likeliest tokens that are reported with each; None: no log-probabilities. max_tokens: None
    for as many as fit.
    """

    model: str | None
    max_tokens: int | None
    sampling: Sampling
    n: int
    stops: tuple[str, ...]
    top: int | None
    stream: bool
    include_usage: bool


@dataclasses.dataclass(frozen=True)
class Completion(Asked):
    """Prompts to be continued, as text or as token ids; echo: the answer repeats them."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


@dataclasses.dataclass(frozen=True)
class Chat(Asked):
    """Messages to be answered: ({'role', 'content'}, ...)."""

    messages: tuple[dict[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that is served: what it may be, in words and as a function, and its value when it is
    left out or null.
    """

    words: str
    holds: Callable[[Any], bool]
    default: Any = None


def number(least: float, most: float, default: float) -> Field:
    def holds(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most

    return Field(f'a number from {least:g} to {most:g}', holds, default)


def integer(least: int, most: int, default: int | None = None) -> Field:
    words = f'a whole number from {least:,} to {most:,}'
    return Field(words, lambda value: type(value) is int and least <= value <= most, default)


def flag() -> Field:
    return Field('true or false', lambda value: type(value) is bool, False)


def is_text(value: Any) -> bool:
    """Whether a value is a string, without halves of characters, which have no UTF-8 form."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def is_stop(value: Any) -> bool:
    many = value if isinstance(value, list) else [value]
    return len(many) <= MOST_STOPS and all(
        is_text(one) and 1 <= len(one) <= LONGEST_STOP for one in many
    )


def is_prompt(value: Any) -> bool:
    if not isinstance(value, list):
        return is_text(value)
    return bool(value) and (is_ids(value) or all(map(is_text, value)) or all(map(is_ids, value)))


def is_options(value: Any) -> bool:
    known = {'include_usage', 'include_obfuscation'}
    return isinstance(value, dict) and value.keys() <= known and all(
        type(one) is bool for one in value.values()
    )  # fmt: skip


FIELDS = {
    'model': Field('a string', is_text),
    'temperature': number(0, 100, 1.0),
    'top_p': Field(
        'a number above 0, of at most 1', lambda v: type(v) in (int, float) and 0 < v <= 1, 1.0
    ),
    'top_k': integer(-1, 2**31 - 1, 0),
    'min_p': number(0, 1, 0.0),
    'n': integer(1, MOST_CHOICES, 1),
    'seed': integer(-SEEDS // 2, SEEDS - 1),
    'stop': Field(
        f'a string of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} such',
        is_stop,
        [],
    ),
    'stream': flag(),
    'stream_options': Field('{"include_usage": true or false}', is_options, {}),
}
COMPLETION = FIELDS | {
    'prompt': Field(
        'a string, a list of strings, token ids, or a list of lists of them', is_prompt
    ),
    'max_tokens': integer(0, 2**31 - 1, 16),
    'echo': flag(),
    'logprobs': integer(0, MOST_ALTERNATIVES),
}
CHAT = FIELDS | {
    'messages': Field('a list of messages', lambda value: isinstance(value, list) and bool(value)),
    'max_tokens': integer(1, 2**31 - 1),
    'max_completion_tokens': integer(1, 2**31 - 1),
    'logprobs': flag(),
    'top_logprobs': integer(0, MOST_ALTERNATIVES, 0),
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


def parse_completion(raw: Mapping[str, Any]) -> Completion:
    """Returns what the body of /v1/completions asks. Raises Refusal."""
    given = checked(raw, COMPLETION)
    prompt = given['prompt']
    if prompt is None:
        raise Refusal(400, 'missing_required_parameter', 'prompt is missing: text to go on from')
    many = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    if given['max_tokens'] == 0 and not given['echo']:
        raise invalid('max_tokens', 0, 'at least 1 without echo')
    common = shared(given, given['max_tokens'], given['logprobs'])
    count_choices(len(many), common['n'])
    prompts = tuple(one if isinstance(one, str) else tuple(one) for one in many)
    return Completion(**common, prompts=prompts, echo=given['echo'])


def parse_chat(raw: Mapping[str, Any]) -> Chat:
    """Returns what the body of /v1/chat/completions asks. Raises Refusal."""
    given = checked(raw, CHAT)
    if given['messages'] is None:
        raise Refusal(400, 'missing_required_parameter', 'messages is missing: what to answer')
    if given['top_logprobs'] and not given['logprobs']:
        raise invalid('top_logprobs', given['top_logprobs'], '0 without logprobs')
    most, old = given['max_completion_tokens'], given['max_tokens']
    if most is not None and old is not None and most != old:
        raise invalid('max_tokens', old, f'max_completion_tokens, its newer name, which is {most}')
    top = given['top_logprobs'] if given['logprobs'] else None
    messages = tuple(message(one, i) for i, one in enumerate(given['messages']))
    return Chat(**shared(given, old if most is None else most, top), messages=messages)


def shared(given: Mapping[str, Any], max_tokens: int | None, top: int | None) -> dict[str, Any]:
    """Returns the fields of an `Asked`."""
    stop = given['stop']
    if given['stream_options'] and not given['stream']:
        raise invalid('stream_options', given['stream_options'], 'left out without stream')
    seed = secrets.randbits(32) if given['seed'] is None else given['seed']
    return {
        'model': given['model'],
        'max_tokens': max_tokens,
        'sampling': Sampling(
            temperature=given['temperature'],
            top_k=max(0, given['top_k']),
            top_p=given['top_p'],
            min_p=given['min_p'],
            seed=seed,
        ),
        'n': given['n'],
        'stops': (stop,) if isinstance(stop, str) else tuple(stop),
        'top': top,
        'stream': given['stream'],
        'include_usage': given['stream_options'].get('include_usage', False),
    }


def checked(raw: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Returns the value of each field, its default where it is left out. Raises Refusal for values
    and fields that are not served.
    """
    for name, value in raw.items():
        if value is None or name in IGNORED:
            continue
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise unsupported(name, value)
        elif name not in fields:
            hint = nearest(name, fields) if len(name) <= MOST_SHOWN else ''
            message = f'there is no field {shown(name)} here.{hint}'
            raise Refusal(400, 'unknown_parameter', message)
        elif not fields[name].holds(value):
            raise invalid(name, value, fields[name].words)
    given = {name: value for name, value in raw.items() if value is not None}
    return {name: given.get(name, field.default) for name, field in fields.items()}


def message(raw: Any, place: int) -> dict[str, str]:
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


def count_choices(prompts: int, n: int) -> None:
    """Raises Refusal where a request asks for too many texts."""
    if prompts * n > MOST_CHOICES:
        raise Refusal(
            400,
            'too_many_choices',
            f'a request may ask for {MOST_CHOICES} texts; got {prompts} prompts times n={n}. '
            'Send several requests.',
        )


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
