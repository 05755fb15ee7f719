"""Cross-entropy with the readout by chunks of tokens, beside all logits at once, in one run.

    uv run python -m tests.bench.loss [--rounds=3]

Value and gradients of activations and readout, each case compiled before and run in turn;
temporaries are allocated by the compiled program.
"""

import argparse
import os
import statistics
import time

from lm.launch.before_jax import has_accelerator

SIZES = (  # tokens, vocabulary, width, type
    (4096, 4096, 128, 'float32'),  # the default config
    (4096, 8192, 512, 'float32'),
    (8192, 50304, 768, 'float32'),
    (8192, 50304, 768, 'bfloat16'),
)
ROW = 256  # tokens


def compile_loss(tokens: int, vocab: int, width: int, dtype: str, chunk: int):
    """Returns (run(), bytes of temporaries)."""
    import jax
    import jax.numpy as jnp

    from modules.kernels.matmul import direct
    from modules.losses import LOSSES, chunk_loss
    from modules.products import Readout

    loss = chunk_loss(LOSSES['cross_entropy'], chunk)
    shape, keys = (tokens // ROW, ROW), jax.random.split(jax.random.key(0), 3)

    def value_and_grads(x, weight, labels):
        def mean(x, weight):
            readout = Readout(weight, None, 0.0, direct, jnp.dtype(dtype))
            sums = loss(x, readout, labels, jnp.ones(shape))
            return sums['objective'] / tokens

        return jax.value_and_grad(mean, argnums=(0, 1))(x, weight)

    x = jax.random.normal(keys[0], (*shape, width), dtype)
    weight = jax.random.normal(keys[1], (width, vocab)) / width**0.5
    labels = jax.random.randint(keys[2], shape, 0, vocab)
    program = jax.jit(value_and_grads).lower(x, weight, labels).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(program(x, weight, labels)), temporary_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=3)
    rounds = parser.parse_args().rounds
    from modules.losses import select_chunk_size

    print('| tokens, vocabulary, width | type | tokens at a time | ms | temporaries, MB |')
    print('|---|---|---|---|---|')
    for tokens, vocab, width, dtype in SIZES:
        chunks = sorted({0, select_chunk_size(tokens, vocab), tokens // 8, tokens // 16})
        programs = {chunk: compile_loss(tokens, vocab, width, dtype, chunk) for chunk in chunks}
        seconds = {chunk: [] for chunk in chunks}
        for _ in range(1 + rounds):
            for chunk, (run, _) in programs.items():
                start = time.perf_counter()
                run()
                seconds[chunk].append(time.perf_counter() - start)
        for chunk, (_, temporary_bytes) in programs.items():
            ms, name = 1e3 * statistics.median(seconds[chunk][1:]), chunk or 'all'
            sizes = f'{tokens:,}, {vocab:,}, {width}'
            print(
                f'| {sizes} | {dtype} | {name} | {ms:.0f} | {temporary_bytes / 1e6:.0f} |',
                flush=True,
            )


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
