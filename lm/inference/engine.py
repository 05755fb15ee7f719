"""Generates many rows at once. Rows enter and leave the slots of a cache at any time.

`eval.generate` and the server run the same engine, so that both give the same text. A row does not
depend on its slot or its neighbours, up to rounding.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from lm.inference.decoding import init_cache
from lm.inference.interventions import Intervention
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
PREFILL_BUDGET = 1024  # prompt tokens read in a step while other rows are ready to decode
MIN_CHUNK = 16  # least tokens that are read at once, with padding
PREFILL_ROWS = 16  # the most rows that are read at once, of PREFILL_CHUNK tokens together
MIN_WAITING = 0.25  # the least share of such rows that must have tokens to read


@dataclasses.dataclass(frozen=True)
class Request:
    """A row to continue.

    tokens: begins with BOS. max_tokens: the most tokens to add. top: how many of the likeliest
    tokens to report with each added token.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    top: int = 0


class Token(NamedTuple):
    """An added token, its log-probability, and the likeliest tokens with theirs.

    Log-probabilities are the model's, without temperature and filters.
    """

    id: int
    log_p: float
    top: tuple[tuple[int, float], ...]


class RowUpdate(NamedTuple):
    """The tokens that a step adds to a row, without the token that ends it.

    finish_reason: '' while the row continues, 'stop' after such a token, 'length' at max_tokens.
    """

    tokens: list[Token]
    finish_reason: str


@dataclasses.dataclass
class _Row:
    """A row in a slot; `n_cached` of its tokens are in the cache, from tokens[first] on."""

    request: Request
    tokens: list[int]
    first: int = 0
    n_cached: int = 0

    @property
    def n_unread(self) -> int:
        """Returns the number of tokens to read before the last one, which decoding reads."""
        return len(self.tokens) - 1 - self.first - self.n_cached

    @property
    def n_remaining(self) -> int:
        """Returns the number of tokens that may still be added."""
        return len(self.request.tokens) + self.request.max_tokens - len(self.tokens)


def raise_error(slot: int, error: Exception) -> None:
    """Raises the error of a row, for callers whose rows succeed or fail together."""
    del slot
    raise error


class Engine:
    """Continues rows in `slots` slots, adding some tokens to all of them in each step.

    A row holds `capacity` tokens. When they are full, the later half is read again from position 0,
    and the earlier half is forgotten. A request with max_tokens of at most capacity - len(tokens)
    never reaches this.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slots: int = 16,
        capacity: int | None = None,
        interventions: Sequence[Intervention] = (),
    ):
        """Args:
          checkpoint: from `load`.
          slots: rows that are continued together.
          capacity: tokens of a row; None: data.seq_len.
          interventions: changes of activations for every row and position.

        Raises:
          ValueError: if the model has fewer positions, or a number is below 1.
        """
        learner, longest = checkpoint.learner, checkpoint.recipe.data.seq_len
        self.capacity = longest if capacity is None else capacity
        if min(slots, self.capacity) < 1:
            raise ValueError(
                f'slots and capacity must be at least 1; got {slots} and {self.capacity}'
            )
        self.vocab_size = learner.model.vocab_size
        self._end_ids = np.array(checkpoint.end_ids, np.int32)
        variables = jax.device_put(checkpoint.intervened_variables(interventions))
        self._programs = checkpoint.programs
        self._cache_shapes = self._programs.cache_shapes(variables, slots, self.capacity)
        self._cache_length = next(iter(self._cache_shapes))
        self._layers = split_layers(
            init_cache(learner, variables, slots, self._cache_length).layers
        )
        is_on_cpu = jax.default_backend() == 'cpu'
        self._variables = self._programs.split_blocks(variables) if is_on_cpu else variables
        # A scan over layers reads stacked weights.
        scans = learner.recipe.model.scan_layers
        self._prefill_variables = variables if scans else self._variables
        self._rows: list[_Row | None] = [None] * slots
        self._prefill_queue: collections.deque[int] = collections.deque()  # slots, first come first

    @property
    def n_free(self) -> int:
        """Returns the number of free slots."""
        return self._rows.count(None)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that can never fit."""
        tokens = request.tokens
        if not 1 <= len(tokens) <= self.capacity:
            raise ValueError(
                f'a prompt must have 1 to {self.capacity} tokens, including the start token; got '
                f'{len(tokens)}. Cut its beginning.'
            )
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            bad_id = next(i for i in tokens if not 0 <= i < self.vocab_size)
            raise ValueError(f'token ids must be between 0 and {self.vocab_size - 1}; got {bad_id}')
        if request.max_tokens < 1:
            raise ValueError(f'max_tokens must be at least 1; got {request.max_tokens}')
        if not 0 <= request.top <= MAX_ALTERNATIVES:
            raise ValueError(f'top must be between 0 and {MAX_ALTERNATIVES}; got {request.top}')

    def admit(self, request: Request) -> int:
        """Puts a request into a free slot, and returns the slot.

        Raises:
          ValueError: if the request can never fit, or no slot is free.
        """
        self.check(request)
        if not self.n_free:
            raise ValueError(f'all {len(self._rows)} slots are in use; wait until one is free')
        slot = self._rows.index(None)
        self._rows[slot] = _Row(request, list(request.tokens))
        self._prefill_queue.append(slot)
        return slot

    def release(self, slot: int) -> None:
        """Frees a slot whose row is no longer needed."""
        self._rows[slot] = None
        if slot in self._prefill_queue:
            self._prefill_queue.remove(slot)

    def step(
        self, on_error: Callable[[int, Exception], None] = raise_error
    ) -> dict[int, RowUpdate]:
        """Reads waiting prompts, then decodes up to TOKENS_PER_CALL tokens of each row that is
        read.

        Args:
          on_error: called with the slot and the error if one row cannot be continued while all
            others can; the slot is free again. By default the error is raised.

        Returns:
          The update of each slot. Slots of rows that have ended are free again.

        Raises:
          Exception: from a program that has lost the cache, and with it every row.
        """
        self._prefill(on_error)
        rows = {i: row for i, row in enumerate(self._rows) if row and i not in self._prefill_queue}
        updates = {}
        for part_rows, decoded in self._decode_parts(rows, on_error):
            for slot, row in part_rows.items():
                try:
                    updates[slot] = self._update_row(slot, row, decoded)
                except Exception as error:
                    self._fail_row(slot, error, on_error)
        return updates

    def _update_row(self, slot: int, row: _Row, decoded: DecodedTokens) -> RowUpdate:
        """Adds decoded tokens to a row, and frees its slot if it has ended."""
        ids = [token for token in decoded.ids_TB[:, slot].tolist() if token >= 0]
        row.n_cached += len(ids)
        row.tokens += ids
        finish_reason = 'stop' if ids[-1] in self._end_ids else '' if row.n_remaining else 'length'
        count = len(ids) - (finish_reason == 'stop')
        update = RowUpdate(_collect_tokens(decoded, slot, count, row.request.top), finish_reason)
        if finish_reason:
            self.release(slot)
        elif row.n_cached == self.capacity:
            row.first = len(row.tokens) - max(1, self.capacity // 2)
            row.n_cached = 0
            self._prefill_queue.append(slot)
        return update

    def _fail_row(
        self, slot: int, error: Exception, on_error: Callable[[int, Exception], None]
    ) -> None:
        """Frees the slot of a failed row; raises the error if the cache is lost."""
        self._check_cache(error)
        self.release(slot)
        on_error(slot, error)

    def _check_cache(self, error: Exception) -> None:
        """Raises the error of a program if it has lost the cache."""
        try:
            jax.block_until_ready(self._layers)
        except Exception:  # a failed program has often consumed its donated arguments
            error.add_note('The cache is lost, and with it all texts in progress.')
            raise error from None

    def _decode_parts(
        self, rows: dict[int, _Row], on_error: Callable[[int, Exception], None]
    ) -> Iterator[tuple[dict[int, _Row], DecodedTokens]]:
        """Yields rows and their decoded tokens: all rows at once, or one by one if that fails.

        One by one, only the row that causes the error ends.
        """
        if not rows:
            return
        try:
            decoded = self._decode(rows)
        except Exception as error:
            if len(rows) == 1:
                self._fail_row(*rows, error, on_error)
                return
            self._check_cache(error)
        else:
            yield rows, decoded
            return
        for slot, row in rows.items():
            yield from self._decode_parts({slot: row}, on_error)

    def _prefill(self, on_error: Callable[[int, Exception], None]) -> None:
        """Reads tokens of waiting rows in turn, at most PREFILL_BUDGET if other rows are ready to
        decode.
        """
        n_read, is_any_ready = 0, self.n_free + len(self._prefill_queue) < len(self._rows)
        while self._prefill_queue and not (is_any_ready and n_read >= PREFILL_BUDGET):
            slots, window = self._select_waiting()
            # All stay in the queue until they are read: another row may raise an error.
            n_read += self._read_parts(slots, window, on_error)
            for slot in slots:
                row = self._rows[slot]
                if row is None:  # it has failed
                    continue
                self._prefill_queue.remove(slot)
                if row.n_unread:
                    self._prefill_queue.append(slot)
                else:
                    is_any_ready = True

    def _select_waiting(self) -> tuple[list[int], range]:
        """Returns the first waiting slot, or several, and the slots that a call for them covers.

        A call for many short chunks takes hardly longer than a call for one. If enough neighbours
        of the first have as short chunks to read, wherever in the queue, they are read with it.
        """
        first = self._prefill_queue[0]
        length, n_slots = self._chunk_length(first), len(self._rows)
        n_rows = min(PREFILL_ROWS, max(1, PREFILL_CHUNK // length), n_slots)
        begin = min(first - first % n_rows, n_slots - n_rows)
        window = range(begin, begin + n_rows)
        slots = [
            slot
            for slot in self._prefill_queue
            if slot in window
            and self._waiting_row(slot).n_unread
            and self._chunk_length(slot) <= length
        ]
        if first not in slots or len(slots) < max(2, n_rows * MIN_WAITING):
            return [first], range(first, first + 1)
        return slots, window

    def _waiting_row(self, slot: int) -> _Row:
        row = self._rows[slot]
        assert row is not None  # `release` takes a slot out of the queue
        return row

    def _chunk_length(self, slot: int) -> int:
        """Returns the length to which the next chunk of a row is padded: a power of two."""
        return next_power_2(max(MIN_CHUNK, min(self._waiting_row(slot).n_unread, PREFILL_CHUNK)))

    def _read_parts(
        self, slots: list[int], window: range, on_error: Callable[[int, Exception], None]
    ) -> int:
        """Reads a chunk of each row, all at once, or one by one if that fails.

        Returns the number of tokens read.
        """
        try:
            return self._read_tokens(slots, window)
        except Exception as error:
            if len(slots) == 1:
                self._fail_row(*slots, error, on_error)
                return 0
            self._check_cache(error)
        return sum(self._read_parts([i], range(i, i + 1), on_error) for i in slots)

    def _read_tokens(self, slots: list[int], window: range) -> int:
        """Reads a chunk of each row, and returns the number of tokens read."""
        tokens_RT = np.zeros((len(window), max(map(self._chunk_length, slots))), np.int32)
        start_R, count_R = np.zeros((2, len(window)), np.int32)
        for i, slot in enumerate(window):
            if row := self._rows[slot]:
                start_R[i] = row.n_cached
                if slot in slots:
                    begin, count_R[i] = row.first + row.n_cached, min(row.n_unread, PREFILL_CHUNK)
                    tokens_RT[i, : count_R[i]] = row.tokens[begin : begin + count_R[i]]
        if not count_R.any():
            return 0
        self._resize_cache(int(np.max(start_R + count_R)))
        self._layers = self._programs.prefill(
            self._prefill_variables,
            self._layers,
            self.capacity,
            tokens_RT,
            window.start,
            start_R,
            count_R,
        )
        for slot in slots:
            self._waiting_row(slot).n_cached += int(count_R[slot - window.start])
        return int(count_R.sum())

    def _resize_cache(self, length: int) -> None:
        """Resizes the cache to the shortest length for rows of `length` tokens and for the cached
        rows.

        Decoding reads all of the cache for each token, so a longer cache is slower.
        """
        length = max(length, *(row.n_cached for row in self._rows if row))
        shortest = next(n for n in self._cache_shapes if n >= length)
        if shortest != self._cache_length:
            self._layers = resize_layers(self._layers, self._cache_shapes[shortest])
            self._cache_length = shortest

    def _decode(self, rows: dict[int, _Row]) -> DecodedTokens:
        """Decodes tokens of the rows, and returns them on the host."""
        n, n_top = len(self._rows), max(row.request.top for row in rows.values())
        last_B, length_B, position_B, remaining_B = np.zeros((4, n), np.int32)
        samplings = [Sampling(temperature=0)] * n
        for slot, row in enumerate(self._rows):
            if row:
                length_B[slot] = row.n_cached
        for slot, row in rows.items():
            last_B[slot], position_B[slot] = row.tokens[-1], len(row.tokens)
            remaining_B[slot] = min(row.n_remaining, self.capacity - row.n_cached, TOKENS_PER_CALL)
            samplings[slot] = row.request.sampling
        self._resize_cache(int(np.max(length_B + remaining_B)))
        decoded, self._layers = self._programs.decode(
            self._variables,
            self._layers,
            self.capacity,
            last_B,
            length_B,
            position_B,
            remaining_B,
            SamplingBatch.stack(samplings),
            self._end_ids,
            n_top,
        )
        return jax.device_get(decoded)


def _collect_tokens(decoded: DecodedTokens, slot: int, count: int, n_top: int) -> list[Token]:
    """Returns the first `count` tokens of a slot, each with the `n_top` likeliest."""
    ids_T, log_p_T = (x[:count, slot].tolist() for x in (decoded.ids_TB, decoded.log_p_TB))
    top = (x[:count, slot, :n_top].tolist() for x in (decoded.top_ids_TBK, decoded.top_log_p_TBK))
    pairs = [tuple(zip(*pair, strict=True)) for pair in zip(*top, strict=True)]
    return [Token(*fields) for fields in zip(ids_T, log_p_T, pairs, strict=True)]
