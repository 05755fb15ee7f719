"""Scores prompts: the log-probability of each token, and the likeliest tokens in its place."""

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
    """Computes the log-probability of the next token, and the `count` likeliest tokens.

    All values come from the same array: if the next token is the likeliest, its log-probability
    equals the first of `top` exactly.

    Args:
      count: K, at most V.
      logits_BCV: logits.
      next_BC: ids of the next tokens.

    Returns:
      {'log_p': [B, C], 'top': log-probabilities [B, C, K], 'ids': of these tokens [B, C, K]}.
    """
    log_p_BCV = jax.nn.log_softmax(logits_BCV, -1)
    log_p_BC = jnp.take_along_axis(log_p_BCV, next_BC[..., None], -1)[..., 0]
    top_BCK, ids_BCK = jax.lax.top_k(log_p_BCV, min(count, log_p_BCV.shape[-1]))
    return {'log_p': log_p_BC, 'top': top_BCK, 'ids': ids_BCK}


class PromptScorer:
    """Scores many prompts in a single program, as the evaluation does."""

    def __init__(self, checkpoint: Checkpoint):
        # Two programs: many clients (lm-eval) ask for the likeliest token alone, few for more.
        counts = (1, MAX_ALTERNATIVES)
        statistics = {count: functools.partial(score_alternatives, count) for count in counts}
        self._scorers = {n: Scorer(checkpoint, statistic) for n, statistic in statistics.items()}
        self.max_length = checkpoint.recipe.data.seq_len  # tokens of a prompt

    def __call__(self, rows: Sequence[Sequence[int]], top: int) -> list[list[Token]]:
        """Returns the tokens after the first of each row, and after them the likeliest next token.

        Args:
          rows: token ids, at most `max_length` in each.
          top: number of likeliest tokens at each position.
        """
        count = min(n for n in self._scorers if n >= top)
        # The appended 0 makes room for scores of the token after the row; its own is not used.
        scores = self._scorers[count]([[*row, 0] for row in rows])
        return [
            build_tokens(row, row_scores, top) for row, row_scores in zip(rows, scores, strict=True)
        ]


def build_tokens(row: Sequence[int], scores: dict[str, np.ndarray], top: int) -> list[Token]:
    """Returns the scored tokens of a row, and the likeliest token after it.

    Args:
      row: token ids.
      scores: `score_alternatives` of the row.
      top: number of alternatives to keep.
    """
    likeliest = zip(scores['ids'].tolist(), scores['top'].tolist(), strict=True)
    pairs = [tuple(zip(ids, values, strict=True)) for ids, values in likeliest]
    following = [*row[1:], pairs[-1][0][0]]
    log_ps = [*scores['log_p'][:-1].tolist(), pairs[-1][0][1]]
    return [
        Token(token, log_p, alternatives[:top])
        for token, log_p, alternatives in zip(following, log_ps, pairs, strict=True)
    ]
