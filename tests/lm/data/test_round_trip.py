"""What tokenizers lose. Reference: bytes counted by hand, and common subsequences by the table.
Property: those that lose nothing by construction are never said to. Contract: it is said at each
start.
"""

import functools
import json
import random

import pytest
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lm.data import cache, open_dataset, prepared, round_trip, tokenizers
from tests.lm.data.conftest import discard_line, notes_of, write_texts
from tests.lm.data.test_tokenizers import TEXTS

LETTERS = 'abcdefghijklmnopqrstuvwxyz'


def train(
    pre_tokenizer, decoder, normalizer=None, byte_fallback=False, postprocess=None, texts=TEXTS
):
    """A byte-pair encoding of all characters of the texts."""
    made = library.Tokenizer(models.BPE(byte_fallback=byte_fallback))
    made.pre_tokenizer = pre_tokenizer
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ['<s>', '</s>']
    special += [f'<0x{i:02X}>' for i in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    parts = {'decoder': decoder, 'normalizer': normalizer, 'post_processor': postprocess}
    for name, part in parts.items():
        if part is not None:
            setattr(made, name, part)
    made.train_from_iterator(texts, trainer)
    return made


def spelled_as_llama():
    """The normalizer and the decoder of Llama 2's tokenizer.json, without a pre-tokenizer."""
    normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(' ', 1, 0)])
    return train(pre_tokenizers.Split('\n', 'isolated'), decoder, normalizer, byte_fallback=True)


byte_level, metaspace = pre_tokenizers.ByteLevel, pre_tokenizers.Metaspace
LOSSLESS = {
    'byte level': lambda: train(byte_level(add_prefix_space=False), decoders.ByteLevel()),
    'byte level, prefix': lambda: train(byte_level(add_prefix_space=True), decoders.ByteLevel()),
    'byte level, offsets': lambda: train(
        byte_level(), decoders.ByteLevel(), postprocess=processors.ByteLevel(trim_offsets=True)
    ),
    'byte level, digits': lambda: train(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_level(add_prefix_space=False)]),
        decoders.ByteLevel(),
    ),
    'byte level, no decoder': lambda: train(byte_level(add_prefix_space=False), None),
    'metaspace': lambda: train(metaspace(), decoders.Metaspace()),
    'metaspace, first': lambda: train(
        metaspace(prepend_scheme='first'), decoders.Metaspace(prepend_scheme='first')
    ),
    'metaspace, never': lambda: train(
        metaspace(prepend_scheme='never'), decoders.Metaspace(prepend_scheme='never')
    ),
    'metaspace, no decoder': lambda: train(metaspace(), None),
    'llama': spelled_as_llama,
}


def as_tokenizer(made, folder):
    made.save(str(folder / 'tokenizer.json'))
    return tokenizers.plan_tokenizer(f'hf:{folder}').build([])


def samples():
    rng = random.Random(0)
    pieces = [*TEXTS, ' ', '  ', '\n', '<s>', '</s>', 'é', '🙂', 'a']
    return [*TEXTS, *(''.join(rng.choices(pieces, k=4)) for _ in range(100))]


@pytest.mark.parametrize('name', LOSSLESS)
def test_property_of_what_loses_nothing_nothing_is_said(name, tmp_path):
    tokenizer = as_tokenizer(LOSSLESS[name](), tmp_path)
    loss = round_trip.measure_loss(tokenizer, samples())
    assert loss == {'bytes': sum(len(t.encode()) for t in samples()), 'lost': 0, 'example': None}
    assert round_trip.describe_loss(loss, 'hf', 'text') == ''


def test_property_ours_lose_nothing():
    assert round_trip.measure_loss(tokenizers.plan_tokenizer('byte').build([]), TEXTS) is None
    assert round_trip.measure_loss(tokenizers.plan_tokenizer('ids:9,7,8').build([]), TEXTS) is None
    ours = tokenizers.plan_tokenizer('bpe:300').build(TEXTS)
    assert round_trip.measure_loss(ours, samples())['lost'] == 0


def words(unknown=None, normalizer=None):
    """Letters alone, between spaces and signs, which have no token."""
    vocabulary = {c: i for i, c in enumerate([*LETTERS, *([unknown] if unknown else [])])}
    made = library.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


LOSSY = {
    'spaces, signs': (words, 'the fox, naïve', 5, ['the fox, naïve', 'thefoxnave']),
    'unknown': (lambda: words('<unk>'), 'the fox, naïve', 5, ['the fox, naïve', 'thefoxnave']),
    'case': (
        lambda: words(normalizer=normalizers.Lowercase()),
        'TheFox',
        2,
        ['TheFox', 'thefox'],
    ),
    'composed': (
        lambda: train(byte_level(False), decoders.ByteLevel(), normalizers.NFC()),
        'cafe\u0301',
        3,
        ['cafe\u0301', 'café'],
    ),
    'accents': (
        lambda: train(
            metaspace(),
            decoders.Metaspace(),
            normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        ),
        'le café',
        2,
        ['le café', 'le cafe'],
    ),
    'two spaces': (
        lambda: train(byte_level(False), decoders.ByteLevel(), normalizers.Strip()),
        '  ab  ',
        4,
        [' ab  ', 'ab'],
    ),
}


@pytest.mark.parametrize('name', LOSSY)
def test_reference_bytes_that_do_not_come_back(name, tmp_path):
    make, text, lost, example = LOSSY[name]
    loss = round_trip.measure_loss(as_tokenizer(make(), tmp_path), [text, 'abc'])
    assert loss == {'bytes': len(text.encode()) + 3, 'lost': lost, 'example': example}


def test_reference_common_subsequences():
    @functools.cache
    def common(a, b):
        if not a or not b:
            return 0
        if a[0] == b[0]:
            return 1 + common(a[1:], b[1:])
        return max(common(a[1:], b), common(a, b[1:]))

    rng = random.Random(0)
    for _ in range(300):
        a, b = (bytes(rng.choices(b'abc', k=rng.randrange(9))) for _ in range(2))
        assert round_trip.count_common(a, b) == common(a, b), (a, b)


def test_a_note_says_what_is_lost_at_each_start(cfg, tmp_path):
    """Of data that are there, too, and of those that a version prepared that did not measure it."""
    tokenizer = f'hf:{tmp_path}'
    words().save(str(tmp_path / 'tokenizer.json'))
    source = write_texts(tmp_path, [f'the {LETTERS[i]} fox, ' * 9 for i in range(9)])
    own = cfg(source=source, tokenizer=tokenizer, seq_len=8)

    (note,) = notes_of(own)
    assert f'data.tokenizer={tokenizer} loses 36.36% of the bytes of {source}' in note  # 4 of 11
    assert "by a sample of 891 bytes: 'the a fox, the a fox, the a fox, the a f' comes back" in note
    assert 'not compare with that of another tokenizer' in note
    assert notes_of(own) == [note]
    folder = cache.root(own.cache_dir) / open_dataset(own, say=discard_line).digest
    report = json.loads((folder / prepared.REPORT).read_text())
    assert report.pop(prepared.ROUND_TRIP)['lost'] == 9 * 9 * 4
    (folder / prepared.REPORT).write_text(json.dumps(report))
    (folder / prepared.CONTENTS).unlink()
    assert notes_of(own) == [note]


def test_a_sample_is_of_the_whole_text(cfg, tmp_path, monkeypatch):
    """Bytes that are lost near its end are seen."""
    monkeypatch.setattr(round_trip, 'SAMPLE_BYTES', 40)
    words().save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'a.txt').write_text('abc' * 9_000 + '123' * 1_000)
    (note,) = notes_of(cfg(source=f'text:{tmp_path}/a.txt', tokenizer=f'hf:{tmp_path}'))
    assert ' loses 9.38% of' in note and 'by a sample of 1,280 bytes' in note  # 3 samples of 32
