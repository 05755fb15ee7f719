"""Property: every request of a stranger gets a text or a reason, and the server keeps serving."""

import http.client
import json
import queue

import pytest

from eval.load import load
from eval.serve import server as program
from eval.serve.requests import ChatBody, CompletionBody, Refusal, parse_body
from eval.serve.scheduler import Scheduler
from tests.eval.serve.fakes import PATIENCE_SEC, Letters, score, service, serving
from tests.eval.serve.hostile import COMPLETIONS, ORDINARY, bodies, encode

COUNT = 600


def test_accepted_requests_are_admitted():
    """The engine admits and continues every accepted request, one after another in one scheduler.

    Without a model. Catches a row that only `admit` refuses.
    """
    engine = Letters(slots=4, at_once=16)
    routes, scheduler = service(engine), Scheduler(engine, score, 8)
    scheduler.start()
    n_accepted = n_refused = 0
    for path, body in bodies(COUNT):
        try:
            body_type = CompletionBody if path == COMPLETIONS else ChatBody
            generation = routes.prepare_generation(body_type.parse(parse_body(body)))
        except Refusal as refusal:
            assert 400 <= refusal.status < 500 and refusal.message, body
            n_refused += 1
            continue
        chunks = queue.SimpleQueue()
        scheduler.submit(generation, chunks.put)
        n_running = len(generation.rows)
        while n_running:
            chunk = chunks.get(timeout=PATIENCE_SEC)
            assert not isinstance(chunk, Refusal), (body[:200], chunk)
            n_running -= bool(chunk.finish)
        n_accepted += 1
    assert scheduler.state() == {'status': 'ok', 'free_slots': 4, 'waiting': 0}
    scheduler.close()
    assert n_accepted > COUNT / 4 and n_refused > COUNT / 4


@pytest.mark.full
def test_strangers_do_not_affect_others(whole):
    """Runs over HTTP with a model: no request fails the server, hangs, or changes a later text."""
    routes = program.Server(str(whole), load(whole), 3, None, 8, PATIENCE_SEC, None).service
    statuses = []
    with serving(routes) as port:
        ordinary = send(port, COMPLETIONS, encode(ORDINARY))
        for path, body in bodies(COUNT):
            status, answer = send(port, path, body)
            statuses.append(status)
            if status == 200 and answer.startswith(b'data: '):
                assert answer.endswith(b'data: [DONE]\n\n') and b'"error"' not in answer, body
            elif status == 200:
                assert json.loads(answer)['choices'], body
            else:
                assert 400 <= status < 500 and json.loads(answer)['error']['message'], body
        after = send(port, COMPLETIONS, encode(ORDINARY))
        health = json.loads(send(port, '/health', None)[1])
    assert [json.loads(response[1])['choices'] for response in (ordinary, after)] == [
        json.loads(ordinary[1])['choices']
    ] * 2
    assert health == {'status': 'ok', 'free_slots': 3, 'waiting': 0}
    assert statuses.count(200) > COUNT / 4 and len(statuses) == COUNT


def send(port: int, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Posts a body, or sends GET without one; returns the status and the response."""
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE_SEC)
    connection.request('GET' if body is None else 'POST', path, body)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, answer
