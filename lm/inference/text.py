"""Text of tokens that arrive one after another."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

from lm.data.tokenizers import Tokenizer
from lm.inference.engine import Engine, Request

REPLACEMENT = '\ufffd'  # decoded for bytes that are not, or not yet, a character


class TextStream:
    """Decodes tokens to text as they arrive.

    It holds back incomplete characters, and text that may begin a stop string. The text ends before
    the stop string that is completed first. It does not depend on how the tokens are divided over
    calls.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), context: Iterable[int] = ()
    ):
        """Args:
          tokenizer: the run's.
          stops: strings that end the text.
          context: tokens before the first, whose text is not returned.

        Raises:
          ValueError: if a stop string is empty.
        """
        if '' in stops:
            raise ValueError('a stop string is empty and would end every text. Leave it out.')
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self.is_stopped = False
        # Tokens are decoded after some earlier tokens: a first token may lose its leading space.
        # `_window_start` and `_window_end` are token positions at which no character is cut.
        self._ids = list(context)
        self._window_start, self._window_end = 0, len(self._ids)
        self._n_emitted = len(self._decode_window())  # characters of the window already returned
        self._pending = ''

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that can be shown now."""
        self._ids += ids
        text = self._decode_window()
        whole = text.rstrip(REPLACEMENT)
        new_text, self._n_emitted = whole[self._n_emitted :], max(self._n_emitted, len(whole))
        if whole == text and len(self._ids) > self._window_end:
            self._window_start, self._window_end = self._window_end, len(self._ids)
            self._n_emitted = len(self._decode_window())
        return self._emit(new_text, self._stop_overlap)

    def finish(self) -> str:
        """Returns the remaining text, once no more tokens arrive."""
        new_text = self._decode_window()[self._n_emitted :]
        self._n_emitted += len(new_text)
        return self._emit(new_text, lambda text: 0)

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._ids[self._window_start :])

    def _emit(self, new_text: str, count_held: Callable[[str], int]) -> str:
        if self.is_stopped:
            return ''
        text = self._pending + new_text
        matches = [(i + len(stop), i) for stop in self._stops if (i := text.find(stop)) >= 0]
        if matches:
            self.is_stopped = True
            return text[: min(matches)[1]]
        end = len(text) - count_held(text)
        self._pending = text[end:]
        return text[:end]

    def _stop_overlap(self, text: str) -> int:
        """Returns the length of the longest suffix that begins a stop string."""
        longest = max(map(len, self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def generate_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    stops: Sequence[Sequence[str]],
    order: Iterable[int] | None = None,
) -> Iterator[tuple[int, str, bool]]:
    """Continues requests, as many at a time as the engine has slots.

    Args:
      engine: an engine whose slots are all free.
      tokenizer: the run's.
      requests: rows to be continued.
      stops: strings that end the text of each request.
      order: numbers of the requests in their order of admission; None: as given.

    Yields:
      (number of a request, text that follows, whether the text has ended).
    """
    waiting = collections.deque(range(len(requests)) if order is None else order)
    running: dict[int, tuple[int, TextStream]] = {}
    while waiting or running:
        while waiting and engine.n_free:
            i = waiting.popleft()
            stream = TextStream(tokenizer, stops[i], requests[i].tokens)
            running[engine.admit(requests[i])] = i, stream
        for slot, update in engine.step().items():
            i, stream = running[slot]
            text = stream.feed(token.id for token in update.tokens)
            if update.finish_reason:
                text += stream.finish()
            elif stream.is_stopped:
                engine.release(slot)
            has_ended = bool(update.finish_reason) or stream.is_stopped
            if has_ended:
                del running[slot]
            yield i, text, has_ended
