"""Layers: the loss without each block, and the angles by which blocks turn the residual stream."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult, Table
from eval.suites.reading import jit_statistic, validation_batches
from lm.inference.blocks import select_blocks
from lm.inference.probes import join_blocks
from lm.inference.scoring import fetch_pipelined
from lm.model.block import ACTIVATIONS, AFTER_MLP, EMBEDDING
from lm.training.state import Hyper, Learner, Weights
from lm.training.step import Batch, compute_activations, target_weights, token_sums
from modules.options import Option

TITLES = {
    'removal': 'loss increase',
    'angle': 'angular distance',
    'influence': 'block influence',
}


def layers(
    checkpoint: Checkpoint,
    *,
    tokens: Annotated[int, Option('approximate number of validation tokens; 0: all', 0)] = 16_384,
    gap: Annotated[int, Option('largest number of blocks between two streams; 0: any', 0)] = 0,
) -> SuiteResult:
    """Measures the effect of each block on loss and residual stream.

    removal_ is the loss without a block minus the loss, in nats per token. angle_ is (1 / pi)
    arccos of the cosine between input and output of a block, and influence_ is 1 - cosine; both are
    averaged over tokens. _max, _mean and _last summarise the blocks (arXiv:2403.17887,
    arXiv:2403.03853). If a placement has two streams, angles are measured on the stream that the
    next block reads.

    Args:
      checkpoint: a loaded checkpoint.
      tokens: approximate number of validation tokens to read; 0: all.
      gap: largest number of blocks between two streams; 0: any.
    """
    c = checkpoint
    L = c.recipe.model.n_layers
    loss, angles = jit_statistic(c, sum_cross_entropy), jit_statistic(c, sum_stream_angles)
    # All blocks, then all blocks but one.
    masks = [np.ones(L, bool), *~np.eye(L, dtype=bool)]
    ce, sums, n_tokens = np.zeros(L + 1), np.zeros((2, L + 1, L + 1)), 0.0
    for batch in validation_batches(c, open_data(c).validation, tokens):
        ce += list(fetch_pipelined(loss(c.weights, batch, c.hyper, mask_L) for mask_L in masks))
        batch_sums, n = jax.device_get(angles(c.weights, batch, c.hyper))
        sums, n_tokens = sums + batch_sums, n_tokens + float(n)
    angle, influence = sums / n_tokens
    by_block = {
        'removal': (ce[1:] - ce[0]) / n_tokens,
        'angle': np.diagonal(angle, 1),
        'influence': np.diagonal(influence, 1),
    }
    numbers = {'ce': float(ce[0]) / n_tokens, 'tokens': n_tokens}
    for name, values in by_block.items():
        summaries = {'max': values.max(), 'mean': values.mean(), 'last': values[-1]}
        numbers |= {f'{name}_{statistic}': float(value) for statistic, value in summaries.items()}
    columns = {'layer': list(range(1, L + 1))}
    columns |= {TITLES[name]: values.tolist() for name, values in by_block.items()}
    tables = {
        'Loss without each block': Table(columns, x='layer', y=TITLES['removal']),
        'Angular distance of the streams before blocks': distance_table(angle, gap or L),
    }
    return SuiteResult(numbers, {}, tables)


def sum_cross_entropy(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper, kept_L: jax.Array
) -> jax.Array:
    """Returns the sum of the cross-entropy over targets, with some blocks removed.

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
      kept_L: whether each block stays.
    """
    variables = select_blocks(learner, learner.variables(weights), kept_L)
    return token_sums(learner, variables, batch, hyper)['ce']


def sum_stream_angles(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper
) -> tuple[jax.Array, jax.Array]:
    """Returns (`sum_angles` of the L + 1 streams before and after blocks, the number of targets).

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
    """
    variables = learner.variables(weights)
    _, filled = compute_activations(learner, variables, batch, (ACTIVATIONS,), hyper)
    activations = join_blocks(learner.recipe, filled[ACTIVATIONS])
    streams_LBTD = jnp.concatenate([activations[EMBEDDING][None], activations[AFTER_MLP]])
    weights_BT = target_weights(batch, learner.bos_id)
    return sum_angles(streams_LBTD, weights_BT), jnp.sum(weights_BT)


def sum_angles(streams: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns sums over tokens of the angle over pi and of 1 - cosine between streams, [2, L, L].

    The angle between unit vectors u and v is 2 arctan(|u - v| / |u + v|). It is exact even for a
    cosine near 1; its arccos would have no correct digits. A vector of zeros is at a right angle to
    all vectors.

    Args:
      streams: [L, ..., D].
      weights: of the tokens, [...].
    """
    streams = streams.astype(jnp.float32)
    lengths = jnp.linalg.norm(streams, axis=-1, keepdims=True)
    units = streams / jnp.where(lengths > 0, lengths, 1.0)

    def compare(u, v):
        difference, total = jnp.linalg.norm(u - v, axis=-1), jnp.linalg.norm(u + v, axis=-1)
        angle = 2 / jnp.pi * jnp.arctan2(difference, total)
        return jnp.sum(weights * angle), jnp.sum(weights * (1 - jnp.sum(u * v, -1)))

    return jnp.stack(jax.lax.map(lambda u: jax.lax.map(lambda v: compare(u, v), units), units))


def distance_table(angle_LL: np.ndarray, gap: int) -> Table:
    """Returns the distance between the inputs of blocks l and l + n, for all l and all n up to
    `gap`.

    The stream after the last block counts as the input of a further block.
    """
    n_streams = len(angle_LL)
    rows = [
        (first + 1, n, float(angle_LL[first, first + n]))
        for n in range(1, min(gap, n_streams - 1) + 1)
        for first in range(n_streams - n)
    ]
    heads = ('layer', 'blocks apart', 'angular distance')
    return Table.from_rows(heads, rows, x='layer', y='angular distance', by='blocks apart')
