"""Noise of the gradient where rows of text are drawn by what is known of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, over_seeds
from eval.claims.measures.starts import small
from eval.suites.influence import document_gradients
from lm import data
from lm.training.state import build_learner, hyper_from, init_state
from lm.training.step import make_train_step

STATES, EVERY = (50, 100, 200), 50  # steps after which gradients are taken; steps of a program
ROWS, SEEDS = 128, 5
CHANCES = ('norm', 'el2n', 'loss')  # what rows are drawn in proportion to


def sampled_rows() -> dict[str, Estimate]:
    """Returns the variance of the gradient of a row drawn by a chance p_i of its own, over that of
    a row drawn evenly.

    The estimate is g_i / (N p_i), whose mean is that of all N rows whatever p is, and whose
    variance is sum |g_i|^2 / p_i / N^2 - |mean g|^2: nothing is drawn here. p is in proportion to
    |g_i|, which makes it least, to the mean of |softmax - onehot| over the row, the proxy of
    arXiv:2302.14772 as the suite `influence` has it, or to the loss. The model is that of
    configs/studies/small.py after STATES steps on its own text, the rows are ROWS of that.
    """
    each = [_ratios(seed) for seed in range(SEEDS)]
    return {name: over_seeds(found[name] for found in each) for name in each[0]}


@functools.cache
def _opened():
    """The recipe, its text, and the programs, which all seeds share."""
    recipe = small({'train.steps': STATES[-1], 'model.scan_layers': True})
    dataset = data.open_dataset(recipe.data, say=lambda line: None)
    tokenizer = dataset.tokenizer
    sizes = tokenizer.vocab_size, tokenizer.bos_id
    learner = build_learner(recipe, *sizes, jax.default_backend())
    step, hyper = make_train_step(learner), hyper_from(recipe)

    def train(state, batches):
        def one(state, batch):
            return step(state, batch, hyper)[0], None

        return jax.lax.scan(one, state, batches)[0]

    init = jax.jit(functools.partial(init_state, learner, hyper))
    return recipe, dataset, init, jax.jit(train), jax.jit(functools.partial(_seen, learner))


def _ratios(seed: int) -> dict[str, float]:
    recipe, dataset, init, train, seen = _opened()
    state, found = init(jax.random.key(seed)), {}
    chosen = np.random.default_rng(seed).choice(len(dataset.train), ROWS, replace=False)
    rows = _stacked([dataset.train[int(i)] for i in chosen])
    for done in range(0, STATES[-1], EVERY):
        steps, size = range(done, done + EVERY), recipe.data.batch_size
        batches = [data.batch_at(dataset.train, i, batch_size=size, seed=seed) for i in steps]
        state = train(state, _stacked(batches))
        if done + EVERY in STATES:
            of_rows, mean_square = jax.device_get(seen(state.weights, rows))
            for name in CHANCES:
                ratio = _ratio(of_rows['norm'], of_rows[name], mean_square)
                found[f'variance_by_{name}_after_{done + EVERY}'] = ratio
    return found


def _ratio(norms: np.ndarray, chances: np.ndarray, mean_square: float) -> float:
    """The variance by chances over that by equal ones. mean_square: |mean g|^2."""
    squares, p = np.float64(norms) ** 2, chances / np.sum(chances, dtype=np.float64)
    drawn, even = np.sum(squares / p) / len(p) ** 2, np.mean(squares)
    return float((drawn - mean_square) / (even - mean_square))


def _stacked(rows: list[dict]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _seen(learner, weights, rows):
    """{norm, el2n, loss} of each row [N], and |mean gradient|^2."""

    def add(total, row):
        gradient, seen = document_gradients(learner, weights, row)
        square = sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradient))
        kept = {'norm': jnp.sqrt(square), 'el2n': seen['el2n'], 'loss': seen['loss']}
        return jax.tree.map(jnp.add, total, gradient), kept

    total, of_rows = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights.params), rows)
    count = len(of_rows['norm'])
    return of_rows, sum(jnp.vdot(x, x) for x in jax.tree.leaves(total)) / count**2
