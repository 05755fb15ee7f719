"""The validation split for suites: batches as in the training loop, and rows for `Scorer`."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from eval.load import Checkpoint, open_data
from lm import data
from lm.config.mixture import MixedRows, split_by_source
from lm.data.rows import ChatTargets
from lm.devices.mesh import batch_parts, put_batch, trace_on_mesh


def batch_rows(checkpoint: Checkpoint) -> int:
    """Returns the rows of a batch: a microbatch, rounded up to a multiple of the mesh's parts."""
    parts = batch_parts(checkpoint.mesh)
    return -(-checkpoint.recipe.microbatch_size // parts) * parts


def validation_batches(checkpoint: Checkpoint, split: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Yields the first batches of a split, on the devices.

    Args:
      checkpoint: a loaded checkpoint.
      split: rows of tokens.
      tokens: approximate number to read; 0: all.
    """
    size = batch_rows(checkpoint)
    limit = -(-tokens // (size * checkpoint.recipe.data.seq_len))
    for batch in data.evaluation_batches(split, batch_size=size, limit=limit):
        yield put_batch(checkpoint.mesh, batch)


def jit_statistic(checkpoint: Checkpoint, statistic: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the jitted statistic(learner, weights, batch, hyper, ...), with the learner bound."""
    return jax.jit(trace_on_mesh(checkpoint.mesh, functools.partial(statistic, checkpoint.learner)))


class TargetRow(NamedTuple):
    """A row of T + 1 tokens, with arrays over its tokens 1 to T.

    is_target: whether a token is a target. document: the number of its document, from 0 over all
    rows.
    """

    tokens: np.ndarray  # int [T + 1]
    is_target: np.ndarray  # bool [T]
    document: np.ndarray  # int [T]


def validation_rows(checkpoint: Checkpoint, tokens: int) -> list[TargetRow]:
    """Returns the first rows of the validation split, until they hold enough targets.

    Context is as in `suites.perplexity`: whole rows, or with data.mask_documents single documents,
    each in a separate row. A mixture gives each source its share of the tokens. Each source has at
    least a row.

    Args:
      checkpoint: a loaded checkpoint.
      tokens: approximate number of targets to read; 0: all.
    """
    split = open_data(checkpoint).validation
    sources = list(split_by_source(split).values())
    shares = split.shares.fractions if isinstance(split, MixedRows) else (1.0,)
    target_rows, n_documents = [], 0
    for rows, share in zip(sources, shares, strict=True):
        n_read = 0
        for row in split_rows(
            rows, checkpoint.recipe.data.mask_documents, checkpoint.learner.bos_id
        ):
            target_rows.append(row._replace(document=row.document + n_documents))
            n_read += int(row.is_target.sum())
            if tokens and n_read >= share * tokens:
                break
        n_documents = int(target_rows[-1].document[-1]) + 1
    return target_rows


def split_rows(rows, mask_documents: bool, bos_id: int) -> Iterator[TargetRow]:
    """Yields the rows of a split, in order.

    A row that begins without bos_id continues the document before it.

    Args:
      rows: of the split.
      mask_documents: whether each document becomes a row.
      bos_id: the first token of a document.
    """
    number = -1
    for i in range(len(rows)):
        stored_row = rows[i]
        length = int((stored_row['segments'] > 0).sum())  # padding is at the end
        tokens, segments = stored_row['tokens'][:length], stored_row['segments'][:length]
        begins = np.diff(segments, prepend=segments[0]) != 0
        # A row of conversations begins one: these are whole.
        begins[0] = tokens[0] == bos_id or number < 0 or isinstance(rows.targets, ChatTargets)
        is_target = stored_row.get('targets', stored_row['tokens'] != bos_id)[:length].astype(bool)
        document = number + np.cumsum(begins)
        number = int(document[-1])
        edges = np.flatnonzero(begins[1:]) + 1 if mask_documents else []
        for start, stop in itertools.pairwise([0, *edges, length]):
            if stop - start > 1:
                yield TargetRow(
                    tokens[start:stop], is_target[start + 1 : stop], document[start + 1 : stop]
                )
