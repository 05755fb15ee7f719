"""A text that is no part of a run's own data, as rows for a suite."""

import codecs
import collections
import contextlib
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eval.load import Checkpoint
from lm.data import Rows
from lm.data.chat_pieces import BATCH_SIZE, build_encoder, describe_left_out
from lm.data.round_trip import N_SAMPLES, SAMPLE_BYTES, describe_loss, measure_loss
from lm.data.rows import CHUNK, PACKINGS, WHOLE_PACKINGS, ChatRows, ChatTargets
from lm.data.sources import open_source
from lm.data.tokenizer_files import list_files_beside
from lm.inference.load import to_stderr
from lm.storage.files import expand_home


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
        raise ValueError(f'{flag}={source} contains no text')
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    ending = [] if eos == bos else [eos]
    encoded = [np.asarray([bos, *tokenizer.encode(text), *ending], np.int32) for text in texts]
    for tokens in encoded:
        if (tokens[1:] == bos).any():
            raise ValueError(
                f'{flag}={source} contains text that the tokenizer encodes as BOS (token {bos}), '
                'which may only begin a document. Remove that text.'
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


def encode_conversations(
    checkpoint: Checkpoint, source: str, flag: str, documents: int
) -> EncodedText:
    """Returns the conversations of a source, with their answers as targets, in memory.

    Args:
      checkpoint: gives the tokenizer, its chat template, the length and the packing of rows.
      source: of the conversations, chat:FILE.
      flag: names the source in errors.
      documents: how many to read, from the first; 0: all.

    Raises:
      ValueError: for a source that cannot be read, and one without an answer that a row can hold.
    """
    fields, tokenizer = checkpoint.recipe.data, checkpoint.tokenizer
    opened = open_source(source, fields.text_field)
    for note in opened.notes:
        to_stderr(note.replace('data.source=', f'{flag}='))
    contents = (b''.join(parts).decode() for _, parts in opened.documents() if parts is not None)
    texts = [*itertools.islice(contents, documents or None)]
    encoder = build_encoder(tokenizer, find_tokenizer_spec(checkpoint))
    with contextlib.closing(encoder):
        batches = itertools.batched(texts, BATCH_SIZE)
        chats = [chat for batch in batches for chat in encoder.encode_batch(batch)]
    usable = [chat for chat in chats if not isinstance(chat, str)]
    left_out = collections.Counter(chat for chat in chats if isinstance(chat, str))
    n_long = sum(len(chat.tokens) > fields.seq_len + 1 for chat in usable)
    if n_long:
        left_out[f'are longer than data.seq_len + 1 = {fields.seq_len + 1} tokens'] = n_long
    reasons = describe_left_out(left_out)
    if n_long == len(usable):
        raise ValueError(f'{flag}={source} has no usable conversation: {reasons or "it is empty"}')
    if reasons:
        to_stderr(f'NOTE: some conversations are skipped: {reasons}')
    ends = np.cumsum([0, *(len(chat.tokens) for chat in usable)])
    stream = np.concatenate([chat.tokens for chat in usable])
    spans = [chat.targets + start for chat, start in zip(usable, ends[:-1], strict=True)]
    targets = ChatTargets(np.concatenate(spans), np.array([chat.n_bytes for chat in usable]))
    chunks = [{'tokens': stream[at : at + CHUNK]} for at in range(0, len(stream), CHUNK)]
    rows = ChatRows(chunks, ends, WHOLE_PACKINGS[fields.packing], fields.seq_len, targets)
    decoded = [tokenizer.decode(tokens.tolist()) for tokens in rows.documents()]
    return EncodedText(rows, decoded, 0.0)


def find_tokenizer_spec(checkpoint: Checkpoint) -> str:
    """Returns the data.tokenizer beside which the chat template of a run lies."""
    spec = checkpoint.recipe.data.tokenizer
    kind, _, path = spec.partition(':')
    folder = checkpoint.path.parent.parent / 'tokenizer'
    # The original may be gone or changed: the run has its copy. Runs of earlier versions have no
    # copy of a template.
    is_gone = kind == 'hf' and not Path(expand_home(path)).exists()
    return f'hf:{folder}' if is_gone or any(list_files_beside(folder)) else spec


def sample_texts(texts: list[str]) -> list[str]:
    """Returns up to N_SAMPLES excerpts of all texts together, at equal distances."""
    joined = '\n'.join(texts)
    step = max(SAMPLE_BYTES, -(-len(joined) // N_SAMPLES))
    return [joined[at : at + SAMPLE_BYTES] for at in range(0, len(joined), step)]
