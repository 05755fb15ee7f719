"""The thread that owns the engine: clients wait, take turns for slots, and get texts in chunks."""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from eval.serve.requests import Refusal
from lm.data.tokenizers import Tokenizer
from lm.inference.engine import Request, RowUpdate, Token
from lm.inference.text import TextStream

SCORED_AT_ONCE = 32  # prompts that are scored between two steps of the engine
RETRY_SEC = 2  # after which a client is told to come again

_logger = logging.getLogger(__name__)


class SlotEngine(Protocol):
    """The part of `lm.inference.engine.Engine` that a scheduler uses."""

    free: int

    def admit(self, request: Request) -> int: ...
    def step(self, fail: Callable[[int, Exception], None]) -> dict[int, RowUpdate]: ...
    def release(self, slot: int) -> None: ...


class Chunk(NamedTuple):
    """The newest part of a text.

    finish: '' while more is to come, else 'stop' or 'length'. prompt: the tokens of the prompt
    behind the first, where they were to be scored.
    """

    text_index: int
    text: str
    tokens: list[Token]
    finish: str
    prompt: list[Token] | None = None


class Generation:
    """The texts that one client wants together, and how far they are.

    rows: what the engine continues for each text. streams: turn the tokens of each into text.
    receive: gets their chunks, or the Refusal that ends them all; the scheduler's thread calls it.
    """

    receive: Callable[[Chunk | Refusal], None]

    def __init__(
        self,
        rows: Sequence[Request],
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        end_tokens: frozenset[int] = frozenset(),
        is_scored: bool = False,
        echoes: Sequence[tuple[str, Sequence[int]]] = (),
    ):
        """Args:
        rows: of each text, prompt and sampling; their max_tokens may be 0.
        tokenizer: the run's.
        stops: strings that end a text.
        ends: tokens that end a text, beside EOS.
        is_scored: the tokens of the prompts are wanted with their log-probabilities.
        echoes: text and token ids of each prompt, as the client gave them; (): none is repeated.
        """
        self.rows, self.echoes, self._stops = rows, echoes, stops
        self._end_tokens, self._is_scored = end_tokens | {tokenizer.eos_id}, is_scored
        self.streams = [TextStream(tokenizer, stops, context=row.tokens) for row in rows]
        places = range(len(rows))
        self.to_score = collections.deque(places if is_scored else ())
        unscored = () if is_scored else places
        self.to_start = collections.deque(i for i in unscored if self.needs_slot(i))
        self.to_echo = collections.deque(i for i in unscored if not self.needs_slot(i))
        self.is_started = False

    def needs_slot(self, index: int) -> bool:
        """Whether a text takes a slot: the likeliest next token alone is found by scoring."""
        row = self.rows[index]
        is_next_alone = row.sampling.temperature == 0 and row.max_tokens == 1
        return row.max_tokens > 0 and not (self._is_scored and is_next_alone)

    def extend(self, index: int, tokens: Sequence[Token], finish: str) -> Chunk:
        """Returns what new tokens add to a text; nothing from a stop string or an ending token on.

        finish: why the engine ends the text; '' where it goes on.
        """
        stream, shown, text = self.streams[index], [], ''
        if not self._stops and self._end_tokens.isdisjoint(token.id for token in tokens):
            shown, text = [*tokens], stream.feed(token.id for token in tokens)
        else:  # where it ends is found token by token
            for token in tokens:
                if token.id in self._end_tokens:
                    finish = 'stop'
                    break
                shown.append(token)
                text += stream.feed([token.id])
                if stream.is_stopped:
                    finish = 'stop'
                    break
        if finish:
            text += stream.finish()
        return Chunk(index, text, shown, finish)

    def finish_scored(self, index: int, tokens: list[Token]) -> Chunk:
        """Returns a scored prompt, with the next token if that is all of the text.

        An ending token is among the tokens here: who asks for one token behind a prompt counts on
        it (lm-eval takes all but the last for the prompt's).
        """
        stream = self.streams[index]
        made = tokens[-1:] if self.rows[index].max_tokens else []
        text = stream.feed(token.id for token in made) + stream.finish()
        is_stopped = stream.is_stopped or not self._end_tokens.isdisjoint(
            token.id for token in made
        )
        return Chunk(index, text, made, 'stop' if is_stopped else 'length', tokens[:-1])


class Scheduler:
    """Lets generations wait, first come first served, and gives their texts the engine's slots in
    turns: one of many texts holds up no other. All work is done in one thread.

    An error in the work for a generation ends that one alone; one that `step` of the engine raises
    ends the thread.
    """

    def __init__(
        self,
        engine: SlotEngine,
        score: Callable[[Sequence[Sequence[int]], int], list[list[Token]]],
        max_waiting: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        """Args:
        engine: nobody else may use it.
        score: as `eval.serve.prompts.PromptScorer`.
        most_waiting: generations that may wait for their first turn.
        failed: is called with the error that ends the thread: the engine's, never a client's.
        """
        self._engine, self._score, self._max_waiting = engine, score, max_waiting
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._queue: collections.deque[Generation] = collections.deque()  # with texts that wait
        self._cancelled: list[Generation] = []  # cancelled since the last turn
        self._is_open = True
        self._running: dict[int, tuple[Generation, int]] = {}  # by slot, the text: with its place
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, generation: Generation, receive: Callable[[Chunk | Refusal], None]) -> None:
        """Lets a generation wait. Raises Refusal where too many do, or the thread has ended."""
        generation.receive = receive
        with self._condition:
            if not self._is_open:
                raise server_closed()
            if self._count_waiting() >= self._max_waiting:
                raise Refusal(
                    429,
                    'queue_full',
                    f'{self._max_waiting} requests wait already. Come again later.',
                    RETRY_SEC,
                )
            self._queue.append(generation)
            self._condition.notify()

    def cancel(self, generation: Generation) -> None:
        """Gives up what is left of a generation; its slots are free before the next step."""
        with self._condition:
            self._cancelled.append(generation)
            self._condition.notify()

    def close(self) -> None:
        """Ends the thread, and refuses what it has not done."""
        with self._condition:
            self._is_open = False
            self._condition.notify()
        self._thread.join()

    def state(self) -> dict[str, Any]:
        """Returns numbers for a person or a monitor."""
        with self._condition:
            return {
                'status': 'ok' if self._is_open else 'closed',
                'free_slots': self._engine.n_free,
                'waiting': self._count_waiting(),
            }

    def _count_waiting(self) -> int:
        return sum(not generation.is_started for generation in self._queue)

    def _run(self) -> None:
        last = server_closed()
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._finish_echoes()
                self._score_prompts()
                self._admit_texts()
                self._step()
        except Exception as error:
            last = engine_failed()
            self._on_failure(error)
        with self._condition:
            self._is_open = False
            running = {generation for generation, _ in self._running.values()}
        for generation in {*self._queue, *running} - {*self._cancelled}:
            with contextlib.suppress(Exception):  # an event loop that has ended
                generation.receive(last)

    @contextlib.contextmanager
    def _contain_errors(self, generation: Generation) -> Iterator[None]:
        """Lets an error of the block end one generation."""
        try:
            yield
        except Exception as error:
            self._refuse(generation, error)

    def _refuse(self, generation: Generation, error: Exception) -> None:
        """Ends a generation by the error that the work for it has raised, and logs why."""
        is_refused = isinstance(error, ValueError)
        _logger.error('a request has failed: %s', error, exc_info=None if is_refused else error)
        with contextlib.suppress(Exception):
            generation.receive(
                Refusal(400, 'invalid_value', str(error)) if is_refused else request_failed()
            )
        self.cancel(generation)

    def _wait_for_work(self) -> bool:
        """Waits until there is something to do; returns whether the thread goes on."""
        with self._condition:
            while self._is_open and not (self._queue or self._cancelled or self._running):
                self._condition.wait()
            return self._is_open

    def _drop_cancelled(self) -> None:
        with self._condition:
            left, self._cancelled = {*self._cancelled}, []
            self._queue = collections.deque(
                generation for generation in self._queue if generation not in left
            )
        for slot in [slot for slot, (generation, _) in self._running.items() if generation in left]:
            self._engine.release(slot)
            del self._running[slot]

    def _finish_echoes(self) -> None:
        """Ends texts of no tokens, whose answers repeat their prompts alone."""
        for generation, place in self._take_texts(lambda texts: texts.to_echo, SCORED_AT_ONCE):
            with self._contain_errors(generation):
                generation.receive(Chunk(place, '', [], 'length'))

    def _score_prompts(self) -> None:
        taken = self._take_texts(lambda texts: texts.to_score, SCORED_AT_ONCE)
        by_top: dict[int, list[tuple[Generation, int]]] = {}
        for generation, place in taken:
            by_top.setdefault(generation.rows[place].top, []).append((generation, place))
        for top, texts in by_top.items():
            for generation, place, tokens in self._compute_scores(texts, top):
                with self._contain_errors(generation):
                    generation.receive(self._finish_or_queue(generation, place, tokens))

    def _compute_scores(
        self, texts: Sequence[tuple[Generation, int]], top: int
    ) -> Iterator[tuple[Generation, int, list[Token]]]:
        """Yields generations and places with the tokens of their prompts; one by one if that fails,
        so that the prompt to blame is the only one that ends.
        """
        rows = [generation.rows[place].tokens for generation, place in texts]
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
            yield from self._compute_scores([text], top)

    def _finish_or_queue(self, generation: Generation, index: int, tokens: list[Token]) -> Chunk:
        if not generation.needs_slot(index):
            return generation.finish_scored(index, tokens)
        with self._condition:
            generation.to_start.append(index)
            if generation not in self._queue:
                self._queue.append(generation)
        return Chunk(index, '', [], '', tokens[:-1])

    def _admit_texts(self) -> None:
        for generation, place in self._take_texts(
            lambda texts: texts.to_start, self._engine.n_free
        ):
            with self._contain_errors(generation):
                self._running[self._engine.admit(generation.rows[place])] = (generation, place)

    def _take_texts(
        self, select_texts: Callable[[Generation], collections.deque[int]], limit: int
    ) -> list[tuple[Generation, int]]:
        """Takes up to `most` texts from their generations, one of each in turn."""
        taken, passed = [], 0
        with self._condition:
            while len(taken) < limit and passed < len(self._queue):
                generation = self._queue.popleft()
                if texts := select_texts(generation):
                    taken.append((generation, texts.popleft()))
                    generation.is_started, passed = True, 0
                else:
                    passed += 1
                if generation.to_score or generation.to_start or generation.to_echo:
                    self._queue.append(generation)
        return taken

    def _step(self) -> None:
        if not self._running:
            return
        for slot, update in self._engine.step(self._fail).items():
            generation, place = self._running[slot]
            if update.finish_reason:
                del self._running[slot]
            with self._contain_errors(generation):
                chunk = generation.extend(place, *update)
                if chunk.finish and not update.finish_reason:  # the engine does not know yet
                    del self._running[slot]
                    self._engine.release(slot)
                generation.receive(chunk)

    def _fail(self, slot: int, error: Exception) -> None:
        generation, _ = self._running.pop(slot)
        self._refuse(generation, error)


def request_failed() -> Refusal:
    message = 'the server has failed at this request; its log says why. Others are not affected.'
    return Refusal(500, 'request_failed', message)


def engine_failed() -> Refusal:
    message = 'the engine has failed, and the server is ending; its log says why'
    return Refusal(503, 'engine_failed', message, RETRY_SEC)


def server_closed() -> Refusal:
    return Refusal(503, 'shutting_down', 'the server is ending', RETRY_SEC)
