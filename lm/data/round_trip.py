"""Measures how much of a text survives encoding and decoding.

Bits per byte divides by all bytes of the text. If a tokenizer drops or changes some of them, the
model never predicts them, and the figure is too small.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm.data.formats import Documents
from lm.data.scan import Scan
from lm.data.tokenizers import SubwordTokenizer, Tokenizer

N_SAMPLES, SAMPLE_BYTES = (
    32,
    2048,
)  # places of a text that are looked at, and bytes at each: a tenth of a second
MIN_LOSS = 1e-4  # a share of the bytes; less changes no figure that is printed
CONTEXT_CHARACTERS = 20  # characters around the first difference, in an example


def sample_scan(scan: Scan) -> list[str]:
    """Returns up to N_SAMPLES excerpts of the text, at equal distances."""
    step = max(SAMPLE_BYTES, -(-scan.n_bytes // N_SAMPLES))
    starts = range(0, scan.n_bytes, step)
    samples = (b''.join(scan.read(at, min(at + SAMPLE_BYTES, scan.n_bytes))) for at in starts)
    return [_decode(data) for data in samples]


def sample_documents(documents: Documents) -> Iterator[str]:
    """Yields the beginnings of the first N_SAMPLES documents."""
    for _, parts in itertools.islice(documents, N_SAMPLES):
        data = b''
        for part in parts or ():
            data += part
            if len(data) >= SAMPLE_BYTES:
                break
        yield _decode(data[:SAMPLE_BYTES])


def _decode(sample: bytes) -> str:
    return sample.decode('utf-8', 'ignore')  # a sample may end within a character


def measure_loss(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Any] | None:
    """Counts the bytes of the texts that decode(encode(text)) lacks.

    A leading space more or less is a convention (of SentencePiece, or `add_prefix_space`) and no
    loss.

    Args:
      tokenizer: the tokenizer to measure.
      texts: samples of text.

    Returns:
      {'bytes': of the texts, 'lost': missing bytes, 'example': [text, decoded] or None}; None for
        tokenizers that are lossless by construction.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        return None
    texts, n_lost, example = [*texts], 0, None
    for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
        candidates = [*_decode_variants(tokenizer.library, tokens.tolist())]
        if any(
            candidate in (text, f' {text}') or f' {candidate}' == text for candidate in candidates
        ):
            continue
        n_missing = len(text.encode()) - count_common(text.encode(), candidates[-1].encode())
        n_lost += n_missing
        if n_missing and example is None:
            example = _show_difference(text, candidates[-1])
    n_bytes = sum(len(text.encode()) for text in texts)
    return {'bytes': n_bytes, 'lost': n_lost, 'example': example}


def _decode_variants(library: Any, ids: Sequence[int]) -> Iterator[str]:
    """Yields the text of the tokens as the library decodes them, then without its additions.

    The additions are `unk` for unknown characters, and spaces between tokens if the file names no
    decoder.
    """
    import tokenizers

    yield library.decode(ids, skip_special_tokens=False)
    unknown = getattr(library.model, 'unk_token', None)  # some models have none
    tokens = [token for token in map(library.id_to_token, ids) if token != unknown]
    decoder, library_decoders = library.decoder, tokenizers.decoders
    if decoder is None:
        state = b'' if library.pre_tokenizer is None else library.pre_tokenizer.__getstate__()
        is_byte_level, is_metaspace = b'"ByteLevel"' in state, b'"Metaspace"' in state
        decoder = (
            library_decoders.ByteLevel()
            if is_byte_level
            else library_decoders.Metaspace()
            if is_metaspace
            else library_decoders.Fuse()
        )
    yield decoder.decode(tokens)


def count_common(a: bytes, b: bytes) -> int:
    """Returns the length of the longest common subsequence (Hyyro 2004).

    It takes len(a) steps on integers of len(b) bits.
    """
    row = all_bits = (1 << len(b)) - 1
    masks = dict.fromkeys(a, 0)
    for i, byte in enumerate(b):
        if byte in masks:
            masks[byte] |= 1 << i
    for byte in a:
        matched = row & masks[byte]
        row = (row + matched | row - matched) & all_bits
    # Each 0 bit stands for a byte of the common subsequence.
    return len(b) - row.bit_count()


def _show_difference(text: str, decoded: str) -> list[str]:
    """Returns both texts from shortly before the first character that differs."""
    text, decoded = text.removeprefix(' '), decoded.removeprefix(' ')
    pairs = enumerate(itertools.zip_longest(text, decoded))
    start = max(0, next(i for i, (a, b) in pairs if a != b) - CONTEXT_CHARACTERS)
    return [side[start : start + 2 * CONTEXT_CHARACTERS] for side in (text, decoded)]


def describe_loss(loss: dict[str, Any] | None, tokenizer: str, source: str) -> str:
    """Returns a note on bytes that decoding does not restore, or '' if they are negligible.

    Args:
      loss: the result of `measure_loss`.
      tokenizer: data.tokenizer.
      source: data.source.
    """
    if not loss or loss['lost'] < MIN_LOSS * loss['bytes']:
        return ''
    text, decoded = loss['example']
    return (
        f'NOTE: data.tokenizer={tokenizer} loses {loss["lost"] / loss["bytes"]:.2%} of the bytes '
        f'of {source}, measured on {loss["bytes"]:,} bytes: {text!r} is decoded as {decoded!r}. '
        'The model does not predict the lost bytes, but bits per byte counts them, so it is too '
        'low and not comparable with other tokenizers.'
    )
