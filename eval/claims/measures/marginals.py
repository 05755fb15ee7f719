"""Marginals of a random language from a single pass, against conditionals and exact values."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from lm.training.state import Learner, init_state, make_hyper
from modules.losses.marginals import (
    chain_conditionals,
    conditional_losses,
    consistency_losses,
    hide_tokens,
    log_conditionals,
    random_cut,
    random_ranks,
)

SYMBOLS, LENGTH = 4, 8
MASK = SYMBOLS  # the token in hidden places
ROWS, STEPS, PEAK = 64, (1500, 2500), (5e-3, 3e-3)  # of conditionals, then of marginals
COMPARED, ORDERS, SEEDS = 256, 5, 5  # rows; orders whose mean probability is compared with
COUNTS = {'rows': LENGTH, 'halves': LENGTH // 2}  # known places of the compared parts
HEADS = ('f', 'f_of_all_hidden', 'supervised_f')
MODEL = {
    'model.d_model': 32,
    'model.n_layers': 2,
    'model.n_heads': 2,
    'model.n_kv_heads': 2,
    'model.d_ff': 128,
    'model.position': 'learned',
    'data.objective': 'prefix',  # a whole row is one prefix, whose tokens see each other
    'data.seq_len': LENGTH,
    'kernels.attention': 'reference',  # rows are short
}

Params = dict[str, Any]
Layers = list[tuple[jax.Array, jax.Array]]  # matrices and biases


@measure(
    *(
        f'rank_correlation_of_{head}_with_{reference}_of_{part}'
        for head in HEADS[:2]
        for part in COUNTS
        for reference in ('conditionals', 'exact')
    ),
    'rank_correlation_of_supervised_f_with_exact_of_rows',
)
def any_order_marginals() -> Iterator[Estimate]:
    """Yields rank correlations of a network's single output with probabilities of rows and halves.

    Rows of LENGTH symbols come from a Markov chain that is drawn for each of SEEDS. A model of two
    blocks without a causal mask learns conditionals from random cuts. Then a head on its last
    activations learns the marginals, f, with all other weights frozen (arXiv:2310.12920). Both see
    fresh rows. The head has the depth and the relative width of the head in the authors' code,
    which reads the mean over places.

    COMPARED rows, and COMPARED random parts of LENGTH / 2 places, get a log-probability from f;
    from conditionals, as the log of the mean over ORDERS of their product, as in that code; and
    from the chain, exactly. rank_correlation: Spearman's, of two of these.

    f_of_all_hidden: a head that learns from the sum of the conditionals of all hidden places
    instead of that of the next place. supervised_f: a head that learns the exact values.
    """
    learner, _ = lab.build_small_learner(MODEL, SYMBOLS + 1, MASK)
    train_and_score = jax.jit(functools.partial(_train, learner))
    by_seed = [rank_correlations(*train_and_score(jax.random.key(s))) for s in range(SEEDS)]
    correlations_HCS = np.moveaxis(np.array(by_seed), 0, -1)
    for correlations_S in (*correlations_HCS[0], *correlations_HCS[1], correlations_HCS[2][1]):
        yield _estimate_correlation(correlations_S)


def _estimate_correlation(correlations: np.ndarray) -> Estimate:
    """Returns the mean, with an interval of Fisher's z, the logit of (1 + r) / 2."""
    share = mean_over_seeds((1 + correlations) / 2, 'logit')
    value, low, high = (2 * x - 1 for x in (share.value, share.low, share.high))
    return dataclasses.replace(
        share, value=value, low=low, high=high, deviation=2 * share.deviation
    )


def draw_chain(key: jax.Array) -> jax.Array:
    """Draws P[i, j] = p(symbol j after i), rows from a Dirichlet distribution."""
    return jax.random.dirichlet(key, jnp.full(SYMBOLS, 0.3), (SYMBOLS,))


def draw_rows(key: jax.Array, chain_VV: jax.Array, rows: int) -> jax.Array:
    """Draws rows of LENGTH symbols; the first symbol is uniform.

    Args:
      key: random key.
      chain_VV: transition probabilities.
      rows: number of rows.
    """
    first_key, rest_key = jax.random.split(key)
    first_B = jax.random.randint(first_key, (rows,), 0, SYMBOLS)
    ends_VV = jnp.cumsum(chain_VV, 1)

    def draw_next(last_B, uniform_B):
        n_passed_B = jnp.sum(ends_VV[last_B] < uniform_B[:, None], 1, dtype=jnp.int32)
        symbol_B = jnp.minimum(n_passed_B, SYMBOLS - 1)  # a sum may round to just under 1
        return symbol_B, symbol_B

    uniform_TB = jax.random.uniform(rest_key, (LENGTH - 1, rows))
    _, rest_TB = jax.lax.scan(draw_next, first_B, uniform_TB)
    return jnp.concatenate([first_B[None], rest_TB]).T


def exact_marginals(chain_VV: Any, known_BT: Any) -> Any:
    """Returns p of the symbols other than MASK, [B], by the forward algorithm."""
    symbols_V = np.arange(SYMBOLS)

    def matches(known_B):
        return (known_B[:, None] == MASK) | (known_B[:, None] == symbols_V[None])

    p_BV = matches(known_BT[:, 0]) / SYMBOLS
    for known_B in known_BT[:, 1:].T:
        p_BV = (p_BV @ chain_VV) * matches(known_B)
    return p_BV.sum(1)


def apply_model(
    learner: Learner, params: Params, known_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies the model to rows with hidden places.

    Args:
      learner: the model.
      params: its parameters.
      known_BT: symbols, MASK in hidden places.

    Returns:
      (logits of the symbols [B, T, V], the last activations of each row [B, T * D]).
    """
    x_BTD, readout = cast(
        Any,
        learner.model.apply(
            {'params': params}, known_BT, prefix_BT=jnp.ones_like(known_BT), method='activations'
        ),
    )
    return readout(x_BTD)[..., :SYMBOLS], x_BTD.reshape(len(x_BTD), -1)


def init_head(key: jax.Array) -> Layers:
    """Draws the weights of a head with two hidden layers of four times the model's width."""
    width = MODEL['model.d_model']
    sizes = (LENGTH * width, 4 * width, 4 * width, 1)
    init, keys = jax.nn.initializers.xavier_uniform(), jax.random.split(key, 3)
    shapes = itertools.pairwise(sizes)
    return [(init(k, s), jnp.zeros(s[1])) for k, s in zip(keys, shapes, strict=True)]


def apply_head(layers: Layers, x_BD: jax.Array) -> jax.Array:
    """Returns f, one number for each row, [B]."""
    for weight, bias in layers[:-1]:
        x_BD = jax.nn.gelu(jnp.einsum('bd,de->be', x_BD, weight) + bias[None])
    weight, bias = layers[-1]
    return jnp.einsum('bd,do->b', x_BD, weight) + bias


def _train(learner, key):
    """Trains a model and HEADS; returns (the chain, `_score_parts` of them)."""
    chain_key, start_key, head_key, conditional_key, marginal_key, row_key, part_key = (
        jax.random.split(key, 7)
    )
    chain_VV = draw_chain(chain_key)

    def draw_batch(key):
        row_key, cut_key = jax.random.split(key)
        return draw_rows(row_key, chain_VV, ROWS), random_cut(cut_key, ROWS, LENGTH)

    def minimize(loss, params, key, steps, peak):
        adam = optax.adam(optax.cosine_decay_schedule(peak, steps))
        return lab.train(loss, params, adam, jax.random.split(key, steps)).params

    def conditional_loss(params, key):
        tokens_BT, cut = draw_batch(key)
        logits_BTV, _ = apply_model(learner, params, hide_tokens(tokens_BT, cut.known_BT, MASK))
        return jnp.mean(conditional_losses(logits_BTV, tokens_BT, cut.known_BT))

    def marginal_loss(heads, key):
        tokens_BT, cut = draw_batch(key)
        hidden_1T = jnp.full((1, LENGTH), MASK, tokens_BT.dtype)
        after_BT = hide_tokens(tokens_BT, cut.known_BT | cut.next_BT, MASK)
        rest_BT = jnp.concatenate([after_BT, hidden_1T])
        logits_BTV, before_BD = apply_model(
            learner, params, hide_tokens(tokens_BT, cut.known_BT, MASK)
        )
        _, rest_BD = apply_model(learner, params, rest_BT)

        def consistency_loss(layers, next_BT):
            log_p_B = log_conditionals(logits_BTV, tokens_BT, next_BT)
            before_B, f_B = apply_head(layers, before_BD), apply_head(layers, rest_BD)
            losses_B = consistency_losses(before_B, log_p_B, f_B[:-1], f_B[-1], LENGTH)
            return jnp.mean(losses_B)

        error_B = apply_head(heads['supervised_f'], rest_BD) - jnp.log(
            exact_marginals(chain_VV, rest_BT)
        )
        # The heads share no weights, so that each learns as it would alone.
        return (
            consistency_loss(heads['f'], cut.next_BT)
            + consistency_loss(heads['f_of_all_hidden'], ~cut.known_BT)
            + jnp.mean(error_B**2)
        )

    start = init_state(learner, make_hyper(learner.recipe), start_key).params
    params = minimize(conditional_loss, start, conditional_key, STEPS[0], PEAK[0])
    heads = dict.fromkeys(HEADS, init_head(head_key))
    heads = minimize(marginal_loss, heads, marginal_key, STEPS[1], PEAK[1])
    tokens_BT = draw_rows(row_key, chain_VV, COMPARED)
    return chain_VV, _score_parts(learner, params, heads, part_key, tokens_BT)


def _score_parts(learner, params, heads, key, tokens_BT):
    """Returns (known symbols, f minus f of hidden rows, log p by ORDERS chains) by COUNTS.

    f of each of HEADS, [H, B].
    """

    def conditionals(known_BT):
        return apply_model(learner, params, known_BT)[0]

    def f(known_BT):
        x_BD = apply_model(learner, params, known_BT)[1]
        return jnp.stack([apply_head(heads[name], x_BD) for name in HEADS])

    parts = []
    for count in COUNTS.values():
        part_key, order_key = jax.random.split(jax.random.fold_in(key, count))
        is_known_BT = random_ranks(part_key, COMPARED, LENGTH) < count
        known_BT = hide_tokens(tokens_BT, is_known_BT, MASK)

        def score_chain(key, is_known_BT=is_known_BT, count=count):
            ranks_BT = random_ranks(key, COMPARED, LENGTH) + LENGTH * ~is_known_BT
            order_BT = jnp.argsort(jnp.argsort(ranks_BT, 1), 1)
            return chain_conditionals(conditionals, tokens_BT, order_BT, count, MASK)

        chains_OB = jax.lax.map(score_chain, jax.random.split(order_key, ORDERS))
        parts.append((known_BT, f(known_BT) - f(jnp.full_like(known_BT[:1], MASK)), chains_OB))
    return parts


def rank_correlations(
    chain_VV: np.ndarray, by_part: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> list[list[float]]:
    """Returns the values of `any_order_marginals` for one seed, by head.

    by_part: as returned by `_score_parts`.
    """
    correlations = []
    for part in by_part:
        known_BT, f_HB, chains_OB = (np.array(x) for x in part)
        mean_B = np.logaddexp.reduce(np.float64(chains_OB), 0)
        exact_B = exact_marginals(np.asarray(chain_VV, np.float64), known_BT)
        correlations.append(
            [
                [float(stats.spearmanr(f_B, other_B)[0]) for other_B in (mean_B, exact_B)]
                for f_B in np.asarray(f_HB, np.float64)
            ]
        )
    return [list(itertools.chain(*by_head)) for by_head in zip(*correlations, strict=True)]
