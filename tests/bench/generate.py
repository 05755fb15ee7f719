"""Tokens a second of generation: with the cache, and reading the whole window for each token.

    uv run python -m tests.bench.generate [--rounds=3]

The default model with random weights, one prompt of 8 tokens, up to rows of 256 and 1,024 tokens,
greedy; every program compiled before. Both give the same tokens.
"""

import argparse
import os
import statistics
import time

from lm.run.process import has_accelerator

PROMPT = 8


def learner_and_variables(length: int):
    import jax

    from configs import default
    from lm.config import resolve
    from lm.state import build_learner, hyper_from, init_state

    config = default.get_config()
    config.data.seq_len = length
    config = resolve(config)
    learner = build_learner(config, 4096, 0, jax.devices()[0].platform)
    state = jax.jit(lambda key: init_state(learner, hyper_from(config), key))(jax.random.key(0))
    return learner, learner.variables(state.weights)


def cached(learner, variables, row: list[int], length: int) -> list[int]:
    import jax
    import jax.numpy as jnp

    from eval.generate import Generator

    if cached.generator is None:
        draw = lambda logits_V, key: jnp.argmax(logits_V)  # noqa: E731
        cached.generator = Generator(learner, variables, length, draw, jax.random.split(jax.random.key(0), 1))
    cached.generator.reset()
    while len(row) < length:
        row = row + cached.generator.more([row])[0]
    return row[:length]
