"""The thread that owns the engine: calls wait, take turns for slots, and get texts in pieces."""

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from eval.serve.requests import Refusal
from lm.inference.engine import Request, Token, Update
from lm.inference.text import TextStream

SCORED_AT_ONCE = 32  # prompts that are scored between two steps of the engine
RETRY_SEC = 2  # after which a client is told to come again

_logger = logging.getLogger(__name__)


class SlotEngine(Protocol):
    """The part of `lm.inference.engine.Engine` that a scheduler uses."""

    free: int

    def admit(self, request: Request) -> int: ...
    def step(self, fail: Callable[[int, Exception], None]) -> dict[int, Update]: ...
    def release(self, slot: int) -> None: ...


@dataclasses.dataclass
class Work:
    """A text that is wanted.

    request: what the engine continues; its max_tokens may be 0. stream: turns its tokens into text,
    up to one of the stop strings. ends: tokens that end it, EOS among them. scored: the tokens of
    its prompt are wanted with their log-probabilities.
    """

    request: Request
    stream: TextStream
    stops: tuple[str, ...]
    ends: frozenset[int]
    scored: bool

    @property
    def generates(self) -> bool:
        """Whether the text takes a slot: the likeliest next token alone is found by scoring."""
        likeliest = self.request.sampling.temperature == 0 and self.request.max_tokens == 1
        return self.request.max_tokens > 0 and not (self.scored and likeliest)


class Piece(NamedTuple):
    """The newest part of a text.

    finish: '' while more is to come, else 'stop' or 'length'. prompt: the tokens of the prompt
    behind the first, where they were to be scored.
    """

    place: int
    text: str
    tokens: list[Token]
    finish: str
    prompt: list[Token] | None = None


class Call:
    """The texts that one client wants together. `receive` gets their pieces, or the Refusal that
    ends them all; the scheduler's thread calls it.
    """

    def __init__(self, works: Sequence[Work], receive: Callable[[Piece | Refusal], None]):
        self.works, self.receive = works, receive
        places = range(len(works))
        self.to_score = collections.deque(i for i in places if works[i].scored)
        unscored = [i for i in places if not works[i].scored]
        self.to_start = collections.deque(i for i in unscored if works[i].generates)
        self.to_echo = collections.deque(i for i in unscored if not works[i].generates)
        self.is_started = False


class Scheduler:
    """Lets calls wait, first come first served, and gives their texts the engine's slots in turns:
    a call of many texts holds up no other. All work is done in one thread.

    An error in the work for one call ends that call alone; one that `step` of the engine raises
    ends the thread.
    """

    def __init__(
        self,
        engine: SlotEngine,
        score: Callable[[Sequence[Sequence[int]], int], list[list[Token]]],
        most_waiting: int,
        failed: Callable[[BaseException], None] = lambda error: None,
    ):
        """Args:
        engine: nobody else may use it.
        score: as `eval.serve.prompts.Prompts`.
        most_waiting: calls that may wait for their first turn.
        failed: is called with the error that ends the thread: the engine's, never a client's.
        """
        self._engine, self._score, self._most_waiting = engine, score, most_waiting
        self._failed = failed
        self._changed = threading.Condition()
        self._calls: collections.deque[Call] = collections.deque()  # with texts that wait
        self._left: list[Call] = []  # cancelled since the last turn
        self._is_open = True
        self._running: dict[int, tuple[Call, int]] = {}  # by slot, the text: its call and place
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Lets a call wait. Raises Refusal where too many do, or the thread has ended."""
        with self._changed:
            if not self._is_open:
                raise closed()
            if self._waiting() >= self._most_waiting:
                raise Refusal(
                    429,
                    'queue_full',
                    f'{self._most_waiting} requests wait already. Come again later.',
                    RETRY_SEC,
                )
            self._calls.append(call)
            self._changed.notify()

    def cancel(self, call: Call) -> None:
        """Gives up what is left of a call; its slots are free before the next step."""
        with self._changed:
            self._left.append(call)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, and refuses what it has not done."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    def state(self) -> dict[str, Any]:
        """Returns numbers for a person or a monitor."""
        with self._changed:
            return {
                'status': 'ok' if self._is_open else 'closed',
                'free_slots': self._engine.free,
                'waiting': self._waiting(),
            }

    def _waiting(self) -> int:
        return sum(not call.is_started for call in self._calls)

    def _run(self) -> None:
        last = closed()
        try:
            while self._rest():
                self._drop()
                self._end_empty()
                self._score_some()
                self._admit()
                self._step()
        except Exception as error:
            last = engine_failed()
            self._failed(error)
        with self._changed:
            self._is_open = False
            calls = {*self._calls, *(call for call, _ in self._running.values())} - {*self._left}
        for call in calls:
            with contextlib.suppress(Exception):  # an event loop that has ended
                call.receive(last)

    @contextlib.contextmanager
    def _for_call(self, call: Call) -> Iterator[None]:
        """Lets an error of the block end one call."""
        try:
            yield
        except Exception as error:
            self._refuse(call, error)

    def _refuse(self, call: Call, error: Exception) -> None:
        """Ends a call by the error that the work for it has raised, and logs why."""
        is_refused = isinstance(error, ValueError)
        _logger.error('a request has failed: %s', error, exc_info=None if is_refused else error)
        with contextlib.suppress(Exception):
            call.receive(
                Refusal(400, 'invalid_value', str(error)) if is_refused else request_failed()
            )
        self.cancel(call)

    def _rest(self) -> bool:
        """Waits until there is something to do; returns whether the thread goes on."""
        with self._changed:
            while self._is_open and not (self._calls or self._left or self._running):
                self._changed.wait()
            return self._is_open

    def _drop(self) -> None:
        with self._changed:
            left, self._left = {*self._left}, []
            self._calls = collections.deque(call for call in self._calls if call not in left)
        for slot in [slot for slot, (call, _) in self._running.items() if call in left]:
            self._engine.release(slot)
            del self._running[slot]

    def _end_empty(self) -> None:
        """Ends texts of no tokens, whose answers repeat their prompts alone."""
        for call, place in self._take(lambda call: call.to_echo, SCORED_AT_ONCE):
            with self._for_call(call):
                call.receive(Piece(place, '', [], 'length'))

    def _score_some(self) -> None:
        taken = self._take(lambda call: call.to_score, SCORED_AT_ONCE)
        by_top: dict[int, list[tuple[Call, int]]] = {}
        for call, place in taken:
            by_top.setdefault(call.works[place].request.top, []).append((call, place))
        for top, texts in by_top.items():
            for call, place, tokens in self._scores(texts, top):
                with self._for_call(call):
                    call.receive(self._scored(call, place, tokens))

    def _scores(
        self, texts: Sequence[tuple[Call, int]], top: int
    ) -> Iterator[tuple[Call, int, list[Token]]]:
        """Yields calls and places with the tokens of their prompts; one by one if that fails, so
        that the prompt to blame is the only one that ends.
        """
        rows = [call.works[place].request.tokens for call, place in texts]
        try:
            scores = self._score(rows, top)
        except Exception as error:
            if len(texts) == 1:
                self._refuse(texts[0][0], error)
                return
        else:
            yield from ((*text, tokens) for text, tokens in zip(texts, scores, strict=True))
            return
        for text in texts:
            yield from self._scores([text], top)

    def _scored(self, call: Call, place: int, tokens: list[Token]) -> Piece:
        """Returns the piece of a scored prompt, with the next token if that is all of the text.

        An ending token is among the tokens here: who asks for one token behind a prompt counts on
        it (lm-eval takes all but the last for the prompt's).
        """
        work = call.works[place]
        if work.generates:
            with self._changed:
                call.to_start.append(place)
                if call not in self._calls:
                    self._calls.append(call)
            return Piece(place, '', [], '', tokens[:-1])
        made = tokens[-1:] if work.request.max_tokens else []
        text = work.stream.feed(token.id for token in made) + work.stream.finish()
        ends = work.stream.stopped or not work.ends.isdisjoint(token.id for token in made)
        return Piece(place, text, made, 'stop' if ends else 'length', tokens[:-1])

    def _admit(self) -> None:
        for call, place in self._take(lambda call: call.to_start, self._engine.free):
            with self._for_call(call):
                self._running[self._engine.admit(call.works[place].request)] = (call, place)

    def _take(
        self, texts_of: Callable[[Call], collections.deque[int]], most: int
    ) -> list[tuple[Call, int]]:
        """Takes up to `most` texts from their calls, one of each in turn."""
        taken, passed = [], 0
        with self._changed:
            while len(taken) < most and passed < len(self._calls):
                call = self._calls.popleft()
                if texts := texts_of(call):
                    taken.append((call, texts.popleft()))
                    call.is_started, passed = True, 0
                else:
                    passed += 1
                if call.to_score or call.to_start or call.to_echo:
                    self._calls.append(call)
        return taken

    def _step(self) -> None:
        if not self._running:
            return
        for slot, update in self._engine.step(self._fail).items():
            call, place = self._running[slot]
            if update.finish:
                del self._running[slot]
            with self._for_call(call):
                piece = piece_of(call.works[place], place, *update)
                if piece.finish and not update.finish:  # the engine does not know yet
                    del self._running[slot]
                    self._engine.release(slot)
                call.receive(piece)

    def _fail(self, slot: int, error: Exception) -> None:
        call, _ = self._running.pop(slot)
        self._refuse(call, error)


def piece_of(work: Work, place: int, tokens: Sequence[Token], finish: str) -> Piece:
    """Returns what new tokens add to a text; nothing from a stop string or an ending token on."""
    kept, text = [], ''
    if not work.stops and work.ends.isdisjoint(token.id for token in tokens):
        kept, text = [*tokens], work.stream.feed(token.id for token in tokens)
    else:  # where it ends is found token by token
        for token in tokens:
            if token.id in work.ends:
                finish = 'stop'
                break
            kept.append(token)
            text += work.stream.feed([token.id])
            if work.stream.stopped:
                finish = 'stop'
                break
    if finish:
        text += work.stream.finish()
    return Piece(place, text, kept, finish)


def request_failed() -> Refusal:
    message = 'the server has failed at this request; its log says why. Others are not affected.'
    return Refusal(500, 'request_failed', message)


def engine_failed() -> Refusal:
    message = 'the engine has failed, and the server is ending; its log says why'
    return Refusal(503, 'engine_failed', message, RETRY_SEC)


def closed() -> Refusal:
    return Refusal(503, 'shutting_down', 'the server is ending', RETRY_SEC)
