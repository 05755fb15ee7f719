"""Documents are read, split, decoded and encoded in parts, with the same result as whole ones."""

import codecs
import hashlib
import random
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lm.data import columnar, open_dataset, prepare, records, scan, streams, tokenizers
from lm.data.scan import align_characters, count_invalid, refuse_invalid
from lm.data.sources import open_source
from tests import ROOT
from tests.lm.data.conftest import discard_line, opening_notes, write_texts

FRACTION = 0.3
PIECES = [
    *('a', 'bc ', 'The', "'s", '12', '.', ',', '_', '"x":', '\n', '\r\n', '\t', '  ', '\n\n'),
    *('é', '日本', '🙂', '²', '\u2028', '\xa0', '\x1f', '\x85', '\ufeff', 'e\u0301', '{', '-'),
]
BROKEN = [b'\xff', b'\x80', b'\xe2\x82', b'\xf0\x9f\x99', b'\xc3', b'\xed\xa0\x80', b'\xf8\x88']


def random_text(rng, n):
    return ''.join(rng.choices(PIECES, k=n))


def random_bytes(rng, n):
    pieces = [piece.encode() for piece in PIECES] + BROKEN * 2
    return b''.join(rng.choices(pieces, k=n))


def corpora(rng):
    many = [random_text(rng, rng.randrange(60)).encode() for _ in range(30)]
    return {
        'many': [b'', *many, b'\xef\xbb\xbfwith a BOM\r\n', b'', b'\r\n', 'é'.encode()],
        'broken': [random_bytes(rng, rng.randrange(1, 60)) for _ in range(30)] + BROKEN,
        'one': [random_text(rng, 400).encode()],
        'one, broken': [random_bytes(rng, 400)],
        'one line': ['é🙂日 '.encode() * 50],
        'no character': [b'', b'\xc3' + b'\x80' * 300 + b'\xff'],
        'copies': [b'some\n\xfftext\nmore'] * 3,
    }


def split_reference(documents):
    """Returns {split: whole documents}, by the rule in the docstrings."""
    documents = [content for content in documents if content]
    hashes = [
        int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) for document in documents
    ]
    if len(set(hashes)) == 1:
        content = documents[0]
        target = min(int(len(content) * (1 - FRACTION)), len(content) - 1)
        at = content.rfind(b'\n', 0, target) + 1 or content.find(b'\n', target) + 1
        if not 0 < at < len(content):
            near = [*range(target, 0, -1), *range(target, len(content))]
            at = next(i for i in near if content[i] & 0xC0 != 0x80)
        return {
            'train': [document[:at] for document in documents],
            'validation': [document[at:] for document in documents],
        }
    threshold = min(max(int(FRACTION * 2**64), min(hashes) + 1), max(hashes))
    is_validation = [h < threshold for h in hashes]
    return {
        'train': [
            document
            for document, is_below in zip(documents, is_validation, strict=True)
            if not is_below
        ],
        'validation': [
            document
            for document, is_below in zip(documents, is_validation, strict=True)
            if is_below
        ],
    }


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:300'])
@pytest.mark.parametrize('name', corpora(random.Random(0)))
def test_equivalence_parts_and_whole_documents(name, tokenizer, cfg, tmp_path, monkeypatch):
    documents = corpora(random.Random(0))[name]
    source = write_texts(tmp_path / 'own', documents)
    documents = [content.removeprefix(codecs.BOM_UTF8) for content in documents]  # is no text
    expected = {
        name: [content.decode('utf-8', 'replace') for content in split_documents]
        for name, split_documents in split_reference(documents).items()
    }
    built = tokenizers.plan_tokenizer(tokenizer).build(expected['train'])
    for module in (streams, scan):
        monkeypatch.setattr(module, 'BLOCK', 5)
    monkeypatch.setattr(tokenizers, 'PART', 7)
    monkeypatch.setattr(prepare, 'BATCH_CHARACTERS', 20)
    options = {'tokenizer': tokenizer, 'validation_fraction': FRACTION, 'seq_len': 1}
    dataset = open_dataset(cfg(source=source, **options), say=discard_line)
    if tokenizer != 'byte':
        assert dataset.tokenizer.library.to_str() == built.library.to_str()
        encode = lambda t: built.library.encode(t, add_special_tokens=False).ids  # noqa: E731
    else:
        encode = built.encode
    for split, texts in expected.items():
        rows = getattr(dataset, split)
        ids = [tokens.tolist() for tokens in rows.documents()]
        assert ids == [encode(random_text) for random_text in texts]
        assert rows.n_bytes == sum(len(random_text.encode()) for random_text in texts)
    escaped = [document.decode('utf-8', 'surrogateescape') for document in documents]
    invalid = [
        sum('\udc80' <= character <= '\udcff' for character in random_text)
        for random_text in escaped
    ]
    assert dataset.report['invalid_utf8'] == {
        'documents': sum(n > 0 for n in invalid),
        'bytes': sum(invalid),
    }
    assert dataset.report['empty_documents'] == documents.count(b'')


def test_equivalence_blocks_and_whole_text():
    rng = random.Random(1)
    for _ in range(300):
        content = random_bytes(rng, rng.randrange(1, 20))
        size = rng.randrange(1, 6)
        blocks = list(align_characters(content[i : i + size] for i in range(0, len(content), size)))
        assert b''.join(blocks) == content and all(blocks) and max(map(len, blocks)) <= size + 3
        assert ''.join(b.decode('utf-8', 'replace') for b in blocks) == content.decode(
            'utf-8', 'replace'
        )
        assert sum(count_invalid('', b, 0) for b in blocks) == count_invalid('', content, 0)
        offset = 0
        try:
            for block in blocks:
                offset += len(block) + refuse_invalid('', block, offset)
        except ValueError as error:
            with pytest.raises(UnicodeDecodeError) as decode_error:
                content.decode()
            assert f'at offset {decode_error.value.start} ' in str(error)
        else:
            content.decode()


def test_property_cuts_agree_with_the_pattern():
    """Catches a cut within a token of the whole text."""
    pieces = tokenizers.plan_tokenizer('bpe:258').build([]).library.pre_tokenizer.pre_tokenize_str

    def split_pieces(random_text):
        return [piece for piece, _ in pieces(random_text)]

    rng, cuts = random.Random(2), 0
    for _ in range(300):
        whole = random_text(rng, 12)
        for match in tokenizers.CUT.finditer(whole):
            offset = match.end()
            assert split_pieces(whole[:offset]) + split_pieces(whole[offset:]) == split_pieces(
                whole
            ), (whole, offset)
            cuts += 1
    assert cuts > 500


def test_property_batches_are_bounded():
    """Otherwise a corpus of single letters would be millions of objects at once."""
    for text, documents in (('x', 100_000), ('word ' * 5_000, 400)):
        parts = (part for _ in range(documents) for part in (('train', text), ('train', None)))
        groups = list(prepare.batch_parts(parts))
        assert sum(map(len, groups)) == 2 * documents
        for group in groups:
            ends = sum(part is None for _, part in group)
            assert ends * scan.DOCUMENT_COST <= prepare.BATCH_CHARACTERS
            characters = sum(len(part or '') for _, part in group)
            assert characters <= prepare.BATCH_CHARACTERS + len(text)


def test_errors_uncuttable_text(cfg, tmp_path, monkeypatch):
    source = write_texts(tmp_path, [f'{i} some words ' + 'x' * i * 20 for i in range(9)])
    monkeypatch.setattr(scan, 'LARGE', 100)
    monkeypatch.setattr(tokenizers, 'PART', 10)
    monkeypatch.setattr(tokenizers, 'LONGEST_UNCUT', 150)
    with pytest.raises(ValueError, match=r'8\.txt has 150 characters without a space.*=byte'):
        open_dataset(cfg(source=source, tokenizer='bpe:300'), say=discard_line)
    assert not list((tmp_path / 'cache').glob('*.partial'))
    assert open_dataset(cfg(source=source), say=discard_line).train.n_bytes > 150


def test_property_note_on_whole_documents(cfg, tmp_path, monkeypatch):
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE({'a': 0, 'b': 1}, []))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    source = write_texts(tmp_path, ['ab ' * (i + 1) * 10_000 for i in range(9)])
    monkeypatch.setattr(scan, 'LARGE', 250_000)
    notes = opening_notes(cfg(source=source, tokenizer=f'hf:{tmp_path}'))
    (note,) = [line for line in notes if 'memory' in line]
    assert f'NOTE: {tmp_path}/0008.txt is a document of 0.3 MB' in note
    assert 'about 0.03 GB of memory' in note


def test_errors_source_changes_during_reading(cfg, tmp_path, monkeypatch):
    """The digest would name other data than the stored."""
    (tmp_path / 'a.txt').write_text('some text\n' * 99)
    monkeypatch.setattr(streams, 'BLOCK', 20)

    def append(name, data, offset):
        with open(tmp_path / 'a.txt', 'a') as file:
            file.write('more\n' * (offset < 50))
        return 0

    monkeypatch.setitem(scan.INVALID_UTF8, 'replace', append)
    with pytest.raises(ValueError, match=r'a\.txt changed while they were read'):
        open_dataset(cfg(source=f'text:{tmp_path}/a.txt'), say=discard_line)


def test_errors_too_long_line(tmp_path, monkeypatch):
    monkeypatch.setattr(records, 'LONGEST_LINE', 30)
    lines = ['{"text": "short"}', '{"text": "' + 'long' * 10 + '"}']
    (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
    with pytest.raises(ValueError, match=r'a\.jsonl:2 is longer than 30 bytes.*a \.txt file'):
        list(open_source(f'text:{tmp_path}/*', 'text').documents())


def test_equivalence_parquet_batch_sizes(tmp_path, monkeypatch):
    texts = [random_text(random.Random(i), 50) for i in range(50)]
    columns = {'text': texts, 'large': pyarrow.array(texts, pyarrow.large_string())}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / 'a.parquet', row_group_size=20)
    monkeypatch.setattr(columnar, 'PARQUET_BATCH', 500)
    groups = (texts[:20], texts[20:40], texts[40:])
    widest = max(sum(len(text.encode()) for text in group) / len(group) for group in groups)
    with pyarrow.parquet.ParquetFile(tmp_path / 'a.parquet') as file:  # it adds some bytes a row
        n_rows = columnar._rows_per_batch([*columnar._list_chunks(file, 'text')])
        assert 500 / (widest + 30) - 1 < n_rows <= 500 / widest
    for field in columns:
        documents = open_source(f'text:{tmp_path}/*', field).documents()
        assert [b''.join(parts).decode() for _, parts in documents] == texts


REPEATED = 'some words ' * 9_000  # 99 kB


def write_repeated(path, n_rows, encoding):
    """Writes a parquet file of about 20 kB for any number of rows."""
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(n_rows, np.int32), [REPEATED])
    table = pyarrow.table({'text': column if encoding == 'dictionary' else column.cast('string')})
    options = {} if encoding == 'dictionary' else {'column_encoding': {'text': encoding}}
    pyarrow.parquet.write_table(
        table, path, use_dictionary=not options, store_schema=False, **options
    )


@pytest.mark.parametrize('encoding', ['dictionary', 'DELTA_BYTE_ARRAY', 'large strings'])
def test_property_memory_for_repeated_parquet_text(encoding, tmp_path, monkeypatch):
    """A value that a page holds once may be in all rows; by average size, a batch took a GB."""
    n_rows = 2_000
    if encoding == 'large strings':
        values = pyarrow.array([REPEATED, 'other'], pyarrow.large_string())
        column = pyarrow.DictionaryArray.from_arrays(np.arange(n_rows, dtype=np.int32) % 2, values)
        pyarrow.parquet.write_table(pyarrow.table({'text': column}), tmp_path / 'a.parquet')
    else:
        write_repeated(tmp_path / 'a.parquet', n_rows, encoding)
    assert (tmp_path / 'a.parquet').stat().st_size < 50_000
    monkeypatch.setattr(columnar, 'PARQUET_BATCH', 1 << 20)
    before, peak, n_read = pyarrow.total_allocated_bytes(), 0, 0
    for _, parts in open_source(f'text:{tmp_path}/*', 'text').documents():
        n_read += b''.join(parts) in (REPEATED.encode(), b'other')
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert n_read == n_rows and peak < 8 << 20


def test_errors_parquet_column_with_lists(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({'text': [['a', 'b']]}), tmp_path / 'a.parquet')
    with pytest.raises(ValueError, match=r'a\.parquet must be text; got list<element: string>'):
        list(open_source(f'text:{tmp_path}/*', 'text').documents())


RESIDENT = """
import re, sys
from pathlib import Path
import pyarrow.parquet
from lm.data.sources import open_source
def peak():
    return int(re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024
before = peak()
n = sum(len(part) for _, parts in open_source(sys.argv[1], 'text').documents() for part in parts)
print(n, peak() - before)
"""


@pytest.mark.full
@pytest.mark.parametrize('encoding', ['dictionary', 'DELTA_BYTE_ARRAY'])
def test_property_reading_process_memory(encoding, tmp_path):
    """A thousand rows at once took 440 MB."""
    write_repeated(tmp_path / 'a.parquet', 5_000, encoding)
    command = [sys.executable, '-c', RESIDENT, f'text:{tmp_path}/a.parquet']
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    n_bytes, growth = map(int, process.stdout.split())
    assert n_bytes == 5_000 * len(REPEATED) and growth < 160 << 20


def test_property_invalid_parquet_text_reaches_the_policy(tmp_path):
    offsets, content = np.array([0, 3], np.int32), b'a\xffb'
    array = pyarrow.StringArray.from_buffers(1, *map(pyarrow.py_buffer, (offsets, content)))
    pyarrow.parquet.write_table(pyarrow.table({'text': array}), tmp_path / 'a.parquet')
    ((_, parts),) = open_source(f'text:{tmp_path}/*', 'text').documents()
    assert b''.join(parts) == content
