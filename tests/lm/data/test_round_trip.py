"""The loss of tokenizers.

Reference: bytes counted by hand, and common subsequences by recursion. Property: tokenizers that
are lossless by construction have no note. Contract: the note is printed at each start.
"""

import functools
import json
import random

import pytest
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lm.data import cache, open_dataset, prepared, round_trip, tokenizers
from tests.lm.data.conftest import discard_line, opening_notes, write_texts
from tests.lm.data.test_tokenizers import TEXTS

LETTERS = 'abcdefghijklmnopqrstuvwxyz'


def train(
    pre_tokenizer, decoder, normalizer=None, byte_fallback=False, postprocess=None, texts=TEXTS
):
    """Trains a byte-pair encoding of all characters of the texts."""
    tokenizer = library.Tokenizer(models.BPE(byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ['<s>', '</s>']
    special += [f'<0x{i:02X}>' for i in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    parts = {'decoder': decoder, 'normalizer': normalizer, 'post_processor': postprocess}
    for name, part in parts.items():
        if part is not None:
            setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def llama_tokenizer():
    """Has the normalizer and the decoder of Llama 2's tokenizer.json, without a pre-tokenizer."""
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
    'llama': llama_tokenizer,
}


def plan_and_build(tokenizer, folder):
    tokenizer.save(str(folder / 'tokenizer.json'))
    return tokenizers.plan_tokenizer(f'hf:{folder}').build([])


def samples():
    rng = random.Random(0)
    pieces = [*TEXTS, ' ', '  ', '\n', '<s>', '</s>', 'é', '🙂', 'a']
    return [*TEXTS, *(''.join(rng.choices(pieces, k=4)) for _ in range(100))]


@pytest.mark.parametrize('name', LOSSLESS)
def test_property_lossless_tokenizers_have_no_note(name, tmp_path):
    tokenizer = plan_and_build(LOSSLESS[name](), tmp_path)
    loss = round_trip.measure_loss(tokenizer, samples())
    assert loss == {'bytes': sum(len(t.encode()) for t in samples()), 'lost': 0, 'example': None}
    assert round_trip.describe_loss(loss, 'hf', 'text') == ''


def test_property_own_tokenizers_are_lossless():
    assert round_trip.measure_loss(tokenizers.plan_tokenizer('byte').build([]), TEXTS) is None
    assert round_trip.measure_loss(tokenizers.plan_tokenizer('ids:9,7,8').build([]), TEXTS) is None
    tokenizer = tokenizers.plan_tokenizer('bpe:300').build(TEXTS)
    assert round_trip.measure_loss(tokenizer, samples())['lost'] == 0


def letters_tokenizer(unknown=None, normalizer=None):
    """Has tokens for letters alone, and none for the spaces and signs between them."""
    vocabulary = {c: i for i, c in enumerate([*LETTERS, *([unknown] if unknown else [])])}
    tokenizer = library.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


LOSSY = {
    'spaces, signs': (letters_tokenizer, 'the fox, naïve', 5, ['the fox, naïve', 'thefoxnave']),
    'unknown': (
        lambda: letters_tokenizer('<unk>'),
        'the fox, naïve',
        5,
        ['the fox, naïve', 'thefoxnave'],
    ),
    'case': (
        lambda: letters_tokenizer(normalizer=normalizers.Lowercase()),
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
def test_reference_lost_bytes(name, tmp_path):
    make, text, lost, example = LOSSY[name]
    loss = round_trip.measure_loss(plan_and_build(make(), tmp_path), [text, 'abc'])
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


def test_note_is_printed_at_each_start(cfg, tmp_path):
    """The note appears also for existing data, and for data of a version that did not measure the
    loss.
    """
    tokenizer = f'hf:{tmp_path}'
    letters_tokenizer().save(str(tmp_path / 'tokenizer.json'))
    source = write_texts(tmp_path, [f'the {LETTERS[i]} fox, ' * 9 for i in range(9)])
    data_cfg = cfg(source=source, tokenizer=tokenizer, seq_len=8, validation_fraction=0.4)

    (note,) = opening_notes(data_cfg)
    assert f'data.tokenizer={tokenizer} loses 36.36% of the bytes of {source}' in note  # 4 of 11
    assert "measured on 891 bytes: 'the a fox, the a fox, the a fox, the a f' is decoded as" in note
    assert 'not comparable with other tokenizers' in note
    assert opening_notes(data_cfg) == [note]
    folder = cache.root(data_cfg.cache_dir) / open_dataset(data_cfg, say=discard_line).digest
    report = json.loads((folder / prepared.REPORT).read_text())
    assert report.pop(prepared.ROUND_TRIP)['lost'] == 9 * 9 * 4
    (folder / prepared.REPORT).write_text(json.dumps(report))
    (folder / prepared.CONTENTS).unlink()
    assert opening_notes(data_cfg) == [note]


def test_samples_cover_the_whole_text(cfg, tmp_path, monkeypatch):
    """Bytes that are lost near its end are noticed."""
    monkeypatch.setattr(round_trip, 'SAMPLE_BYTES', 40)
    letters_tokenizer().save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'a.txt').write_text('abc' * 9_000 + '123' * 1_000)
    (note,) = opening_notes(cfg(source=f'text:{tmp_path}/a.txt', tokenizer=f'hf:{tmp_path}'))
    assert ' loses 9.38% of' in note and 'measured on 1,280 bytes' in note  # 3 samples of 32
