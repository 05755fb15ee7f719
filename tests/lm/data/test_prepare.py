import hashlib
import itertools
import re

import numpy as np
import pytest

from lm.data import check, open_dataset, prepare, prepared, rows
from lm.data.prepared import Chunks
from lm.data.rows import CHUNK
from lm.data.scan import cut_point
from tests.lm.data.conftest import discard_line, write_texts, write_tokenizer


def hash64(data):
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def read_split(ds, split):
    """Returns the texts of a split, joined from its rows (concat packing)."""
    tokens = [split[0]['tokens'][:1]]
    for row in split:
        tokens.append(row['tokens'][1:][row['segments'][1:] > 0])
    stream = np.concatenate(tokens)
    starts = np.flatnonzero(stream == ds.tokenizer.bos_id)
    documents = []
    for document in np.split(stream, starts[1:]):
        assert document[-1] == ds.tokenizer.eos_id
        documents.append(ds.tokenizer.decode(document))
    return documents


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:400'])
def test_property_every_document_is_in_one_split_whole(tokenizer, cfg, tmp_path):
    ds = open_dataset(cfg(tokenizer=tokenizer), say=discard_line)
    train, validation = read_split(ds, ds.train), read_split(ds, ds.validation)
    texts = [path.read_bytes().decode() for path in sorted((tmp_path / 'corpus').iterdir())]
    threshold = 0.2 * 2**64
    assert validation == [text for text in texts if hash64(text.encode()) < threshold]
    assert train == [text for text in texts if hash64(text.encode()) >= threshold]
    for split, documents in ((ds.train, train), (ds.validation, validation)):
        assert split.n_bytes == sum(len(text.encode()) for text in documents)
        assert split.n_tokens == sum(len(ds.tokenizer.encode(text)) + 1 for text in documents)
    assert ds.report['train']['documents'] == len(train)


def test_equivalence_batch_and_file_sizes(cfg, tmp_path, monkeypatch):
    ds = open_dataset(cfg(), say=discard_line)
    whole = [read_split(ds, split) for split in (ds.train, ds.validation)]
    monkeypatch.setattr(prepare, 'BATCH_CHARACTERS', 500)
    monkeypatch.setattr(prepared, 'CHUNKS_PER_FILE', 2)
    for reader in (rows, prepared):
        monkeypatch.setattr(reader, 'CHUNK', 64)
    ds = open_dataset(cfg(cache_dir=str(tmp_path / 'other')), say=discard_line)
    assert len(list((tmp_path / 'other').glob('*/records/*train.array_record*'))) > 10
    assert [read_split(ds, split) for split in (ds.train, ds.validation)] == whole


def test_property_documents_longer_than_a_chunk(cfg, tmp_path):
    texts = [f'{i} ' + 'abcdefg' * (i * CHUNK // 7) for i in range(6)]
    source = write_texts(tmp_path / 'long', texts)
    # By hash 0.4 of the text is for validation, so that no document is cut.
    ds = open_dataset(cfg(source=source, seq_len=1000, validation_fraction=0.5), say=discard_line)
    assert sorted(read_split(ds, ds.train) + read_split(ds, ds.validation)) == sorted(texts)


def test_property_ids_beyond_16_bits(cfg):
    """An unfilled vocabulary puts BOS and EOS at its end."""
    ds = open_dataset(cfg(tokenizer='bpe:70000'), say=discard_line)
    assert ds.train[0]['tokens'][0] == ds.tokenizer.bos_id == 69998
    assert read_split(ds, ds.train)[0].startswith('document ')


def test_errors_bos_in_text(cfg, tmp_path):
    source = write_texts(tmp_path / 'a', [f'line{"n" * i}' for i in range(9)])
    with pytest.raises(ValueError, match=r'as its own BOS, token 4.*another bos_token'):
        open_dataset(cfg(source=source, tokenizer=write_tokenizer(tmp_path)), say=discard_line)


def test_property_copies_stay_on_one_side(cfg, tmp_path):
    texts = [f'text {i % 30} ' * 9 for i in range(90)]
    ds = open_dataset(cfg(source=write_texts(tmp_path / 'twice', texts)), say=discard_line)
    train, validation = read_split(ds, ds.train), read_split(ds, ds.validation)
    assert len(train) + len(validation) == 90
    assert not set(train) & set(validation)


def test_property_the_split_ignores_order(cfg, tmp_path):
    texts = [f'text {i} ' * 9 for i in range(60)]
    sides = []
    for name, order in (('a', texts), ('b', texts[::-1])):
        ds = open_dataset(cfg(source=write_texts(tmp_path / name, order)), say=discard_line)
        sides.append(set(read_split(ds, ds.validation)))
    assert sides[0] == sides[1]


@pytest.mark.parametrize('fraction', [0.0, 1e-9, 0.999999])
def test_property_neither_split_is_empty(fraction, cfg):
    ds = open_dataset(cfg(validation_fraction=fraction), say=discard_line)
    counts = [ds.report[split]['documents'] for split in ('train', 'validation')]
    assert sorted(counts) == [1, 39]


def test_property_one_document_is_cut_at_a_line(cfg, tmp_path):
    text = ''.join(f'line {i} é🙂\n' for i in range(50))
    messages = []
    source = write_texts(tmp_path / 'one', [text])
    ds = open_dataset(cfg(source=source, validation_fraction=0.1), say=messages.append)
    (train,), (validation,) = read_split(ds, ds.train), read_split(ds, ds.validation)
    assert train + validation == text
    assert validation.startswith('line') and 0.05 < len(validation) / len(text) < 0.2
    assert any('last lines are the validation split' in line for line in messages)


@pytest.mark.parametrize('fraction', [0.0, 0.5, 0.99])
@pytest.mark.parametrize('text', ['é' * 40, 'a\n' + 'é' * 40, 'é' * 40 + '\n', 'ab', '\nb'])
def test_property_cut_points_leave_two_texts(text, fraction):
    content = text.encode()
    offset = cut_point('name', content, len(content), max(fraction, 1e-9))
    head, tail = content[:offset].decode(), content[offset:].decode()
    assert head and tail and head + tail == text


def test_property_tokenizer_ignores_validation_split(cfg, tmp_path):
    texts = [f'text number {i} ' * 9 for i in range(60)]
    validation_texts = [text for text in texts if hash64(text.encode()) < 0.2 * 2**64]
    secret = next(
        f'{i} ' + 'zqj' * 400
        for i in itertools.count()
        if hash64(f'{i} '.encode() + b'zqj' * 400) < 0.2 * 2**64
    )
    options = {'tokenizer': 'bpe:400'}
    plain = open_dataset(
        cfg(source=write_texts(tmp_path / 'a', texts), **options), say=discard_line
    )
    with_secret = open_dataset(
        cfg(source=write_texts(tmp_path / 'b', [*texts, secret]), **options), say=discard_line
    )
    assert len(read_split(with_secret, with_secret.validation)) == len(validation_texts) + 1
    assert with_secret.tokenizer.library.to_str() == plain.tokenizer.library.to_str()


def test_property_digest_depends_on_content_alone(cfg, tmp_path):
    source = write_texts(tmp_path / 'a', [f'text {i} ' * 9 for i in range(20)])

    def digest(**fields):
        return open_dataset(cfg(**({'source': source} | fields)), say=discard_line).digest

    first = digest()
    irrelevant = [{'seq_len': 16}, {'packing': 'best_fit'}, {'seed': 5}, {'batch_size': 2}]
    relevant = [{'tokenizer': 'bpe:300'}, {'validation_fraction': 0.3}, {'invalid_utf8': 'stop'}]
    relevant += [{'missing_text': 'stop'}]
    assert {digest(**fields) for fields in irrelevant} == {first}
    copy = write_texts(tmp_path / 'copy', [f'text {i} ' * 9 for i in range(20)])
    assert digest(source=copy, cache_dir=str(tmp_path / 'elsewhere')) == first
    digests = [digest(**fields) for fields in relevant]
    path = tmp_path / 'a' / '0003.txt'
    path.write_bytes(path.read_bytes().replace(b'3', b'4'))
    digests.append(digest())
    assert len({first, *digests}) == 6


def test_property_invalid_utf8_is_replaced_and_counted(cfg, tmp_path):
    texts = [f'text {i} ' * 9 for i in range(20)]
    source = write_texts(
        tmp_path / 'a', [*texts, b'caf\xe9 \xff\xfe na\xc3\xafve', b'tail \xf0\x9f\x99']
    )
    messages = []
    ds = open_dataset(cfg(source=source), say=messages.append)
    assert ds.report['invalid_utf8'] == {'documents': 2, 'bytes': 6}
    assert any('6 bytes become U+FFFD' in line for line in messages)
    documents = read_split(ds, ds.train) + read_split(ds, ds.validation)
    assert 'caf\ufffd \ufffd\ufffd naïve' in documents and 'tail \ufffd' in documents
    assert ds.train.n_bytes + ds.validation.n_bytes == sum(len(t.encode()) for t in documents)


def test_errors_invalid_utf8_stops(cfg, tmp_path):
    source = write_texts(tmp_path / 'a', ['fine', b'caf\xe9!'])
    says = r'0001\.txt is not UTF-8: byte 0xe9 at offset 3 .*data\.invalid_utf8=replace'
    with pytest.raises(ValueError, match=says):
        open_dataset(cfg(source=source, invalid_utf8='stop'), say=discard_line)
    assert not list((tmp_path / 'cache').glob('*.partial'))


def test_property_empty_documents_are_left_out(cfg, tmp_path):
    source = write_texts(tmp_path / 'a', ['', *(f'text {i} ' * 9 for i in range(20)), ''])
    ds = open_dataset(cfg(source=source), say=discard_line)
    assert ds.report['empty_documents'] == 2
    assert ds.report['train']['documents'] + ds.report['validation']['documents'] == 20


@pytest.mark.parametrize(
    'fields, says',
    [
        (
            {'packing': 'bestfit'},
            "data.packing must be one of best_fit, concat; got 'bestfit'. Did",
        ),
        ({'invalid_utf8': 'ignore'}, 'data.invalid_utf8 must be one of replace, stop'),
        ({'tokenizer': 'bpe:100'}, 'size of at least 258'),
        ({'source': 'text:nowhere/*.txt'}, 'no file matches'),
        (
            {'cache_dir': '/caf\udce9'},
            "stored in b'/caf\\xe9': its name, or this locale, is not UTF-8",
        ),
        ({'seq_len': 0}, 'data.seq_len must be at least 1; got 0'),
        ({'seq_len': 10**30}, 'data.seq_len must be at most 2147483647; got 1'),
        ({'batch_size': -1}, 'data.batch_size must be at least 1; got -1'),
        ({'epochs': 0}, 'data.epochs must be at least 1'),
        ({'seed': -1}, 'data.seed must be at least 0'),
        ({'prefetch': -1}, 'data.prefetch must be at least 0'),
        ({'validation_fraction': 1.0}, 'data.validation_fraction must be'),
        ({'validation_fraction': float('nan')}, 'data.validation_fraction must be'),
    ],
)
def test_errors_before_any_work(fields, says, cfg, tmp_path):
    with pytest.raises(ValueError, match=re.escape(says)):
        check(cfg(**fields))
    assert not (tmp_path / 'cache').exists()


def test_check_passes_what_opens(cfg):
    check(cfg())


def test_errors_small_corpora(cfg, tmp_path):
    with pytest.raises(ValueError, match=r'has no text: 2 documents, all of them empty'):
        open_dataset(cfg(source=write_texts(tmp_path / 'empty', ['', ''])), say=discard_line)
    with pytest.raises(
        ValueError, match=r'0000\.txt, of 1 bytes, is the only document and too short to be split'
    ):
        open_dataset(cfg(source=write_texts(tmp_path / 'tiny', ['x'])), say=discard_line)
    source = write_texts(tmp_path / 'short', ['0123456789', 'abcdefghij'])
    says = r'has 12 tokens, but one row needs .*= 13.*data\.seq_len to at most 11'
    with pytest.raises(ValueError, match=says):
        open_dataset(cfg(source=source, seq_len=12), say=discard_line)
    assert len(open_dataset(cfg(source=source, seq_len=11), say=discard_line).train) == 1


def test_property_opening_again_prepares_nothing(cfg):
    messages = []
    open_dataset(cfg(), say=messages.append)
    assert len(messages) <= 3
    count = len(messages)
    open_dataset(cfg(seq_len=16, packing='best_fit'), say=messages.append)
    assert len(messages) == count


def test_token_beyond_vocabulary_is_refused():
    """JAX would clamp the index, to another token."""
    source = [{'tokens': np.array([0, 5], np.uint16)}]
    assert Chunks(source, 'train of there', 6)[0]['tokens'].tolist() == [0, 5]
    with pytest.raises(OSError, match=r'train of there.*has token 5, but .* has only 5 tokens'):
        Chunks(source, 'train of there', 5)[0]
