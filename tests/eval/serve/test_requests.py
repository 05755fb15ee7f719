"""Contract: what a client may ask is taken, and anything else is refused by name."""

import json

import pytest

from eval.serve.requests import (
    CHAT,
    COMPLETION,
    IGNORED,
    MOST_CHOICES,
    NEUTRAL,
    Refusal,
    parse_body,
    parse_chat,
    parse_completion,
    shown,
)

HELLO = [{'role': 'user', 'content': 'hello'}]


def refusal(parse, *arguments) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(*arguments)
    return caught.value


def test_what_is_left_out_has_the_value_that_openai_gives_it():
    asked = parse_completion({'prompt': 'a'})
    assert (asked.prompts, asked.max_tokens, asked.n, asked.stops) == (('a',), 16, 1, ())
    assert (asked.sampling.temperature, asked.sampling.top_p) == (1.0, 1.0)
    assert (asked.top, asked.echo, asked.stream, asked.include_usage) == (None, False, False, False)
    assert parse_completion({'prompt': 'a', 'max_tokens': None, 'logprobs': None}).max_tokens == 16
    assert all(parse_completion({'prompt': 'a', 'stop': none}).stops == () for none in (None, []))


def test_a_request_without_seed_has_one_of_its_own():
    seeds = {parse_completion({'prompt': 'a'}).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert parse_completion({'prompt': 'a', 'seed': -3}).sampling.seed == -3


@pytest.mark.parametrize(
    'prompt, wanted',
    [
        ('ab', ('ab',)),
        (['ab', ''], ('ab', '')),
        ([1, 2], ((1, 2),)),
        ([[1, 2], []], ((1, 2), ())),
    ],
)
def test_prompts_have_four_forms(prompt, wanted):
    assert parse_completion({'prompt': prompt}).prompts == wanted


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
    ('stream_options', {'include_usage': True}, 'left out without stream'),
    ('stream_options', {'usage': True}, 'stream_options must be'),
]


@pytest.mark.parametrize('name, value, words', BAD)
def test_a_bad_value_is_refused_with_what_holds(name, value, words):
    wrong = refusal(parse_completion, {'prompt': 'a', name: value})
    assert (wrong.status, wrong.code) == (400, 'invalid_value') and words in wrong.message
    assert '\n' not in wrong.message and wrong.message.encode()


@pytest.mark.parametrize(
    'parse, raw', [(parse_completion, {'prompt': 'a'}), (parse_chat, {'messages': HELLO})]
)
def test_fields_that_are_not_served_may_stand_at_what_changes_nothing(parse, raw):
    """Clients send many. Catches one that would change the answer and is passed over."""
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            parse(raw | {name: value})
        wrong = refusal(parse, raw | {name: ['another']})
        assert wrong.code == 'unsupported_parameter' and name in wrong.message
    assert parse(raw | dict.fromkeys(IGNORED, 'x')).n == 1
    assert not NEUTRAL.keys() & (IGNORED | COMPLETION.keys() | CHAT.keys())


def test_an_unknown_field_is_refused_with_the_nearest():
    wrong = refusal(parse_completion, {'prompt': 'a', 'temprature': 1})
    assert wrong.code == 'unknown_parameter' and "Did you mean 'temperature'?" in wrong.message
    # To find the nearest of a long name takes a second for each million characters.
    wrong = refusal(parse_completion, {'prompt': 'a', 'temperature' * 10: 1})
    assert wrong.code == 'unknown_parameter' and 'Did you mean' not in wrong.message


@pytest.mark.parametrize(
    'body', [b'', b'{', b'[]', b'"a"', b'\xff', b'[' * 100_000, b'{"n": 1' + b'0' * 5000 + b'}']
)
def test_a_body_that_is_no_object_is_refused(body):
    wrong = refusal(parse_body, body)
    assert wrong.code == 'invalid_json' and '\n' not in wrong.message


def test_texts_of_a_request_are_counted():
    wrong = refusal(parse_completion, {'prompt': ['a'] * 3, 'n': MOST_CHOICES // 2})
    assert wrong.code == 'too_many_choices'


def test_prompt_and_messages_are_needed():
    assert refusal(parse_completion, {}).code == 'missing_required_parameter'
    assert refusal(parse_chat, {'messages': None}).code == 'missing_required_parameter'


def test_messages_are_texts_with_roles():
    parts = [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]
    raw = [{'role': 'system', 'content': parts, 'name': 'x'}, {'role': 'user', 'content': ''}]
    assert parse_chat({'messages': raw}).messages == (
        {'role': 'system', 'content': 'ab'},
        {'role': 'user', 'content': ''},
    )


@pytest.mark.parametrize(
    'message, words',
    [
        ('hello', 'messages[1] must be'),
        ({'role': 'robot', 'content': 'a'}, 'messages[1].role must be one of system'),
        ({'role': ['user'], 'content': 'a'}, 'messages[1].role'),
        ({'role': 'user'}, 'messages[1].content must be text; got null'),
        ({'role': 'user', 'content': [{'type': 'image_url'}]}, 'messages[1].content is not served'),
        ({'role': 'assistant', 'content': 'a', 'tool_calls': [1]}, 'messages[1].tool_calls'),
    ],
)
def test_other_messages_are_refused_by_place(message, words):
    wrong = refusal(parse_chat, {'messages': [*HELLO, message]})
    assert wrong.status == 400 and words in wrong.message


def test_both_names_of_the_most_tokens_are_known():
    assert parse_chat({'messages': HELLO, 'max_completion_tokens': 7}).max_tokens == 7
    assert parse_chat({'messages': HELLO}).max_tokens is None
    both = {'messages': HELLO, 'max_completion_tokens': 7, 'max_tokens': 8}
    assert refusal(parse_chat, both).code == 'invalid_value'


def test_top_logprobs_need_logprobs():
    assert parse_chat({'messages': HELLO, 'logprobs': True, 'top_logprobs': 2}).top == 2
    assert parse_chat({'messages': HELLO, 'logprobs': True}).top == 0
    assert refusal(parse_chat, {'messages': HELLO, 'top_logprobs': 2}).code == 'invalid_value'


@pytest.mark.parametrize('name', ['a\ud800', 'x' * 10**6, '\n'], ids=['half', 'long', 'line'])
def test_errors_have_a_short_form_whatever_was_sent(name):
    wrong = refusal(parse_completion, {'prompt': 'a', name: 1})
    assert len(json.dumps(wrong.message, ensure_ascii=False).encode()) < 2000
    assert len(shown(name)) < 70
