"""Noise of the gradient where rows of text are drawn by what is known of them."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.lab import measure
from eval.suites.influence import compute_document_gradients
from lm import data
from lm.training.state import build_learner, init_state, make_hyper

STATES, EVERY = (50, 100, 200), 50  # steps after which gradients are taken; steps of a program
ROWS, SEEDS = 128, 5


@measure(*(f'variance_by_el2n_after_{steps}' for steps in STATES))
def sampled_rows() -> Iterable[Iterable[float]]:
    """Returns the variance of the gradient of a row drawn by a chance p_i of its own, over that of
    a row drawn evenly.

    The estimate is g_i / (N p_i), whose mean is that of all N rows whatever p is, and whose
    variance is sum |g_i|^2 / p_i / N^2 - |mean g|^2: nothing is drawn here. p is in proportion to
    the mean of |softmax - onehot| over the row, the proxy of arXiv:2302.14772 as the suite
    `influence` has it. The model is that of configs/studies/small.py after STATES steps on its own
    text, the rows are ROWS of that.
    """
    return zip(*(_variance_ratios(seed) for seed in range(SEEDS)), strict=True)


@functools.cache
def _build_programs():
    """The recipe, its text, and the programs, which all seeds share."""
    recipe = lab.read_recipe({'train.steps': STATES[-1], 'model.scan_layers': True})
    dataset = data.open_dataset(recipe.data, say=lambda line: None)
    tokenizer = dataset.tokenizer
    sizes = tokenizer.vocab_size, tokenizer.bos_id
    learner = build_learner(recipe, *sizes, jax.default_backend())
    hyper = make_hyper(recipe)
    train = jax.jit(functools.partial(lab.train_model, learner, hyper))
    init = jax.jit(functools.partial(init_state, learner, hyper))
    return recipe, dataset, init, train, jax.jit(functools.partial(_row_norms, learner))


def _variance_ratios(seed: int) -> list[float]:
    recipe, dataset, init, train, seen = _build_programs()
    state, found = init(jax.random.key(seed)), []
    chosen = np.random.default_rng(seed).choice(len(dataset.train), ROWS, replace=False)
    rows = _stack_rows([dataset.train[int(i)] for i in chosen])
    for done in range(0, STATES[-1], EVERY):
        steps, size = range(done, done + EVERY), recipe.data.batch_size
        batches = [data.batch_at(dataset.train, i, batch_size=size, seed=seed) for i in steps]
        state = train(state, _stack_rows(batches))
        if done + EVERY in STATES:
            norms, chances, mean_square = jax.device_get(seen(state.weights, rows))
            found.append(_variance_ratio(norms, chances, mean_square))
    return found


def _variance_ratio(norms: np.ndarray, chances: np.ndarray, mean_square: float) -> float:
    """The variance by chances over that by equal ones. mean_square: |mean g|^2."""
    squares, p = np.float64(norms) ** 2, chances / np.sum(chances, dtype=np.float64)
    drawn, even = np.sum(squares / p) / len(p) ** 2, np.mean(squares)
    return float((drawn - mean_square) / (even - mean_square))


def _stack_rows(rows: list[dict]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _row_norms(learner, weights, rows):
    """|gradient| and el2n of each row [N], and |mean gradient|^2."""

    def add(total, row):
        gradient, seen = compute_document_gradients(learner, weights, row)
        square = sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradient))
        return jax.tree.map(jnp.add, total, gradient), (jnp.sqrt(square), seen['el2n'])

    total, (norms, chances) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights.params), rows)
    square = sum(jnp.vdot(x, x) for x in jax.tree.leaves(total))
    return norms, chances, square / len(norms) ** 2
