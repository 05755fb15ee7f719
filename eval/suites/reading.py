"""The validation split as suites read it: batches of the training loop, and rows for `Scorer`."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from eval.load import Checkpoint, open_data
from lm import data
from lm.config.mixture import MixedRows, split_by_source
from lm.devices.mesh import batch_parts, put_batch, trace_on_mesh


def batch_rows(checkpoint: Checkpoint) -> int:
    """Returns the rows of a batch: those of a microbatch, or as many more as the mesh cuts."""
    parts = batch_parts(checkpoint.mesh)
    return -(-checkpoint.recipe.microbatch_size // parts) * parts


def validation_batches(checkpoint: Checkpoint, split: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Yields the first batches of a split, on the devices.

    Args:
      checkpoint: as `load` gives it.
      split: rows of tokens.
      tokens: how many are read, about; 0: all.
    """
    size = batch_rows(checkpoint)
    limit = -(-tokens // (size * checkpoint.recipe.data.seq_len))
    for batch in data.evaluation_batches(split, batch_size=size, limit=limit):
        yield put_batch(checkpoint.mesh, batch)


def jit_statistic(checkpoint: Checkpoint, statistic: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the jitted statistic(learner, weights, batch, hyper, ...) without its learner."""
    return jax.jit(trace_on_mesh(checkpoint.mesh, functools.partial(statistic, checkpoint.learner)))


class TargetRow(NamedTuple):
    """A row of T + 1 tokens. Of its tokens 1 to T: whether each is a target, and the number of its
    document, counted from 0 over all rows.
    """

    tokens: np.ndarray  # int [T + 1]
    is_target: np.ndarray  # bool [T]
    document: np.ndarray  # int [T]


def validation_rows(checkpoint: Checkpoint, tokens: int) -> list[TargetRow]:
    """Returns the first rows of the validation split that hold so many targets, at least one row.

    A row has what `suites.perplexity` has as context: whole rows, or with data.mask_documents its
    documents, each a row here. A mixture gives each source its share of the tokens.

    Args:
      checkpoint: as `load` gives it.
      tokens: targets to be read, about; 0: all.
    """
    split = open_data(checkpoint).validation
    sources = list(split_by_source(split).values())
    shares = split.shares.fractions if isinstance(split, MixedRows) else (1.0,)
    found, n_documents = [], 0
    for rows, share in zip(sources, shares, strict=True):
        read = 0
        for row in split_rows(
            rows, checkpoint.recipe.data.mask_documents, checkpoint.learner.bos_id
        ):
            found.append(row._replace(document=row.document + n_documents))
            read += int(row.is_target.sum())
            if tokens and read >= share * tokens:
                break
        n_documents = int(found[-1].document[-1]) + 1
    return found


def split_rows(rows, mask_documents: bool, bos_id: int) -> Iterator[TargetRow]:
    """Yields the rows of a split, in order; a row that begins without bos_id goes on with the
    document before it.
    """
    number = -1
    for i in range(len(rows)):
        one = rows[i]
        length = int((one['segments'] > 0).sum())  # padding is at the end
        tokens, segments = one['tokens'][:length], one['segments'][:length]
        begins = np.diff(segments, prepend=segments[0]) != 0
        begins[0] = tokens[0] == bos_id or number < 0
        document = number + np.cumsum(begins)
        number = int(document[-1])
        edges = np.flatnonzero(begins[1:]) + 1 if mask_documents else []
        for start, stop in itertools.pairwise([0, *edges, length]):
            if stop - start > 1:
                own = tokens[start:stop]
                yield TargetRow(own, own[1:] != bos_id, document[start + 1 : stop])
