"""The thread that owns the engine: clients wait, take turns for slots, and get texts in chunks."""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from eval.serve.refusal import Refusal
from lm.data.tokenizers import Tokenizer
from lm.inference.engine import Request, RowUpdate, Token
from lm.inference.text import TextStream

SCORED_AT_ONCE = 32  # prompts that are scored between two steps of the engine
RETRY_SEC = 2  # after which a refused client may retry

_logger = logging.getLogger(__name__)


class SlotEngine(Protocol):
    """The part of `lm.inference.engine.Engine` that a scheduler uses."""

    @property
    def n_free(self) -> int: ...

    def admit(self, request: Request) -> int: ...
    def step(self, on_error: Callable[[int, Exception], None]) -> dict[int, RowUpdate]: ...
    def release(self, slot: int) -> None: ...


class Chunk(NamedTuple):
    """The newest part of a text.

    Attributes:
      text_index: index of the text in its generation.
      text: new text.
      tokens: new tokens.
      finish: '' while the text continues, else 'stop' or 'length'.
      prompt: the prompt's tokens after the first, if scores were requested.
    """

    text_index: int
    text: str
    tokens: list[Token]
    finish: str
    prompt: list[Token] | None = None


class Generation:
    """The texts of a request, and their progress.

    Attributes:
      rows: the engine's request for each text.
      streams: turn the tokens of each text into characters.
      receive: gets the chunks, or the Refusal that ends all texts; called in the scheduler's
        thread.
    """

    receive: Callable[[Chunk | Refusal], object]

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
        rows: prompt and sampling options of each text; max_tokens may be 0.
        tokenizer: the run's.
        stops: strings that end a text.
        end_tokens: tokens that end a text, besides EOS.
        is_scored: whether to compute log-probabilities of the prompts.
        echoes: text and token ids of each prompt, as the client sent it; (): none is repeated.
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
        """Whether a text needs a slot. Scoring also finds the next token of a greedy text."""
        row = self.rows[index]
        is_next_alone = row.sampling.temperature == 0 and row.max_tokens == 1
        return row.max_tokens > 0 and not (self._is_scored and is_next_alone)

    def extend(self, index: int, tokens: Sequence[Token], finish: str) -> Chunk:
        """Returns the chunk of new tokens, up to a stop string or an end token.

        Args:
          index: index of the text.
          tokens: new tokens from the engine.
          finish: the engine's reason to end the text; '' while it continues.
        """
        stream, visible, text = self.streams[index], [], ''
        if not self._stops and self._end_tokens.isdisjoint(token.id for token in tokens):
            visible, text = [*tokens], stream.feed(token.id for token in tokens)
        else:  # token by token, to find the end
            for token in tokens:
                if token.id in self._end_tokens:
                    finish = 'stop'
                    break
                visible.append(token)
                text += stream.feed([token.id])
                if stream.is_stopped:
                    finish = 'stop'
                    break
        if finish:
            text += stream.finish()
        return Chunk(index, text, visible, finish)

    def finish_scored(self, index: int, tokens: list[Token]) -> Chunk:
        """Returns the chunk of a scored prompt, with the next token if the text has no more.

        Unlike in `extend`, the tokens include an end token: lm-eval requests a single token after
        the prompt, and takes all tokens but the last for the prompt.
        """
        stream = self.streams[index]
        new_tokens = tokens[-1:] if self.rows[index].max_tokens else []
        text = stream.feed(token.id for token in new_tokens) + stream.finish()
        is_stopped = stream.is_stopped or not self._end_tokens.isdisjoint(
            token.id for token in new_tokens
        )
        return Chunk(index, text, new_tokens, 'stop' if is_stopped else 'length', tokens[:-1])


class Scheduler:
    """Queues generations, first come first served, and assigns the engine's slots to their texts.

    Generations take turns, so that a request for many texts does not block others. A single thread
    does all the work. An error in the work for a generation ends only that generation; an error
    from `engine.step` ends the thread.
    """

    def __init__(
        self,
        engine: SlotEngine,
        score: Callable[[Sequence[Sequence[int]], int], list[list[Token]]],
        max_waiting: int,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ):
        """Args:
        engine: used by this scheduler alone.
        score: as `eval.serve.prompts.PromptScorer`.
        max_waiting: generations that may wait for their first turn.
        on_failure: called with the error that ends the thread, which is always the engine's.
        """
        self._engine, self._score, self._max_waiting = engine, score, max_waiting
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._queue: collections.deque[Generation] = collections.deque()  # with texts that wait
        self._cancelled: list[Generation] = []  # cancelled since the last turn
        self._is_open = True
        self._running: dict[int, tuple[Generation, int]] = {}  # {slot: (generation, text index)}
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, generation: Generation, receive: Callable[[Chunk | Refusal], object]) -> None:
        """Queues a generation. Raises Refusal if the queue is full, or the thread has ended."""
        generation.receive = receive
        with self._condition:
            if not self._is_open:
                raise server_closed()
            if self._count_waiting() >= self._max_waiting:
                raise Refusal(
                    429,
                    'queue_full',
                    f'{self._max_waiting} requests are already waiting. Try again later.',
                    RETRY_SEC,
                )
            self._queue.append(generation)
            self._condition.notify()

    def cancel(self, generation: Generation) -> None:
        """Cancels the rest of a generation; its slots are free before the next step."""
        with self._condition:
            self._cancelled.append(generation)
            self._condition.notify()

    def close(self) -> None:
        """Ends the thread, and refuses unfinished work."""
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
        refusal = server_closed()
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._finish_echoes()
                self._score_prompts()
                self._admit_texts()
                self._step()
        except Exception as error:
            refusal = engine_failed()
            self._on_failure(error)
        with self._condition:
            self._is_open = False
            running = {generation for generation, _ in self._running.values()}
        # Everything unfinished gets an answer; without it, its client would wait for the timeout.
        for generation in {*self._queue, *running} - {*self._cancelled}:
            with contextlib.suppress(Exception):  # an event loop that has ended
                generation.receive(refusal)

    @contextlib.contextmanager
    def _contain_errors(self, generation: Generation) -> Generator[None]:
        """Ends the generation, instead of the thread, if the block raises an error."""
        try:
            yield
        except Exception as error:
            self._refuse(generation, error)

    def _refuse(self, generation: Generation, error: Exception) -> None:
        """Ends a generation with the error of its work, and logs it."""
        # The engine raises ValueError for requests that it cannot accept: the client's error.
        is_refused = isinstance(error, ValueError)
        _logger.error('a request failed: %s', error, exc_info=None if is_refused else error)
        with contextlib.suppress(Exception):
            generation.receive(
                Refusal(400, 'invalid_value', str(error)) if is_refused else request_failed()
            )
        self.cancel(generation)

    def _wait_for_work(self) -> bool:
        """Waits until there is work; returns False once the scheduler is closed."""
        with self._condition:
            while self._is_open and not (self._queue or self._cancelled or self._running):
                self._condition.wait()
            return self._is_open

    def _drop_cancelled(self) -> None:
        with self._condition:
            cancelled, self._cancelled = {*self._cancelled}, []
            self._queue = collections.deque(
                generation for generation in self._queue if generation not in cancelled
            )
        for slot in [
            slot for slot, (generation, _) in self._running.items() if generation in cancelled
        ]:
            self._engine.release(slot)
            del self._running[slot]

    def _finish_echoes(self) -> None:
        """Ends texts without tokens: their answers only repeat the prompts."""
        for generation, index in self._take_texts(
            lambda generation: generation.to_echo, SCORED_AT_ONCE
        ):
            with self._contain_errors(generation):
                generation.receive(Chunk(index, '', [], 'length'))

    def _score_prompts(self) -> None:
        texts = self._take_texts(lambda generation: generation.to_score, SCORED_AT_ONCE)
        by_top: dict[int, list[tuple[Generation, int]]] = {}
        for generation, index in texts:
            by_top.setdefault(generation.rows[index].top, []).append((generation, index))
        for top, group in by_top.items():
            for generation, index, tokens in self._compute_scores(group, top):
                with self._contain_errors(generation):
                    generation.receive(self._finish_or_queue(generation, index, tokens))

    def _compute_scores(
        self, texts: Sequence[tuple[Generation, int]], top: int
    ) -> Iterator[tuple[Generation, int, list[Token]]]:
        """Yields generations and text indices with the tokens of their prompts.

        If a batch fails, each prompt is scored separately, so that only the faulty prompt ends.
        """
        rows = [generation.rows[index].tokens for generation, index in texts]
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
            # `_take_texts` drops a generation without further texts; here it gets another turn.
            generation.to_start.append(index)
            if generation not in self._queue:
                self._queue.append(generation)
        return Chunk(index, '', [], '', tokens[:-1])

    def _admit_texts(self) -> None:
        for generation, index in self._take_texts(
            lambda generation: generation.to_start, self._engine.n_free
        ):
            with self._contain_errors(generation):
                self._running[self._engine.admit(generation.rows[index])] = (generation, index)

    def _take_texts(
        self, select_texts: Callable[[Generation], collections.deque[int]], limit: int
    ) -> list[tuple[Generation, int]]:
        """Takes up to `limit` texts, a single text from each generation in turn."""
        selected, n_skipped = [], 0
        with self._condition:
            # A whole round of generations without such texts ends the loop.
            while len(selected) < limit and n_skipped < len(self._queue):
                generation = self._queue.popleft()
                if texts := select_texts(generation):
                    selected.append((generation, texts.popleft()))
                    generation.is_started, n_skipped = True, 0
                else:
                    n_skipped += 1
                if generation.to_score or generation.to_start or generation.to_echo:
                    self._queue.append(generation)
        return selected

    def _step(self) -> None:
        if not self._running:
            return
        for slot, update in self._engine.step(self._fail).items():
            generation, index = self._running[slot]
            if update.finish_reason:
                del self._running[slot]
            with self._contain_errors(generation):
                chunk = generation.extend(index, *update)
                if chunk.finish and not update.finish_reason:  # the engine does not know yet
                    del self._running[slot]
                    self._engine.release(slot)
                generation.receive(chunk)

    def _fail(self, slot: int, error: Exception) -> None:
        generation, _ = self._running.pop(slot)
        self._refuse(generation, error)


def request_failed() -> Refusal:
    message = "this request failed; the server's log has the reason. Others are not affected."
    return Refusal(500, 'request_failed', message)


def engine_failed() -> Refusal:
    message = "the engine failed and the server is stopping; the server's log has the reason"
    return Refusal(503, 'engine_failed', message, RETRY_SEC)


def server_closed() -> Refusal:
    return Refusal(503, 'shutting_down', 'the server is stopping', RETRY_SEC)
