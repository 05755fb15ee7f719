"""Generation of many rows at once: slots over one cache, which rows enter and leave at any time.

`eval.generate` and the server run the same engine, so that both give the same text. A row is what
it would be alone, whatever its slot and its neighbours, to rounding.
"""

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.inference.decoding import Cache, extend, init_cache
from lm.inference.load import Checkpoint
from lm.inference.sampling import Rows, Sampling, draw
from lm.training.state import Learner

AT_ONCE = 16  # tokens of a row that a step makes at most, without the host
CHUNK = 256  # tokens of a prompt that are read at once
BUDGET = 1024  # tokens of prompts that a step reads while others wait for theirs
MOST_ALTERNATIVES = 20  # that may be asked for with each token


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
    """The tokens that a step made for a row, without EOS, and why the row has ended: '' it has not,
    'stop' by EOS, 'length' by its max_tokens.
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
          ValueError: where the positions of the model end before `capacity`.
        """
        learner, longest = checkpoint.learner, checkpoint.recipe.data.seq_len
        self.capacity = longest if capacity is None else capacity
        self.vocab_size = learner.model.vocab_size
        self._eos = checkpoint.tokenizer.eos_id
        self._variables = jax.device_put(checkpoint.variables)
        self._cache = init_cache(learner, self._variables, slots, self.capacity)
        self._rows: list[_Row | None] = [None] * slots
        self._filling: collections.deque[int] = collections.deque()  # slots, first come first
        self._read, self._decode = programs(learner)

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

    def step(self) -> dict[int, Update]:
        """Reads prompts that wait, then makes up to AT_ONCE tokens of each row that is read.

        Returns:
          The new tokens by slot; slots of rows that have ended are free again.
        """
        self._fill()
        rows = {i: row for i, row in enumerate(self._rows) if row and i not in self._filling}
        if not rows:
            return {}
        ids_TB, log_p_TB, top_ids, top_log_p = self._decoded(rows)
        updates = {}
        for slot, row in rows.items():
            made = ids_TB[:, slot].tolist()
            made = made[: made.index(-1)] if -1 in made else made
            row.cached += len(made)
            row.tokens += made
            finish = 'stop' if made[-1] == self._eos else '' if row.left else 'length'
            log_p_T = log_p_TB[: len(made), slot].tolist()
            tokens = [
                Token(token, log_p, _pairs(top_ids, top_log_p, i, slot, row.request.top))
                for i, (token, log_p) in enumerate(zip(made, log_p_T, strict=True))
            ]
            updates[slot] = Update(tokens[:-1] if finish == 'stop' else tokens, finish)
            if finish:
                self.release(slot)
            elif row.cached == self.capacity:
                row.first = len(row.tokens) - max(1, self.capacity // 2)
                row.cached = 0
                self._filling.append(slot)
        return updates

    def _fill(self) -> None:
        """Reads tokens of rows that wait, BUDGET at most if others are ready to go on."""
        read, ready = 0, self.free + len(self._filling) < len(self._rows)
        while self._filling and not (ready and read >= BUDGET):
            slot = self._filling[0]
            row = self._rows[slot]
            count = min(row.unread, CHUNK)
            if count:
                begin = row.first + row.cached
                padded = np.zeros((1, 2 ** math.ceil(math.log2(count))), np.int32)
                padded[0, :count] = row.tokens[begin : begin + count]
                self._cache = self._read(
                    self._variables, self._cache, padded, slot, row.cached, count
                )
                row.cached += count
                read += padded.size
            if not row.unread:
                self._filling.popleft()
                ready = True

    def _decoded(self, rows: dict[int, _Row]) -> list[np.ndarray]:
        """Returns what `_decode` made for the rows, on the host."""
        n = len(self._rows)
        last_B, place_B, left_B, cached_B = (np.zeros(n, np.int32) for _ in range(4))
        samplings, most = [Sampling(temperature=0)] * n, 0
        for slot, row in enumerate(self._rows):
            if row:
                cached_B[slot] = row.cached
        for slot, row in rows.items():
            last_B[slot], place_B[slot] = row.tokens[-1], len(row.tokens)
            left_B[slot] = min(row.left, self.capacity - row.cached, AT_ONCE)
            samplings[slot] = row.request.sampling
            most = max(most, row.request.top)
        cache = self._cache.replace(lengths_B=jnp.asarray(cached_B))
        made, self._cache = self._decode(
            self._variables, cache, last_B, place_B, left_B, Rows.of(samplings), self._eos, most
        )
        return jax.device_get(made)


def _pairs(ids_TBK, log_p_TBK, i: int, slot: int, count: int) -> tuple[tuple[int, float], ...]:
    ids, log_p = ids_TBK[i, slot, :count].tolist(), log_p_TBK[i, slot, :count].tolist()
    return tuple(zip(ids, log_p, strict=True))


def programs(learner: Learner) -> tuple[Any, Any]:
    """Returns (read, decode), compiled once for each shape."""
    read_row = jax.jit(functools.partial(read, learner), donate_argnums=1)
    return read_row, jax.jit(functools.partial(decode, learner), donate_argnums=1)


def read(
    learner: Learner,
    variables: Any,
    cache: Cache,
    tokens_1T: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> Cache:
    """Reads `count` tokens of the row in `slot`, behind the `start` tokens it has."""
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, 1), cache.layers)
    own = Cache(own, jnp.full(1, start), cache.capacity)
    _, own = extend(learner, variables, own, tokens_1T, jnp.full(1, count))
    layers = jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 1),
        cache.layers,
        own.layers,
    )
    return cache.replace(layers=layers)


def decode(
    learner: Learner,
    variables: Any,
    cache: Cache,
    last_B: jax.Array,
    place_B: jax.Array,
    left_B: jax.Array,
    rows: Rows,
    eos: jax.Array,
    most: jax.Array,
) -> tuple[tuple[jax.Array, ...], Cache]:
    """Makes up to left_B tokens of each row, until EOS, behind its last token.

    place_B: the place of the first one in its row. most: of the likeliest tokens that a row asks
    for.

    Returns:
      ((tokens [AT_ONCE, B], -1 where there is none, their log-probabilities, the likeliest tokens
      [AT_ONCE, B, K], and theirs), the cache without the last token).
    """
    batch, kept = len(last_B), min(MOST_ALTERNATIVES, learner.model.vocab_size)

    def goes_on(carry):
        i, _, _, _, left_B, _ = carry
        return (i < AT_ONCE) & jnp.any(left_B > 0)

    def one(carry):
        i, cache, last_B, place_B, left_B, made = carry
        active_B = left_B > 0
        logits_B1V, cache = extend(
            learner, variables, cache, last_B[:, None], active_B.astype(jnp.int32)
        )
        logits_BV = logits_B1V[:, 0]
        token_B = draw(logits_BV, rows, place_B)
        found = (jnp.where(active_B, token_B, -1), *described(logits_BV, token_B, most, kept))
        made = tuple(x.at[i].set(new) for x, new in zip(made, found, strict=True))
        left_B = jnp.where(active_B & (token_B != eos), left_B - 1, 0)
        return i + 1, cache, jnp.where(active_B, token_B, last_B), place_B + 1, left_B, made

    none_TB = jnp.full((AT_ONCE, batch), -1, jnp.int32)
    zeros_TB = jnp.zeros((AT_ONCE, batch))
    made = (
        none_TB,
        zeros_TB,
        jnp.zeros((AT_ONCE, batch, kept), jnp.int32),
        jnp.zeros((AT_ONCE, batch, kept)),
    )
    carry = (0, cache, last_B, place_B, left_B, made)
    _, cache, *_, made = jax.lax.while_loop(goes_on, one, carry)
    return made, cache


def described(
    logits_BV: jax.Array, token_B: jax.Array, most: jax.Array, kept: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (log-probabilities of the tokens, the `kept` likeliest [B, K], and theirs); the last
    two are zeros where `most` is 0.
    """
    total_B = jax.nn.logsumexp(logits_BV, -1)
    log_p_B = jnp.take_along_axis(logits_BV, token_B[:, None], -1)[:, 0] - total_B

    def likeliest(logits_BV):
        values_BK, ids_BK = jax.lax.top_k(logits_BV, kept)
        return ids_BK, values_BK - total_B[:, None]

    def nothing(logits_BV):
        shape = (len(logits_BV), kept)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits_BV.dtype)

    return log_p_B, *jax.lax.cond(most > 0, likeliest, nothing, logits_BV)
