"""Contract: valid requests are accepted, and anything else is refused by name."""

import json

import pytest
from pydantic import ValidationError

from eval.serve.requests import (
    IGNORED,
    MAX_CHOICES,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    Refusal,
    parse_body,
    quote_value,
)

HELLO = [{'role': 'user', 'content': 'hello'}]


def catch_refusal(parse, *arguments) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(*arguments)
    return caught.value


def test_defaults_match_openai():
    body = CompletionBody.parse({'prompt': 'a'})
    assert (body.prompts, body.max_tokens, body.n, body.stops) == (['a'], 16, 1, ())
    assert (body.temperature, body.top_p, body.top) == (1.0, 1.0, None)
    assert (body.echo, body.stream, body.stream_options) == (False, False, {})
    assert (
        CompletionBody.parse({'prompt': 'a', 'max_tokens': None, 'logprobs': None}).max_tokens == 16
    )
    assert all(
        CompletionBody.parse({'prompt': 'a', 'stop': empty}).stops == () for empty in (None, [])
    )


def test_request_without_seed_has_a_random_one():
    seeds = {CompletionBody.parse({'prompt': 'a'}).seed for _ in range(8)}
    assert len(seeds) == 8
    body = CompletionBody.parse({'prompt': 'a', 'seed': -3})
    assert [body.make_sampling(index).seed for index in (0, 2)] == [-3, -1]


@pytest.mark.parametrize(
    'prompt, expected',
    [
        ('ab', ['ab']),
        (['ab', ''], ['ab', '']),
        ([1, 2], [[1, 2]]),
        ([[1, 2], []], [[1, 2], []]),
    ],
)
def test_prompts_have_four_forms(prompt, expected):
    assert CompletionBody.parse({'prompt': prompt}).prompts == expected


BAD = [
    ('prompt', [], 'prompt must be'),
    ('prompt', [1, 'a'], 'prompt must be'),
    ('prompt', [True], 'prompt must be'),
    ('prompt', {'a': 1}, 'got an object of 1'),
    ('prompt', 'a\ud800', 'prompt must be'),
    ('temperature', 'hot', 'temperature must be a number from 0 to 100; got "hot"'),
    ('temperature', float('nan'), 'got nan'),
    ('temperature', True, 'temperature must be'),
    ('top_p', 0, 'top_p must be a number above 0'),
    ('min_p', 2, 'min_p must be'),
    ('top_k', 1.5, 'top_k must be'),
    ('n', 0, 'n must be'),
    ('n', 10**30, 'n must be'),
    ('max_tokens', -1, 'max_tokens must be'),
    ('max_tokens', 0, 'at least 1 without echo'),
    ('stop', [''], 'stop must be'),
    ('stop', '', 'stop must be a string of 1 to 1000 characters'),
    ('stop', ['a'] * 17, 'stop must be'),
    ('stop', 'a' * 1001, 'stop must be'),
    ('seed', 2**64, 'seed must be'),
    ('logprobs', True, 'logprobs must be'),
    ('logprobs', 21, 'logprobs must be'),
    ('stream', 1, 'stream must be'),
    ('stream_options', {'include_usage': True}, 'absent without stream'),
    ('stream_options', {'usage': True}, 'stream_options must be'),
    ('stream_options', {'include_usage': 1}, 'stream_options must be'),
    ('model', 'a\ud800', 'model must be a string'),
]


@pytest.mark.parametrize('name, value, message', BAD)
def test_invalid_value_is_refused(name, value, message):
    refusal = catch_refusal(CompletionBody.parse, {'prompt': 'a', name: value})
    assert (refusal.status, refusal.code) == (400, 'invalid_value') and message in refusal.message
    assert '\n' not in refusal.message and refusal.message.encode()


@pytest.mark.parametrize(
    'parse, raw', [(CompletionBody.parse, {'prompt': 'a'}), (ChatBody.parse, {'messages': HELLO})]
)
def test_unsupported_fields_accept_neutral_values(parse, raw):
    """Clients send many. Catches a field that would change the answer and is ignored."""
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            parse(raw | {name: value})
        refusal = catch_refusal(parse, raw | {name: ['another']})
        assert refusal.code == 'unsupported_parameter' and name in refusal.message
    assert parse(raw | dict.fromkeys(IGNORED, 'x')).n == 1
    assert not NEUTRAL.keys() & (
        IGNORED | CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    )


WRONG = {'top_p': 2, 'min_p': 2, 'best_of': 2, 'promt': 'a'}


@pytest.mark.parametrize('first', WRONG)
def test_first_error_is_reported(first):
    later_errors = {name: value for name, value in WRONG.items() if name != first}
    refusal = catch_refusal(
        CompletionBody.parse, {first: WRONG[first], 'prompt': 'a'} | later_errors
    )
    assert first in refusal.message.partition(' must ')[0].partition(' is not ')[0]


def test_unknown_field_suggests_the_nearest():
    refusal = catch_refusal(CompletionBody.parse, {'prompt': 'a', 'temprature': 1})
    assert refusal.code == 'unknown_parameter' and "Did you mean 'temperature'?" in refusal.message
    # Finding the nearest of a long name takes a second for each million characters.
    refusal = catch_refusal(CompletionBody.parse, {'prompt': 'a', 'temperature' * 10: 1})
    assert refusal.code == 'unknown_parameter' and 'Did you mean' not in refusal.message


@pytest.mark.parametrize(
    'body', [b'', b'{', b'[]', b'"a"', b'\xff', b'[' * 100_000, b'{"n": 1' + b'0' * 5000 + b'}']
)
def test_body_must_be_an_object(body):
    refusal = catch_refusal(parse_body, body)
    assert refusal.code == 'invalid_json' and '\n' not in refusal.message


def test_too_many_texts_are_refused():
    refusal = catch_refusal(CompletionBody.parse, {'prompt': ['a'] * 3, 'n': MAX_CHOICES // 2})
    assert refusal.code == 'too_many_choices'


def test_prompt_and_messages_are_needed():
    assert catch_refusal(CompletionBody.parse, {}).code == 'missing_required_parameter'
    assert catch_refusal(ChatBody.parse, {'messages': None}).code == 'missing_required_parameter'


def test_messages_are_texts_with_roles():
    parts = [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]
    raw = [{'role': 'system', 'content': parts, 'name': 'x'}, {'role': 'user', 'content': ''}]
    assert ChatBody.parse({'messages': raw}).messages == [
        {'role': 'system', 'content': 'ab'},
        {'role': 'user', 'content': ''},
    ]


@pytest.mark.parametrize(
    'message, expected',
    [
        ('hello', 'messages[1] must be'),
        ({'role': 'robot', 'content': 'a'}, 'messages[1].role must be one of system'),
        ({'role': ['user'], 'content': 'a'}, 'messages[1].role'),
        ({'role': 'user'}, 'messages[1].content must be text; got null'),
        (
            {'role': 'user', 'content': [{'type': 'image_url'}]},
            'messages[1].content is not supported',
        ),
        ({'role': 'assistant', 'content': 'a', 'tool_calls': [1]}, 'messages[1].tool_calls'),
    ],
)
def test_invalid_messages_are_refused_by_index(message, expected):
    refusal = catch_refusal(ChatBody.parse, {'messages': [*HELLO, message]})
    assert refusal.status == 400 and expected in refusal.message


def test_max_tokens_has_two_names():
    assert ChatBody.parse({'messages': HELLO, 'max_completion_tokens': 7}).max_tokens == 7
    assert ChatBody.parse({'messages': HELLO}).max_tokens is None
    conflict = {'messages': HELLO, 'max_completion_tokens': 7, 'max_tokens': 8}
    assert catch_refusal(ChatBody.parse, conflict).code == 'invalid_value'


def test_top_logprobs_need_logprobs():
    assert ChatBody.parse({'messages': HELLO, 'logprobs': True, 'top_logprobs': 2}).top == 2
    assert ChatBody.parse({'messages': HELLO, 'logprobs': True}).top == 0
    assert (
        catch_refusal(ChatBody.parse, {'messages': HELLO, 'top_logprobs': 2}).code
        == 'invalid_value'
    )


@pytest.mark.parametrize('name', ['a\ud800', 'x' * 10**6, '\n'], ids=['half', 'long', 'line'])
def test_error_values_are_shortened(name):
    refusal = catch_refusal(CompletionBody.parse, {'prompt': 'a', name: 1})
    assert len(json.dumps(refusal.message, ensure_ascii=False).encode()) < 2000
    assert len(quote_value(name)) < 70


MANY = 300_000


@pytest.mark.parametrize(
    'fields',
    [
        {str(i): i for i in range(MANY)},
        {'stream_options': {str(i): i for i in range(MANY)}},
        {'prompt': [True] * MANY},
        {'prompt': [[True] * MANY]},
        {'prompt': [[]] * MANY + ['a']},
        {'stop': [''] * MANY},
    ],
    ids=['names', 'options', 'ids', 'row', 'rows', 'stops'],
)
def test_many_errors_stop_at_the_first(fields):
    """An error for each entry would block all other clients for seconds."""
    body = {'prompt': 'a'} | fields
    assert catch_refusal(CompletionBody.parse, body).status == 400
    try:
        CompletionBody.model_validate(body)
    except ValidationError as error:
        assert error.error_count() < 10
