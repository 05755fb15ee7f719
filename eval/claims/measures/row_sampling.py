"""Noise of the gradient if rows of text are drawn by their difficulty."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from eval.suites.influence import compute_document_gradients
from lm import data
from lm.training.state import build_learner, init_state, make_hyper

STATES, EVERY = (50, 100, 200), 50  # steps after which gradients are taken; steps of a program
ROWS, SEEDS = 128, 5


@measure(*(f'variance_by_{score}_after_{steps}' for score in ('el2n', 'norm') for steps in STATES))
def sampled_rows() -> Iterator[Estimate]:
    """Yields the gradient variance of a row drawn with probability p_i, relative to uniform draws.

    The estimate g_i / (N p_i) has the gradient of all N rows as its mean, whatever p is, and the
    variance sum |g_i|^2 / p_i / N^2 - |mean g|^2. The measure therefore needs no draws. p is
    proportional to the mean of |softmax - onehot| over the row, the proxy of arXiv:2302.14772 as in
    the suite `influence`. The model of configs/studies/small.py is evaluated after STATES steps on
    its own text, on ROWS rows of it. The same follows for p proportional to |g_i|, whose variance
    is the lowest of all.
    """
    ratios_S2T = np.array([_variance_ratios(seed) for seed in range(SEEDS)])
    yield from (mean_over_seeds(ratios_S, 'log') for ratios_S in ratios_S2T.reshape(SEEDS, -1).T)


@functools.cache
def _build_programs():
    """Returns the recipe, its text, and the compiled programs, which all seeds share."""
    recipe = lab.read_recipe({'train.steps': STATES[-1], 'model.scan_layers': True})
    dataset = data.open_dataset(recipe.data, say=lambda line: None)
    tokenizer = dataset.tokenizer
    sizes = tokenizer.vocab_size, tokenizer.bos_id
    learner = build_learner(recipe, *sizes, jax.default_backend())
    hyper = make_hyper(recipe)
    train = jax.jit(functools.partial(lab.train_model, learner, hyper))
    init = jax.jit(functools.partial(init_state, learner, hyper))
    return recipe, dataset, init, train, jax.jit(functools.partial(_row_norms, learner))


def _variance_ratios(seed: int) -> tuple[list[float], list[float]]:
    """Returns the ratios after STATES steps, of draws by el2n and by the norm of the gradient."""
    recipe, dataset, init, train, row_norms = _build_programs()
    state, by_el2n, by_norm = init(jax.random.key(seed)), [], []
    row_ids = np.random.default_rng(seed).choice(len(dataset.train), ROWS, replace=False)
    rows = _stack_rows([dataset.train[int(i)] for i in row_ids])
    for start in range(0, STATES[-1], EVERY):
        steps, size = range(start, start + EVERY), recipe.data.batch_size
        batches = [data.batch_at(dataset.train, i, batch_size=size, seed=seed) for i in steps]
        state = train(state, _stack_rows(batches))
        if start + EVERY in STATES:
            norms, el2n, mean_square = jax.device_get(row_norms(state.weights, rows))
            by_el2n.append(_variance_ratio(norms, el2n, mean_square))
            by_norm.append(_variance_ratio(norms, norms, mean_square))
    return by_el2n, by_norm


def _variance_ratio(norms: np.ndarray, chances: np.ndarray, mean_square: float) -> float:
    """Returns the variance with these probabilities over the variance of uniform draws.

    mean_square: |mean g|^2.
    """
    squares, p = np.float64(norms) ** 2, chances / np.sum(chances, dtype=np.float64)
    sampled, uniform = np.sum(squares / p) / len(p) ** 2, np.mean(squares)
    return float((sampled - mean_square) / (uniform - mean_square))


def _stack_rows(rows: list[dict]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _row_norms(learner, weights, rows):
    """Returns |gradient| and el2n of each row [N], and |mean gradient|^2."""

    def add(total, row):
        gradient, statistics = compute_document_gradients(learner, weights, row)
        square = sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradient))
        return jax.tree.map(jnp.add, total, gradient), (jnp.sqrt(square), statistics['el2n'])

    total, (norms, chances) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights.params), rows)
    square = sum(jnp.vdot(x, x) for x in jax.tree.leaves(total))
    return norms, chances, square / len(norms) ** 2
