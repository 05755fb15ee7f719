import codecs
import gzip
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lm.data import cache, open_dataset, regression, sources, streams
from lm.data.sources import SOURCES, SYNTHETIC, open_source
from lm.data.standard_library import read_docstrings
from tests import ROOT
from tests.lm.data.conftest import discard_line, opening_notes, write_texts

TEXTS = ['first\r\ntext', 'zweiter 🙂', 'the third\n']


def read_source(source, field='text', limit=None):
    documents = itertools.islice(open_source(source, field).documents(), limit)
    return [b''.join(parts).decode() for _, parts in documents if parts is not None]


def jsonl(field='text'):
    lines = [json.dumps({'id': i, field: text}) for i, text in enumerate(TEXTS)]
    return '\n'.join([lines[0], '', *lines[1:]]).encode()  # an empty line is no record


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


COMPRESS = {'': lambda data: data, '.gz': gzip.compress, '.zst': zstandard.compress}


@pytest.mark.parametrize('compression', COMPRESS)
def test_reference_txt(compression, tmp_path):
    for i, text in enumerate(TEXTS):
        path = tmp_path / 'deep' / f'{2 - i}.txt{compression}'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(COMPRESS[compression](text.encode()))
    (tmp_path / 'deep' / 'folder.txt').mkdir()
    assert read_source(f'text:{tmp_path}/**/*.txt{compression}') == TEXTS[::-1]


@pytest.mark.parametrize('compression', COMPRESS)
def test_reference_jsonl(compression, tmp_path):
    (tmp_path / f'a.jsonl{compression}').write_bytes(COMPRESS[compression](jsonl('body')))
    assert read_source(f'text:{tmp_path}/*', 'body') == TEXTS


def test_reference_compressed_in_several_frames(tmp_path):
    """Parallel compressors write many; a reader that stops at the first loses the rest."""
    for compress, name in ((gzip.compress, 'a.txt.gz'), (zstandard.compress, 'b.txt.zst')):
        (tmp_path / name).write_bytes(compress(b'one, ') + compress(b'two'))
    assert read_source(f'text:{tmp_path}/*') == ['one, two'] * 2


def test_reference_parquet(tmp_path):
    write_parquet(tmp_path / 'a.parquet', body=TEXTS, other=[1, 2, 3])
    write_parquet(tmp_path / 'b.parquet', body=[text.encode() for text in TEXTS])
    assert read_source(f'text:{tmp_path}/*.parquet', 'body') == TEXTS * 2


def test_reference_glob_is_relative_to_working_folder(tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text('here')
    monkeypatch.chdir(tmp_path)
    assert read_source('text:*.txt') == ['here']


def test_file_name_precedes_glob(tmp_path):
    (tmp_path / 'a[1].txt').write_text('the file')
    (tmp_path / 'a1.txt').write_text('the match')
    assert read_source(f'text:{tmp_path}/a[1].txt') == ['the file']
    (tmp_path / 'a[1].txt').unlink()
    assert read_source(f'text:{tmp_path}/a[1].txt') == ['the match']


@pytest.fixture
def linked_texts(tmp_path):
    """Two texts, in a folder that links lead back into, and a third one in another folder."""
    folder = tmp_path / 'texts'
    for name in ('b.txt', 'run/a.txt', '../elsewhere/c.txt'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'text of {name}')
    for name, target in (('up', '.'), ('run/up', '..'), ('aaa', 'run'), ('more', '../elsewhere')):
        (folder / name).symlink_to(target)
    return folder


TWICE = 'some files under several names, which are links. Each file is read once, and not as '


@pytest.mark.parametrize(
    ('pattern', 'files', 'double'),
    [
        ('**/*.txt', ['b.txt', 'more/c.txt', 'run/a.txt'], 'aaa'),
        ('*/*.txt', ['more/c.txt', 'run/a.txt', 'up/b.txt'], 'aaa/a.txt'),
        ('aaa/*.txt', ['aaa/a.txt'], ''),
        ('**/aaa/*.txt', ['aaa/a.txt'], 'aaa'),
        ('**/**/b.txt', ['b.txt'], 'aaa'),
    ],
)
def test_linked_files_are_read_once(pattern, files, double, linked_texts):
    """With `glob` the first has 2**40 matches or so."""
    source = open_source(f'text:{linked_texts}/{pattern}', 'text')
    assert source.files == tuple(linked_texts / name for name in files)
    if double:
        assert f'{TWICE}{linked_texts}/{double}' in source.notes[0]
    else:
        assert source.notes == ()


def test_hard_links_are_one_file(tmp_path):
    (tmp_path / 'b.txt').write_text('the text')
    (tmp_path / 'a.txt').hardlink_to(tmp_path / 'b.txt')
    source = open_source(f'text:{tmp_path}/*.txt', 'text')
    assert source.files == (tmp_path / 'a.txt',) and f'{TWICE}{tmp_path}/b.txt' in source.notes[0]


def test_links_without_duplicates_have_no_note(tmp_path):
    """The cache of the hub has such links."""
    for i in range(3):
        (tmp_path / f'blob{i}').write_text(f'text {i}')
        (tmp_path / f'{i}.txt').symlink_to(f'blob{i}')
    source = open_source(f'text:{tmp_path}/*.txt', 'text')
    assert [path.name for path in source.files] == ['0.txt', '1.txt', '2.txt']
    assert source.notes == ()


def test_irregular_files_are_skipped_with_a_note(cfg, tmp_path):
    """Reading a pipe would block, and a device would never end."""
    os.mkfifo(tmp_path / 'a.txt')
    (tmp_path / 'b.txt').symlink_to('/dev/zero')
    (tmp_path / 'c.txt').symlink_to('nowhere')
    (tmp_path / 'd.txt').mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / 'e.txt'))
    write_texts(tmp_path / 'folder', [f'some text {i}\n' * 9 for i in range(9)])
    messages = []
    open_dataset(cfg(source=f'text:{tmp_path}/**/*.txt'), say=messages.append)
    first = ', '.join(f'{tmp_path}/{name}.txt' for name in 'abc')
    assert f'matches {first} and 2 more, but only regular files are read' in messages[0]
    with pytest.raises(ValueError, match=r'a\.txt, but only regular files are read'):
        open_source(f'text:{tmp_path}/a.txt', 'text')


MARKED = {
    'utf-8-sig': codecs.BOM_UTF8,
    'utf-16-le': codecs.BOM_UTF16_LE,
    'utf-16-be': codecs.BOM_UTF16_BE,
    'utf-32-le': codecs.BOM_UTF32_LE,
    'utf-32-be': codecs.BOM_UTF32_BE,
}


def encode_marked(text, encoding):
    return MARKED[encoding] + text.encode(encoding.removesuffix('-sig'))


@pytest.mark.parametrize('compression', COMPRESS)
@pytest.mark.parametrize('encoding', MARKED)
def test_byte_order_mark_names_the_encoding(encoding, compression, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, 'BLOCK', 7)  # no whole number of characters
    compress, text = COMPRESS[compression], TEXTS[1] + 'é, \ufeff within it, \U0001f642' * 9
    (tmp_path / f'a.txt{compression}').write_bytes(compress(encode_marked(text, encoding)))
    lines = f'{{"text": "{text}"}}\n' * 2
    (tmp_path / f'b.jsonl{compression}').write_bytes(compress(encode_marked(lines, encoding)))
    assert read_source(f'text:{tmp_path}/a.txt*') == [text]
    assert read_source(f'text:{tmp_path}/b.jsonl*') == [text, text]


def test_mark_alone_is_empty_text(tmp_path):
    for encoding, mark in MARKED.items():
        (tmp_path / f'{encoding}.txt').write_bytes(mark)
    (tmp_path / 'short.txt').write_bytes(codecs.BOM_UTF8[:2])
    source = open_source(f'text:{tmp_path}/*', 'text')
    texts = [b''.join(parts) for _, parts in source.documents()]
    assert texts == [codecs.BOM_UTF8[:2], *[b''] * len(MARKED)]


@pytest.mark.parametrize(
    ('encoding', 'invalid', 'message'),
    [
        ('utf-16-le', b'x', 'UTF-16-LE, but has other content: truncated data at offset 42'),
        ('utf-16-le', b'\x00\xdcxx', 'illegal encoding at offset 42'),
        (
            'utf-32-be',
            b'\x7f\xff\xff\xff',
            'UTF-32-BE, but has other content: code point not in range',
        ),
    ],
)
def test_errors_text_contradicts_its_mark(encoding, invalid, message, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, 'BLOCK', 5)
    source = write_file(tmp_path, 'a.txt', encode_marked('x' * 20, encoding) + invalid)
    with pytest.raises(ValueError, match=rf'a\.txt begins with the byte-order mark of .*{message}'):
        read_source(source)


def test_digest_includes_the_mark(tmp_path, monkeypatch):
    """Digests of files without a mark, by earlier versions, are reused."""
    files, folder = [tmp_path / name for name in ('a.txt', 'b.txt')], tmp_path / 'cache'
    files[0].write_text('some text\n' * 9)
    files[1].write_bytes(codecs.BOM_UTF8 + b'some text\n' * 9)
    plain = [cache.file_digest(path) for path in files]
    digests = cache.file_digests(folder, files)
    assert digests == [plain[0], f'{plain[1]}utf-8-sig']
    notes = json.loads((folder / 'files.json').read_text())
    earlier = {
        path: [size, changed, plain[i]]
        for i, (path, (size, changed, *_)) in enumerate(notes.items())
    }
    (folder / 'files.json').write_text(json.dumps(earlier))
    monkeypatch.setattr(cache, 'file_digest', pytest.fail)  # no file is read again
    assert cache.file_digests(folder, files) == digests
    assert json.loads((folder / 'files.json').read_text()) == notes


def test_unmarked_utf_16_prints_a_note(cfg, tmp_path):
    """UTF-16 of ASCII text is valid UTF-8, with a zero after every letter."""
    encodings = ['utf-16-le' if i == 4 else 'utf-8' for i in range(9)]
    texts = [f'some text {i} '.encode(encoding) * 9 for i, encoding in enumerate(encodings)]
    (note,) = opening_notes(cfg(source=write_texts(tmp_path, texts)))
    assert (
        'in 1 documents at least a quarter' in note and f'the first is {tmp_path}/0004.txt' in note
    )


OPENS = """
import os, sys
from lm.data.sources import open_source
folder, field = (os.fsdecode(bytes.fromhex(one)) for one in sys.argv[1:])
source = open_source(f'text:{folder}/*', field)
print(source.identity.encode().hex(), [len(b''.join(p)) for _, p in source.documents()])
"""


@pytest.mark.full
def test_non_ascii_names_in_any_locale(tmp_path):
    """Catches names that reach a library, or a digest, as surrogates."""
    folder, texts = tmp_path / 'café', ['première', 'deuxième']
    folder.mkdir()
    write_parquet(folder / 'à.parquet', téxt=texts)
    lines = '\n'.join(json.dumps({'téxt': text}, ensure_ascii=False) for text in texts)
    (folder / 'é.jsonl').write_text(lines, encoding='utf-8')
    (folder / 'è.jsonl.zst').write_bytes(zstandard.compress(lines.encode()))
    command = [sys.executable, '-c', OPENS, os.fsencode(folder).hex(), 'téxt'.encode().hex()]
    printed = {
        subprocess.run(
            command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True
        ).stdout
        for env in ({'PYTHONUTF8': '1'}, {'LC_ALL': 'C', 'PYTHONUTF8': '0'})
    }
    assert printed == {f'{"records of téxt".encode().hex()} [9, 9, 9, 9, 9, 9]\n'}


def test_property_invalid_json_bytes_reach_the_policy(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a\xffb"}\n{"text": "half \\ud83d"}\n')
    source = open_source(f'text:{tmp_path}/*', 'text')
    documents = [b''.join(parts) for _, parts in source.documents()]
    assert documents == [b'a\xffb', b'half \xed\xa0\xbd']


def test_property_python_excludes_tests():
    source = open_source('python', 'text')
    names = [name for name, _ in source.documents()]
    assert names == sorted(names) and len(names) > 300
    assert {'ast.py', 'json/decoder.py'} <= set(names)
    for name in names:
        assert name.endswith('.py')
        assert not {'test', 'tests', 'idle_test', 'site-packages'} & set(name.split('/'))
        assert '_sysconfigdata' not in name


def test_docstrings_are_read_in_order_without_code():
    """Catches nested functions that come after later ones, indentation, and other strings."""
    code = b'''"""Of the module."""
a = """not a docstring"""
class Outer:
    """Of the class.

    Indented \\d.
    """
    def inner(self):
        "Of the \xc3\xa9 method."
        return "no"
async def last():
    "Of the function."
def bare(): ...
'''
    assert read_docstrings(code) == (
        'Of the module.\n\nOf the class.\n\nIndented \\d.\n\nOf the é method.\n\n'
        'Of the function.\n\n'
    )
    assert read_docstrings(b'x = 1') == ''


def test_property_docstrings_are_text_without_code():
    documents = dict(itertools.islice(open_source('docstrings', 'text').documents(), 40))
    assert documents.keys() <= dict(open_source('python', 'text').documents()).keys()
    (text,) = documents['ast.py']
    assert text.startswith(b'ast\n~~~\n\nThe `ast` module helps') and b'import' not in text
    with pytest.raises(ValueError, match="'docstrings' takes no argument; got 'docstrings:x'"):
        open_source('docstrings:x', 'text')


@pytest.mark.parametrize('name', SYNTHETIC)
def test_property_synthetic_is_deterministic_and_distinct(name):
    is_regression = name in regression.REGRESSIONS  # there are many, of one kind
    documents = read_source(f'synthetic:{name}', limit=500 if is_regression else None)
    assert documents[:400] == read_source(f'synthetic:{name}', limit=400)
    assert len(set(documents)) == (500 if is_regression else sources.DOCUMENTS)
    length = regression.LENGTH if is_regression else sources.LENGTH
    assert {len(document) for document in documents} == {length}


def bigram_bits(documents):
    """Returns the entropy of a letter given the previous one, from counts."""
    pairs = Counter(pair for text in documents for pair in itertools.pairwise(text))
    firsts = Counter(text[i] for text in documents for i in range(len(text) - 1))
    total = sum(pairs.values())
    return -sum(n / total * math.log2(n / firsts[pair[0]]) for pair, n in pairs.items())


def test_reference_entropy_rates():
    for name in ('uniform', 'markov'):
        measured = bigram_bits(read_source(f'synthetic:{name}'))
        assert measured == pytest.approx(SYNTHETIC[name].bits_per_byte(), abs=0.01)
    assert SYNTHETIC['copy'].bits_per_byte() == 2
    blocks = np.frombuffer(read_source('synthetic:copy')[0].encode(), np.uint8)
    blocks = blocks.reshape(-1, 2, sources.COPY_BLOCK)
    np.testing.assert_array_equal(blocks[:, 0], blocks[:, 1])


def test_reference_regression_documents():
    """Text alone: least squares over a document leaves the noise, and w ~ N(0, I / 2)."""
    text = ''.join(read_source('synthetic:linear_regression', limit=500)).encode('ascii')
    values = (np.frombuffer(text, np.uint8) - 79.0) * (4 / 94)  # 79: the middle of ' ' to '~'
    pairs = values.reshape(500, 42, 3)
    assert np.abs(pairs[..., :2]).max() <= 1 + 2 / 94
    fits = [np.linalg.lstsq(pair[:, :2], pair[:, 2]) for pair in pairs]
    w, residuals = np.array([fit[0] for fit in fits]), np.array([fit[1][0] for fit in fits])
    assert np.mean(residuals) / (42 - 2) == pytest.approx(0.1**2 + (4 / 94) ** 2 / 12, rel=0.05)
    np.testing.assert_allclose(np.cov(w.T), np.eye(2) / 2, atol=0.1)


def write_file(folder, name, content):
    (folder / name).write_bytes(content)
    return f'text:{folder}/{name}'


@pytest.mark.parametrize(
    'make, message',
    [
        (
            lambda d: 'pyton',
            "of chat, docstrings, hub, python, synthetic, text, tfds; got 'pyton'. Did you mean",
        ),
        (lambda d: write_file(d, 'a.txt', b'x')[5:], 'set data.source=text:{}/a.txt.'),
        (lambda d: '*.jsonl', 'set data.source=text:*.jsonl.'),
        (lambda d: 'nowhere.txt.gz', 'set data.source=text:nowhere.txt.gz.'),
        (lambda d: str(d), 'data.source=text:{} has no readable text files'),
        (lambda d: write_file(d, 'a.txt', b'x') and f'{d}/', 'set data.source=text:{}/.'),
        (
            lambda d: 'file:/a.txt',
            "one of chat, docstrings, hub, python, synthetic, text, tfds; got 'file'",
        ),
        (lambda d: 'python:3', 'takes no argument'),
        (lambda d: 'text', 'needs a glob'),
        (lambda d: f'text:{d}/*.txt', 'no file matches'),
        (lambda d: write_file(d, 'a.parquet.gz', b'x'), 'Decompress it to a .parquet file'),
        (lambda d: write_file(d, 'a.jsonl', b'{"text": "x"}\n{"text"'), 'a.jsonl:2 is not JSON'),
        (
            lambda d: write_file(d, 'a.jsonl', b'\n{"text": ' + b'[' * 99_999),
            'a.jsonl:2 is nested too deeply',
        ),
        (lambda d: write_file(d, 'a.jsonl', b'{}\n["x"]'), 'a.jsonl:2 must be an object; got list'),
        (lambda d: write_file(d, 'a.jsonl', b'["x"]'), 'a.jsonl[0] must be an object; got str'),
        (lambda d: write_file(d, 'a.jsonl', b'{"a": 1, "b": 2}'), "its fields are 'a', 'b'"),
        (
            lambda d: write_file(d, 'a.jsonl', b'{"text": 3}'),
            "'text' of {}/a.jsonl:1 must be text; got i",
        ),
        (
            lambda d: write_file(d, 'a.txt.gz', gzip.compress(b'x' * 99)[:-9]),
            'cannot be read completely',
        ),
        (lambda d: write_file(d, 'a.txt.gz', b'no gzip'), 'cannot be read completely'),
        (
            lambda d: write_file(d, 'a.txt.zst', zstandard.compress(os.urandom(999))[:-99]),
            'cannot be read completely',
        ),
        (lambda d: write_file(d, 'a.parquet', b'no'), 'is not a parquet file'),
        (lambda d: 'synthetic:markow', "got 'markow'. Did you mean 'markov'"),
        (
            lambda d: 'synthetic',
            'one of copy, linear_regression, linear_regression_1d, linear_regression_5d, markov',
        ),
        (lambda d: 'tfds', 'needs a name'),
        (lambda d: 'tfds:huggingface:c4', 'would download'),
        (lambda d: 'tfds:surely_not_a_dataset', 'is not prepared in'),
    ],
)
def test_invalid_sources_raise(make, message, tmp_path):
    source = make(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message.format(tmp_path))):
        read_source(source)


def test_errors_parquet_fields(tmp_path):
    write_parquet(tmp_path / 'a.parquet', title=['x'], n=[1])
    with pytest.raises(ValueError, match="no field 'text'; its fields are 'title', 'n'"):
        read_source(f'text:{tmp_path}/*.parquet')
    with pytest.raises(ValueError, match=r"'n' of .*a.parquet\[0\] must be text; got int"):
        read_source(f'text:{tmp_path}/*.parquet', 'n')


TFDS_PROGRAM = """
import json, sys
import tensorflow_datasets as tfds
from lm.data.sources import open_source
TEXTS = json.loads(sys.argv[2])
class TinyText(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.2.0')
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='plain')]
    def _info(self):
        body = tfds.features.Text()
        features = tfds.features.FeaturesDict({'body': body, 'title': body})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)
    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples()}
    def _generate_examples(self):
        for i, text in enumerate(TEXTS):
            yield i, {'body': text, 'title': 't'}
def refusal(name, field):
    try:
        open_source('tfds:' + name, field)
    except ValueError as error:
        return str(error)
assert 'is not prepared in ' + sys.argv[1] in refusal('tiny_text', 'body')
tfds.disable_progress_bar()
TinyText(data_dir=sys.argv[1], file_format='array_record').download_and_prepare()
for name in ('tiny_text', 'tiny_text/plain:1.2.0'):
    source = open_source('tfds:' + name, 'body')
    assert [data.decode() for _, (data,) in source.documents()] == TEXTS, name
    assert source.files and all(path.is_file() for path in source.files)
assert "has no field 'text'; its fields are 'body', 'title'" in refusal('tiny_text', 'text')
assert 'is not prepared' in refusal('tiny_text/fancy', 'body')
assert 'tensorflow' not in sys.modules
"""


@pytest.mark.full  # imports TensorFlow
def test_reference_tfds(tmp_path):
    """Runs in a separate process: TFDS reads TFDS_DATA_DIR once, when it is imported."""
    process = subprocess.run(
        [sys.executable, '-c', TFDS_PROGRAM, str(tmp_path), json.dumps(TEXTS)],
        env=os.environ | {'TFDS_DATA_DIR': str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr


def test_equivalence_formats_make_the_same_rows(cfg, tmp_path):
    """The documents of .txt files, as lines of .jsonl.zst."""
    texts = open_dataset(cfg(), say=discard_line)
    files = sorted((tmp_path / 'corpus').glob('*.txt'))
    lines = [json.dumps({'text': path.read_bytes().decode()}) for path in files]
    (tmp_path / 'all.jsonl.zst').write_bytes(zstandard.compress('\n'.join(lines).encode()))
    records = open_dataset(cfg(source=f'text:{tmp_path}/all.jsonl.zst'), say=discard_line)
    assert records.report == texts.report
    for a, b in zip(records.train, texts.train, strict=True):
        np.testing.assert_array_equal(a['tokens'], b['tokens'])


def test_contract_every_source_is_covered():
    assert set(SOURCES) == {'python', 'docstrings', 'text', 'chat', 'hub', 'tfds', 'synthetic'}
