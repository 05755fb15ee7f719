"""Losses of several next tokens from the same logits, with weights that change over a run.

It is the multi-token prediction of the code of modded-nanogpt, without parameters.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from modules.losses.base import Loss, Sums

EXAMPLE = "For example: '1 0.5 0.25:0, 1 0.5:0, 1'."

Stages = tuple[tuple[tuple[float, float], ...], ...]


def parse_token_weights(path: str, text: str) -> Stages:
    """Returns ((1, 1), (0.5, 0)) of each stage, for each next token, for '1 0.5:0, ...'.

    Stages are equally long parts of a run. A stage names the weight of the next token, of the one
    after it, and so on; `a:b` goes from a to b linearly.

    Args:
      path: the field, for errors.
      text: its value.

    Returns:
      The weights at start and end of each stage. All stages have equally many: those of tokens that
      a stage does not name are 0.

    Raises:
      ValueError: for text that names no such weights.
    """
    stages = [
        [_parse_range(path, text, word) for word in stage.split()] for stage in text.split(',')
    ]
    if any(not stage or min(stage[0]) <= 0 for stage in stages):
        raise ValueError(
            f'{path}: each stage must begin with the weight of the next token, above 0; got '
            f'{text!r}. {EXAMPLE}'
        )
    count = max(map(len, stages))
    return tuple((*stage, *[(0.0, 0.0)] * (count - len(stage))) for stage in stages)


def _parse_range(path: str, text: str, word: str) -> tuple[float, float]:
    try:
        start, end = (float(number) for number in (word.split(':') * 2)[:2])
    except ValueError:
        start = end = math.nan
    if word.count(':') > 1 or not (0 <= start < math.inf and 0 <= end < math.inf):
        raise ValueError(
            f'{path}: {word!r} is no weight, a number of at least 0 or two of them as in 0.5:0; '
            f'got {text!r}. {EXAMPLE}'
        )
    return start, end


def token_weights_at(stages: Stages, share: Any) -> jax.Array:
    """Returns the weights of the next tokens, [n], at a share of the run.

    Args:
      stages: from `parse_token_weights`.
      share: of the run that is done, 0 to 1; may be a tracer.
    """
    ranges_SN2 = jnp.asarray(stages, jnp.float32)
    position = jnp.float32(share) * len(stages)
    stage = jnp.clip(jnp.floor(position).astype(jnp.int32), 0, len(stages) - 1)
    start_N, end_N = jnp.moveaxis(ranges_SN2[stage], 1, 0)
    return start_N + (end_N - start_N) * jnp.clip(position - stage, 0, 1)


def shift_targets(
    labels_BT: jax.Array, weights_BT: jax.Array, segments_BS: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns labels and weights [B, T, n] of the next `count` tokens of each position.

    A token counts if it is itself a target, and belongs to the document of the position.

    Args:
      labels_BT: the next token of each position.
      weights_BT: above 0 if it is a target.
      segments_BS: the document of each token, S = T + 1; positions are the first T.
      count: n.
    """
    labels, weights = [labels_BT], [weights_BT]
    for k in range(1, count):
        widths = ((0, 0), (0, k))
        labels.append(jnp.pad(labels_BT[:, k:], widths))
        # The token k + 1 places on is the next token of the position k places on.
        is_same = segments_BS[:, k + 1 :] == segments_BS[:, : -k - 1]
        weights.append(jnp.pad(weights_BT[:, k:] * is_same, widths))
    return jnp.stack(labels, -1), jnp.stack(weights, -1)


def weigh_next_tokens(loss: Any) -> Loss:
    """Makes a loss of several next tokens: `objective = sum_k w_k objective_k`.

    The logits are computed once. Terms other than `objective` are those of the next token alone.

    Args:
      loss: a row of `LOSSES` that depends on logits alone.

    Returns:
      A loss whose labels and weights are [..., n], with the further number `token_weights` [n].
    """

    @functools.wraps(loss)
    def weighted_loss(x, readout, labels, weights, *, token_weights, **numbers) -> Sums:
        logits = readout(x)
        sums: Sequence[Sums] = [
            loss(logits, lambda logits: logits, labels[..., k], weights[..., k], **numbers)
            for k in range(labels.shape[-1])
        ]
        objective = sum(token_weights[k] * terms['objective'] for k, terms in enumerate(sums))
        return sums[0] | {'objective': objective}

    return weighted_loss
