"""Contract: responses have the format that OpenAI's clients read, including errors."""

import asyncio
import json
import threading

import pytest
from starlette.testclient import TestClient

from eval.serve.answers import BACKLOG
from eval.serve.app import CHAT_READERS, READERS
from eval.serve.chat import PlainChat
from tests.eval.serve.fakes import BYTE, Letters, service, wait_until

HELLO = [{'role': 'user', 'content': 'hello'}]


@pytest.fixture(scope='module')
def client():
    with TestClient(service(Letters(slots=2)).app()) as test_client:
        yield test_client


def ask(client, path='/v1/completions', **body):
    return client.post(path, json={'temperature': 0} | body)


def events(response) -> list:
    """Returns the records of a stream, which ends with [DONE]."""
    assert response.headers['content-type'].startswith('text/event-stream')
    lines = response.text.split('\n\n')
    assert lines[-2:] == ['data: [DONE]', ''] and all(
        line.startswith('data: ') for line in lines[:-1]
    )
    return [json.loads(line.removeprefix('data: ')) for line in lines[:-2]]


def test_completion_format(client):
    answer = ask(client, prompt='a', max_tokens=3, model='letters').json()
    assert answer['id'].startswith('cmpl-') and answer['created'] > 1_700_000_000
    del answer['id'], answer['created']
    assert answer == {
        'object': 'text_completion',
        'model': 'letters',
        'system_fingerprint': 'fp_' + 'ab' * 6,
        'choices': [{'index': 0, 'text': 'bcd', 'logprobs': None, 'finish_reason': 'length'}],
        'usage': {'prompt_tokens': 2, 'completion_tokens': 3, 'total_tokens': 5},
    }


def test_prompts_times_n_texts_in_order(client):
    answer = ask(client, prompt=['a', 'x'], n=2, max_tokens=2).json()
    assert [choice['text'] for choice in answer['choices']] == ['bc', 'bc', 'yz', 'yz']
    assert [choice['index'] for choice in answer['choices']] == [0, 1, 2, 3]
    assert answer['usage'] == {'prompt_tokens': 4, 'completion_tokens': 8, 'total_tokens': 12}
    echoed = ask(client, prompt=['a', 'x'], n=2, max_tokens=2, echo=True).json()
    assert [choice['text'] for choice in echoed['choices']] == ['abc', 'abc', 'xyz', 'xyz']


def test_each_text_has_its_own_seed():
    engine = Letters(slots=4)
    with TestClient(service(engine).app()) as client:
        ask(client, prompt=['a', 'b'], n=2, seed=7, temperature=1, top_k=5, min_p=0.1)
    assert sorted(row.sampling.seed for row in engine.admitted) == [7, 8, 9, 10]
    assert {(row.sampling.top_k, row.sampling.min_p) for row in engine.admitted} == {(5, 0.1)}


def test_stop_strings_end_a_text(client):
    (choice,) = ask(client, prompt='a', max_tokens=9, stop='de').json()['choices']
    assert (choice['text'], choice['finish_reason']) == ('bc', 'stop')
    (choice,) = ask(client, prompt='x', max_tokens=9).json()['choices']
    assert (choice['text'], choice['finish_reason']) == ('yz', 'stop')


def test_completion_log_probabilities(client):
    (choice,) = ask(client, prompt='a', max_tokens=2, logprobs=2).json()['choices']
    assert choice['logprobs'] == {
        'tokens': ['b', 'c'],
        'token_logprobs': [-0.5, -0.5],
        'top_logprobs': [{'b': -0.5, 'c': -1.5}, {'c': -0.5, 'd': -1.5}],
        'text_offset': [0, 1],
    }
    (choice,) = ask(client, prompt='a', max_tokens=1, logprobs=0).json()['choices']
    assert choice['logprobs']['top_logprobs'] == [{'b': -0.5}]


def test_echo_repeats_the_prompt_with_its_log_probabilities(client):
    (choice,) = ask(client, prompt='abd', max_tokens=2, logprobs=1, echo=True).json()['choices']
    assert choice['text'] == 'abdef'
    logprobs = choice['logprobs']
    assert logprobs['tokens'] == ['a', 'b', 'd', 'e', 'f'] and logprobs['text_offset'] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert logprobs['token_logprobs'] == [-0.5, -0.5, -2.0, -0.5, -0.5]
    assert logprobs['top_logprobs'][2] == {'c': -0.5, 'd': -2.0}
    (choice,) = ask(client, prompt='abd', max_tokens=2, echo=True).json()['choices']
    assert (choice['text'], choice['logprobs']) == ('abdef', None)
    (choice,) = ask(client, prompt='abd', max_tokens=0, echo=True, logprobs=1).json()['choices']
    assert choice['text'] == 'abd' and choice['logprobs']['tokens'] == ['a', 'b', 'd']


@pytest.mark.parametrize('prompt', ['abd', '', ['abd', 'x'], [97, 98]])
def test_echo_without_tokens_repeats_the_prompt(client, prompt):
    """Whole and streamed; without log-probabilities nothing is computed."""
    body = {'prompt': prompt, 'max_tokens': 0, 'echo': True}
    prompts = prompt if prompt and isinstance(prompt[0], str) and len(prompt) == 2 else [prompt]
    texts = [entry if isinstance(entry, str) else 'ab' for entry in prompts]
    answer = ask(client, **body).json()
    assert [entry['text'] for entry in answer['choices']] == texts
    assert {entry['finish_reason'] for entry in answer['choices']} == {'length'}
    assert {entry['logprobs'] for entry in answer['choices']} == {None}
    assert answer['usage']['completion_tokens'] == 0
    chunks = events(ask(client, **body, stream=True))
    choices = sorted(
        (chunk_choice['index'], chunk_choice['text'])
        for entry in chunks
        for chunk_choice in entry['choices']
    )
    assert choices == [*enumerate(texts)]


@pytest.mark.parametrize('prefix', [[], [BYTE.bos_id]])
def test_lm_eval_requests_can_be_summed(client, prefix):
    """Sums log-probabilities of token ids, from the start of the continuation to the last but one.

    A token is greedy if its log-probability is the largest. Also if EOS follows them.
    """
    contexts, continuations = [[97, 98], [97]], [[99, 120], [122]]
    rows = [
        [*prefix, *context_ids, *continuation_ids]
        for context_ids, continuation_ids in zip(contexts, continuations, strict=True)
    ]
    answer = ask(client, prompt=rows, max_tokens=1, logprobs=1, seed=1234, echo=True).json()
    sums, greedy = [], []
    for choice, context in zip(answer['choices'], contexts, strict=True):
        span = slice(len(prefix) + len(context), -1)
        log_ps = choice['logprobs']['token_logprobs'][span]
        tops = choice['logprobs']['top_logprobs'][span]
        sums.append(sum(log_ps))
        greedy.append([log_p == max(top.values()) for log_p, top in zip(log_ps, tops, strict=True)])
    assert sums == [-2.5, -2.0] and greedy == [[True, False], [False]]
    first = answer['choices'][0]['logprobs']
    assert (first['tokens'][0], first['token_logprobs'][0]) == (
        ('<|bos|>', None) if prefix else ('a', -0.5)
    )
    assert answer['choices'][1]['finish_reason'] == 'stop'


def test_stream_chunks_add_up_to_the_whole(client):
    body = {'prompt': ['a', 'x'], 'max_tokens': 3, 'logprobs': 1, 'echo': True}
    whole = ask(client, **body).json()
    usage = {'include_usage': True}
    *chunks, last = events(ask(client, **body, stream=True, stream_options=usage))
    assert last['choices'] == [] and last['usage'] == whole['usage']
    assert {entry['id'] for entry in chunks} == {last['id']} and all(
        not entry['usage'] for entry in chunks
    )
    for index, expected in enumerate(whole['choices']):
        deltas = [
            choice for entry in chunks for choice in entry['choices'] if choice['index'] == index
        ]
        assert ''.join(entry['text'] for entry in deltas) == expected['text']
        tokens = [
            token for entry in deltas if entry['logprobs'] for token in entry['logprobs']['tokens']
        ]
        assert tokens == expected['logprobs']['tokens']
        offsets = [
            token
            for entry in deltas
            if entry['logprobs']
            for token in entry['logprobs']['text_offset']
        ]
        assert offsets == expected['logprobs']['text_offset']
        assert [entry['finish_reason'] for entry in deltas if entry['finish_reason']] == [
            expected['finish_reason']
        ]
    assert 'usage' not in events(ask(client, prompt='a', stream=True))[0]


def test_chat_format(client):
    body = {'messages': HELLO, 'max_tokens': 2, 'logprobs': True, 'top_logprobs': 1}
    answer = ask(client, '/v1/chat/completions', **body).json()
    assert answer['object'] == 'chat.completion' and answer['id'].startswith('chatcmpl-')
    (choice,) = answer['choices']
    assert choice['message'] == {'role': 'assistant', 'content': 'ab', 'refusal': None}
    assert choice['finish_reason'] == 'length'
    entry = {'token': 'a', 'logprob': -0.5, 'bytes': [97]}
    assert choice['logprobs']['content'][0] == entry | {'top_logprobs': [entry]}
    assert answer['usage']['prompt_tokens'] == len('user: hello\nassistant:') + 1


def test_chat_without_length_may_fill_the_capacity():
    engine = Letters(endless=True)
    with TestClient(service(engine).app()) as client:
        answer = ask(client, '/v1/chat/completions', messages=HELLO).json()
    assert answer['usage']['total_tokens'] == engine.capacity


def test_chat_stream_begins_with_the_role(client):
    body = {'messages': HELLO, 'max_tokens': 3, 'n': 2, 'stream': True}
    chunks = events(ask(client, '/v1/chat/completions', **body))
    assert {entry['object'] for entry in chunks} == {'chat.completion.chunk'}
    for index in (0, 1):
        deltas = [
            choice for entry in chunks for choice in entry['choices'] if choice['index'] == index
        ]
        assert deltas[0]['delta'] == {'role': 'assistant', 'content': ''}
        assert ''.join(entry['delta'].get('content', '') for entry in deltas) == 'abc'
        assert [entry['finish_reason'] for entry in deltas][-2:] == [None, 'length']


def test_models_health_and_tokens(client):
    (model,) = client.get('/v1/models').json()['data']
    assert (model['id'], model['step'], model['digest']) == ('letters', 3, 'ab' * 32)
    assert client.get('/v1/models/letters').json() == model
    assert client.get('/health').json() == {'status': 'ok', 'free_slots': 2, 'waiting': 0}
    tokenizer_info = client.get('/tokenizer_info').json()
    assert (tokenizer_info['bos_token'], tokenizer_info['eos_token']) == (
        '<|bos|>',
        '<|endoftext|>',
    )
    tokens = client.post('/tokenize', json={'prompt': 'é', 'add_special_tokens': False}).json()
    assert tokens['tokens'] == [*'é'.encode()]
    assert client.post('/tokenize', json={'prompt': 'a'}).json()['tokens'] == [BYTE.bos_id, 97]
    eos = client.post('/tokenize', json={'prompt': '<|endoftext|>'}).json()
    assert eos['tokens'] == [BYTE.eos_id]
    assert client.post('/detokenize', json={'tokens': tokens['tokens']}).json() == {'prompt': 'é'}


BAD = [
    (400, 'invalid_json', {'content': b'nonsense'}),
    (400, 'invalid_json', {'content': b''}),
    (400, 'missing_required_parameter', {'json': {}}),
    (400, 'unknown_parameter', {'json': {'prompt': 'a', 'promt': 'b'}}),
    (400, 'unsupported_parameter', {'json': {'prompt': 'a', 'logit_bias': {'1': 2}}}),
    (400, 'context_length_exceeded', {'json': {'prompt': 'a' * 64}}),
    (400, 'context_length_exceeded', {'json': {'prompt': ['a', 'a' * 99]}}),
    (400, 'context_length_exceeded', {'json': {'prompt': [97] * 64}}),
    (400, 'invalid_value', {'json': {'prompt': 'a', 'max_tokens': 65}}),
    (400, 'invalid_value', {'json': {'prompt': [97, 258]}}),
    (400, 'invalid_value', {'json': {'prompt': [-1]}}),
    (404, 'model_not_found', {'json': {'prompt': 'a', 'model': 'gpt-4'}}),
    (413, 'body_too_large', {'content': b' ' * 10_001}),
    (413, 'body_too_large', {'content': (b' ' * 999 for _ in range(12))}),
    (400, 'invalid_value', {'content': b'{}', 'headers': {'content-length': 'ten'}}),
]


@pytest.mark.parametrize(
    'status, code, post_args', BAD, ids=[f'{code}_{i}' for i, (_, code, _) in enumerate(BAD)]
)
def test_errors_are_one_line(status, code, post_args):
    with TestClient(service(Letters(), body_bytes=10_000).app()) as client:
        response = client.post('/v1/completions', **post_args)
    error = response.json()['error']
    assert (response.status_code, error['code']) == (status, code)
    assert error['type'] == 'invalid_request_error' and '\n' not in error['message']


def test_overlong_text_is_not_encoded(client, monkeypatch):
    monkeypatch.setattr(type(BYTE), 'encode', lambda self, text: pytest.fail('it is'))
    long = 'a' * 100_000
    for path, body in (
        ('/v1/completions', {'prompt': long}),
        ('/v1/chat/completions', {'messages': [{'role': 'user', 'content': long}]}),
    ):
        response = ask(client, path, **body)
        assert response.json()['error']['code'] == 'context_length_exceeded'
        assert '100,000 characters' in response.json()['error']['message']


def test_errors_for_missing_routes_have_the_same_format(client):
    for response, status, code in (
        (client.get('/v2'), 404, 'not_found'),
        (client.get('/v1/completions'), 405, 'method_not_allowed'),
        (client.get('/v1/models/other'), 404, 'model_not_found'),
        (client.post('/detokenize', json={'tokens': 'a'}), 400, 'invalid_value'),
    ):
        assert (response.status_code, response.json()['error']['code']) == (status, code)


def test_preflight_allows_no_other_sites():
    """A preflight has no key, and is no error."""
    preflight = {'origin': 'http://other', 'access-control-request-method': 'POST'}
    with TestClient(service(Letters(), key='secret').app()) as client:
        for path, methods in (
            ('/v1/chat/completions', 'OPTIONS, POST'),
            ('/v1/models', 'GET, HEAD, OPTIONS'),
        ):
            response = client.options(path, headers=preflight)
            assert (response.status_code, response.text) == (204, '')
            assert response.headers['allow'] == methods
            assert not any(name.startswith('access-control') for name in response.headers)
        assert client.options('/nothing').status_code == 404
        assert client.delete('/v1/models').headers['allow'] == 'GET, HEAD, OPTIONS'


def test_head_request_has_no_body(client):
    for path, status in (('/health', 200), ('/v1/models', 200), ('/v1/completions', 405)):
        response = client.head(path)
        assert response.status_code == status
    assert client.head('/v1/completions').headers['allow'] == 'OPTIONS, POST'


def test_failing_route_has_the_same_error_format(monkeypatch):
    engine = Letters()
    monkeypatch.setattr(engine, 'check', lambda row: 1 / 0)
    app = service(engine).app()
    with TestClient(app, raise_server_exceptions=False) as client:
        response = ask(client, prompt='a')
        assert client.get('/health').status_code == 200
    error = response.json()['error']
    assert (response.status_code, error['type'], error['code']) == (
        500,
        'server_error',
        'request_failed',
    )


def test_listed_end_tokens_end_a_text(tmp_path):
    """Checks a completion and a chat, also if the token is found by scoring."""
    (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': [0, ord('c')]}))
    with TestClient(service(Letters(), folder=tmp_path).app()) as client:
        (choice,) = ask(client, prompt='a', max_tokens=9).json()['choices']
        assert (choice['text'], choice['finish_reason']) == ('b', 'stop')
        (choice,) = ask(client, '/v1/chat/completions', messages=HELLO).json()['choices']
        assert (choice['message']['content'], choice['finish_reason']) == ('ab', 'stop')
        scored = {'prompt': 'b', 'max_tokens': 1, 'echo': True, 'logprobs': 1}
        (choice,) = ask(client, **scored).json()['choices']
        assert choice['finish_reason'] == 'stop'


def test_prompts_do_not_wait_for_slow_chats(monkeypatch):
    """More chats than there are threads for them."""
    release, threads = threading.Event(), []
    format_prompt = PlainChat.format_prompt

    def slow(self, messages):
        assert release.wait(60)
        return format_prompt(self, messages)

    monkeypatch.setattr(PlainChat, 'format_prompt', slow)
    answers = []
    with TestClient(service(Letters(slots=4)).app()) as client:
        body = {'messages': HELLO, 'max_tokens': 2}

        def chat():
            answers.append(ask(client, '/v1/chat/completions', **body).status_code)

        for _ in range(READERS + CHAT_READERS + 1):
            threads.append(threading.Thread(target=chat))
            threads[-1].start()
        assert ask(client, prompt='a', max_tokens=2).json()['choices'][0]['text'] == 'bc'
        assert not answers
        release.set()
        for thread in threads:
            thread.join(60)
    assert answers == [200] * len(threads)


def test_chat_too_long_after_template_is_not_encoded(monkeypatch):
    monkeypatch.setattr(PlainChat, 'format_prompt', lambda self, messages: 'a' * 100_000)
    monkeypatch.setattr(PlainChat, 'encode', lambda self, text: pytest.fail('it is'))
    with TestClient(service(Letters()).app()) as client:
        response = ask(client, '/v1/chat/completions', messages=HELLO)
    assert response.json()['error']['code'] == 'context_length_exceeded'


def test_all_routes_but_health_need_the_key():
    with TestClient(service(Letters(), key='secret').app()) as client:
        for path in ('/v1/models', '/v1/models/letters', '/tokenizer_info'):
            assert client.get(path).status_code == 401
        wrong_key = {'authorization': 'Bearer secreT'}
        response = client.post('/v1/completions', content=b'nonsense', headers=wrong_key)
        assert response.json()['error']['code'] == 'invalid_api_key'
        assert response.headers['www-authenticate'] == 'Bearer'
        right_key = {'authorization': 'Bearer secret'}
        assert client.get('/v1/models', headers=right_key).status_code == 200
        assert client.get('/health').status_code == 200


def test_full_queue_sends_retry_after():
    engine = Letters(slots=1, step_sec=0.01, endless=True)
    engine.capacity = 10**9
    routes = service(engine, queue=1, timeout_sec=2)
    with TestClient(routes.app()) as client:
        responses = []

        def post():
            responses.append(ask(client, prompt='a', max_tokens=64, stop='never'))

        threads = [threading.Thread(target=post) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    refused = [response for response in responses if response.status_code == 429]
    assert refused and all(int(response.headers['retry-after']) > 0 for response in refused)
    assert {response.json()['error']['code'] for response in refused} == {'queue_full'}
    assert any(response.status_code == 200 for response in responses)


@pytest.mark.parametrize('stream', [False, True])
def test_requests_time_out_waiting_and_generating(stream):
    engine = Letters(slots=1, step_sec=0.02, endless=True)
    with TestClient(service(engine, timeout_sec=0.3).app()) as client:
        body = {'prompt': ['a', 'a'], 'max_tokens': 64, 'stream': stream}
        response = ask(client, **body)
        if stream:  # which has begun
            assert events(response)[-1]['error']['code'] == 'generation_timeout'
        else:
            assert (response.status_code, response.json()['error']['code']) == (
                504,
                'generation_timeout',
            )
        wait_until(lambda: engine.n_free == 1, 'the slot is given back')
        engine.step_sec = 1  # nobody gets a turn behind this one
        first = threading.Thread(target=lambda: ask(client, **body))
        first.start()
        wait_until(lambda: engine.n_free == 0, 'the first one has the slot')
        response = ask(client, **body)
        first.join()
    assert (response.status_code, response.json()['error']['code']) == (504, 'queue_timeout')


def exchange(routes, engine, body, client, on_send=None):
    """Runs one request through the routes, as a server does; `client` plays the client."""

    async def run():
        app, messages, inbox = routes.app(), [], asyncio.Queue()
        inbox.put_nowait({'type': 'http.request', 'body': json.dumps(body).encode()})
        scope = {
            'type': 'http',
            'method': 'POST',
            'path': '/v1/completions',
            'headers': [],
            'query_string': b'',
            'received': inbox,
        }

        async def send(message):
            messages.append(message)
            if on_send:
                await on_send(inbox)

        async with app.router.lifespan_context(app):
            client_task = asyncio.create_task(client(inbox))
            await asyncio.wait_for(app(scope, inbox.get, send), 60)
            await client_task
            while engine.n_free < engine.slots:
                await asyncio.sleep(0.005)
        return messages

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize('stream', [False, True])
def test_leaving_client_frees_its_slots(stream):
    """This holds without streaming too, where the server would only notice at the end."""
    engine = Letters(slots=2, step_sec=0.005, endless=True)
    engine.capacity = 10**9
    routes = service(engine, timeout_sec=1000)

    async def leave(inbox):
        while engine.n_free:
            await asyncio.sleep(0.005)
        inbox.put_nowait({'type': 'http.disconnect'})

    body = {'prompt': ['a'] * 3, 'max_tokens': 64, 'stream': stream, 'stop': 'never'}
    engine.admit = make_unending(engine)
    messages = exchange(routes, engine, body, leave)
    assert not any(not message.get('more_body', True) for message in messages)


def make_unending(engine):
    """Returns an `admit` whose rows never end, whatever their requests ask for."""
    admit = engine.admit

    def admit_unending(request):
        slot = admit(request)
        engine.rows[slot][2] = 10**9
        return slot

    return admit_unending


def test_slow_reader_is_disconnected():
    """The client reads nothing of a stream, while the engine makes more than may wait for it."""
    engine = Letters(slots=1, step_sec=0.001, endless=True)
    engine.admit = make_unending(engine)
    steps_at_cut, steps = [], []

    def abort(scope):
        steps_at_cut.append(len(steps))
        scope['received'].put_nowait({'type': 'http.disconnect'})

    step = engine.step
    engine.step = lambda fail: (steps.append(1), step(fail))[1]
    routes = service(engine, cut=abort)
    unblocked = asyncio.Event()

    async def stall(inbox):
        while not steps_at_cut:
            await asyncio.sleep(0.005)
        unblocked.set()

    async def on_send(inbox):
        del inbox
        await unblocked.wait()

    exchange(routes, engine, {'prompt': 'a', 'max_tokens': 64, 'stream': True}, stall, on_send)
    assert BACKLOG < steps_at_cut[0] < 3 * BACKLOG


def test_slow_body_times_out():
    engine = Letters()
    routes = service(engine, body_sec=0.05)

    async def run():
        messages, app = [], routes.app()
        first = [{'type': 'http.request', 'body': b'{', 'more_body': True}]

        async def receive():
            return first.pop() if first else await asyncio.sleep(60)

        async def send(message):
            messages.append(message)

        scope = {'type': 'http', 'method': 'POST', 'path': '/v1/completions', 'headers': []}
        await asyncio.wait_for(app(scope | {'query_string': b''}, receive, send), 60)
        return messages

    start, body = asyncio.run(run())
    assert start['status'] == 408 and (b'connection', b'close') in start['headers']
    assert json.loads(body['body'])['error']['code'] == 'request_timeout'
