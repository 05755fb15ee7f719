"""Text of tokens that come one after another."""

import collections
from collections.abc import Iterable, Iterator, Sequence

from lm.data.tokenizers import Tokenizer
from lm.inference.engine import Engine, Request

REPLACEMENT = '\ufffd'  # what bytes that are no character, or not yet, are decoded as


class TextStream:
    """Turns tokens into text as they come.

    It holds back characters whose bytes are not all there, and what may be the beginning of a stop
    string. The text ends before the stop string that is complete first, and does not depend on how
    the tokens are cut into calls.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), context: Iterable[int] = ()
    ):
        """Args:
          tokenizer: the run's.
          stops: strings that end the text.
          after: tokens before those that come, whose text is not given.

        Raises:
          ValueError: where a stop string is empty.
        """
        if '' in stops:
            raise ValueError('a stop string is empty: it would end every text. Leave it out.')
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self.is_stopped = False
        # Tokens are decoded behind some of those before: a first token may have no space before it.
        # `_window_start` and `_whole` count the tokens up to two places at which no character is cut.
        self._ids = list(context)
        self._window_start, self._window_end = 0, len(self._ids)
        self._n_emitted = len(
            self._decode_window()
        )  # characters of what is decoded since `_window_start`
        self._pending = ''

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that may be shown now."""
        self._ids += ids
        text = self._decode_window()
        whole = text.rstrip(REPLACEMENT)
        new, self._n_emitted = whole[self._n_emitted :], max(self._n_emitted, len(whole))
        if whole == text and len(self._ids) > self._window_end:
            self._window_start, self._window_end = self._window_end, len(self._ids)
            self._n_emitted = len(self._decode_window())
        return self._emit(new, self._stop_overlap)

    def finish(self) -> str:
        """Returns the rest of the text, when no more tokens come."""
        new = self._decode_window()[self._n_emitted :]
        self._n_emitted += len(new)
        return self._emit(new, lambda text: 0)

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._ids[self._window_start :])

    def _emit(self, new_text: str, count_held) -> str:
        if self.is_stopped:
            return ''
        text = self._pending + new_text
        found = [(i + len(stop), i) for stop in self._stops if (i := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)[1]]
        end = len(text) - count_held(text)
        self._pending = text[end:]
        return text[:end]

    def _stop_overlap(self, text: str) -> int:
        """Returns the length of the longest end of a text with which a stop string begins."""
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
      engine: with free slots only.
      tokenizer: the run's.
      requests: rows to be continued.
      stops: strings that end the text of each request.
      order: numbers of the requests, as they enter; None: as they are given.

    Yields:
      (the number of a request, text that follows, whether that is the end of it).
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
