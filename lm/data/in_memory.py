"""A text beside the data of a run, such as a held-out text, as rows in memory."""

import codecs
import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.config.mixture import CHAT
from lm.config.recipe import Recipe
from lm.data import cache
from lm.data.chat_pieces import BATCH_SIZE, build_encoder, describe_left_out
from lm.data.round_trip import N_SAMPLES, SAMPLE_BYTES, describe_loss, measure_loss
from lm.data.rows import CHUNK, PACKINGS, WHOLE_PACKINGS, ChatRows, ChatTargets, Rows
from lm.data.sources import open_source
from lm.data.tokenizers import Tokenizer

# Characters of a document that are read for each token of the limit. Tokens of text have 3 to 5,
# and a book may have a million.
CHARACTERS_PER_TOKEN = 16


class EncodedText(NamedTuple):
    """The documents of a source, as tokens and as text.

    lost_share: of the bytes that the tokens do not restore, by a sample. digest: of the tokens.
    """

    rows: Rows
    texts: list[str]
    lost_share: float
    digest: str


class TextRequest(NamedTuple):
    """A source, and how much of it is read. flag: names the source in errors.

    Attributes:
      source: of the text or of conversations, spelt as in data.source.
      flag: names it in errors.
      documents: how many to read, from the first; 0: all.
      tokens: about how many to read; 0: all. The last document is cut there, unless it is a
        conversation.
    """

    source: str
    flag: str
    documents: int = 0
    tokens: int = 0


def check_source(request: TextRequest, fields: DataConfig) -> None:
    """Raises ValueError, with the flag, for a source that does not exist, and for a tokenizer that
    cannot encode it.

    Args:
      request: the source.
      fields: the field of records that has text, and the tokenizer.
    """
    try:
        source = open_source(request.source, fields.text_field)
    except ValueError as error:
        raise ValueError(str(error).replace('data.source', request.flag)) from error
    if source.is_chat and fields.tokenizer.startswith('ids:'):
        raise ValueError(
            f'{request.flag}={request.source} has conversations, but '
            f'data.tokenizer={fields.tokenizer} cannot encode text. Leave this text out.'
        )


def list_text_requests(recipe: Recipe) -> dict[str, TextRequest]:
    """Returns what is read of each text of eval.texts."""
    tokens = recipe.eval.texts_tokens
    return {
        name: TextRequest(source, f'eval.texts, {name!r}', tokens=tokens)
        for name, source in recipe.texts.items()
    }


def check_held_out_texts(recipe: Recipe) -> None:
    """Raises ValueError, with the name, if a source of eval.texts does not exist."""
    for request in list_text_requests(recipe).values():
        check_source(request, recipe.data)


def encode_source(
    request: TextRequest,
    tokenizer: Tokenizer,
    fields: DataConfig,
    tokenizer_spec: str,
    say: Callable[[str], None],
) -> EncodedText:
    """Returns the documents of a text, or of conversations with their answers as targets.

    Args:
      request: the source.
      tokenizer: the tokenizer.
      fields: the length and packing of rows, and the field of records that has text.
      tokenizer_spec: the data.tokenizer beside which the chat template lies.
      say: gets notes.

    Raises:
      ValueError: for a source that cannot be read or holds nothing usable.
    """
    if request.source.startswith(CHAT):
        return encode_conversations(request, tokenizer, fields, tokenizer_spec, say)
    return encode_text(request, tokenizer, fields, say)


def encode_text(
    request: TextRequest, tokenizer: Tokenizer, fields: DataConfig, say: Callable[[str], None]
) -> EncodedText:
    """Returns the documents of a text.

    Each is encoded whole, between BOS and EOS as in training. A token that both begins and ends
    documents stands at their beginning alone, as it is no target.

    Args:
      request: the source.
      tokenizer: the tokenizer.
      fields: the length and packing of rows, and the field of records that has text.
      say: gets notes.

    Raises:
      ValueError: for a source that cannot be read or holds no text, and for a text that the
        tokenizer encodes with its own BOS.
    """
    label = f'{request.flag}={request.source}'
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    ending = [] if eos == bos else [eos]
    texts, encoded, n_tokens = [], [], 0
    for text in _read_texts(request, fields, say):
        tokens = tokenizer.encode(text)
        room = request.tokens - n_tokens
        if request.tokens and len(tokens) > room:
            # The text is cut, and not its tokens: the bytes of what is left are then known.
            text = text[: max(1, len(text) * room // len(tokens))]
            tokens = tokenizer.encode(text)
        encoded.append(np.asarray([bos, *tokens, *ending], np.int32))
        texts.append(text)
        n_tokens += len(encoded[-1])
        if request.tokens and n_tokens >= request.tokens:
            break
    if not texts:
        raise ValueError(f'{label} contains no text')
    for tokens in encoded:
        if (tokens[1:] == bos).any():
            raise ValueError(
                f'{label} contains text that the tokenizer encodes as BOS (token {bos}), which may '
                'only begin a document. Remove that text.'
            )
    ends = np.cumsum([0, *map(len, encoded)])
    stream = np.concatenate(encoded)
    layout = PACKINGS[fields.packing](ends, fields.seq_len)
    n_bytes = sum(len(text.encode()) for text in texts)
    loss = measure_loss(tokenizer, sample_texts(texts))
    if note := describe_loss(loss, fields.tokenizer, request.source):
        say(note)
    lost_share = loss['lost'] / loss['bytes'] if loss and loss['bytes'] else 0.0
    rows = Rows(split_stream(stream), ends, layout, fields.seq_len, n_bytes)
    digest = cache.digest_bytes(stream.tobytes(), ends.tobytes(), str(n_bytes).encode())
    return EncodedText(rows, texts, lost_share, digest)


def encode_conversations(
    request: TextRequest,
    tokenizer: Tokenizer,
    fields: DataConfig,
    tokenizer_spec: str,
    say: Callable[[str], None],
) -> EncodedText:
    """Returns the conversations of a source, with their answers as targets.

    Args:
      request: the source.
      tokenizer: the tokenizer.
      fields: the length and packing of rows, and the field of records that has text.
      tokenizer_spec: the data.tokenizer beside which the chat template lies.
      say: gets notes.

    Raises:
      ValueError: for a source that cannot be read, and one without an answer that a row can hold.
    """
    encoder = build_encoder(tokenizer, tokenizer_spec)
    usable, left_out, n_tokens = [], collections.Counter(), 0
    with contextlib.closing(encoder):
        for batch in itertools.batched(_read_texts(request, fields, say), BATCH_SIZE):
            chats = encoder.encode_batch(batch)
            left_out.update(chat for chat in chats if isinstance(chat, str))
            usable += [chat for chat in chats if not isinstance(chat, str)]
            n_tokens = sum(len(chat.tokens) for chat in usable)
            if request.tokens and n_tokens >= request.tokens:
                break
    if request.tokens:
        counts = np.cumsum([len(chat.tokens) for chat in usable])
        usable = usable[: int(np.searchsorted(counts, request.tokens)) + 1]
    n_long = sum(len(chat.tokens) > fields.seq_len + 1 for chat in usable)
    if n_long:
        left_out[f'are longer than data.seq_len + 1 = {fields.seq_len + 1} tokens'] = n_long
    reasons = describe_left_out(left_out)
    if n_long == len(usable):
        raise ValueError(
            f'{request.flag}={request.source} has no usable conversation: '
            f'{reasons or "it is empty"}'
        )
    if reasons:
        say(f'NOTE: some conversations are skipped: {reasons}')
    ends = np.cumsum([0, *(len(chat.tokens) for chat in usable)])
    stream = np.concatenate([chat.tokens for chat in usable])
    spans = [chat.targets + start for chat, start in zip(usable, ends[:-1], strict=True)]
    targets = ChatTargets(np.concatenate(spans), np.array([chat.n_bytes for chat in usable]))
    layout = WHOLE_PACKINGS[fields.packing]
    rows = ChatRows(split_stream(stream), ends, layout, fields.seq_len, targets)
    decoded = [tokenizer.decode(tokens.tolist()) for tokens in rows.documents()]
    parts = stream, ends, targets.spans, targets.n_bytes
    return EncodedText(rows, decoded, 0.0, cache.digest_bytes(*(x.tobytes() for x in parts)))


def _read_texts(
    request: TextRequest, fields: DataConfig, say: Callable[[str], None]
) -> Iterator[str]:
    """Yields the texts of the documents that are not empty, up to the number of the request."""
    opened = open_source(request.source, fields.text_field)
    for note in opened.notes:
        say(note.replace('data.source=', f'{request.flag}='))
    is_chat = request.source.startswith(CHAT)  # conversations are read whole
    limit = 0 if is_chat else request.tokens * CHARACTERS_PER_TOKEN
    decoded = (_decode(parts, limit) for _, parts in opened.documents() if parts is not None)
    yield from itertools.islice(filter(None, decoded), request.documents or None)


def _decode(parts: Iterable[bytes], limit: int) -> str:
    """Returns the text of a document, up to `limit` characters; 0: all of it."""
    pieces, length = [], 0
    for piece in codecs.iterdecode(parts, 'utf-8', 'replace'):
        pieces.append(piece)
        length += len(piece)
        if limit and length >= limit:
            return ''.join(pieces)[:limit]
    return ''.join(pieces)


def split_stream(stream: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Returns the chunks that `Rows` reads."""
    return [{'tokens': stream[at : at + CHUNK]} for at in range(0, len(stream), CHUNK)]


def sample_texts(texts: list[str]) -> list[str]:
    """Returns up to N_SAMPLES excerpts of all texts together, at equal distances."""
    joined = '\n'.join(texts)
    step = max(SAMPLE_BYTES, -(-len(joined) // N_SAMPLES))
    return [joined[at : at + SAMPLE_BYTES] for at in range(0, len(joined), step)]
