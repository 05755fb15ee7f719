"""Tokens per second of generation, by how many rows are generated together, beside PyTorch's.

    uv run python -m tests.bench.generate [--rounds=3] [--length=256] [--width=256]
        [--group=1] [--torch=PYTHON]

The default model, or one of another width, with random weights and `group` query heads for each key
head (PyTorch's decoder has one); prompts of 8 tokens, completed to rows of `length` tokens, greedy,
every program compiled before. Each case runs in its own processes, in turn, with equal malloc
settings; `--torch` names an interpreter with PyTorch (tests/bench/torch_generate.py).
`window` reads the whole row for each token instead of a cache. `filters` samples with top_k and
top_p.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lm.launch.before_jax import has_accelerator
from tests.bench.step import KEEPING

PROMPT = 8
SLOTS = (1, 4, 16, 64)
VOCAB = 4096


class Shape(NamedTuple):
    """Tokens of a row, features of a token, and query heads for each key head."""

    length: int
    width: int
    group: int


def build_config(shape: Shape):
    """Returns the default config with heads of 64 features and hidden layers of four widths."""
    from configs import default

    raw = default.get_config()
    raw.data.seq_len, raw.model.d_model = shape.length, shape.width
    raw.model.d_ff, raw.model.n_heads = 4 * shape.width, shape.width // 64
    raw.model.n_kv_heads = raw.model.n_heads // shape.group
    return raw


def random_checkpoint(shape: Shape):
    """Returns a model with random weights; nothing ends its rows."""
    import jax

    from lm.config.resolve import resolve
    from lm.data.tokenizers import TokenIds
    from lm.inference.load import Checkpoint
    from lm.training.state import build_learner, init_state, make_hyper

    recipe = resolve(build_config(shape))
    learner, hyper = build_learner(recipe, VOCAB, 0, jax.devices()[0].platform), make_hyper(recipe)
    state = jax.jit(lambda key: init_state(learner, hyper, key))(jax.random.key(0))
    tokenizer = TokenIds(VOCAB + 1, 0, VOCAB)
    return Checkpoint(
        Path(), recipe, 0, {}, learner, None, hyper, weights=state.weights, tokenizer=tokenizer
    )


def with_engine(slots: int, shape: Shape, **sampling):
    """Returns run() -> None, which completes all slots to rows of that length."""
    from lm.inference.engine import Engine, Request
    from lm.inference.sampling import Sampling

    engine = Engine(random_checkpoint(shape), slots)

    def run() -> None:
        for i in range(slots):
            tokens = tuple(range(i + 1, i + 1 + PROMPT))
            engine.admit(Request(tokens, shape.length - PROMPT, Sampling(**sampling, seed=i)))
        while engine.n_free < slots:
            engine.step()

    return run


def by_window(shape: Shape):
    """Returns the same for one row that is read whole for each token."""
    import jax
    import jax.numpy as jnp

    checkpoint = random_checkpoint(shape)
    variables, model = checkpoint.variables, checkpoint.model

    @jax.jit
    def next_token(variables, window_1T, last):
        return jnp.argmax(model.apply(variables, window_1T)[0, last])

    def run() -> None:
        row = list(range(1, 1 + PROMPT))
        while len(row) < shape.length:
            window = jnp.array([row + [0] * (shape.length - len(row))], jnp.int32)
            row.append(int(next_token(variables, window, len(row) - 1)))

    return run


def measure(case: str, slots: int, shape: Shape, rounds: int) -> None:
    """Prints the seconds of each round in this process; the first one, which compiles, too."""
    if case == 'window':
        run = by_window(shape)
    elif case == 'filters':
        run = with_engine(slots, shape, temperature=0.8, top_k=50, top_p=0.95)
    else:
        run = with_engine(slots, shape, temperature=0.0)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({'seconds': seconds}))


def commands(slots: int, flags: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the commands that measure each case in its own process."""
    cases = ('evenkeel', 'filters', *(['window'] if slots == 1 else []))
    shape = Shape(flags.length, flags.width, flags.group)
    options = [f'--slots={slots}', '--rounds=1']
    options += [f'--{name}={value}' for name, value in shape._asdict().items()]
    module = [sys.executable, '-m', 'tests.bench.generate']
    case_commands = {case: [*module, f'--measure={case}', *options] for case in cases}
    if flags.torch:
        model = build_config(shape).model
        sizes = (model.d_model, model.n_heads, model.n_layers, model.d_ff, shape.length, VOCAB)
        script = str(Path(__file__).with_name('torch_generate.py'))
        case_commands['torch'] = [flags.torch, script, *map(str, (*sizes, slots, PROMPT, 2))]
    return case_commands


def run_seconds(command: list[str]) -> float:
    """Returns the median of the rounds after the first."""
    child = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'} | KEEPING
    process = subprocess.run(command, env=child, check=True, capture_output=True, text=True)
    return statistics.median(json.loads(process.stdout.splitlines()[-1])['seconds'][1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--length', type=int, default=256)
    parser.add_argument('--width', type=int, default=256)
    parser.add_argument('--group', type=int, default=1, help='query heads for each key head')
    parser.add_argument('--torch', help='an interpreter that has PyTorch')
    parser.add_argument('--slots', type=int, nargs='*', default=SLOTS)
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        shape = Shape(flags.length, flags.width, flags.group)
        measure(flags.measure, *flags.slots, shape, flags.rounds)
        return
    print('| rows together | case | tokens/s | ms a token of all rows |\n|---|---|---|---|')
    for slots in flags.slots:
        samples = {case: [] for case in commands(slots, flags)}
        for _ in range(flags.rounds):
            for case, command in commands(slots, flags).items():
                samples[case].append(run_seconds(command))
        for case, seconds in samples.items():
            token_seconds = statistics.median(seconds) / (flags.length - PROMPT)
            print(
                f'| {slots} | {case} | {slots / token_seconds:,.0f} | {1e3 * token_seconds:.2f} |',
                flush=True,
            )


if __name__ == '__main__':
    if not has_accelerator():
        os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    main()
