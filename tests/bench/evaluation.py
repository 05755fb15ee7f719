"""Tokens per second of evaluation, beside training of the same config, in one process.

    uv run python -m tests.bench.evaluation [--rounds=5] [--steps=4] [--change=PATH=VALUE ...]

The default config with random weights on rows of random tokens, every program compiled before. A
round times some training steps, then as many batches of each kind of evaluation: `rows` as the
loop's validation reads them, `scores` as suite perplexity does (a score of each token comes back),
and `packed` documents of a sixth to a whole row, as pairs and windows are scored, with tokens
counted without the padding. The goal is 2.5 times training's rate: a forward pass is a third of it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from lm.launch.before_jax import has_accelerator

VOCAB, GOAL = 4096, 2.5
Timed = dict[str, tuple[Callable[[], object], int]]  # what is run, and its tokens


def cases(changes: dict[str, object], steps: int) -> Timed:
    """Returns the timed functions, and how many tokens each reads."""
    import jax
    import numpy as np

    from configs import default
    from lm.config.resolve import resolve
    from lm.devices.mesh import make_mesh, put_batch
    from lm.devices.shardings import jit_init
    from lm.inference.load import Checkpoint
    from lm.inference.scoring import Scorer, fetch_pipelined, jit_score_batch, log_probabilities
    from lm.training.state import build_learner, make_hyper
    from tests.helpers import jit_eval_step, jit_train_step

    config = default.get_config()
    config.update_from_flattened_dict(changes)
    recipe = resolve(config)
    learner = build_learner(recipe, VOCAB, 0, jax.devices()[0].platform)
    hyper, mesh = make_hyper(recipe), make_mesh(recipe.mesh)
    size, length = recipe.data.batch_size, recipe.data.seq_len
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (size, length + 1), np.int32)
    batch = put_batch(mesh, {'tokens': tokens, 'segments': np.ones_like(tokens)})
    init, train_step = jit_init(learner, mesh), jit_train_step(learner, mesh)
    state = [init(jax.random.key(0), hyper)]
    weights = init(jax.random.key(0), hyper).weights
    eval_step = jit_eval_step(learner, mesh)
    score = jit_score_batch(learner, mesh, log_probabilities, recipe.data.mask_documents)
    scorer = Scorer(Checkpoint(None, recipe, 0, {}, learner, mesh, hyper, weights, tokenizer=None))
    lengths = rng.integers(length // 6, length + 2, steps * size * 2)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), steps * size * length)]
    documents = [rng.integers(1, VOCAB, n, np.int32) for n in lengths]

    def train() -> None:
        for _ in range(steps):
            state[0], metrics = train_step(state[0], batch, hyper)
        jax.block_until_ready(metrics)

    def rows() -> None:
        list(fetch_pipelined(eval_step(weights, batch, hyper) for _ in range(steps)))

    def scores() -> None:
        list(fetch_pipelined(score(weights, batch) for _ in range(steps)))

    full = steps * size * length
    return {
        'training': (train, full),
        'rows': (rows, full),
        'scores': (scores, full),
        'packed': (lambda: scorer(documents), int(lengths.sum())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--steps', type=int, default=4, help='batches of a round')
    parser.add_argument('--change', action='append', default=[], help='PATH=VALUE of the config')
    options = parser.parse_args()
    changes = dict(change.split('=', 1) for change in options.change)
    timed = cases({path: _value(text) for path, text in changes.items()}, options.steps)
    for run, _ in timed.values():
        run()  # compiles
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(options.rounds):
        for name, (run, tokens) in timed.items():
            start = time.perf_counter()
            run()
            rates[name].append(tokens / (time.perf_counter() - start))
    print('| what | tokens/s | times training, by round |\n|---|---|---|')
    for name, samples in rates.items():
        ratios = sorted(a / b for a, b in zip(samples, rates['training'], strict=True))
        span = f'{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})'
        print(f'| {name} | {statistics.median(samples):,.0f} | {span} |', flush=True)
    print(f'goal: {GOAL} times training')


def _value(text: str) -> object:
    """Returns a number if the text is a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
