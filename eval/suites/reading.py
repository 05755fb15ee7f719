"""The validation split in rows that `Scorer` takes, read as perplexity reads it."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from eval.load import Checkpoint, open_data
from lm.config.mixture import MixedRows, by_source


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
    sources = list(by_source(split).values())
    shares = split.shares.of_each if isinstance(split, MixedRows) else (1.0,)
    found, n_documents = [], 0
    for rows, share in zip(sources, shares, strict=True):
        read = 0
        for row in rows_of(rows, checkpoint.recipe.data.mask_documents, checkpoint.learner.bos_id):
            found.append(row._replace(document=row.document + n_documents))
            read += int(row.is_target.sum())
            if tokens and read >= share * tokens:
                break
        n_documents = int(found[-1].document[-1]) + 1
    return found


def rows_of(rows, mask_documents: bool, bos_id: int) -> Iterator[TargetRow]:
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
