"""Property: slots are shared in turns, given back at once, and a failing thread ends all calls."""

import threading

import pytest

from eval.serve.requests import Refusal
from eval.serve.scheduler import Chunk, Generation, Scheduler
from lm.inference.engine import Request, RowUpdate
from lm.inference.sampling import Sampling
from tests.eval.serve.fakes import BYTE, Letters, score, wait_until

GREEDY = Sampling(temperature=0)


def row(text='a', most=3, top=1) -> Request:
    return Request((BYTE.bos_id, *text.encode()), most, GREEDY, top)


class Texts:
    """The texts that a client wants, and what came of them."""

    def __init__(self, *rows: Request, **settings):
        self.chunks: list[Chunk | Refusal] = []
        self.ended = threading.Event()
        self.generation = Generation(rows, BYTE, **settings)

    def receive(self, chunk: Chunk | Refusal) -> None:
        self.chunks.append(chunk)
        finished = sum(bool(isinstance(one, Refusal) or one.finish) for one in self.chunks)
        if finished == len(self.generation.rows) or isinstance(chunk, Refusal):
            self.ended.set()

    def text(self, place: int = 0) -> str:
        return ''.join(one.text for one in self.chunks if one.text_index == place)


def done(scheduler: Scheduler, *texts: Texts) -> None:
    """Lets calls wait, then serves them all."""
    for one in texts:
        scheduler.submit(one.generation, one.receive)
    scheduler.start()
    for one in texts:
        assert one.ended.wait(60)
    scheduler.close()


@pytest.mark.parametrize('at_once', [1, 4])
def test_texts_end_as_asked(at_once):
    """Four ways: length, EOS, a stop string, an ending token."""
    engine = Letters(slots=2, at_once=at_once)
    texts = [
        Texts(row('a', 3), row('x', 9)),
        Texts(row('a', 9), stops=('ef',)),
        Texts(row('a', 9), end_tokens=frozenset({ord('d')})),
    ]
    done(Scheduler(engine, score, 8), *texts)
    assert [texts[0].text(0), *(one.text(-1 + len(one.generation.rows)) for one in texts)] == [
        'bcd',
        'yz',
        'bcd',
        'bc',
    ]
    finishes = [(one.text_index, one.finish) for text in texts for one in text.chunks if one.finish]
    assert sorted(finishes) == [(0, 'length'), (0, 'stop'), (0, 'stop'), (1, 'stop')]
    assert engine.free == 2


def test_a_call_of_many_texts_holds_up_no_other():
    """Texts are taken one of each call in turn, whoever came first."""
    engine = Letters(slots=1)
    many, one = Texts(*(row('a', 2) for _ in range(6))), Texts(row('m', 2))
    done(Scheduler(engine, score, 8), many, one)
    firsts = [request.tokens[-1] for request in engine.admitted]
    assert firsts.index(ord('m')) == 1 and len(firsts) == 7


def test_a_call_that_is_given_up_frees_its_slot_before_the_next_step():
    engine = Letters(slots=1, step_sec=0.01, endless=True)
    scheduler = Scheduler(engine, score, 8)
    scheduler.start()
    endless, waits = Texts(row('a', 10**9), row('a', 10**9)), Texts(row('a', 1))
    scheduler.submit(endless.generation, endless.receive)
    wait_until(lambda: endless.chunks, 'the first text begins')
    scheduler.submit(waits.generation, waits.receive)
    scheduler.cancel(endless.generation)
    assert waits.ended.wait(60) and waits.text() == 'b'
    wait_until(lambda: engine.free == 1, 'the slot is free')
    scheduler.cancel(waits.generation)  # which has ended: nothing happens
    assert scheduler.state() == {'status': 'ok', 'free_slots': 1, 'waiting': 0}
    scheduler.close()
    assert not endless.ended.is_set()


def test_calls_that_wait_are_bounded_and_those_that_began_are_not_counted():
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


def test_a_prompt_is_scored_without_a_slot_where_the_likeliest_token_is_all():
    engine = Letters(slots=1)
    texts = Texts(row('ab', 1), row('ac', 0), row('ab', 2), is_scored=True)
    done(Scheduler(engine, score, 8), texts)
    assert len(engine.admitted) == 1 and engine.admitted[0].max_tokens == 2
    assert [texts.text(i) for i in range(3)] == ['c', '', 'cd']
    scored = {one.text_index: one.prompt for one in texts.chunks if one.prompt is not None}
    assert [token.log_p for token in scored[0]] == [-0.5, -0.5]
    assert [token.log_p for token in scored[1]] == [-0.5, -2.0]
    assert len(texts.chunks[0].tokens) == 1  # the one behind the prompt


def test_the_one_token_behind_a_scored_prompt_is_given_if_it_is_eos():
    """lm-eval leaves out the last one, whatever it is."""
    texts = Texts(row('z', 1), is_scored=True)
    done(Scheduler(Letters(), score, 8), texts)
    (chunk,) = texts.chunks
    assert ([token.id for token in chunk.tokens], chunk.finish) == ([BYTE.eos_id], 'stop')
    assert chunk.text == ''


def test_a_text_of_no_tokens_takes_no_slot():
    """Its answer repeats the prompt alone. Also while all slots are in use."""
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
    """An engine that fails at one text, in one place, and holds the others to their tokens."""

    def __init__(self, place: str, error: Exception):
        super().__init__(slots=2)
        self.place, self.error = place, error

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


@pytest.mark.parametrize('place', ['admit', 'step', 'score', 'text', 'receive'])
@pytest.mark.parametrize('error', [ValueError('wrong'), RuntimeError('secret')])
def test_an_error_at_one_call_ends_that_call_alone(place, error, caplog):
    """Wherever it comes from; the others get their texts, also those scored together with it."""
    engine = Fails(place, error)

    def scores(rows, top):
        if place == 'score' and any(row[-1] == ord('f') for row in rows):
            raise error
        return score(rows, top)

    scheduler = Scheduler(engine, scores, 8)
    is_scored = place == 'score'
    good = [Texts(row('a', 5), row('m', 3), is_scored=is_scored) for _ in range(2)]
    fails = Texts(row('f', 5), row('c', 20), is_scored=is_scored)
    if place == 'text':
        fails.generation.streams[0].feed = raising(error)
    if place == 'receive':
        receive = fails.receive
        fails.receive = lambda item: (
            receive(item) if isinstance(item, Refusal) else raising(error)()
        )
    done(scheduler, good[0], fails, good[1])
    for texts in good:
        assert (texts.text(0), texts.text(1)) == ('bcdef', 'nop')
    (refusal,) = [one for one in fails.chunks if isinstance(one, Refusal)]
    assert refusal.status == (400 if isinstance(error, ValueError) else 500)
    assert ('wrong' in refusal.message) == isinstance(error, ValueError)
    assert 'secret' not in refusal.message and str(error) in caplog.text
    assert engine.free == 2 and not scheduler._running


def raising(error: Exception):
    def function(*args):
        raise error

    return function


def test_an_engine_that_fails_ends_all_calls():
    engine, told = Letters(slots=1), []
    engine.fails_with = RuntimeError('out of memory')
    scheduler = Scheduler(engine, score, 8, on_failure=told.append)
    running, waiting = Texts(row()), Texts(row())
    done(scheduler, running, waiting)
    assert told == [engine.fails_with]
    for texts in (running, waiting):
        assert [(one.status, one.code) for one in texts.chunks] == [(503, 'engine_failed')]
    assert scheduler.state()['status'] == 'closed'
