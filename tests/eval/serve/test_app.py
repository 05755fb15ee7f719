"""Contract: answers have the shapes that OpenAI's clients read, and mistakes are errors to them."""

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
    with TestClient(service(Letters(slots=2)).app()) as found:
        yield found


def ask(client, path='/v1/completions', **body):
    return client.post(path, json={'temperature': 0} | body)


def events(response) -> list:
    """The records of a stream, which ends with [DONE]."""
    assert response.headers['content-type'].startswith('text/event-stream')
    lines = response.text.split('\n\n')
    assert lines[-2:] == ['data: [DONE]', ''] and all(
        one.startswith('data: ') for one in lines[:-1]
    )
    return [json.loads(one.removeprefix('data: ')) for one in lines[:-2]]


def test_a_completion_has_its_shape(client):
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


def test_prompts_times_n_are_texts_in_order(client):
    answer = ask(client, prompt=['a', 'x'], n=2, max_tokens=2).json()
    assert [one['text'] for one in answer['choices']] == ['bc', 'bc', 'yz', 'yz']
    assert [one['index'] for one in answer['choices']] == [0, 1, 2, 3]
    assert answer['usage'] == {'prompt_tokens': 4, 'completion_tokens': 8, 'total_tokens': 12}
    echoed = ask(client, prompt=['a', 'x'], n=2, max_tokens=2, echo=True).json()
    assert [one['text'] for one in echoed['choices']] == ['abc', 'abc', 'xyz', 'xyz']


def test_each_text_of_a_request_has_a_seed_of_its_own():
    engine = Letters(slots=4)
    with TestClient(service(engine).app()) as client:
        ask(client, prompt=['a', 'b'], n=2, seed=7, temperature=1, top_k=5, min_p=0.1)
    assert sorted(row.sampling.seed for row in engine.admitted) == [7, 8, 9, 10]
    assert {(row.sampling.top_k, row.sampling.min_p) for row in engine.admitted} == {(5, 0.1)}


def test_stop_strings_end_a_text_and_are_not_in_it(client):
    (choice,) = ask(client, prompt='a', max_tokens=9, stop='de').json()['choices']
    assert (choice['text'], choice['finish_reason']) == ('bc', 'stop')
    (choice,) = ask(client, prompt='x', max_tokens=9).json()['choices']
    assert (choice['text'], choice['finish_reason']) == ('yz', 'stop')


def test_log_probabilities_of_a_text(client):
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
    found = choice['logprobs']
    assert found['tokens'] == ['a', 'b', 'd', 'e', 'f'] and found['text_offset'] == [0, 1, 2, 3, 4]
    assert found['token_logprobs'] == [-0.5, -0.5, -2.0, -0.5, -0.5]
    assert found['top_logprobs'][2] == {'c': -0.5, 'd': -2.0}
    (choice,) = ask(client, prompt='abd', max_tokens=2, echo=True).json()['choices']
    assert (choice['text'], choice['logprobs']) == ('abdef', None)
    (choice,) = ask(client, prompt='abd', max_tokens=0, echo=True, logprobs=1).json()['choices']
    assert choice['text'] == 'abd' and choice['logprobs']['tokens'] == ['a', 'b', 'd']


@pytest.mark.parametrize('prompt', ['abd', '', ['abd', 'x'], [97, 98]])
def test_echo_of_no_tokens_repeats_the_prompt_alone(client, prompt):
    """Whole and streamed; without log-probabilities nothing is computed."""
    body = {'prompt': prompt, 'max_tokens': 0, 'echo': True}
    prompts = prompt if prompt and isinstance(prompt[0], str) and len(prompt) == 2 else [prompt]
    texts = [one if isinstance(one, str) else 'ab' for one in prompts]
    answer = ask(client, **body).json()
    assert [one['text'] for one in answer['choices']] == texts
    assert {one['finish_reason'] for one in answer['choices']} == {'length'}
    assert {one['logprobs'] for one in answer['choices']} == {None}
    assert answer['usage']['completion_tokens'] == 0
    chunks = events(ask(client, **body, stream=True))
    choices = sorted((c['index'], c['text']) for one in chunks for c in one['choices'])
    assert choices == [*enumerate(texts)]


@pytest.mark.parametrize('prefix', [[], [BYTE.bos_id]])
def test_what_lm_eval_posts_can_be_summed(client, prefix):
    """Token ids, of which the continuation's log-probabilities are those from its place to the last
    but one; a token is greedy where it has the largest. Also where EOS is the one behind them.
    """
    contexts, continuations = [[97, 98], [97]], [[99, 120], [122]]
    rows = [[*prefix, *a, *b] for a, b in zip(contexts, continuations, strict=True)]
    answer = ask(client, prompt=rows, max_tokens=1, logprobs=1, seed=1234, echo=True).json()
    sums, greedy = [], []
    for choice, context in zip(answer['choices'], contexts, strict=True):
        span = slice(len(prefix) + len(context), -1)
        log_ps = choice['logprobs']['token_logprobs'][span]
        tops = choice['logprobs']['top_logprobs'][span]
        sums.append(sum(log_ps))
        greedy.append([one == max(top.values()) for one, top in zip(log_ps, tops, strict=True)])
    assert sums == [-2.5, -2.0] and greedy == [[True, False], [False]]
    first = answer['choices'][0]['logprobs']
    assert (first['tokens'][0], first['token_logprobs'][0]) == (
        ('<|bos|>', None) if prefix else ('a', -0.5)
    )
    assert answer['choices'][1]['finish_reason'] == 'stop'


def test_a_stream_is_the_whole_in_chunks(client):
    body = {'prompt': ['a', 'x'], 'max_tokens': 3, 'logprobs': 1, 'echo': True}
    whole = ask(client, **body).json()
    usage = {'include_usage': True}
    *chunks, last = events(ask(client, **body, stream=True, stream_options=usage))
    assert last['choices'] == [] and last['usage'] == whole['usage']
    assert {one['id'] for one in chunks} == {last['id']} and all(not one['usage'] for one in chunks)
    for place, wanted in enumerate(whole['choices']):
        own = [c for one in chunks for c in one['choices'] if c['index'] == place]
        assert ''.join(one['text'] for one in own) == wanted['text']
        tokens = [t for one in own if one['logprobs'] for t in one['logprobs']['tokens']]
        assert tokens == wanted['logprobs']['tokens']
        offsets = [t for one in own if one['logprobs'] for t in one['logprobs']['text_offset']]
        assert offsets == wanted['logprobs']['text_offset']
        assert [one['finish_reason'] for one in own if one['finish_reason']] == [
            wanted['finish_reason']
        ]
    assert 'usage' not in events(ask(client, prompt='a', stream=True))[0]


def test_a_chat_has_its_shape(client):
    asked = {'messages': HELLO, 'max_tokens': 2, 'logprobs': True, 'top_logprobs': 1}
    answer = ask(client, '/v1/chat/completions', **asked).json()
    assert answer['object'] == 'chat.completion' and answer['id'].startswith('chatcmpl-')
    (choice,) = answer['choices']
    assert choice['message'] == {'role': 'assistant', 'content': 'ab', 'refusal': None}
    assert choice['finish_reason'] == 'length'
    entry = {'token': 'a', 'logprob': -0.5, 'bytes': [97]}
    assert choice['logprobs']['content'][0] == entry | {'top_logprobs': [entry]}
    assert answer['usage']['prompt_tokens'] == len('user: hello\nassistant:') + 1


def test_a_chat_without_a_length_may_fill_the_capacity():
    engine = Letters(endless=True)
    with TestClient(service(engine).app()) as client:
        answer = ask(client, '/v1/chat/completions', messages=HELLO).json()
    assert answer['usage']['total_tokens'] == engine.capacity


def test_a_chat_is_streamed_with_a_role_first(client):
    asked = {'messages': HELLO, 'max_tokens': 3, 'n': 2, 'stream': True}
    chunks = events(ask(client, '/v1/chat/completions', **asked))
    assert {one['object'] for one in chunks} == {'chat.completion.chunk'}
    for place in (0, 1):
        own = [c for one in chunks for c in one['choices'] if c['index'] == place]
        assert own[0]['delta'] == {'role': 'assistant', 'content': ''}
        assert ''.join(one['delta'].get('content', '') for one in own) == 'abc'
        assert [one['finish_reason'] for one in own][-2:] == [None, 'length']


def test_models_health_and_tokens(client):
    (model,) = client.get('/v1/models').json()['data']
    assert (model['id'], model['step'], model['digest']) == ('letters', 3, 'ab' * 32)
    assert client.get('/v1/models/letters').json() == model
    assert client.get('/health').json() == {'status': 'ok', 'free_slots': 2, 'waiting': 0}
    info = client.get('/tokenizer_info').json()
    assert (info['bos_token'], info['eos_token']) == ('<|bos|>', '<|endoftext|>')
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
    'status, code, sent', BAD, ids=[f'{one[1]}_{i}' for i, one in enumerate(BAD)]
)
def test_a_mistake_is_an_error_in_one_line(status, code, sent):
    with TestClient(service(Letters(), body_bytes=10_000).app()) as client:
        response = client.post('/v1/completions', **sent)
    error = response.json()['error']
    assert (response.status_code, error['code']) == (status, code)
    assert error['type'] == 'invalid_request_error' and '\n' not in error['message']


def test_a_text_that_is_far_too_long_is_not_turned_into_tokens(client, monkeypatch):
    monkeypatch.setattr(type(BYTE), 'encode', lambda self, text: pytest.fail('it is'))
    long = 'a' * 100_000
    for path, body in (
        ('/v1/completions', {'prompt': long}),
        ('/v1/chat/completions', {'messages': [{'role': 'user', 'content': long}]}),
    ):
        response = ask(client, path, **body)
        assert response.json()['error']['code'] == 'context_length_exceeded'
        assert '100,000 characters' in response.json()['error']['message']


def test_what_is_not_there_is_said_in_the_same_form(client):
    for response, status, code in (
        (client.get('/v2'), 404, 'not_found'),
        (client.get('/v1/completions'), 405, 'method_not_allowed'),
        (client.get('/v1/models/other'), 404, 'model_not_found'),
        (client.post('/detokenize', json={'tokens': 'a'}), 400, 'invalid_value'),
    ):
        assert (response.status_code, response.json()['error']['code']) == (status, code)


def test_a_browser_that_asks_what_is_allowed_gets_no_leave_for_other_sites():
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


def test_head_is_get_without_a_body(client):
    for path, status in (('/health', 200), ('/v1/models', 200), ('/v1/completions', 405)):
        response = client.head(path)
        assert response.status_code == status
    assert client.head('/v1/completions').headers['allow'] == 'OPTIONS, POST'


def test_a_route_that_fails_is_an_error_in_the_same_form(monkeypatch):
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


def test_tokens_that_the_model_lists_end_a_text_and_are_not_shown(tmp_path):
    """Of a completion and of a chat, also where the token comes of scoring."""
    (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': [0, ord('c')]}))
    with TestClient(service(Letters(), folder=tmp_path).app()) as client:
        (choice,) = ask(client, prompt='a', max_tokens=9).json()['choices']
        assert (choice['text'], choice['finish_reason']) == ('b', 'stop')
        (choice,) = ask(client, '/v1/chat/completions', messages=HELLO).json()['choices']
        assert (choice['message']['content'], choice['finish_reason']) == ('ab', 'stop')
        scored = {'prompt': 'b', 'max_tokens': 1, 'echo': True, 'logprobs': 1}
        (choice,) = ask(client, **scored).json()['choices']
        assert choice['finish_reason'] == 'stop'


def test_prompts_do_not_wait_for_chats_whose_template_takes_its_time(monkeypatch):
    """More chats than there are threads for them."""
    goes_on, threads = threading.Event(), []
    read = PlainChat.format_prompt

    def slow(self, messages):
        assert goes_on.wait(60)
        return read(self, messages)

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
        goes_on.set()
        for thread in threads:
            thread.join(60)
    assert answers == [200] * len(threads)


def test_a_chat_that_its_template_makes_too_long_is_not_turned_into_tokens(monkeypatch):
    monkeypatch.setattr(PlainChat, 'format_prompt', lambda self, messages: 'a' * 100_000)
    monkeypatch.setattr(PlainChat, 'encode', lambda self, text: pytest.fail('it is'))
    with TestClient(service(Letters()).app()) as client:
        response = ask(client, '/v1/chat/completions', messages=HELLO)
    assert response.json()['error']['code'] == 'context_length_exceeded'


def test_a_key_is_asked_for_of_all_but_the_health():
    with TestClient(service(Letters(), key='secret').app()) as client:
        for path in ('/v1/models', '/v1/models/letters', '/tokenizer_info'):
            assert client.get(path).status_code == 401
        wrong = {'authorization': 'Bearer secreT'}
        response = client.post('/v1/completions', content=b'nonsense', headers=wrong)
        assert response.json()['error']['code'] == 'invalid_api_key'
        assert response.headers['www-authenticate'] == 'Bearer'
        right = {'authorization': 'Bearer secret'}
        assert client.get('/v1/models', headers=right).status_code == 200
        assert client.get('/health').status_code == 200


def test_a_full_queue_says_when_to_come_again():
    engine = Letters(slots=1, step_sec=0.01, endless=True)
    engine.capacity = 10**9
    own = service(engine, queue=1, timeout_sec=2)
    with TestClient(own.app()) as client:
        statuses = []

        def post():
            statuses.append(ask(client, prompt='a', max_tokens=64, stop='never'))

        threads = [threading.Thread(target=post) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    refused = [one for one in statuses if one.status_code == 429]
    assert refused and all(int(one.headers['retry-after']) > 0 for one in refused)
    assert {one.json()['error']['code'] for one in refused} == {'queue_full'}
    assert any(one.status_code == 200 for one in statuses)


@pytest.mark.parametrize('stream', [False, True])
def test_time_runs_out_while_waiting_and_while_generating(stream):
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
        wait_until(lambda: engine.free == 1, 'the slot is given back')
        engine.step_sec = 1  # nobody gets a turn behind this one
        first = threading.Thread(target=lambda: ask(client, **body))
        first.start()
        wait_until(lambda: engine.free == 0, 'the first one has the slot')
        response = ask(client, **body)
        first.join()
    assert (response.status_code, response.json()['error']['code']) == (504, 'queue_timeout')


def exchange(own, engine, body, events_of_client, on_send=None):
    """Runs one request through the routes, as a server does: what the client does is played."""

    async def run():
        app, sent, received = own.app(), [], asyncio.Queue()
        received.put_nowait({'type': 'http.request', 'body': json.dumps(body).encode()})
        scope = {
            'type': 'http',
            'method': 'POST',
            'path': '/v1/completions',
            'headers': [],
            'query_string': b'',
            'received': received,
        }

        async def send(message):
            sent.append(message)
            if on_send:
                await on_send(received)

        async with app.router.lifespan_context(app):
            leaving = asyncio.create_task(events_of_client(received))
            await asyncio.wait_for(app(scope, received.get, send), 60)
            await leaving
            while engine.free < engine.slots:
                await asyncio.sleep(0.005)
        return sent

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_leaves_gives_its_slots_back(stream):
    """Also one that is not streamed to, and would only notice at the end."""
    engine = Letters(slots=2, step_sec=0.005, endless=True)
    engine.capacity = 10**9
    own = service(engine, timeout_sec=1000)

    async def leave(received):
        while engine.free:
            await asyncio.sleep(0.005)
        received.put_nowait({'type': 'http.disconnect'})

    body = {'prompt': ['a'] * 3, 'max_tokens': 64, 'stream': stream, 'stop': 'never'}
    engine.admit = unending(engine)
    sent = exchange(own, engine, body, leave)
    assert not any(not one.get('more_body', True) for one in sent)


def unending(engine):
    """Lets rows go on for ever, whatever their requests say."""
    admit = engine.admit

    def admitted(request):
        slot = admit(request)
        engine.rows[slot][2] = 10**9
        return slot

    return admitted


def test_a_reader_that_is_too_slow_is_cut_off_and_stalls_nobody():
    """One that takes nothing of a stream, while the engine makes more than may wait for it."""
    engine = Letters(slots=1, step_sec=0.001, endless=True)
    engine.admit = unending(engine)
    cut, made = [], []

    def abort(scope):
        cut.append(len(made))
        scope['received'].put_nowait({'type': 'http.disconnect'})

    step = engine.step
    engine.step = lambda fail: (made.append(1), step(fail))[1]
    own = service(engine, cut=abort)
    unblocked = asyncio.Event()

    async def stall(received):
        while not cut:
            await asyncio.sleep(0.005)
        unblocked.set()

    async def on_send(received):
        del received
        await unblocked.wait()

    exchange(own, engine, {'prompt': 'a', 'max_tokens': 64, 'stream': True}, stall, on_send)
    assert BACKLOG < cut[0] < 3 * BACKLOG


def test_a_body_that_does_not_come_is_not_waited_for():
    engine = Letters()
    own = service(engine, body_sec=0.05)

    async def run():
        sent, app = [], own.app()
        first = [{'type': 'http.request', 'body': b'{', 'more_body': True}]

        async def receive():
            return first.pop() if first else await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        scope = {'type': 'http', 'method': 'POST', 'path': '/v1/completions', 'headers': []}
        await asyncio.wait_for(app(scope | {'query_string': b''}, receive, send), 60)
        return sent

    start, body = asyncio.run(run())
    assert start['status'] == 408 and (b'connection', b'close') in start['headers']
    assert json.loads(body['body'])['error']['code'] == 'request_timeout'
