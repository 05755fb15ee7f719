"""Reference: losses of marginals against all 4^5 marginals of a drawn distribution over rows of 5
tokens from 3, summed in NumPy. Property: cuts are uniform.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.losses.marginals import (
    chain_conditionals,
    conditional_losses,
    consistency_losses,
    hide_tokens,
    log_conditionals,
    random_cut,
    random_ranks,
)

LENGTH, WORDS = 5, 3
MASK = WORDS
ROWS = np.array([*itertools.product(range(WORDS), repeat=LENGTH)])  # [3^5, 5]
PARTS = np.array([*itertools.product((False, True), repeat=LENGTH)])  # [2^5, 5]
P = np.random.default_rng(0).dirichlet(np.full(len(ROWS), 0.3)) * 0.99 + 0.01 / len(ROWS)


def marginal_table():
    """Returns log p [4, 4, 4, 4, 4] of visible tokens; MASK stands for a token that is summed
    over.
    """
    table = np.empty([WORDS + 1] * LENGTH)
    for visible in itertools.product(range(WORDS + 1), repeat=LENGTH):
        is_open = np.array(visible) == MASK
        agree = np.all(is_open | (visible == ROWS), 1)
        table[visible] = np.log(P[agree].sum())
    return table


TABLE = marginal_table()


def log_marginals(visible_BT):
    return jnp.float32(TABLE)[tuple(visible_BT.T)]


def conditional_table():
    """Returns logits [4, 4, 4, 4, 4, 5, 3]: log p(word at a position | the other visible tokens).

    A number is added for each position. At a visible position the logits favour its own word, as a
    network would.
    """
    table = np.empty((*TABLE.shape, LENGTH, WORDS))
    for place in range(LENGTH):
        by_word = np.moveaxis(TABLE, place, 0)[:WORDS]
        at_place = np.moveaxis(table[..., place, :], place, 0)
        at_place[MASK] = np.moveaxis(by_word, 0, -1) + place
        for word in range(WORDS):
            at_place[word] = 9 * (np.arange(WORDS) == word)
    return table


LOGITS = conditional_table()


def conditionals(visible_BT):
    return jnp.float32(LOGITS)[tuple(visible_BT.T)]


@pytest.fixture(scope='module')
def cuts():
    """Returns all rows with all cuts: (tokens, known, next), [3^5 * 80, 5]."""
    pairs = [
        (part, np.arange(LENGTH) == place) for part in PARTS for place in np.flatnonzero(~part)
    ]
    tokens = np.repeat(ROWS, len(pairs), 0)
    is_known, following = (np.tile(np.stack(x), (len(ROWS), 1)) for x in zip(*pairs, strict=True))
    return tuple(jnp.array(x) for x in (tokens, is_known, following))


def loss_inputs(cuts):
    tokens, is_known, following = cuts
    before = hide_tokens(tokens, is_known, MASK)
    log_p = log_conditionals(conditionals(before), tokens, following)
    return before, log_p, hide_tokens(tokens, is_known | following, MASK)


def test_consistency_loss_is_0_only_at_marginals(cuts):
    """f plus c per known position is off by c everywhere; f plus c, only for the empty row."""

    @jax.jit
    def losses(slope, shift):
        before, log_p, after = loss_inputs(cuts)

        def f(visible_BT):
            return log_marginals(visible_BT) + slope * jnp.sum(visible_BT != MASK, 1) + shift

        (empty,) = f(jnp.full((1, LENGTH), MASK))
        return consistency_losses(f(before), log_p, f(after), empty, LENGTH)

    np.testing.assert_allclose(losses(0.0, 0.0), 0, atol=1e-9)
    np.testing.assert_allclose(losses(0.3, 0.0), LENGTH * 0.3**2, rtol=1e-3)
    np.testing.assert_allclose(losses(0.0, 0.7), 0.7**2, rtol=1e-3)


def test_consistency_loss_moves_f_only():
    """Gradients by (before, conditional, after, empty) at an f that is too large by 0.5."""
    log_p = [jnp.float32([x]) for x in (-1.0, -2.0, -2.5)]

    def loss(*log_p):
        return consistency_losses(*log_p, LENGTH)[0]

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*log_p, jnp.float32(-0.25))
    np.testing.assert_allclose(np.concatenate([np.ravel(x) for x in gradients]), [-5, 0, 5, -0.5])


def test_conditional_losses_sum_to_entropy(cuts):
    """-1/T sum p log p, over rows by p and over known positions by the probability of a cut."""
    is_known = jnp.array(PARTS[:-1])  # the last has no place left
    chance = np.array([1 / (LENGTH * math.comb(LENGTH, part.sum())) for part in PARTS[:-1]])

    @jax.jit
    def mean(tokens):
        visible = hide_tokens(tokens[None], is_known, MASK)
        rows = jnp.broadcast_to(tokens[None], visible.shape)
        return jnp.vdot(chance, conditional_losses(conditionals(visible), rows, is_known))

    losses = np.array([mean(jnp.array(row)) for row in ROWS])
    np.testing.assert_allclose(P @ losses, -P @ np.log(P) / LENGTH, rtol=1e-4)


@pytest.mark.parametrize('count', [2, LENGTH])
def test_chain_matches_marginal(count):
    """Each row has its own order."""
    ranks = random_ranks(jax.random.key(1), len(ROWS), LENGTH)
    actual = jax.jit(
        lambda: chain_conditionals(conditionals, jnp.array(ROWS), ranks, count, MASK)
    )()
    expected = TABLE[tuple(np.where(ranks < count, ROWS, MASK).T)]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('count', [0, LENGTH + 1])
def test_impossible_count_is_rejected(count):
    ranks = random_ranks(jax.random.key(1), len(ROWS), LENGTH)
    with pytest.raises(ValueError, match=rf'between 1 and the length of a row, 5; got {count}'):
        chain_conditionals(conditionals, jnp.array(ROWS), ranks, count, MASK)


def test_random_cuts_are_uniform():
    """1 / (T C(T, n) (T - n)) for each n known positions and a next one, within 5 deviations."""
    draws = 2**16
    cut = jax.jit(lambda key: random_cut(key, draws, LENGTH))(jax.random.key(2))
    is_known, following = (np.array(x) for x in cut)
    assert (following.sum(1) == 1).all() and not (is_known & following).any()
    bits = 2 ** np.arange(LENGTH)
    counts = np.zeros((2**LENGTH, LENGTH))
    np.add.at(counts, (is_known @ bits, following.argmax(1)), 1)
    for number in range(2**LENGTH):
        n = number.bit_count()
        for place in range(LENGTH):
            possible = not number >> place & 1
            chance = possible / (LENGTH * math.comb(LENGTH, n) * max(LENGTH - n, 1))
            spread = math.sqrt(draws * chance * (1 - chance))
            assert abs(counts[number, place] - draws * chance) <= 5 * spread
