"""Property: slots are shared in turns and freed at once, and a failing engine ends all calls."""

import threading

import pytest

from eval.serve.requests import Refusal
from eval.serve.scheduler import Chunk, Generation, Scheduler
from lm.inference.engine import Request, RowUpdate
from lm.inference.sampling import Sampling
from tests.eval.serve.fakes import BYTE, Letters, score, wait_until

GREEDY = Sampling(temperature=0)


def row(text='a', max_tokens=3, top=1) -> Request:
    return Request((BYTE.bos_id, *text.encode()), max_tokens, GREEDY, top)


class Texts:
    """The texts that a client requests, and the chunks that it gets."""

    def __init__(self, *rows: Request, **settings):
        self.chunks: list[Chunk | Refusal] = []
        self.ended = threading.Event()
        self.generation = Generation(rows, BYTE, **settings)

    def receive(self, chunk: Chunk | Refusal) -> None:
        self.chunks.append(chunk)
        finished = sum(
            bool(isinstance(received, Refusal) or received.finish) for received in self.chunks
        )
        if finished == len(self.generation.rows) or isinstance(chunk, Refusal):
            self.ended.set()

    def text(self, index: int = 0) -> str:
        return ''.join(chunk.text for chunk in self.chunks if chunk.text_index == index)


def serve_all(scheduler: Scheduler, *texts: Texts) -> None:
    """Queues calls, then serves them all."""
    for client in texts:
        scheduler.submit(client.generation, client.receive)
    scheduler.start()
    for client in texts:
        assert client.ended.wait(60)
    scheduler.close()


@pytest.mark.parametrize('at_once', [1, 4])
def test_text_ends_for_four_reasons(at_once):
    """Length, EOS, a stop string, an end token."""
    engine = Letters(slots=2, at_once=at_once)
    texts = [
        Texts(row('a', 3), row('x', 9)),
        Texts(row('a', 9), stops=('ef',)),
        Texts(row('a', 9), end_tokens=frozenset({ord('d')})),
    ]
    serve_all(Scheduler(engine, score, 8), *texts)
    assert [texts[0].text(0), *(text.text(-1 + len(text.generation.rows)) for text in texts)] == [
        'bcd',
        'yz',
        'bcd',
        'bc',
    ]
    finishes = [
        (text.text_index, text.finish) for client in texts for text in client.chunks if text.finish
    ]
    assert sorted(finishes) == [(0, 'length'), (0, 'stop'), (0, 'stop'), (1, 'stop')]
    assert engine.n_free == 2


def test_long_calls_do_not_block_others():
    """Texts are taken from each call in turn, whoever came first."""
    engine = Letters(slots=1)
    many, single = Texts(*(row('a', 2) for _ in range(6))), Texts(row('m', 2))
    serve_all(Scheduler(engine, score, 8), many, single)
    firsts = [request.tokens[-1] for request in engine.admitted]
    assert firsts.index(ord('m')) == 1 and len(firsts) == 7


def test_cancel_frees_the_slot_at_once():
    engine = Letters(slots=1, step_sec=0.01, endless=True)
    scheduler = Scheduler(engine, score, 8)
    scheduler.start()
    endless, waiting = Texts(row('a', 10**9), row('a', 10**9)), Texts(row('a', 1))
    scheduler.submit(endless.generation, endless.receive)
    wait_until(lambda: endless.chunks, 'the first text begins')
    scheduler.submit(waiting.generation, waiting.receive)
    scheduler.cancel(endless.generation)
    assert waiting.ended.wait(60) and waiting.text() == 'b'
    wait_until(lambda: engine.n_free == 1, 'the slot is free')
    scheduler.cancel(waiting.generation)  # which has ended: nothing happens
    assert scheduler.state() == {'status': 'ok', 'free_slots': 1, 'waiting': 0}
    scheduler.close()
    assert not endless.ended.is_set()


def test_waiting_generations_are_limited():
    engine = Letters(slots=1, step_sec=0.01, endless=True)
    scheduler = Scheduler(engine, score, 1)
    first, second, third = (Texts(row('a', 10**9)) for _ in range(3))
    scheduler.submit(first.generation, first.receive)
    with pytest.raises(Refusal) as caught:
        scheduler.submit(second.generation, second.receive)
    assert (caught.value.status, caught.value.code) == (429, 'queue_full')
    assert caught.value.retry_after > 0
    scheduler.start()
    wait_until(lambda: first.chunks, 'the first text begins')
    scheduler.submit(second.generation, second.receive)
    with pytest.raises(Refusal):
        scheduler.submit(third.generation, third.receive)
    scheduler.close()
    for texts in (first, second):  # both are told
        assert texts.chunks[-1].code == 'shutting_down'
    with pytest.raises(Refusal):
        scheduler.submit(third.generation, third.receive)


def test_scoring_replaces_a_slot_for_one_greedy_token():
    engine = Letters(slots=1)
    texts = Texts(row('ab', 1), row('ac', 0), row('ab', 2), is_scored=True)
    serve_all(Scheduler(engine, score, 8), texts)
    assert len(engine.admitted) == 1 and engine.admitted[0].max_tokens == 2
    assert [texts.text(i) for i in range(3)] == ['c', '', 'cd']
    scored = {chunk.text_index: chunk.prompt for chunk in texts.chunks if chunk.prompt is not None}
    assert [token.log_p for token in scored[0]] == [-0.5, -0.5]
    assert [token.log_p for token in scored[1]] == [-0.5, -2.0]
    assert len(texts.chunks[0].tokens) == 1  # the one behind the prompt


def test_scored_prompt_includes_eos():
    """lm-eval leaves out the last token, whatever it is."""
    texts = Texts(row('z', 1), is_scored=True)
    serve_all(Scheduler(Letters(), score, 8), texts)
    (chunk,) = texts.chunks
    assert ([token.id for token in chunk.tokens], chunk.finish) == ([BYTE.eos_id], 'stop')
    assert chunk.text == ''


def test_empty_text_needs_no_slot():
    """Its answer only repeats the prompt. Also while all slots are in use."""
    engine = Letters(slots=1, step_sec=0.01, endless=True)
    scheduler = Scheduler(engine, score, 8)
    scheduler.start()
    endless, empty = Texts(row('a', 10**9)), Texts(row('ab', 0), row('ac', 0))
    scheduler.submit(endless.generation, endless.receive)
    wait_until(lambda: endless.chunks, 'the slot is taken')
    scheduler.submit(empty.generation, empty.receive)
    assert empty.ended.wait(60)
    assert sorted(empty.chunks) == [Chunk(0, '', [], 'length'), Chunk(1, '', [], 'length')]
    assert len(engine.admitted) == 1
    scheduler.close()


class Fails(Letters):
    """An engine that fails at one text, in one method, and serves the others."""

    def __init__(self, failing_call: str, error: Exception):
        super().__init__(slots=2)
        self.place, self.error = failing_call, error

    def admit(self, request: Request) -> int:
        if self.place == 'admit' and request.tokens[-1] == ord('f'):
            raise self.error
        return super().admit(request)

    def step(self, fail) -> dict[int, RowUpdate]:
        for slot, (request, _, _) in [*self.rows.items()]:
            if self.place == 'step' and request.tokens[-1] == ord('f'):
                self.release(slot)
                fail(slot, self.error)
        return super().step(fail)


@pytest.mark.parametrize('failing_call', ['admit', 'step', 'score', 'text', 'receive'])
@pytest.mark.parametrize('error', [ValueError('wrong'), RuntimeError('secret')])
def test_error_ends_one_generation(failing_call, error, caplog):
    """Wherever it is raised; the others get their texts, even if they were scored together."""
    engine = Fails(failing_call, error)

    def score_or_fail(rows, top):
        if failing_call == 'score' and any(row[-1] == ord('f') for row in rows):
            raise error
        return score(rows, top)

    scheduler = Scheduler(engine, score_or_fail, 8)
    is_scored = failing_call == 'score'
    good = [Texts(row('a', 5), row('m', 3), is_scored=is_scored) for _ in range(2)]
    failing = Texts(row('f', 5), row('c', 20), is_scored=is_scored)
    if failing_call == 'text':
        failing.generation.streams[0].feed = make_raising(error)
    if failing_call == 'receive':
        receive = failing.receive
        failing.receive = lambda chunk: (
            receive(chunk) if isinstance(chunk, Refusal) else make_raising(error)()
        )
    serve_all(scheduler, good[0], failing, good[1])
    for texts in good:
        assert (texts.text(0), texts.text(1)) == ('bcdef', 'nop')
    (refusal,) = [received for received in failing.chunks if isinstance(received, Refusal)]
    assert refusal.status == (400 if isinstance(error, ValueError) else 500)
    assert ('wrong' in refusal.message) == isinstance(error, ValueError)
    assert 'secret' not in refusal.message and str(error) in caplog.text
    assert engine.n_free == 2 and not scheduler._running


def make_raising(error: Exception):
    def function(*args):
        raise error

    return function


def test_engine_failure_ends_all_generations():
    engine, errors = Letters(slots=1), []
    engine.fails_with = RuntimeError('out of memory')
    scheduler = Scheduler(engine, score, 8, on_failure=errors.append)
    running, waiting = Texts(row()), Texts(row())
    serve_all(scheduler, running, waiting)
    assert errors == [engine.fails_with]
    for texts in (running, waiting):
        assert [(refusal.status, refusal.code) for refusal in texts.chunks] == [
            (503, 'engine_failed')
        ]
    assert scheduler.state()['status'] == 'closed'
