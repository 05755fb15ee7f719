"""Reference: known marginals against a sum over all rows, and what is compared against values made
by hand. Property: no causal mask. Contract: the measure has the values of its row.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import marginals
from eval.claims.measures.marginals import MASK, SYMBOLS, compared, draw_rows, exact_marginals
from eval.claims.measures.rows import MEASURES

CHAIN = np.random.default_rng(0).dirichlet(np.full(SYMBOLS, 0.5), SYMBOLS)


def test_known_marginals_are_sums_over_rows():
    """All parts of rows of 4: the product of the chain's steps, summed over what is hidden."""
    rows = np.array([*itertools.product(range(SYMBOLS), repeat=4)])
    p = CHAIN[rows[:, :-1], rows[:, 1:]].prod(1) / SYMBOLS
    seen = np.array([*itertools.product(range(SYMBOLS + 1), repeat=4)])
    agree = ((seen[:, None] == rows[None]) | (seen[:, None] == MASK)).all(-1)
    np.testing.assert_allclose(exact_marginals(CHAIN, seen), np.log(agree @ p), atol=1e-12)


def test_rows_are_of_the_chain():
    """Frequencies of first symbols and of pairs, within 5 deviations of the least likely."""
    draw = jax.jit(draw_rows, static_argnums=2)
    rows = np.array(draw(jax.random.key(0), jnp.float32(CHAIN), 2**14))
    assert np.abs(np.bincount(rows[:, 0]) / len(rows) - 1 / SYMBOLS).max() < 5 * 0.5 / 2**7
    for symbol in range(SYMBOLS):
        following = rows[:, 1:][rows[:, :-1] == symbol]
        found = np.bincount(following, minlength=SYMBOLS) / len(following)
        assert np.abs(found - CHAIN[symbol]).max() < 5 * 0.5 / np.sqrt(len(following))


@pytest.fixture(scope='module')
def untrained():
    """The learner, and weights as they start."""
    recipe = marginals.small(marginals.MODEL)
    learner = marginals.build_learner(recipe, SYMBOLS + 1, MASK, 'cpu')
    hyper = marginals.hyper_from(recipe)
    start = jax.jit(lambda key: marginals.init_state(learner, hyper, key).params)
    return learner, start(jax.random.key(0))


def test_every_place_sees_every_other(untrained):
    """Catches a causal mask: each place's logits change with a symbol in any other place."""
    learner, params = untrained
    rows = np.full((marginals.LENGTH + 1, marginals.LENGTH), MASK)
    rows[np.arange(marginals.LENGTH), np.arange(marginals.LENGTH)] = 1
    logits, _ = jax.jit(lambda seen: marginals.read(learner, params, seen))(jnp.array(rows))
    assert (np.abs(logits[:-1] - logits[-1:]).max(-1) > 1e-5).all()


def test_what_is_compared():
    """Three rows: f is the conditionals' mean probability and 0.5, in the order of the truth."""
    seen = np.array([[0, 1], [0, 2], [0, 3]])
    exact = exact_marginals(CHAIN, seen)
    ranks = exact.argsort().argsort()
    chains = np.log(np.stack([0.1 + 0.1 * ranks, 0.3 + 0.3 * ranks]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marginals, 'ORDERS', 2)
        found = compared(CHAIN, {'rows': (seen, np.log(0.2 + 0.2 * ranks) + 0.5, chains)})
        other = compared(CHAIN, {'rows': (seen, -exact, chains)})
    np.testing.assert_allclose(found.pop('error_of_rows'), 0.5, rtol=1e-6)
    assert set(found.values()) == {1.0}
    signs = {
        name: other[f'rank_correlation_of_{name}_of_rows']
        for name in ('f_with_exact', 'f_with_conditionals', 'conditionals_with_exact')
    }
    assert signs == {'f_with_exact': -1, 'f_with_conditionals': -1, 'conditionals_with_exact': 1}


@pytest.mark.full
def test_the_measure_has_the_values_of_its_row(monkeypatch):
    """Catches training that goes up, and conditionals of another half than f's."""
    monkeypatch.setattr(marginals, 'STEPS', (300, 3))
    monkeypatch.setattr(marginals, 'SEEDS', 2)
    monkeypatch.setattr(marginals, 'COMPARED', 128)
    found = MEASURES['any_order_marginals'].compute()
    assert found.keys() == set(MEASURES['any_order_marginals'].values)
    for part in marginals.COUNTS:
        assert found[f'rank_correlation_of_conditionals_with_exact_of_{part}'].value > 0.6
