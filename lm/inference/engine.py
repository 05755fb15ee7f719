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
from lm.inference.sampling import Sampling, Samplings
from lm.inference.scoring import power_of_two
from lm.inference.slots import AT_ONCE, MOST_ALTERNATIVES, Made, resized, split_layers

CHUNK = 256  # tokens of a prompt that are read at once
BUDGET = 1024  # tokens of prompts that a step reads while others wait for theirs
SHORTEST = 16  # tokens of the shortest part of a prompt that is read, with padding


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


class Update(NamedTuple):
    """The tokens that a step made for a row, without the one that ends it, and why it has ended: ''
    it has not, 'stop' by such a token, 'length' by its max_tokens.
    """

    tokens: list[Token]
    finish: str


@dataclasses.dataclass
class _Row:
    """A row in a slot: `cached` of its tokens are in the cache, from tokens[first] on."""

    request: Request
    tokens: list[int]
    first: int = 0
    cached: int = 0

    @property
    def unread(self) -> int:
        """Returns how many tokens are read before the last one, which decoding reads."""
        return len(self.tokens) - 1 - self.first - self.cached

    @property
    def left(self) -> int:
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
        self._ends = np.array(checkpoint.end_ids, np.int32)
        self._variables = jax.device_put(checkpoint.variables)
        self._programs = checkpoint.programs
        self._rooms = self._programs.rooms(self._variables, slots, self.capacity)
        self._room = next(iter(self._rooms))
        self._layers = split_layers(init_cache(learner, self._variables, slots, self._room).layers)
        self._rows: list[_Row | None] = [None] * slots
        self._filling: collections.deque[int] = collections.deque()  # slots, first come first

    @property
    def free(self) -> int:
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
        if not 0 <= request.top <= MOST_ALTERNATIVES:
            raise ValueError(f'top is from 0 to {MOST_ALTERNATIVES}; got {request.top}')

    def admit(self, request: Request) -> int:
        """Puts a request in a free slot, and returns the slot.

        Raises:
          ValueError: where the request never fits, or no slot is free.
        """
        self.check(request)
        if not self.free:
            raise ValueError(f'all {len(self._rows)} slots are in use; wait for one that is free')
        slot = self._rows.index(None)
        self._rows[slot] = _Row(request, list(request.tokens))
        self._filling.append(slot)
        return slot

    def release(self, slot: int) -> None:
        """Frees a slot whose row nobody waits for any more."""
        self._rows[slot] = None
        if slot in self._filling:
            self._filling.remove(slot)

    def step(self, fail: Callable[[int, Exception], None] = raise_error) -> dict[int, Update]:
        """Reads prompts that wait, then makes up to AT_ONCE tokens of each row that is read.

        Args:
          fail: is called with the slot and the error of a row that cannot be continued, while all
            others can; the slot is free again. By default the error is raised.

        Returns:
          The new tokens by slot; slots of rows that have ended are free again.

        Raises:
          Exception: that of a program that has lost the cache, and every row with it.
        """
        self._fill(fail)
        rows = {i: row for i, row in enumerate(self._rows) if row and i not in self._filling}
        updates = {}
        for part, made in self._decode_parts(rows, fail):
            for slot, row in part.items():
                try:
                    updates[slot] = self._update(slot, row, made)
                except Exception as error:
                    self._give_up(slot, error, fail)
        return updates

    def _update(self, slot: int, row: _Row, made: Made) -> Update:
        """Adds what was made to a row; frees its slot where it has ended."""
        ids = [token for token in made.ids_TB[:, slot].tolist() if token >= 0]
        row.cached += len(ids)
        row.tokens += ids
        finish = 'stop' if ids[-1] in self._ends else '' if row.left else 'length'
        count = len(ids) - (finish == 'stop')
        update = Update(_tokens(made, slot, count, row.request.top), finish)
        if finish:
            self.release(slot)
        elif row.cached == self.capacity:
            row.first = len(row.tokens) - max(1, self.capacity // 2)
            row.cached = 0
            self._filling.append(slot)
        return update

    def _give_up(self, slot: int, error: Exception, fail: Callable[[int, Exception], None]) -> None:
        """Frees the slot of a row that an error has ended; raises it where the cache is lost."""
        try:
            jax.block_until_ready(self._layers)
        except Exception:  # a program that fails has often taken its arguments already
            error.add_note('The cache is lost, and with it every text under way.')
            raise error from None
        self.release(slot)
        fail(slot, error)

    def _decode_parts(
        self, rows: dict[int, _Row], fail: Callable[[int, Exception], None]
    ) -> Iterator[tuple[dict[int, _Row], Made]]:
        """Yields rows and what is made for them: all at once, or each alone if that fails, so that
        the row to blame is the only one that ends.
        """
        if not rows:
            return
        try:
            made = self._decode(rows)
        except Exception as error:
            if len(rows) == 1:
                self._give_up(*rows, error, fail)
                return
        else:
            yield rows, made
            return
        for slot, row in rows.items():
            yield from self._decode_parts({slot: row}, fail)

    def _fill(self, fail: Callable[[int, Exception], None]) -> None:
        """Reads tokens of rows that wait, in turn, BUDGET at most if others are ready to go on."""
        read, ready = 0, self.free + len(self._filling) < len(self._rows)
        while self._filling and not (ready and read >= BUDGET):
            slot = self._filling.popleft()
            row = self._rows[slot]
            count = min(row.unread, CHUNK)
            if count:
                begin = row.first + row.cached
                part = row.tokens[begin : begin + count]
                try:
                    self._read(slot, row.cached, part)
                except Exception as error:
                    self._give_up(slot, error, fail)
                    continue
                row.cached += count
                read += count
            if row.unread:
                self._filling.append(slot)
            else:
                ready = True

    def _read(self, slot: int, start: int, part: list[int]) -> None:
        """Reads tokens of a row behind the first `start`, padded to a power of two."""
        length = power_of_two(max(SHORTEST, len(part)))
        tokens_1T = np.zeros((1, length), np.int32)
        tokens_1T[0, : len(part)] = part
        self._make_room(start + len(part))
        self._layers = self._programs.read(
            self._variables, self._layers, self.capacity, tokens_1T, slot, start, len(part)
        )

    def _make_room(self, needed: int) -> None:
        """Gives the cache room for rows of `needed` tokens, and for those it holds, but not much
        more: what is read for each token is all of it.
        """
        needed = max(needed, *(row.cached for row in self._rows if row))
        room = next(room for room in self._rooms if room >= needed)
        if room != self._room:
            self._layers = resized(self._layers, self._rooms[room])
            self._room = room

    def _decode(self, rows: dict[int, _Row]) -> Made:
        """Returns what is made for the rows, on the host."""
        n, most = len(self._rows), max(row.request.top for row in rows.values())
        last_B, length_B, place_B, left_B = np.zeros((4, n), np.int32)
        samplings = [Sampling(temperature=0)] * n
        for slot, row in enumerate(self._rows):
            if row:
                length_B[slot] = row.cached
        for slot, row in rows.items():
            last_B[slot], place_B[slot] = row.tokens[-1], len(row.tokens)
            left_B[slot] = min(row.left, self.capacity - row.cached, AT_ONCE)
            samplings[slot] = row.request.sampling
        self._make_room(int(np.max(length_B + left_B)))
        made, self._layers = self._programs.decode(
            self._variables,
            self._layers,
            self.capacity,
            last_B,
            length_B,
            place_B,
            left_B,
            Samplings.of(samplings),
            self._ends,
            most,
        )
        return jax.device_get(made)


def _tokens(made: Made, slot: int, count: int, top: int) -> list[Token]:
    """Returns the first `count` tokens of a slot, with the `top` likeliest beside each."""
    ids_T, log_p_T = (x[:count, slot].tolist() for x in (made.ids_TB, made.log_p_TB))
    likeliest = (x[:count, slot, :top].tolist() for x in (made.top_ids_TBK, made.top_log_p_TBK))
    pairs = [tuple(zip(*both, strict=True)) for both in zip(*likeliest, strict=True)]
    return [Token(*one) for one in zip(ids_T, log_p_T, pairs, strict=True)]
