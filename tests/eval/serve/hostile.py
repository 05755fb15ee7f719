"""Requests of strangers: hand-written bodies, and random combinations of valid and invalid
values.
"""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

COMPLETIONS, CHATS = '/v1/completions', '/v1/chat/completions'
ORDINARY = {'prompt': 'abc', 'max_tokens': 4, 'temperature': 0}
PROMPTS = [
    *(
        'abc',
        '',
        'é\u0000\n',
        'x' * 200,
        '\U0001f600',
        'a\ud800',
        ['a', 'b'],
        ['', ''],
        ['a'] * 200,
    ),
    *([], [[]], [97], [97, 98], [[97], [98, 99]], [[], [97]], [0], [10**6], [-1], [True]),
    *([[97], 'a'], [1.5], [10**30], {'a': 1}, 5, None, True),
]
COMMON = {
    'model': [None, None, 'gpt-4', '', 5],
    'temperature': [0, 1, 0.5, 1e-300, 100, 101, -1, math.nan, math.inf, '0', True, 10**400, None],
    'top_p': [0, 1, 0.5, 1e-300, 1.5, math.nan, '1', None],
    'top_k': [-1, 0, 1, 5, 10**6, 2**31 - 1, 2**31, 1.0, None],
    'min_p': [0, 0.1, 1, 1e-300, 2, -math.inf, None],
    'n': [1, 2, 3, 0, 129, 10**30, '2', True, None],
    'best_of': [1, 2, None],
    'seed': [0, 1, -1, 2**63, 2**64 - 1, 2**64, 1.5, None],
    'stop': [None, 'b', '', [], ['b', 'cd'], [''], ['a'] * 17, 'x' * 1001, 5, {'a': 1}, [None]],
    'stream': [True, False, 1, None],
    'stream_options': [None, {}, {'include_usage': True}, {'include_usage': 1}, {'x': 1}, 5],
    'logit_bias': [{}, {'97': 100}, [], 5, None],
    'presence_penalty': [0, 0.0, 1, math.nan, None],
    'frequency_penalty': [0, 1, 'x', None],
    'repetition_penalty': [1, 1.1],
    'user': ['me', 5, {'a': [1]}, None],
    'metadata': [{'a': 1}, None],
    'response_format': [{'type': 'text'}, {'type': 'json_object'}, []],
    'stop_token_ids': [[], [97]],
}
COMPLETION = COMMON | {
    'prompt': PROMPTS,
    'max_tokens': [0, 1, 2, 8, 16, 17, 10**9, 10**30, -1, 1.0, '4', True, None],
    'echo': [True, False, 'yes', 1, None],
    'logprobs': [0, 1, 5, 20, 21, -1, True, 2.0, None],
    'suffix': ['', 'x', None],
}
USER = {'role': 'user', 'content': 'a'}
MESSAGES = [
    [USER],
    [{'role': 'system', 'content': 'b'}, USER],
    [USER, {'role': 'assistant', 'content': 'b'}, USER],
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}],
    [{'role': 'user', 'content': [{'type': 'text', 'text': None}]}],
    [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}],
    [{'role': 'user', 'content': [[]]}],
    [{'role': 'user', 'content': []}],
    [{'role': 'user', 'content': None}],
    [{'role': 'user', 'content': ''}],
    [{'role': 'user', 'content': 'x' * 10_000}],
    [{'role': 'user', 'content': '\ud800'}],
    [{'role': 'user'}],
    [{'role': ['user'], 'content': 'a'}],
    [{'role': {}, 'content': 'a'}],
    [{'role': 'tool', 'content': 'a', 'tool_call_id': '1'}],
    [{'role': 'assistant', 'content': None, 'tool_calls': [{'id': '1'}]}],
    [{'role': 'developer', 'content': 'a', 'name': 5}],
    [{}],
    *([[]], ['a'], [None], [], {}, 'a', 5, None),
]
CHAT = COMMON | {
    'messages': MESSAGES,
    'max_tokens': [1, 2, 4, 0, 10**9, '4', None],
    'max_completion_tokens': [1, 4, 0, 2**31, None],
    'logprobs': [True, False, 5, None],
    'top_logprobs': [0, 5, 20, 21, None],
    'tools': [[], [{'type': 'function'}], None],
    'tool_choice': ['none', 'auto', 'required'],
}
BODIES = [
    *(b'', b' ', b'null', b'[]', b'"a"', b'5', b'{', b'{}', b'{"prompt": "a"', b'NaN', b'\xff\xfe'),
    *(b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b'\xef\xbb\xbf{"prompt": "a"}'),
    *(b'[' * 100_000, b'{"a":' * 100_000, b'{"prompt": ' + b'[' * 500 + b']' * 500 + b'}'),
    *(b'{"prompt": "a", "seed": ' + b'9' * 5000 + b'}', b'{"prompt": "a", "n": 1e999}'),
    *(b'{"prompt": "a", "prompt": "b", "max_tokens": 2}', '{"prompt": "a"}'.encode('utf-16')),
    *(b'prompt=a&max_tokens=1', b'--x\r\ncontent-disposition: form-data\r\n\r\na\r\n--x--\r\n'),
]
WRITTEN = [
    (COMPLETIONS, {'prompt': 'abc', 'max_tokens': 0, 'echo': True}),
    (COMPLETIONS, {'prompt': ['abc', ''], 'max_tokens': 0, 'echo': True, 'n': 3}),
    (COMPLETIONS, {'prompt': 'abc', 'max_tokens': 0, 'echo': True, 'stream': True}),
    (COMPLETIONS, {'prompt': 'abc', 'max_tokens': 0, 'echo': True, 'logprobs': 0}),
    (COMPLETIONS, {'prompt': '', 'max_tokens': 0, 'echo': True, 'logprobs': 5}),
    (COMPLETIONS, {'prompt': 'abc', 'max_tokens': 0}),
    *((COMPLETIONS, {'prompt': 'abc', name: 1}) for name in ('promt', 'x' * 100_000, '\ud800')),
    (COMPLETIONS, {'prompt': 'x' * 15, 'max_tokens': 16}),
    (COMPLETIONS, {'prompt': 'x' * 16, 'max_tokens': 1, 'echo': True, 'logprobs': 1}),
    (CHATS, {'messages': [USER], 'logprobs': True, 'top_logprobs': 20, 'stream': True}),
]


def bodies(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yields `count` pairs (path, body).

    They are the hand-written ones, each value of each field alone, and then random combinations.
    """
    rng = random.Random(seed)
    base = {
        COMPLETIONS: ({'prompt': 'abc', 'max_tokens': 2}, COMPLETION),
        CHATS: ({'messages': [USER], 'max_tokens': 2}, CHAT),
    }
    records = [*WRITTEN]
    for path, (ordinary, fields) in base.items():
        for name, values in fields.items():
            records += [(path, ordinary | {name: value}) for value in values]
    requests = [(COMPLETIONS, body) for body in BODIES] + [
        (path, encode(record)) for path, record in records
    ]
    assert len(requests) < count
    yield from requests
    for _ in range(count - len(requests)):
        path = rng.choice([COMPLETIONS, COMPLETIONS, CHATS])
        yield path, encode(change_fields(rng, *base[path]))


def change_fields(rng: random.Random, ordinary: dict[str, Any], fields: dict[str, list]) -> dict:
    """Returns an ordinary request with some fields changed, more often to a valid value."""
    names = rng.sample([*fields], rng.randint(1, 6))
    valid = {name: rng.choice(fields[name][:2]) for name in names}
    return (
        ordinary | valid | ({names[0]: rng.choice(fields[names[0]])} if rng.random() < 0.5 else {})
    )


def encode(record: Any) -> bytes:
    return json.dumps(record).encode()
