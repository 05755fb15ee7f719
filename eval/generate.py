"""Samples text from a checkpoint.

python -m eval.generate --checkpoint=DIR --prompt=TEXT [--prompt=TEXT ...] [--tokens=N]
  [--temperature=T] [--top_k=K] [--seed=N]
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from eval.load import Checkpoint, define_checkpoint, load
from lm.inference.decoding import Cache, extend, init_cache
from lm.launch.command import parse_flags, run_main
from lm.training.state import Learner

CHECKPOINT = define_checkpoint()
PROMPT = flags.DEFINE_multi_string(
    'prompt', [''], 'Text to go on from; empty: from the beginning. Several are gone on together.'
)
TOKENS = flags.DEFINE_integer('tokens', 128, 'How many to sample at most.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float('temperature', 0.8, '0 takes the likeliest.', lower_bound=0)
TOP_K = flags.DEFINE_integer('top_k', 0, 'Sample among the K likeliest; 0: all.', lower_bound=0)
SEED = flags.DEFINE_integer('seed', 0, 'Of the sampling.')

AT_ONCE = 16  # tokens that a call of a program samples; ends of documents are looked for after it


def sample(
    logits_V: jax.Array, key: jax.Array, temperature: jax.Array | float, top_k: int
) -> jax.Array:
    """A token from softmax(logits / temperature) over the top_k largest (0: all); argmax at 0."""
    if top_k:
        least = jax.lax.top_k(logits_V, min(top_k, logits_V.shape[-1]))[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature == 0, jnp.argmax(logits_V), drawn)


def generate(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> list[str]:
    """Continues each prompt by up to `tokens` tokens, to the end of the document at most.

    Rows of different length are read together, and each is what it would be alone. Tokens are read
    once, into a cache of data.seq_len tokens at most; where a row fills it, the later half of what
    it holds is read again from position 0, and what lies before is forgotten.
    """
    tokenizer = checkpoint.tokenizer
    rows = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    starts, ended = [len(row) for row in rows], [False] * len(rows)
    capacity = min(checkpoint.recipe.data.seq_len, max(starts) + tokens)
    draw = functools.partial(sample, temperature=temperature, top_k=top_k)
    fold_in = functools.partial(jax.random.fold_in, jax.random.key(seed))
    keys_B = jax.vmap(fold_in)(jnp.arange(len(rows)))
    variables = jax.device_put(checkpoint.variables)
    generator = Generator(checkpoint.learner, variables, capacity, draw, keys_B)
    while not all(ended):
        for i, new in enumerate(generator.more(rows)):
            for token in new:
                ended[i] |= token == tokenizer.eos_id or len(rows[i]) == starts[i] + tokens
                if not ended[i]:
                    rows[i].append(token)
    return [tokenizer.decode(row[1:]) for row in rows]


class Generator:
    """Continues rows of tokens, some at a time, with a program that reads and one that samples.

    draw(logits_V, key) -> token. keys_B: the random key of each row.
    """

    def __init__(
        self,
        learner: Learner,
        variables: Any,
        capacity: int,
        draw: Callable[[jax.Array, jax.Array], jax.Array],
        keys_B: jax.Array,
    ):
        self._learner, self._variables, self._keys_B = learner, variables, keys_B
        self.capacity = capacity
        self._cache: Cache | None = None
        self._drawn = 0

        def read(variables, cache, tokens_BT, counts_B):
            return extend(learner, variables, cache, tokens_BT, counts_B)[1]

        def go_on(variables, cache, tokens_B, keys_B, drawn, count):
            """(the next `count` tokens, in [AT_ONCE, B]; the cache, without the last of them)."""

            def one(i, carry):
                cache, tokens_B, found_TB = carry
                logits_B1V, cache = extend(learner, variables, cache, tokens_B[:, None])
                keys = jax.vmap(lambda key: jax.random.fold_in(key, drawn + i))(keys_B)
                tokens_B = jax.vmap(draw)(logits_B1V[:, 0], keys).astype(jnp.int32)
                return cache, tokens_B, found_TB.at[i].set(tokens_B)

            nothing = jnp.zeros((AT_ONCE, len(tokens_B)), jnp.int32)
            cache, _, found_TB = jax.lax.fori_loop(0, count, one, (cache, tokens_B, nothing))
            return found_TB, cache

        self._read = jax.jit(read, donate_argnums=1)
        self._go_on = jax.jit(go_on, donate_argnums=1)

    def more(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The next tokens of each row. The rows are those of the previous call with the tokens that
        it returned; a shorter row has ended, and its tokens here mean nothing.
        """
        if self._cache is None:
            self._cache = self._filled(rows, self.capacity - 1)
        if int(jnp.max(self._cache.lengths_B)) == self.capacity:
            self._cache = self._filled(rows, self.capacity // 2 - 1)
        count = min(AT_ONCE, self.capacity - int(jnp.max(self._cache.lengths_B)))
        last_B = np.array([row[-1] for row in rows], np.int32)
        tokens_TB, self._cache = self._go_on(
            self._variables, self._cache, last_B, self._keys_B, self._drawn, count
        )
        self._drawn += count
        return np.asarray(tokens_TB)[:count].T.tolist()

    def _filled(self, rows: Sequence[Sequence[int]], most: int) -> Cache:
        """A cache of up to `most` tokens before the last one of each row."""
        kept = [list(row[max(0, len(row) - 1 - most) : -1]) for row in rows]
        counts = [len(row) for row in kept]
        length = 2 ** math.ceil(math.log2(max(1, *counts)))  # few lengths: few programs
        tokens_BT = np.array([row + [0] * (length - len(row)) for row in kept], np.int32)
        cache = init_cache(self._learner, self._variables, len(rows), self.capacity)
        return self._read(self._variables, cache, tokens_BT, np.array(counts, np.int32))


def main(_) -> None:
    checkpoint = load(CHECKPOINT.value)
    options = (TOKENS.value, TEMPERATURE.value, TOP_K.value, SEED.value)
    print('\n\n'.join(generate(checkpoint, PROMPT.value, *options)))


if __name__ == '__main__':
    flags.mark_flag_as_required('checkpoint')
    app.run(run_main(main), flags_parser=parse_flags)
