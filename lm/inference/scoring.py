"""Scores of tokens: what a model says of each token of many rows, packed into few programs."""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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

MAX_IN_FLIGHT = 8  # batches that wait on the devices
MAX_PROGRAMS = 8  # of learners, meshes and statistics
MIN_LENGTH = 32  # tokens of a row that is read; shorter ones are packed

# (logits [B, C, V] float32, the token that follows each [B, C]) -> arrays [B, C, ...] by name.
Statistic = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]
Scores = dict[str, np.ndarray]


def log_probabilities(logits_BCV: jax.Array, next_BC: jax.Array) -> dict[str, jax.Array]:
    """Returns `log_p`, log softmax(logits) of the next token in nats, and `is_likeliest`, whether
    no other token has a larger logit.
    """
    logit_BC = jnp.take_along_axis(logits_BCV, next_BC[..., None], -1)[..., 0]
    log_p_BC = logit_BC - jax.nn.logsumexp(logits_BCV, -1)
    return {'log_p': log_p_BC, 'is_likeliest': logit_BC == jnp.max(logits_BCV, -1)}


class Scorer:
    """Scores rows of tokens, each as one document that begins with its first token.

    Rows are packed as documents of longer ones, whose length is a power of two or data.seq_len, so
    that few programs serve all lengths; they are cut over the devices of the checkpoint's mesh.
    """

    def __init__(self, checkpoint: Checkpoint, statistic: Statistic = log_probabilities):
        """Args:
        checkpoint: as `load` gives it.
        statistic: what is kept of the logits of each token.
        """
        self._checkpoint, mesh = checkpoint, checkpoint.mesh
        learner, data = checkpoint.learner, checkpoint.recipe.data
        share = data.batch_size // checkpoint.recipe.train.microbatches
        self.max_length = data.seq_len + 1  # tokens of a row, the first of which is not scored
        self._batch_tokens = share * data.seq_len
        self._step = jit_score_batch(learner, mesh, statistic, mask_documents=True)

    def __call__(
        self, rows: Sequence[Sequence[int]], weights: Weights | None = None
    ) -> list[Scores]:
        """Returns the scores of each row, by name: of its tokens 1, 2, ... given those before.

        Args:
          rows: token ids, at most data.seq_len + 1 of them in each; a row of one has no scores.
          weights: in place of the checkpoint's own.

        Raises:
          ValueError: where a row is too long, or empty.
        """
        lengths = np.array([len(row) for row in rows], np.int64)
        if not rows:
            return []
        if lengths.min() < 1 or lengths.max() > self.max_length:
            raise ValueError(
                f'a row that is scored has 1 to {self.max_length} tokens (data.seq_len and the token '
                f'that begins it); got {lengths.min()} to {lengths.max()}. Cut it.'
            )
        weights = self._checkpoint.weights if weights is None else weights
        width = min(self.max_length - 1, next_power_2(max(MIN_LENGTH, lengths.max() - 1)))
        row_of = best_fit_decreasing(lengths, width + 1, np.zeros(0, np.int64))
        places = [[] for _ in range(row_of.max() + 1)]
        for i, row in enumerate(row_of.tolist()):
            places[row].append(i)
        parts = batch_parts(self._checkpoint.mesh)
        size = min(max(1, self._batch_tokens // width), next_power_2(len(places)))
        size = -(-size // parts) * parts
        groups = [places[i : i + size] for i in range(0, len(places), size)]
        batches = (pack_rows(rows, group, size, width) for group in groups)
        step = functools.partial(self._step, weights)
        results = fetch_pipelined(
            step(put_batch(self._checkpoint.mesh, batch)) for batch in batches
        )
        found: list[Scores] = [{}] * len(rows)
        for group, result in zip(groups, results, strict=True):
            for b, own in enumerate(group):
                start = 0
                for i in own:
                    span = slice(start, start + lengths[i] - 1)
                    found[i] = {name: values[b, span] for name, values in result.items()}
                    start += lengths[i]
        return found


@functools.lru_cache(MAX_PROGRAMS)
def jit_score_batch(
    learner: Learner, mesh: Mesh, statistic: Statistic, mask_documents: bool
) -> Callable[[Weights, Any], dict[str, jax.Array]]:
    """Returns the jitted `score_batch`: batch cut by rows, scores replicated. The checkpoints that
    share a learner (`lm.inference.load.at_step`) share its programs.
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
    """Returns the statistic of each token but the first, [B, T, ...]; logits are made in chunks.

    `batch` is {'tokens', 'segments'} [B, T + 1], as `lm.data` makes it. mask_documents: whether
    documents of a row do not see each other, whatever data.mask_documents is.
    """
    tokens_BT, next_BT = batch['tokens'][:, :-1], batch['tokens'][:, 1:]
    read_BT = batch['segments'][:, :-1]
    segments_BT = read_BT if mask_documents else None
    x_BTD, readout = learner.model.apply(
        learner.variables(weights), tokens_BT, segments_BT, read_BT > 0, method='activations'
    )
    rows, length = tokens_BT.shape
    chunk = loss_chunk_size(learner, tokens_BT.shape, readout.weight_DV.shape[-1]) or rows * length
    columns = math.gcd(length, max(1, chunk // rows))
    count = length // columns

    def to_chunks(x):
        return jnp.swapaxes(x.reshape(rows, count, columns, *x.shape[2:]), 0, 1)

    def score_chunk(part):
        x_BCD, next_BC = part
        return statistic(readout(x_BCD).astype(jnp.float32), next_BC)

    found = jax.lax.map(score_chunk, (to_chunks(x_BTD), to_chunks(next_BT)))
    return jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1).reshape(rows, length, *y.shape[3:]), found)


def pack_rows(
    rows: Sequence[Sequence[int]], row_groups: Sequence[Sequence[int]], size: int, width: int
) -> dict[str, np.ndarray]:
    """Returns {'tokens', 'segments'} [size, width + 1] of the rows whose numbers `places` lists."""
    tokens, segments = np.zeros((2, size, width + 1), np.int32)
    for b, own in enumerate(row_groups):
        start = 0
        for segment, i in enumerate(own, 1):
            stop = start + len(rows[i])
            tokens[b, start:stop], segments[b, start:stop] = rows[i], segment
            start = stop
    return {'tokens': tokens, 'segments': segments}


def next_power_2(n: int) -> int:
    """Returns the least power of two that is n or more."""
    return 1 << (int(n) - 1).bit_length()


def fetch_pipelined(device_scores: Iterable[Any]) -> Iterator[Any]:
    """Yields results from the devices, each fetched when MOST_IN_FLIGHT later ones are dispatched:
    devices do not wait, and hold the inputs of no more.
    """
    waiting = collections.deque()
    for result in device_scores:
        waiting.append(result)
        if len(waiting) > MAX_IN_FLIGHT:
            yield jax.device_get(waiting.popleft())
    yield from jax.device_get(list(waiting))
