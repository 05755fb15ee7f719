"""Reference: marginals against sums over all rows, and correlations of values made by hand.
Property: no causal mask.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims import lab
from eval.claims.measures import marginals
from eval.claims.measures.marginals import (
    MASK,
    SYMBOLS,
    draw_rows,
    exact_marginals,
    rank_correlations,
)

CHAIN = np.random.default_rng(0).dirichlet(np.full(SYMBOLS, 0.5), SYMBOLS)


def test_marginals_are_sums_over_rows():
    """All parts of rows of 4: the product of the chain's steps, summed over hidden symbols."""
    rows = np.array([*itertools.product(range(SYMBOLS), repeat=4)])
    p = CHAIN[rows[:, :-1], rows[:, 1:]].prod(1) / SYMBOLS
    known_symbols = np.array([*itertools.product(range(SYMBOLS + 1), repeat=4)])
    agree = ((known_symbols[:, None] == rows[None]) | (known_symbols[:, None] == MASK)).all(-1)
    np.testing.assert_allclose(exact_marginals(CHAIN, known_symbols), agree @ p, atol=1e-12)


def test_rows_follow_chain():
    """Frequencies of first symbols and of pairs, within 5 deviations of the least likely."""
    draw = jax.jit(draw_rows, static_argnums=2)
    rows = np.array(draw(jax.random.key(0), jnp.float32(CHAIN), 2**14))
    assert np.abs(np.bincount(rows[:, 0]) / len(rows) - 1 / SYMBOLS).max() < 5 * 0.5 / 2**7
    for symbol in range(SYMBOLS):
        following = rows[:, 1:][rows[:, :-1] == symbol]
        frequencies = np.bincount(following, minlength=SYMBOLS) / len(following)
        assert np.abs(frequencies - CHAIN[symbol]).max() < 5 * 0.5 / np.sqrt(len(following))


@pytest.fixture(scope='module')
def learner_and_params():
    """Returns the learner and its initial weights."""
    learner, hyper = lab.build_small_learner(marginals.MODEL, SYMBOLS + 1, MASK)
    start = jax.jit(lambda key: marginals.init_state(learner, hyper, key).params)
    return learner, start(jax.random.key(0))


def test_position_sees_all_others(learner_and_params):
    """Catches a causal mask: the logits of each place change with a symbol in any other place."""
    learner, params = learner_and_params
    rows = np.full((marginals.LENGTH + 1, marginals.LENGTH), MASK)
    rows[np.arange(marginals.LENGTH), np.arange(marginals.LENGTH)] = 1
    logits, _ = jax.jit(lambda tokens: marginals.apply_model(learner, params, tokens))(
        jnp.array(rows)
    )
    assert (np.abs(logits[:-1] - logits[-1:]).max(-1) > 1e-5).all()


@pytest.mark.full
def test_score_depends_on_known_symbols_only(learner_and_params, monkeypatch):
    """Catches chains that start from hidden symbols: changing these changes nothing."""
    monkeypatch.setattr(marginals, 'COMPARED', 4)
    learner, params = learner_and_params
    heads = dict.fromkeys(marginals.HEADS, marginals.init_head(jax.random.key(1)))
    key = jax.random.key(2)
    rows = jax.random.randint(key, (4, marginals.LENGTH), 0, SYMBOLS)
    score = jax.jit(lambda rows: marginals._score_parts(learner, params, heads, key, rows))
    known_symbols, f, chains = score(rows)[1]
    other_known, other_f, other_chains = score(
        jnp.where(known_symbols == MASK, (rows + 1) % SYMBOLS, rows)
    )[1]
    np.testing.assert_array_equal(other_known, known_symbols)
    np.testing.assert_array_equal(other_f, f)
    np.testing.assert_array_equal(other_chains, chains)
    assert np.abs(score((rows + 1) % SYMBOLS)[1][2] - chains).min() > 0


def test_correlations_with_known_ranks():
    """Three rows: f of a head equals the mean probability of the conditionals plus 0.5, in the
    order of the truth; another head gives the opposite order for the second part.
    """
    known_symbols = np.array([[0, 1], [0, 2], [0, 3]])
    exact = exact_marginals(CHAIN, known_symbols)
    ranks = exact.argsort().argsort()
    chains = np.log(np.stack([0.1 + 0.1 * ranks, 0.3 + 0.3 * ranks]))
    right_B = np.log(0.2 + 0.2 * ranks) + 0.5
    first, second = (
        (known_symbols, np.stack([right_B, right_B]), chains),
        (known_symbols, np.stack([right_B, -exact]), chains),
    )
    correlations = rank_correlations(CHAIN, [first, second])
    np.testing.assert_allclose(correlations, [[1, 1, 1, 1], [1, 1, -1, -1]])
