"""Samples text from a checkpoint.

python -m eval.generate --checkpoint=DIR --prompt=TEXT [--tokens=N] [--temperature=T] [--top_k=K]
"""

from lm.run.process import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import jax
import jax.numpy as jnp
from absl import app, flags

from eval.load import Checkpoint, load
from eval.program import run_main

CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Workdir, or WORKDIR/checkpoints/STEP.')
PROMPT = flags.DEFINE_string('prompt', '', 'Text to go on from; empty: from the beginning.')
TOKENS = flags.DEFINE_integer('tokens', 128, 'How many to sample at most.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float('temperature', 0.8, '0 takes the likeliest.', lower_bound=0)
TOP_K = flags.DEFINE_integer('top_k', 0, 'Sample among the K likeliest; 0: all.', lower_bound=0)
SEED = flags.DEFINE_integer('seed', 0, 'Of the sampling.')


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
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """The prompt and up to `tokens` more tokens, to the end of the document at most.

    One compiled program reads a window of data.seq_len tokens for each new one; what lies before
    the window is forgotten.
    """
    length, tokenizer = checkpoint.config.data.seq_len, checkpoint.tokenizer

    @jax.jit
    def next_token(variables, window_1T, last, key):
        logits_1TV = checkpoint.model.apply(variables, window_1T)
        return sample(logits_1TV[0, last], key, temperature, top_k)

    variables, ids = checkpoint.variables, [tokenizer.bos_id, *tokenizer.encode(prompt)]
    for key in jax.random.split(jax.random.key(seed), tokens):
        seen = ids[-length:]
        window_1T = jnp.array([seen + [0] * (length - len(seen))], jnp.int32)
        token = int(next_token(variables, window_1T, len(seen) - 1, key))
        if token == tokenizer.eos_id:
            break
        ids.append(token)
    return tokenizer.decode(ids[1:])


def main(_) -> None:
    checkpoint = load(CHECKPOINT.value)
    options = (TOKENS.value, TEMPERATURE.value, TOP_K.value, SEED.value)
    print(generate(checkpoint, PROMPT.value, *options))


if __name__ == '__main__':
    flags.mark_flag_as_required('checkpoint')
    app.run(run_main(main))
