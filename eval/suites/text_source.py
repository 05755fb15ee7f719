"""A text that is no part of a run's own data, as rows for a suite."""

import codecs
import itertools
from typing import NamedTuple

import numpy as np

from eval.load import Checkpoint
from lm.data import Rows
from lm.data.round_trip import N_SAMPLES, SAMPLE_BYTES, describe_loss, measure_loss
from lm.data.rows import CHUNK, PACKINGS
from lm.data.sources import open_source
from lm.inference.load import to_stderr


class EncodedText(NamedTuple):
    """The documents of a source, as tokens and as text.

    lost_share: of the bytes that the tokens do not restore, by a sample.
    """

    rows: Rows
    texts: list[str]
    lost_share: float


def encode_source(checkpoint: Checkpoint, source: str, flag: str, documents: int) -> EncodedText:
    """Returns the documents of a `data.source` under the tokenizer of a checkpoint.

    Each is encoded whole, between BOS and EOS as in training, in memory: nothing is cached. A token
    that both begins and ends documents stands at their beginning alone, as it is no target.

    Args:
      checkpoint: gives the tokenizer, the length and the packing of rows.
      source: of the text, such as text:FILE.
      flag: names the source in errors.
      documents: how many to read, from the first; 0: all.

    Raises:
      ValueError: for a source that cannot be read or holds no text, and for a text that the
        tokenizer encodes with its own BOS.
    """
    fields, tokenizer = checkpoint.recipe.data, checkpoint.tokenizer
    opened = open_source(source, fields.text_field)
    for note in opened.notes:
        to_stderr(note.replace('data.source=', f'{flag}='))
    decoded = (
        ''.join(codecs.iterdecode(parts, 'utf-8', 'replace'))
        for _, parts in opened.documents()
        if parts is not None
    )
    texts = [*itertools.islice(filter(None, decoded), documents or None)]
    if not texts:
        raise ValueError(f'{flag}={source} holds no text')
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    ending = [] if eos == bos else [eos]
    encoded = [np.asarray([bos, *tokenizer.encode(text), *ending], np.int32) for text in texts]
    for tokens in encoded:
        if (tokens[1:] == bos).any():
            raise ValueError(
                f'the tokenizer makes its own BOS, token {bos}, out of {flag}={source}: the start '
                'of a document could not be told from it'
            )
    ends = np.cumsum([0, *map(len, encoded)])
    stream = np.concatenate(encoded)
    chunks = [{'tokens': stream[at : at + CHUNK]} for at in range(0, len(stream), CHUNK)]
    layout = PACKINGS[fields.packing](ends, fields.seq_len)
    n_bytes = sum(len(text.encode()) for text in texts)
    loss = measure_loss(tokenizer, sample_texts(texts))
    if note := describe_loss(loss, fields.tokenizer, source):
        to_stderr(note)
    lost_share = loss['lost'] / loss['bytes'] if loss and loss['bytes'] else 0.0
    return EncodedText(Rows(chunks, ends, layout, fields.seq_len, n_bytes), texts, lost_share)


def sample_texts(texts: list[str]) -> list[str]:
    """Returns up to N_SAMPLES excerpts of all texts together, at equal distances."""
    joined = '\n'.join(texts)
    step = max(SAMPLE_BYTES, -(-len(joined) // N_SAMPLES))
    return [joined[at : at + SAMPLE_BYTES] for at in range(0, len(joined), step)]
