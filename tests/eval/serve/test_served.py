"""Equivalence: what is served of a checkpoint is what the same checkpoint gives in the process."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from starlette.testclient import TestClient

from eval.generate import generate
from eval.load import load
from eval.serve import server as program
from eval.serve.connections import bind_socket
from lm.inference.scoring import Scorer
from tests.commands import PATIENCE_SEC, ROOT
from tests.eval.programs import run_module
from tests.eval.serve.fakes import serving

PROMPTS = ['norm lay', 'é', '']


@pytest.fixture(scope='module')
def checkpoint(whole):
    return load(whole)


@pytest.fixture(scope='module')
def client(checkpoint, whole):
    with TestClient(service(checkpoint, whole).app()) as found:
        yield found


def service(checkpoint, whole):
    """The routes over the checkpoint, which can be served once."""
    return program.Server(str(whole), checkpoint, 3, None, 8, PATIENCE_SEC, None).service


@pytest.mark.full
def test_a_served_text_is_that_of_generate(client, checkpoint):
    """With the same seed, and the same when it is streamed. Catches other random numbers, another
    first token, a space lost between prompt and text.
    """
    asked = {'prompt': PROMPTS, 'max_tokens': 6, 'temperature': 0.9, 'top_k': 40, 'seed': 5}
    answer = client.post('/v1/completions', json=asked).json()
    served = [p + one['text'] for p, one in zip(PROMPTS, answer['choices'], strict=True)]
    assert served == generate(checkpoint, PROMPTS, 6, temperature=0.9, top_k=40, seed=5)
    echoed = client.post('/v1/completions', json=asked | {'echo': True}).json()
    assert [one['text'] for one in echoed['choices']] == served
    streamed = client.post('/v1/completions', json=asked | {'stream': True}).text
    chunks = [json.loads(one[6:]) for one in streamed.split('\n\n')[:-2]]
    texts = [''] * len(PROMPTS)
    for choice in (choice for chunk in chunks for choice in chunk['choices']):
        texts[choice['index']] += choice['text']
    assert [p + text for p, text in zip(PROMPTS, texts, strict=True)] == served


def test_scores_of_prompts_are_those_of_evaluation(client, checkpoint):
    """Asked for like lm-eval does: each number, and whether the token is the likeliest."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, length).tolist() for length in (15, 9, 2)]
    bos = checkpoint.tokenizer.bos_id
    wanted = Scorer(checkpoint)([[bos, *row] for row in rows])
    asked = {'prompt': rows, 'max_tokens': 1, 'temperature': 0, 'logprobs': 1, 'echo': True}
    answer = client.post('/v1/completions', json=asked).json()
    for choice, scores in zip(answer['choices'], wanted, strict=True):
        found = choice['logprobs']
        np.testing.assert_allclose(found['token_logprobs'][:-1], scores['log_p'], rtol=1e-5)
        tops = [max(top.values()) for top in found['top_logprobs']]
        greedy = [a == b for a, b in zip(found['token_logprobs'], tops, strict=True)]
        assert greedy[:-1] == scores['is_likeliest'].tolist() and greedy[-1]


def test_the_token_behind_a_scored_prompt_is_the_engines(client):
    """Scoring finds it without a slot."""
    asked = {'prompt': PROMPTS, 'max_tokens': 1, 'temperature': 0, 'logprobs': 3}
    by_engine = client.post('/v1/completions', json=asked).json()['choices']
    by_score = client.post('/v1/completions', json=asked | {'echo': True}).json()['choices']
    for one, other in zip(by_engine, by_score, strict=True):
        assert one['logprobs']['tokens'] == other['logprobs']['tokens'][-1:]
        np.testing.assert_allclose(
            one['logprobs']['token_logprobs'], other['logprobs']['token_logprobs'][-1:], rtol=1e-5
        )


def test_the_model_has_the_name_of_its_workdir_and_the_digest_of_its_weights(client, whole):
    (model,) = client.get('/v1/models').json()['data']
    assert (model['id'], model['step'], model['max_model_len']) == (whole.name, 12, 16)
    assert len(model['digest']) == 64
    assert program.model_name(f'{whole}/checkpoints/12/', 12) == whole.name
    assert program.model_name('s3://bucket/runs/mine', 12) == 'mine'


@pytest.mark.parametrize('key', ['', 'a b', 'é'])
def test_a_key_that_no_header_holds_is_refused(key, monkeypatch):
    monkeypatch.setenv(program.KEY_VARIABLE, key)
    for given in (key, 'env'):
        with pytest.raises(ValueError, match='must be letters, digits or signs of ASCII'):
            program.read_key(given)
    monkeypatch.setenv(program.KEY_VARIABLE, 'right')
    assert (program.read_key('env'), program.read_key('k'), program.read_key(None)) == (
        'right',
        'k',
        None,
    )


@pytest.mark.full
def test_an_engine_that_fails_ends_the_server_with_the_reason(checkpoint, whole, capsys):
    """Its client is told so; the reason itself is for who runs the server."""
    server = program.Server(str(whole), checkpoint, 3, None, 8, PATIENCE_SEC, None)
    lost, raised = RuntimeError('no memory'), []
    server.service._scheduler._engine._decode_parts = lambda *rest: raise_(lost)

    def run():
        try:
            server.run(sock, lambda: None)
        except RuntimeError as error:
            raised.append(error)

    with bind_socket('127.0.0.1', 0) as sock:
        sock.listen()
        thread = threading.Thread(target=run)
        thread.start()
        response = ask(sock.getsockname()[1], '/v1/completions', {'prompt': 'a', 'max_tokens': 2})
        answer = json.load(response)
        thread.join(PATIENCE_SEC)
    assert (response.status, answer['error']['code']) == (503, 'engine_failed')
    assert raised == [lost] and 'memory' not in answer['error']['message']
    assert 'the engine has failed, and every text under way with it: RuntimeError: no memory' in (
        capsys.readouterr().err
    )


def raise_(error):
    raise error


@contextlib.contextmanager
def process(*flags: str):
    """Starts the program; yields it and its port."""
    command = [sys.executable, '-m', 'eval.serve', *flags]
    started = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        line = started.stdout.readline()
        assert line.startswith('serving '), started.communicate()
        yield started, int(line.split('/v1')[0].rpartition(':')[2])
    finally:
        started.kill()
        started.wait()


def ask(port: int, path: str, record: dict | None = None, **headers: str):
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE_SEC)
    body = None if record is None else json.dumps(record)
    connection.request('GET' if body is None else 'POST', path, body, headers)
    return connection.getresponse()


@pytest.mark.full
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_program_serves_until_a_signal_and_ends_what_it_has_begun(whole, number):
    flags = [f'--checkpoint={whole}', '--port=0', '--key=env', '--slots=2']
    os.environ[program.KEY_VARIABLE] = 'k'
    with process(*flags) as (started, port):
        del os.environ[program.KEY_VARIABLE]
        asked = {'prompt': 'norm', 'max_tokens': 8, 'temperature': 0}
        assert ask(port, '/v1/models').status == 401
        assert ask(port, '/v1/models', authorization='Bearer k').status == 200
        text = json.load(ask(port, '/v1/completions', asked, authorization='Bearer k'))
        assert 'norm' + text['choices'][0]['text'] == generate(load(whole), ['norm'], 8, 0)[0]
        long = asked | {'max_tokens': 16, 'n': 64, 'stream': True, 'stop': 'never'}
        stream = ask(port, '/v1/completions', long, authorization='Bearer k')
        assert stream.status == 200 and stream.readline().startswith(b'data: ')
        started.send_signal(number)
        assert stream.read().endswith(b'data: [DONE]\n\n')
        _, said = started.communicate(timeout=PATIENCE_SEC)
        assert started.returncode == 128 + number
        assert said == f'{number.name}: the server has ended\n'


@pytest.mark.full
def test_the_program_says_in_a_line_why_it_does_not_start(whole, tmp_path):
    def said(*flags: str) -> str:
        done = run_module('eval.serve', *flags)
        assert done.returncode == 1 and done.stderr.count('\n') == 1, done.stderr
        return done.stderr

    assert 'holds no checkpoint' in said(f'--checkpoint={tmp_path}', '--port=0')
    with process(f'--checkpoint={whole}', '--port=0') as (_, port):
        words = said(f'--checkpoint={tmp_path}', f'--port={port}')
        assert f'--port={port} of 127.0.0.1 cannot be had' in words


@pytest.mark.full
def test_lm_eval_gets_over_http_what_the_harness_gets_in_the_process(checkpoint, whole):
    """Sums, greediness and texts by its own client, with the tokenizer of the server."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from eval.suites.harness_lm import CheckpointLM

    pairs = [('norm', ' layer'), ('a ', 'b c d'), ('', 'token'), ('loss', ' é')]
    scored = [Instance('loglikelihood', {}, pair, i) for i, pair in enumerate(pairs)]
    until = [('norm ', {'until': ['a', 'e'], 'max_gen_toks': 8}), ('x', {'max_gen_toks': 5})]
    texts = [Instance('generate_until', {}, one, i) for i, one in enumerate(until)]
    with serving(service(checkpoint, whole)) as port:
        url = f'http://127.0.0.1:{port}/v1/completions'
        client = LocalCompletionsAPI(url, model=whole.name, batch_size=3, max_length=16)
        found = client.loglikelihood(scored)
        made = [client.generate_until([one])[0] for one in texts]
    harness = CheckpointLM(checkpoint)
    wanted = harness.loglikelihood(scored)
    np.testing.assert_allclose([one for one, _ in found], [one for one, _ in wanted], rtol=1e-5)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert made == harness.generate_until(texts)
