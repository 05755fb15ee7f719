"""Generation of many rows at once: slots over one cache, which rows enter and leave at any time.

`eval.generate` and the server run the same engine, so that both give the same text. A row is what
it would be alone, whatever its slot and its neighbours, to rounding.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from lm.inference.decoding import init_cache
from lm.inference.load import Checkpoint
from lm.inference.sampling import Sampling, SamplingBatch
from lm.inference.scoring import next_power_2
from lm.inference.slots import (
    MAX_ALTERNATIVES,
    TOKENS_PER_CALL,
    DecodedTokens,
    resize_layers,
    split_layers,
)

PREFILL_CHUNK = 256  # tokens of a prompt that are read at once
PREFILL_BUDGET = 1024  # tokens of prompts that a step reads while others wait for theirs
MIN_CHUNK = 16  # tokens of the shortest part of a prompt that is read, with padding


@dataclasses.dataclass(frozen=True)
class Request:
    """A row to be continued.

    tokens: begins with BOS. max_tokens: the most that are made. top: how many of the likeliest
    tokens are reported with each one made.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    top: int = 0


class Token(NamedTuple):
    """A token made, its log-probability under the model, without temperature and filters, and the
    likeliest ones with theirs.
    """

    id: int
    log_p: float
    top: tuple[tuple[int, float], ...]


class RowUpdate(NamedTuple):
    """The tokens that a step made for a row, without the one that ends it, and why it has ended: ''
    it has not, 'stop' by such a token, 'length' by its max_tokens.
    """

    tokens: list[Token]
    finish_reason: str


@dataclasses.dataclass
class _Row:
    """A row in a slot: `n_cached` of its tokens are in the cache, from tokens[first] on."""

    request: Request
    tokens: list[int]
    first: int = 0
    n_cached: int = 0

    @property
    def n_unread(self) -> int:
        """Returns how many tokens are read before the last one, which decoding reads."""
        return len(self.tokens) - 1 - self.first - self.n_cached

    @property
    def n_remaining(self) -> int:
        return len(self.request.tokens) + self.request.max_tokens - len(self.tokens)


def raise_error(slot: int, error: Exception) -> None:
    """Raises the error of a row, for callers whose rows succeed or fail together."""
    del slot
    raise error


class Engine:
    """Continues rows in `slots` slots, some tokens of all of them in each step.

    A row holds `capacity` tokens; where it fills them, the later half is read again from position
    0, and what lies before is forgotten. max_tokens of at most capacity - len(tokens) never does.
    """

    def __init__(self, checkpoint: Checkpoint, slots: int = 16, capacity: int | None = None):
        """Args:
          checkpoint: as `load` gives it.
          slots: rows that are continued together.
          capacity: tokens of a row; None: data.seq_len.

        Raises:
          ValueError: where the model has fewer positions, or a number is below 1.
        """
        learner, longest = checkpoint.learner, checkpoint.recipe.data.seq_len
        self.capacity = longest if capacity is None else capacity
        if min(slots, self.capacity) < 1:
            raise ValueError(f'slots and capacity are at least 1; got {slots} and {self.capacity}')
        self.vocab_size = learner.model.vocab_size
        self._end_ids = np.array(checkpoint.end_ids, np.int32)
        self._variables = jax.device_put(checkpoint.variables)
        self._programs = checkpoint.programs
        self._cache_shapes = self._programs.cache_shapes(self._variables, slots, self.capacity)
        self._cache_length = next(iter(self._cache_shapes))
        self._layers = split_layers(
            init_cache(learner, self._variables, slots, self._cache_length).layers
        )
        self._rows: list[_Row | None] = [None] * slots
        self._prefill_queue: collections.deque[int] = collections.deque()  # slots, first come first

    @property
    def n_free(self) -> int:
        """Returns how many slots are free."""
        return self._rows.count(None)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that never fits."""
        tokens = request.tokens
        if not 1 <= len(tokens) <= self.capacity:
            raise ValueError(
                f'a prompt has 1 to {self.capacity} tokens, with the one that begins it; got '
                f'{len(tokens)}. Leave out its beginning.'
            )
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(i for i in tokens if not 0 <= i < self.vocab_size)
            raise ValueError(f'token ids are from 0 to {self.vocab_size - 1}; got {wrong}')
        if request.max_tokens < 1:
            raise ValueError(f'max_tokens must be at least 1; got {request.max_tokens}')
        if not 0 <= request.top <= MAX_ALTERNATIVES:
            raise ValueError(f'top is from 0 to {MAX_ALTERNATIVES}; got {request.top}')

    def admit(self, request: Request) -> int:
        """Puts a request in a free slot, and returns the slot.

        Raises:
          ValueError: where the request never fits, or no slot is free.
        """
        self.check(request)
        if not self.n_free:
            raise ValueError(f'all {len(self._rows)} slots are in use; wait for one that is free')
        slot = self._rows.index(None)
        self._rows[slot] = _Row(request, list(request.tokens))
        self._prefill_queue.append(slot)
        return slot

    def release(self, slot: int) -> None:
        """Frees a slot whose row nobody waits for any more."""
        self._rows[slot] = None
        if slot in self._prefill_queue:
            self._prefill_queue.remove(slot)

    def step(
        self, on_error: Callable[[int, Exception], None] = raise_error
    ) -> dict[int, RowUpdate]:
        """Reads prompts that wait, then makes up to AT_ONCE tokens of each row that is read.

        Args:
          fail: is called with the slot and the error of a row that cannot be continued, while all
            others can; the slot is free again. By default the error is raised.

        Returns:
          The new tokens by slot; slots of rows that have ended are free again.

        Raises:
          Exception: that of a program that has lost the cache, and every row with it.
        """
        self._prefill(on_error)
        rows = {i: row for i, row in enumerate(self._rows) if row and i not in self._prefill_queue}
        updates = {}
        for part, made in self._decode_parts(rows, on_error):
            for slot, row in part.items():
                try:
                    updates[slot] = self._update_row(slot, row, made)
                except Exception as error:
                    self._fail_row(slot, error, on_error)
        return updates

    def _update_row(self, slot: int, row: _Row, decoded: DecodedTokens) -> RowUpdate:
        """Adds what was made to a row; frees its slot where it has ended."""
        ids = [token for token in decoded.ids_TB[:, slot].tolist() if token >= 0]
        row.n_cached += len(ids)
        row.tokens += ids
        finish = 'stop' if ids[-1] in self._end_ids else '' if row.n_remaining else 'length'
        count = len(ids) - (finish == 'stop')
        update = RowUpdate(_collect_tokens(decoded, slot, count, row.request.top), finish)
        if finish:
            self.release(slot)
        elif row.n_cached == self.capacity:
            row.first = len(row.tokens) - max(1, self.capacity // 2)
            row.n_cached = 0
            self._prefill_queue.append(slot)
        return update

    def _fail_row(
        self, slot: int, error: Exception, on_error: Callable[[int, Exception], None]
    ) -> None:
        """Frees the slot of a row that an error has ended; raises it where the cache is lost."""
        try:
            jax.block_until_ready(self._layers)
        except Exception:  # a program that fails has often taken its arguments already
            error.add_note('The cache is lost, and with it every text under way.')
            raise error from None
        self.release(slot)
        on_error(slot, error)

    def _decode_parts(
        self, rows: dict[int, _Row], on_error: Callable[[int, Exception], None]
    ) -> Iterator[tuple[dict[int, _Row], DecodedTokens]]:
        """Yields rows and what is made for them: all at once, or each alone if that fails, so that
        the row to blame is the only one that ends.
        """
        if not rows:
            return
        try:
            made = self._decode(rows)
        except Exception as error:
            if len(rows) == 1:
                self._fail_row(*rows, error, on_error)
                return
        else:
            yield rows, made
            return
        for slot, row in rows.items():
            yield from self._decode_parts({slot: row}, on_error)

    def _prefill(self, on_error: Callable[[int, Exception], None]) -> None:
        """Reads tokens of rows that wait, in turn, BUDGET at most if others are ready to go on."""
        read, ready = 0, self.n_free + len(self._prefill_queue) < len(self._rows)
        while self._prefill_queue and not (ready and read >= PREFILL_BUDGET):
            slot = self._prefill_queue.popleft()
            row = self._rows[slot]
            count = min(row.n_unread, PREFILL_CHUNK)
            if count:
                begin = row.first + row.n_cached
                part = row.tokens[begin : begin + count]
                try:
                    self._read_tokens(slot, row.n_cached, part)
                except Exception as error:
                    self._fail_row(slot, error, on_error)
                    continue
                row.n_cached += count
                read += count
            if row.n_unread:
                self._prefill_queue.append(slot)
            else:
                ready = True

    def _read_tokens(self, slot: int, start: int, part: list[int]) -> None:
        """Reads tokens of a row behind the first `start`, padded to a power of two."""
        length = next_power_2(max(MIN_CHUNK, len(part)))
        tokens_1T = np.zeros((1, length), np.int32)
        tokens_1T[0, : len(part)] = part
        self._resize_cache(start + len(part))
        self._layers = self._programs.prefill(
            self._variables, self._layers, self.capacity, tokens_1T, slot, start, len(part)
        )

    def _resize_cache(self, length: int) -> None:
        """Gives the cache room for rows of `needed` tokens, and for those it holds, but not much
        more: what is read for each token is all of it.
        """
        length = max(length, *(row.n_cached for row in self._rows if row))
        room = next(room for room in self._cache_shapes if room >= length)
        if room != self._cache_length:
            self._layers = resize_layers(self._layers, self._cache_shapes[room])
            self._cache_length = room

    def _decode(self, rows: dict[int, _Row]) -> DecodedTokens:
        """Returns what is made for the rows, on the host."""
        n, most = len(self._rows), max(row.request.top for row in rows.values())
        last_B, length_B, place_B, left_B = np.zeros((4, n), np.int32)
        samplings = [Sampling(temperature=0)] * n
        for slot, row in enumerate(self._rows):
            if row:
                length_B[slot] = row.n_cached
        for slot, row in rows.items():
            last_B[slot], place_B[slot] = row.tokens[-1], len(row.tokens)
            left_B[slot] = min(row.n_remaining, self.capacity - row.n_cached, TOKENS_PER_CALL)
            samplings[slot] = row.request.sampling
        self._resize_cache(int(np.max(length_B + left_B)))
        made, self._layers = self._programs.decode(
            self._variables,
            self._layers,
            self.capacity,
            last_B,
            length_B,
            place_B,
            left_B,
            SamplingBatch.stack(samplings),
            self._end_ids,
            most,
        )
        return jax.device_get(made)


def _collect_tokens(decoded: DecodedTokens, slot: int, count: int, n_top: int) -> list[Token]:
    """Returns the first `count` tokens of a slot, with the `top` likeliest beside each."""
    ids_T, log_p_T = (x[:count, slot].tolist() for x in (decoded.ids_TB, decoded.log_p_TB))
    likeliest = (
        x[:count, slot, :n_top].tolist() for x in (decoded.top_ids_TBK, decoded.top_log_p_TBK)
    )
    pairs = [tuple(zip(*both, strict=True)) for both in zip(*likeliest, strict=True)]
    return [Token(*one) for one in zip(ids_T, log_p_T, pairs, strict=True)]
