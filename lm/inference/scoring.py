"""Scores each token of many rows, packed into few programs."""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsInt, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lm.data.rows import best_fit_decreasing
from lm.devices.mesh import (
    batch_parts,
    batch_sharding,
    put_batch,
    replicated_sharding,
    trace_on_mesh,
)
from lm.devices.shardings import state_shardings
from lm.inference.load import Checkpoint
from lm.training.state import Learner, Weights
from lm.training.step import loss_chunk_size
from modules.products import Readout

MAX_IN_FLIGHT = 8  # batches that wait on the devices
MAX_PROGRAMS = 8  # of learners, meshes and statistics
MIN_LENGTH = 32  # least tokens of a packed row

# (logits [B, C, V] float32, next tokens [B, C]) -> arrays [B, C, ...] by name.
Statistic = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]
Scores = dict[str, np.ndarray]


def log_probabilities(logits_BCV: jax.Array, next_BC: jax.Array) -> dict[str, jax.Array]:
    """Returns scores of the next token: its log-probability, and whether it is the likeliest.

    `log_p` is log softmax(logits) in nats; `is_likeliest` is True if no other token has a larger
    logit.
    """
    logit_BC = jnp.take_along_axis(logits_BCV, next_BC[..., None], -1)[..., 0]
    log_p_BC = logit_BC - jax.nn.logsumexp(logits_BCV, -1)
    return {'log_p': log_p_BC, 'is_likeliest': logit_BC == jnp.max(logits_BCV, -1)}


class Scorer:
    """Scores rows of tokens, each as a document that begins with its first token.

    Rows are packed as documents into longer rows, with a power of two or data.seq_len tokens, so
    that few programs serve all lengths. Batches are sharded over the checkpoint's mesh.
    """

    def __init__(self, checkpoint: Checkpoint, statistic: Statistic = log_probabilities):
        """Args:
        checkpoint: from `load`.
        statistic: computes the scores of each token from its logits.
        """
        self._checkpoint, mesh = checkpoint, checkpoint.mesh
        learner, data_config = checkpoint.learner, checkpoint.recipe.data
        n_rows = data_config.batch_size // checkpoint.recipe.train.microbatches
        self.max_length = (
            data_config.seq_len + 1
        )  # tokens of a row, the first of which is not scored
        self._batch_tokens = n_rows * data_config.seq_len
        self._step = jit_score_batch(learner, mesh, statistic, mask_documents=True)

    def __call__(
        self, rows: Sequence[Sequence[int]], weights: Weights | None = None
    ) -> list[Scores]:
        """Scores tokens 1, 2, ... of each row, given the tokens before.

        Args:
          rows: token ids, at most data.seq_len + 1 in each row; a row of one token has no scores.
          weights: replace the checkpoint's weights.

        Returns:
          Scores of each row by name.

        Raises:
          ValueError: if a row is too long, or empty.
        """
        lengths = np.array([len(row) for row in rows], np.int64)
        if not rows:
            return []
        if lengths.min() < 1 or lengths.max() > self.max_length:
            raise ValueError(
                f'each scored row must have 1 to {self.max_length} tokens (data.seq_len plus the '
                f'start token); got {lengths.min()} to {lengths.max()}. Shorten it.'
            )
        weights = self._checkpoint.weights if weights is None else weights
        width = min(self.max_length - 1, next_power_2(max(MIN_LENGTH, lengths.max() - 1)))
        packed_row = best_fit_decreasing(lengths, width + 1, np.zeros(0, np.int64))
        packing = [[] for _ in range(packed_row.max() + 1)]
        for i, row in enumerate(packed_row.tolist()):
            packing[row].append(i)
        n_shards = batch_parts(self._checkpoint.mesh)
        n_rows = min(max(1, self._batch_tokens // width), next_power_2(len(packing)))
        n_rows = -(-n_rows // n_shards) * n_shards
        groups = [packing[i : i + n_rows] for i in range(0, len(packing), n_rows)]
        batches = (pack_rows(rows, group, n_rows, width) for group in groups)
        step = functools.partial(self._step, weights)
        batch_scores = fetch_pipelined(
            step(put_batch(self._checkpoint.mesh, batch)) for batch in batches
        )
        scores: list[Scores] = [{}] * len(rows)
        for group, arrays in zip(groups, batch_scores, strict=True):
            for b, row_numbers in enumerate(group):
                start = 0
                for i in row_numbers:
                    span = slice(start, start + lengths[i] - 1)
                    scores[i] = {name: values[b, span] for name, values in arrays.items()}
                    start += lengths[i]
        return scores


@functools.lru_cache(MAX_PROGRAMS)
def jit_score_batch(
    learner: Learner, mesh: Mesh, statistic: Statistic, mask_documents: bool
) -> Callable[[Weights, Any], dict[str, jax.Array]]:
    """Jits `score_batch`, with the batch sharded by rows and the scores replicated.

    Checkpoints that share a learner (`lm.inference.load.load_step`) share its programs.

    Args:
      learner: the learner.
      mesh: the devices.
      statistic: computes the scores of each token from its logits.
      mask_documents: as in `score_batch`.

    Returns:
      The jitted function (weights, batch) -> scores by name.
    """
    score = functools.partial(score_batch, learner, statistic, mask_documents=mask_documents)
    return jax.jit(
        trace_on_mesh(mesh, score),
        in_shardings=(state_shardings(learner, mesh).weights, batch_sharding(mesh)),
        out_shardings=replicated_sharding(mesh),
    )


def score_batch(
    learner: Learner,
    statistic: Statistic,
    weights: Weights,
    batch: Mapping[str, jax.Array],
    mask_documents: bool = True,
) -> dict[str, jax.Array]:
    """Computes the statistic of each token but the first, with logits in chunks.

    Args:
      learner: the learner.
      statistic: computes the scores of each token from its logits.
      weights: the weights.
      batch: {'tokens', 'segments'} [B, T + 1], as `lm.data` makes it.
      mask_documents: whether attention stays within documents; overrides data.mask_documents.

    Returns:
      Arrays [B, T, ...] by name.
    """
    tokens_BT, next_BT = batch['tokens'][:, :-1], batch['tokens'][:, 1:]
    packed_BT = batch['segments'][:, :-1]
    segments_BT = packed_BT if mask_documents else None
    x_BTD, readout = cast(
        tuple[jax.Array, Readout],
        learner.model.apply(
            learner.variables(weights), tokens_BT, segments_BT, packed_BT > 0, method='activations'
        ),
    )
    rows, length = tokens_BT.shape
    chunk = loss_chunk_size(learner, tokens_BT.shape, readout.weight_DV.shape[-1]) or rows * length
    chunk_length = math.gcd(length, max(1, chunk // rows))
    n_chunks = length // chunk_length

    def to_chunks(x):
        return jnp.swapaxes(x.reshape(rows, n_chunks, chunk_length, *x.shape[2:]), 0, 1)

    def score_chunk(chunk):
        x_BCD, next_BC = chunk
        return statistic(readout(x_BCD).astype(jnp.float32), next_BC)

    scores = jax.lax.map(score_chunk, (to_chunks(x_BTD), to_chunks(next_BT)))
    return jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1).reshape(rows, length, *y.shape[3:]), scores)


def pack_rows(
    rows: Sequence[Sequence[int]], row_groups: Sequence[Sequence[int]], size: int, width: int
) -> dict[str, np.ndarray]:
    """Packs rows into a batch.

    Args:
      rows: token ids.
      row_groups: numbers of the rows that each packed row holds.
      size: number of packed rows.
      width: tokens of a packed row that are scored.

    Returns:
      {'tokens', 'segments'} [size, width + 1].
    """
    tokens, segments = np.zeros((2, size, width + 1), np.int32)
    for b, row_numbers in enumerate(row_groups):
        start = 0
        for segment, i in enumerate(row_numbers, 1):
            stop = start + len(rows[i])
            tokens[b, start:stop], segments[b, start:stop] = rows[i], segment
            start = stop
    return {'tokens': tokens, 'segments': segments}


def next_power_2(n: SupportsInt) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << (int(n) - 1).bit_length()


def fetch_pipelined(device_scores: Iterable[Any]) -> Iterator[Any]:
    """Yields scores from the devices, each fetched after MAX_IN_FLIGHT later batches are
    dispatched.

    The devices never wait for the host, and hold the inputs of no more batches.
    """
    in_flight = collections.deque()
    for scores in device_scores:
        in_flight.append(scores)
        if len(in_flight) > MAX_IN_FLIGHT:
            yield jax.device_get(in_flight.popleft())
    yield from jax.device_get(list(in_flight))
