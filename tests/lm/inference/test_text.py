"""Property: text arrives with its tokens, and does not depend on how they are split into calls."""

import numpy as np
import pytest

from lm.data import tokenizers
from lm.inference.text import TextStream

TEXT = 'A cafe\u0301, 10 € for 😀😀 and naïve   spaces\n\tdef f(x): return "ß"\n'


class ByteRuns:
    """Bytes of a tokenizer with byte fallback: a run of bytes is text if it is valid UTF-8."""

    def decode(self, ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return '\ufffd' * len(ids)


@pytest.fixture(scope='module')
def bpe():
    return tokenizers.plan_tokenizer('bpe:300').build([TEXT * 3])


def stream_text(stream: TextStream, ids: list[int], size: int) -> str:
    parts = [stream.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return ''.join([*parts, stream.finish()])


@pytest.mark.parametrize('size', [1, 2, 5, 1000])
@pytest.mark.parametrize('kind', ['byte', 'bpe', 'ids'])
def test_streamed_parts_join_to_whole_text(kind, size, bpe):
    """The text follows the tokens of a prompt, and may depend on them."""
    tokenizer = {
        'byte': tokenizers.ByteTokenizer(),
        'bpe': bpe,
        'ids': tokenizers.TokenIds(40, 0, 1),
    }[kind]
    ids = [7, 12, 9, 30, 5] if kind == 'ids' else tokenizer.encode(TEXT)
    for before in (0, 1, 3):
        stream = TextStream(tokenizer, context=[tokenizer.bos_id, *ids[:before]])
        prompt = tokenizer.decode(ids[:before])
        assert prompt + stream_text(stream, ids[before:], size) == tokenizer.decode(ids)


@pytest.mark.parametrize('size', [1, 3, 64])
def test_random_bytes_decode_like_whole(size):
    """Each call may end within a character, or within none."""
    tokenizer = tokenizers.ByteTokenizer()
    for seed in range(40):
        ids = np.random.default_rng(seed).choice([65, 0x80, 0xE2, 0x82, 0xAC, 0xF0, 0xC3], 64)
        assert stream_text(TextStream(tokenizer), ids.tolist(), size) == tokenizer.decode(ids)


def test_emitted_text_is_final():
    """Catches a character emitted before its last byte, when a run of bytes is text only as a
    whole.
    """
    ids = list('a€€b'.encode())
    emitted = [stream.feed([i]) for stream in [TextStream(ByteRuns())] for i in ids[1:4]]
    assert emitted == ['', '', '€']
    stream = TextStream(tokenizers.ByteTokenizer())
    assert [stream.feed([i]) for i in ids] == ['a', '', '', '€', '', '', '€', 'b']


STOPS = ['\n\n', 'def', 'de f', 'efg', 'xyz', 'abcd', 'bc']


@pytest.mark.parametrize('size', [1, 2, 3, 100])
@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('no stop d', 'no stop d'),  # the last letters may have been the beginning of one
        ('a dedef b', 'a de'),
        ('one\n', 'one\n'),
        ('one\n\ntwo', 'one'),
        ('xyxyz', 'xy'),
        ('zabcd', 'za'),  # 'bc' is complete before 'abcd'
        ('defg', ''),
    ],
)
def test_text_ends_before_first_stop(text, expected, size):
    stream = TextStream(tokenizers.ByteTokenizer(), STOPS)
    assert stream_text(stream, list(text.encode()), size) == expected
    assert stream.is_stopped == (expected != text)
    assert not stream.is_stopped or stream.feed(list(b'more')) == stream.finish() == ''


def test_partial_stop_is_held_back():
    stream = TextStream(tokenizers.ByteTokenizer(), ['\n\n', 'stop'])
    assert [stream.feed([i]) for i in b'ast st'] == ['a', '', '', 'st ', '', '']
    assert stream.finish() == 'st' and not stream.is_stopped


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match='a stop string is empty'):
        TextStream(tokenizers.ByteTokenizer(), ['a', ''])
