"""Property and contract: a table of file formats, with the same documents through each of them."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import re
import sys

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from lm.data import formats, open_dataset, records
from lm.data.kinds import ADVICE, UnreadableKind, detect_kind
from lm.data.sources import open_source
from lm.storage.files import discard_line
from tests import ROOT
from tests.lm.data.conftest import opening_notes

PIECES = [
    'a',
    'the norm',
    ' ',
    '\n',
    '\r\n',
    '\r',
    '"',
    '""',
    ',',
    '\t',
    ';',
    '\\',
    "'",
    '日本',
    '🙂',
    '{',
]
PIECES += ['\x00', '\u2028', '\ufeff', '[', ']', 'é', '#']


def make_texts(seed=0, n=40):
    rng = random.Random(seed)
    texts = [''.join(rng.choices(PIECES, k=rng.randint(1, 60))) for _ in range(n)]
    return [f'x{text}' for text in texts]  # CSV has no difference between '' and no row


def long_window(content, log=31):
    """Returns a stream of unknown size as zstd --long=31 writes it."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


def write_lines(texts):
    return ''.join(
        json.dumps({'n': i, 'text': text}) + '\n' for i, text in enumerate(texts)
    ).encode()


def write_array(texts, **options):
    rows = [{'n': i, 'text': text} for i, text in enumerate(texts)]
    return json.dumps(rows, **options).encode()


def write_csv(texts, **dialect):
    file = io.StringIO(newline='')
    writer = csv.writer(file, **dialect)
    writer.writerows([('n', 'text'), *enumerate(texts)])
    return file.getvalue().encode()


def write_table(texts, kind, **options):
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table(
        {'n': range(len(texts)), 'text': pyarrow.array(texts, options.pop('as', 'string'))}
    )
    if kind == 'parquet':
        pyarrow.parquet.write_table(table, sink, write_page_checksum=True)
    elif kind == 'feather':
        pyarrow.feather.write_feather(table, sink, **options)
    else:
        opener = pyarrow.ipc.new_file if kind == 'file' else pyarrow.ipc.new_stream
        with opener(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


FORMATS = {
    'a.jsonl': write_lines,
    'A.JSONL': write_lines,
    'a.ndjson': write_lines,
    'a.jsonl.gz': lambda texts: gzip.compress(write_lines(texts)),
    'a.jsonl.bz2': lambda texts: bz2.compress(write_lines(texts)),
    'a.JSONL.XZ': lambda texts: lzma.compress(write_lines(texts)),
    'a.jsonl.zst': lambda texts: zstandard.compress(write_lines(texts)),
    'long.jsonl.zst': lambda texts: long_window(write_lines(texts)),
    'frames.jsonl.zst': lambda texts: (
        long_window(write_lines(texts[:9])) + long_window(write_lines(texts[9:]), 28)
    ),
    'marked.jsonl': lambda texts: write_lines(texts).decode().encode('utf-16'),
    'a.json': write_array,
    'indented.json': lambda texts: write_array(texts, indent=1, ensure_ascii=False),
    'pretty.json': lambda texts: '\n'.join(
        json.dumps({'text': text}, indent=2) for text in texts
    ).encode(),
    'c4-train.00000-of-01024.json.gz': lambda texts: gzip.compress(write_lines(texts)),
    'array.json.xz': lambda texts: lzma.compress(write_array(texts)),
    'a.csv': write_csv,
    'marked.csv': lambda texts: b'\xef\xbb\xbf' + write_csv(texts),
    'semicolons.csv': lambda texts: write_csv(texts, delimiter=';'),
    'a.tsv.csv': lambda texts: write_csv(texts),
    'a.csv.gz': lambda texts: gzip.compress(
        write_csv(texts, quoting=csv.QUOTE_ALL, lineterminator='\n')
    ),
    'a.tsv': lambda texts: write_csv(texts, delimiter='\t', quoting=csv.QUOTE_ALL),
    'a.parquet': lambda texts: write_table(texts, 'parquet'),
    'a.arrow': lambda texts: write_table(texts, 'file'),
    'stream.arrow': lambda texts: write_table(texts, 'stream'),
    'large.arrow': lambda texts: write_table(texts, 'stream', **{'as': 'large_string'}),
    'view.arrow': lambda texts: write_table(texts, 'stream', **{'as': 'string_view'}),
    'a.feather': lambda texts: write_table(texts, 'feather', compression='zstd'),
}


def read_texts(source, field='text'):
    return [
        None if parts is None else b''.join(parts).decode()
        for _, parts in open_source(source, field).documents()
    ]


@pytest.mark.parametrize('name', FORMATS)
def test_property_round_trip_through_every_format(name, tmp_path, monkeypatch):
    """Catches a reader that drops, splits or changes text: newlines, quotes, long records."""
    for block in (1 << 20, 11):  # the second is shorter than most records
        monkeypatch.setattr('lm.data.streams.BLOCK', block)
        texts = make_texts(seed=block)
        path = tmp_path / name
        path.write_bytes(FORMATS[name](texts))
        assert read_texts(f'text:{path}') == texts
        columns = ('text', 'absent') if block > len(texts) else ()
        rows = [row for _, row in formats.read_records(path, columns)]
        assert [row['text'] for row in rows] == texts


@pytest.mark.parametrize('name', FORMATS)
def test_damage_is_named_in_every_format(name, tmp_path):
    """A file that is cut off must not be read as a shorter one."""
    path, texts = tmp_path / name, make_texts()
    content = FORMATS[name](texts)
    cut = content[: -len(content) // 7]
    # A field of CSV that ends with its quotes may be whole; this one lacks them.
    path.write_bytes(cut.rstrip(b'"') if name.endswith(('.csv', '.tsv')) else cut)
    with pytest.raises(ValueError, match='^' + str(path).replace('.', r'\.') + r'\S* ') as error:
        read_texts(f'text:{path}')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['part-00000', 'part-00000.gz', 'a.txt'])
def test_note_on_records_whose_name_says_text(name, tmp_path):
    """A model would learn the syntax of JSON, from files as Spark names them."""
    content = write_lines(['a', 'b'])
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    (tmp_path / 'z.py').write_text('a = {"text": 1}')
    notes = [*open_source(f'text:{tmp_path}/*', 'text').notes]
    assert len(notes) == (name != 'a.txt')
    if notes:
        assert f'{tmp_path}/{name} is read as one text' in notes[0] and '.jsonl' in notes[0]


def test_errors_arrow_writer_was_stopped(tmp_path):
    """Without its end mark a stream may lack any number of batches, and reads well."""
    (tmp_path / 'a.arrow').write_bytes(write_table(['a', 'b'], 'stream')[:-8])
    with pytest.raises(ValueError, match=r'a\.arrow is not an Arrow file: it has no end mark'):
        read_texts(f'text:{tmp_path}/a.arrow')


def test_errors_long_window_without_its_library(tmp_path, monkeypatch):
    """Arrow's message names neither the cause nor a way."""
    (tmp_path / 'a.txt.zst').write_bytes(long_window(b'some text'))
    monkeypatch.setitem(sys.modules, 'zstandard', None)
    with pytest.raises(ValueError, match=r'--extra zstd\. Or .*: zstd -dc --long=31 .*a\.txt\.zst'):
        read_texts(f'text:{tmp_path}/*')


def test_token_ids_become_text_as_the_page_says(tmp_path, monkeypatch, cfg):
    page = (ROOT / 'docs/guide/data.md').read_text()
    program = page.partition('```python\n')[2].partition('```')[0]
    documents = [[5, 6, 7 + i] * 9 for i in range(9)]
    tokens = [token for document in documents for token in (*document, 50256)]
    np.array(tokens, np.uint16).tofile(tmp_path / 'train.bin')
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    texts = [' '.join(map(str, document)) for document in documents]
    assert [text for text in read_texts('text:train.jsonl') if text] == texts
    tokenizer = re.search(r'data\.tokenizer=(ids:[\d,]+)', page)
    assert tokenizer
    fields = {'source': 'text:train.jsonl', 'tokenizer': tokenizer[1], 'seq_len': 8}
    opened = open_dataset(cfg(**fields), say=discard_line)
    rows = [*opened.train.documents(), *opened.validation.documents()]
    assert sorted([token for token in row.tolist() if token != 50256] for row in rows) == documents


@pytest.mark.parametrize(
    'name', ['a.md', 'a.py', 'A.TXT', 'README', 'a.tex.gz', 'a.rst.zst', 'a.b.c']
)
def test_text_with_any_suffix_is_a_document(name, tmp_path):
    compress = {'.gz': gzip.compress, '.zst': long_window}.get((tmp_path / name).suffix, bytes)
    text = '日' * 9000 + '\r\n'  # the beginning that is looked at ends within a character
    for encoding in ('utf-8', 'utf-8-sig', 'utf-16'):
        (tmp_path / name).write_bytes(compress(text.encode(encoding)))
        assert read_texts(f'text:{tmp_path}/*') == [text]


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.pdf', b'%PDF-1.4\nall of it is ASCII', 'is a PDF. Convert it to text first'),
        ('a.docx', b'PK\x03\x04\0', "is a word processor's document"),
        ('a.zip', b'PK\x03\x04\0', 'is an archive. Unpack it'),
        ('a.tar.gz', gzip.compress(b'name\0\0', mtime=0), 'is an archive. Unpack it'),
        ('train.bin', b'\x8f\x02\0\1', 'data.tokenizer=ids:V,BOS,EOS'),
        ('noname', b'PK\x03\x04\0', 'is an archive'),
        ('noname', b'\x89PNG\r\n', 'is an image'),
        ('noname', gzip.compress(b'text', mtime=0), 'Rename it to end with .gz.'),
        ('a.md', 'é'.encode('latin-1'), 'is not UTF-8 text: byte 0xe9 at offset 0. If it is'),
        ('a.log', b'ab\0c', 'is not UTF-8 text: byte 0x00 at offset 2'),
        ('a.arrow.gz', b'x', 'is compressed as a whole. Decompress it to a .arrow file'),
        ('a.txt.lz4', b'\x04"M\x18\xff', 'is compressed in an unsupported format'),
    ],
)
def test_errors_kinds_that_are_no_text(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableKind) as error:
        detect_kind(tmp_path / name)
    assert str(error.value).startswith(f'{tmp_path}/{name} ') and message in str(error.value)
    with pytest.raises(ValueError, match='Narrow the glob'):
        open_source(f'text:{tmp_path}/*', 'text')


def test_advice_names_each_suffix_once():
    suffixes = ' '.join(ADVICE).split()
    assert len(suffixes) == len({*suffixes}) and all(suffix.startswith('.') for suffix in suffixes)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.json', b'[{"text": "a"} {"text": "b"}]', 'a.json[1] is not JSON: there is no comma'),
        ('a.json', b'[{"text": "a"}, 3]', 'a.json[1] must be an object; got int'),
        ('a.json', b'[{"text": "a"}] x', 'a.json continues after the end of its array'),
        ('a.json', b'[{"text": "a"}', 'a.json ends within its array'),
        ('a.json', b'{"text": "a" oh}', 'a.json:1 is not JSON'),
        ('a.json', b'{"text":\n1 2}', 'a.json[0] is not JSON'),
        ('a.csv', b'n,text\n1,a,b\n', 'a.csv:2 has 3 fields, but the header has 2'),
        ('a.csv', b'n,text\n1,a\n2\n', 'a.csv:3 has 1 fields, but the header has 2'),
        ('a.csv', b'n,text\n1,"a\nb" c\n', 'a.csv:2 is not CSV'),
        ('a.csv', b'n,body\n1,abc\n', "'n', 'body'"),
        ('a.arrow', b'no', 'a.arrow is not an Arrow file'),
    ],
)
def test_errors_records(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_texts(f'text:{tmp_path}/*')
    assert message in str(error.value)


def test_errors_too_long_record(tmp_path, monkeypatch):
    """A text without an end would be held in memory whole."""
    monkeypatch.setattr(records, 'LONGEST_LINE', 30)
    monkeypatch.setattr('lm.data.streams.BLOCK', 20)
    long_text = 'x' * 200
    (tmp_path / 'a.json').write_text('[{"text": "a"},\n{"text": "' + long_text + '"}]')
    (tmp_path / 'b.csv').write_text(f'text\n{long_text}\n')
    for name, location in (('a.json', 'a.json[1]'), ('b.csv', 'b.csv:2')):
        with pytest.raises(ValueError) as error:
            read_texts(f'text:{tmp_path}/{name}')
        assert f'{location} is longer than 30 bytes' in str(error.value)


def write_records(path, rows):
    if path.suffix == '.parquet':
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return f'text:{path}'


MESSAGES = [{'role': 'user', 'content': 'hi'}]


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet', 'a.feather'])
def test_records_keep_their_other_columns(name, tmp_path):
    """Conversations are lists; a column of lists is no dictionary of texts."""
    rows = [{'messages': MESSAGES * i, 'text': 'é', 'n': i, 'none': None} for i in range(1, 99)]
    if name == 'a.feather':
        pyarrow.feather.write_feather(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        write_records(tmp_path / name, rows)
    assert [row for _, row in formats.read_records(tmp_path / name)] == rows
    some = [row for _, row in formats.read_records(tmp_path / name, ('messages', 'absent'))]
    assert [row['messages'] for row in some] == [row['messages'] for row in rows]


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
@pytest.mark.parametrize(
    ('row', 'field', 'message'),
    [
        ({'id': 1, 'body': 'a'}, 'text', 'Set data.text_field=body.'),
        ({'title': 'a', 'content': 'b'}, 'text', 'Set data.text_field=content.'),
        ({'text': 'a', 'abstract': 'b'}, 'abstrakt', 'Set data.text_field=abstract.'),
        (
            {'title': 'a', 'zzz': 'b'},
            'text',
            "its fields are 'title', 'zzz'. Set data.text_field to",
        ),
        ({'messages': MESSAGES}, 'text', 'For chats, replace text: with chat: in data.source'),
        ({'messages': MESSAGES}, 'messages', 'For chats, replace text: with chat: in data.source'),
        ({'prompt': 'a', 'completion': 'b'}, 'text', 'For chats, replace text: with chat: in'),
        ({'text': 3}, 'text', 'must be text; got int.'),
        ({'rows': [{'text': 'a'}]}, 'text', "its fields are 'rows'. None of them has text."),
    ],
)
def test_errors_name_the_field_to_set(suffix, row, field, message, tmp_path):
    source = write_records(tmp_path / f'a{suffix}', [row])
    with pytest.raises(ValueError) as error:
        read_texts(source, field)
    assert message in str(error.value)


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
def test_advice_for_lists_works(suffix, tmp_path, monkeypatch):
    """Runs the command of the error, and reads the file that it writes."""
    rows = [{'text': ['one', 'two']}, {'text': ['three']}]
    source = write_records(tmp_path / f'a{suffix}', rows)
    with pytest.raises(ValueError, match=r'must be text; got list') as error:
        read_texts(source)
    program = str(error.value).partition('python -c "')[2].removesuffix('".').replace('\\"', '"')
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert read_texts('text:new.parquet') == ['one\ntwo', 'three']


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
def test_records_without_text_are_counted(suffix, cfg, tmp_path):
    """A null among many texts stopped the run; it must be neither silent nor in the data."""
    rows = [{'id': i, 'text': f'document {i} of words'} for i in range(30)]
    write_records(tmp_path / f'whole{suffix}', rows)
    rows[0] = {'id': 0, 'text': None}
    rows[7] = {'id': 7} if suffix == '.jsonl' else {'id': 7, 'text': None}
    source = write_records(tmp_path / f'a{suffix}', rows)
    location = f'a{suffix}:1' if suffix == '.jsonl' else f'a{suffix}[0]'
    (note,) = opening_notes(cfg(source=source))
    assert "2 records without text in 'text'" in note and location in note
    with pytest.raises(ValueError, match=r'has no text in its field .*missing_text=skip'):
        opening_notes(cfg(source=source, missing_text='stop'))
    assert not opening_notes(cfg(source=f'text:{tmp_path}/whole{suffix}', missing_text='stop'))


def test_field_that_all_records_lack_is_missing(tmp_path, monkeypatch):
    """A misspelt field must not be a corpus of nothing, read to its end first."""
    monkeypatch.setattr(formats, 'MOST_MISSING', 3)
    lines = [*['{"body": "a"}'] * 3, 'this line is not read']
    (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'b.jsonl').write_text('\n'.join(lines[:2]))
    for name in ('a', 'b'):
        with pytest.raises(ValueError, match=rf'{name}\.jsonl:1 has no field .*text_field=body'):
            read_texts(f'text:{tmp_path}/{name}.jsonl')


def test_identity_tells_kinds_apart(tmp_path):
    """Equal bytes under another suffix are other documents; and earlier versions' data stay."""
    content = write_csv(['a', 'b'])
    identities = set()
    for name in ('a.csv', 'a.tsv', 'a.txt', 'a.jsonl'):
        (tmp_path / name).write_bytes(content)
        identities.add(open_source(f'text:{tmp_path}/{name}', 'text').identity)
    assert len(identities) == 4 and {'text', 'records of text'} < identities
    for name in ('a.csv', 'a.tsv'):
        (tmp_path / name).unlink()
    assert open_source(f'text:{tmp_path}/*', 'text').identity == 'records of text'
