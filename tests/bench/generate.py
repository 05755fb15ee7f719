"""Tokens a second of generation: with the cache, and reading the whole window for each token.

    uv run python -m tests.bench.generate [--rounds=3]

The default model with random weights, one prompt of 8 tokens, up to rows of 256 and 1,024 tokens,
greedy; every program compiled before. Both give the same tokens.
"""

import argparse
import os
import statistics
import time

from lm.launch.before_jax import has_accelerator

PROMPT = 8


def learner_and_variables(length: int):
    import jax

    from configs import default
    from lm.config.resolve import resolve
    from lm.training.state import build_learner, hyper_from, init_state

    config = default.get_config()
    config.data.seq_len = length
    config = resolve(config)
    learner = build_learner(config, 4096, 0, jax.devices()[0].platform)
    state = jax.jit(lambda key: init_state(learner, hyper_from(config), key))(jax.random.key(0))
    return learner, learner.variables(state.weights)


def with_cache(learner, variables, length: int):
    """run(row) -> the row gone on to `length` tokens; a full cache is filled anew."""
    import jax
    import jax.numpy as jnp

    from eval.generate import Generator

    keys = jax.random.split(jax.random.key(0), 1)
    generator = Generator(learner, variables, length, lambda logits, key: jnp.argmax(logits), keys)

    def run(row: list[int]) -> list[int]:
        while len(row) < length:
            row = row + generator.more([row])[0]
        return row[:length]

    return run


def without_cache(learner, variables, length: int):
    """The same, the whole window read for each token."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def next_token(variables, window_1T, last):
        return jnp.argmax(learner.model.apply(variables, window_1T)[0, last])

    def run(row: list[int]) -> list[int]:
        while len(row) < length:
            window = jnp.array([row + [0] * (length - len(row))], jnp.int32)
            row = [*row, int(next_token(variables, window, len(row) - 1))]
        return row

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=3)
    rounds = parser.parse_args().rounds
    print('| row | way | tokens/s | times without |\n|---|---|---|---|')
    for length in (256, 1024):
        learner, variables = learner_and_variables(length)
        prompt = list(range(1, 1 + PROMPT))
        runs = {'with the cache': with_cache, 'without': without_cache}
        runs = {name: make(learner, variables, length) for name, make in runs.items()}
        rows = {name: run(prompt) for name, run in runs.items()}
        equal = sum(a == b for a, b in zip(*rows.values(), strict=True))
        rates = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run(prompt)
                rates[name].append((length - PROMPT) / (time.perf_counter() - start))
        slow = statistics.median(rates['without'])
        for name, found in rates.items():
            rate = statistics.median(found)
            print(f'| {length} | {name} | {rate:,.0f} | {rate / slow:.1f} |', flush=True)
        print(f'{equal} of {length} tokens are the same')


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
