"""Scores of prompts: the log-probability of each of their tokens, and the likeliest ones there."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lm.inference.engine import MAX_ALTERNATIVES, Token
from lm.inference.load import Checkpoint
from lm.inference.scoring import Scorer


def score_alternatives(
    count: int, logits_BCV: jax.Array, next_BC: jax.Array
) -> dict[str, jax.Array]:
    """Returns the log-probability of the next token, and the `count` likeliest with theirs.

    Both are read from one array: a token that is the likeliest has exactly the first of these.
    """
    log_p_BCV = jax.nn.log_softmax(logits_BCV, -1)
    log_p_BC = jnp.take_along_axis(log_p_BCV, next_BC[..., None], -1)[..., 0]
    top_BCK, ids_BCK = jax.lax.top_k(log_p_BCV, min(count, log_p_BCV.shape[-1]))
    return {'log_p': log_p_BC, 'top': top_BCK, 'ids': ids_BCK}


class PromptScorer:
    """Scores prompts as evaluation does, many in one program."""

    def __init__(self, checkpoint: Checkpoint):
        # Few clients ask for more than the likeliest one, and many for that (lm-eval).
        counts = (1, MAX_ALTERNATIVES)
        statistics = {count: functools.partial(score_alternatives, count) for count in counts}
        self._scorers = {n: Scorer(checkpoint, statistic) for n, statistic in statistics.items()}
        self.max_length = checkpoint.recipe.data.seq_len  # tokens of a prompt

    def __call__(self, rows: Sequence[Sequence[int]], top: int) -> list[list[Token]]:
        """Returns the tokens behind the first of each row, and behind them the likeliest next one.

        Args:
          rows: token ids, at most `longest` in each.
          top: how many of the likeliest tokens are wanted in each place.
        """
        count = min(one for one in self._scorers if one >= top)
        # What follows a row is scored too, in place of a token that is not read.
        found = self._scorers[count]([[*row, 0] for row in rows])
        return [build_tokens(row, scores, top) for row, scores in zip(rows, found, strict=True)]


def build_tokens(row: Sequence[int], scores: dict[str, np.ndarray], top: int) -> list[Token]:
    """Returns the scored tokens of a row, and the likeliest one behind it."""
    likeliest = zip(scores['ids'].tolist(), scores['top'].tolist(), strict=True)
    pairs = [tuple(zip(ids, values, strict=True)) for ids, values in likeliest]
    following = [*row[1:], pairs[-1][0][0]]
    log_ps = [*scores['log_p'][:-1].tolist(), pairs[-1][0][1]]
    return [
        Token(token, log_p, one[:top])
        for token, log_p, one in zip(following, log_ps, pairs, strict=True)
    ]
