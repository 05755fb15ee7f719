"""Equivalence: a served checkpoint gives the same results as in the process."""

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
    with TestClient(service(checkpoint, whole).app()) as test_client:
        yield test_client


def service(checkpoint, whole):
    """Returns the routes over the checkpoint, which can be served once."""
    return program.Server(str(whole), checkpoint, 3, None, 8, PATIENCE_SEC, None).service


@pytest.mark.full
def test_served_text_matches_generate(client, checkpoint):
    """The texts have the same seed, and may be streamed. Catches other random numbers, another
    first token, and a lost space between prompt and text.
    """
    body = {'prompt': PROMPTS, 'max_tokens': 6, 'temperature': 0.9, 'top_k': 40, 'seed': 5}
    answer = client.post('/v1/completions', json=body).json()
    served = [
        prompt + choice['text'] for prompt, choice in zip(PROMPTS, answer['choices'], strict=True)
    ]
    assert served == generate(checkpoint, PROMPTS, 6, temperature=0.9, top_k=40, seed=5)
    echoed = client.post('/v1/completions', json=body | {'echo': True}).json()
    assert [choice['text'] for choice in echoed['choices']] == served
    streamed = client.post('/v1/completions', json=body | {'stream': True}).text
    chunks = [json.loads(choice[6:]) for choice in streamed.split('\n\n')[:-2]]
    texts = [''] * len(PROMPTS)
    for choice in (choice for chunk in chunks for choice in chunk['choices']):
        texts[choice['index']] += choice['text']
    assert [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)] == served


def test_prompt_scores_match_evaluation(client, checkpoint):
    """Requested as lm-eval does: each number, and whether the token is the likeliest."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, length).tolist() for length in (15, 9, 2)]
    bos = checkpoint.tokenizer.bos_id
    expected = Scorer(checkpoint)([[bos, *row] for row in rows])
    body = {'prompt': rows, 'max_tokens': 1, 'temperature': 0, 'logprobs': 1, 'echo': True}
    answer = client.post('/v1/completions', json=body).json()
    for choice, scores in zip(answer['choices'], expected, strict=True):
        logprobs = choice['logprobs']
        np.testing.assert_allclose(logprobs['token_logprobs'][:-1], scores['log_p'], rtol=1e-5)
        tops = [max(top.values()) for top in logprobs['top_logprobs']]
        greedy = [log_p == top for log_p, top in zip(logprobs['token_logprobs'], tops, strict=True)]
        assert greedy[:-1] == scores['is_likeliest'].tolist() and greedy[-1]


@pytest.mark.full
def test_token_after_scored_prompt_matches_the_engine(client):
    """Scoring finds it without a slot."""
    body = {'prompt': PROMPTS, 'max_tokens': 1, 'temperature': 0, 'logprobs': 3}
    by_engine = client.post('/v1/completions', json=body).json()['choices']
    by_score = client.post('/v1/completions', json=body | {'echo': True}).json()['choices']
    for decoded, scored in zip(by_engine, by_score, strict=True):
        assert decoded['logprobs']['tokens'] == scored['logprobs']['tokens'][-1:]
        np.testing.assert_allclose(
            decoded['logprobs']['token_logprobs'],
            scored['logprobs']['token_logprobs'][-1:],
            rtol=1e-5,
        )


def test_model_name_and_digest(client, whole):
    (model,) = client.get('/v1/models').json()['data']
    assert (model['id'], model['step'], model['max_model_len']) == (whole.name, 12, 16)
    assert len(model['digest']) == 64
    assert program.model_name(f'{whole}/checkpoints/12/', 12) == whole.name
    assert program.model_name('s3://bucket/runs/mine', 12) == 'mine'


@pytest.mark.parametrize('key', ['', 'a b', 'é'])
def test_invalid_key_is_refused(key, monkeypatch):
    monkeypatch.setenv(program.KEY_VARIABLE, key)
    for flag_value in (key, 'env'):
        with pytest.raises(ValueError, match='must be printable ASCII without spaces'):
            program.read_key(flag_value)
    monkeypatch.setenv(program.KEY_VARIABLE, 'right')
    assert (program.read_key('env'), program.read_key('k'), program.read_key(None)) == (
        'right',
        'k',
        None,
    )


@pytest.mark.full
def test_engine_failure_ends_the_server(checkpoint, whole, capsys):
    """Its client gets an error; the reason is for the person who runs the server."""
    server = program.Server(str(whole), checkpoint, 3, None, 8, PATIENCE_SEC, None)
    memory_error, raised = RuntimeError('no memory'), []
    server.service._scheduler._engine._decode_parts = lambda *args: raise_(memory_error)

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
    assert raised == [memory_error] and 'memory' not in answer['error']['message']
    assert 'the engine failed, with all unfinished texts: RuntimeError: no memory' in (
        capsys.readouterr().err
    )


def raise_(error):
    raise error


@contextlib.contextmanager
def start_program(*flags: str):
    """Starts the program; yields the process and its port."""
    command = [sys.executable, '-m', 'eval.serve', *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        line = process.stdout.readline()
        assert line.startswith('serving '), process.communicate()
        yield process, int(line.split('/v1')[0].rpartition(':')[2])
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str, record: dict | None = None, **headers: str):
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE_SEC)
    body = None if record is None else json.dumps(record)
    connection.request('GET' if body is None else 'POST', path, body, headers)
    return connection.getresponse()


@pytest.mark.full
@pytest.mark.parametrize('end_signal', [signal.SIGTERM, signal.SIGINT])
def test_program_serves_until_a_signal(whole, end_signal):
    flags = [f'--checkpoint={whole}', '--port=0', '--key=env', '--slots=2']
    os.environ[program.KEY_VARIABLE] = 'k'
    with start_program(*flags) as (process, port):
        del os.environ[program.KEY_VARIABLE]
        body = {'prompt': 'norm', 'max_tokens': 8, 'temperature': 0}
        assert ask(port, '/v1/models').status == 401
        assert ask(port, '/v1/models', authorization='Bearer k').status == 200
        text = json.load(ask(port, '/v1/completions', body, authorization='Bearer k'))
        assert 'norm' + text['choices'][0]['text'] == generate(load(whole), ['norm'], 8, 0)[0]
        long = body | {'max_tokens': 16, 'n': 64, 'stream': True, 'stop': 'never'}
        stream = ask(port, '/v1/completions', long, authorization='Bearer k')
        assert stream.status == 200 and stream.readline().startswith(b'data: ')
        process.send_signal(end_signal)
        assert stream.read().endswith(b'data: [DONE]\n\n')
        _, errors = process.communicate(timeout=PATIENCE_SEC)
        assert process.returncode == 128 + end_signal
        assert errors == f'{end_signal.name}: the server has stopped\n'


@pytest.mark.full
def test_program_start_errors_are_one_line(whole, tmp_path):
    def failure_line(*flags: str) -> str:
        process = run_module('eval.serve', *flags)
        assert process.returncode == 1 and process.stderr.count('\n') == 1, process.stderr
        return process.stderr

    assert 'has no checkpoint' in failure_line(f'--checkpoint={tmp_path}', '--port=0')
    with start_program(f'--checkpoint={whole}', '--port=0') as (_, port):
        message = failure_line(f'--checkpoint={tmp_path}', f'--port={port}')
        assert f'cannot listen on --port={port} of 127.0.0.1' in message


@pytest.mark.full
def test_lm_eval_over_http_matches_the_harness(checkpoint, whole):
    """Sums, greediness and texts by its own client, with the tokenizer of the server."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from eval.suites.harness_lm import CheckpointLM

    pairs = [('norm', ' layer'), ('a ', 'b c d'), ('', 'token'), ('loss', ' é')]
    scored = [Instance('loglikelihood', {}, pair, i) for i, pair in enumerate(pairs)]
    until = [('norm ', {'until': ['a', 'e'], 'max_gen_toks': 8}), ('x', {'max_gen_toks': 5})]
    texts = [Instance('generate_until', {}, instance, i) for i, instance in enumerate(until)]
    with serving(service(checkpoint, whole)) as port:
        url = f'http://127.0.0.1:{port}/v1/completions'
        client = LocalCompletionsAPI(url, model=whole.name, batch_size=3, max_length=16)
        served = client.loglikelihood(scored)
        served_texts = [client.generate_until([instance])[0] for instance in texts]
    harness = CheckpointLM(checkpoint)
    expected = harness.loglikelihood(scored)
    np.testing.assert_allclose(
        [instance for instance, _ in served], [instance for instance, _ in expected], rtol=1e-5
    )
    assert [is_greedy for _, is_greedy in served] == [is_greedy for _, is_greedy in expected]
    assert served_texts == harness.generate_until(texts)
