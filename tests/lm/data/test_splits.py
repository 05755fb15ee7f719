"""How text is divided into training and validation.

Reference: splits and names of prepared data as earlier versions made them. Property: shares of
texts of few documents; data.validation_source is validated on and nothing else is.
"""

import dataclasses
import json

import numpy as np
import pytest

from configs import default
from lm.config.resolve import resolve
from lm.data import check, dataset, long_documents, open_dataset, prepare
from lm.data.long_documents import FEW, select_cut_documents
from lm.data.sources import open_source
from lm.data.tokenizers import plan_tokenizer
from tests.lm.data.conftest import discard_line, document, opening_notes, write_texts
from tests.lm.data.test_prepare import hash64, read_split

BOOK = ''.join(f'line {i} of a book\n' for i in range(2000))


def write_books(folder, lengths):
    """Returns the source of books with so many lines, of another length in each."""
    return write_texts(
        folder,
        (
            ''.join(f'line {i} of book {"b" * (3 * k + 1)}\n' for i in range(n))
            for k, n in enumerate(lengths)
        ),
    )


def validation_share(report):
    counts = [report[split]['bytes'] for split in ('train', 'validation')]
    return counts[1] / sum(counts)


MANY = [document(i) for i in range(40)]
TINY = ['a first text\n' * 9, 'a second text\n' * 7]
SINGLE = [''.join(f'line {i}\n' for i in range(900))]
UNIFORM = [f'text {i} ' * 40 for i in range(400)]
# Names that the version before data.validation_source gave to the data of these texts.
PUBLISHED = [
    (MANY, 0.2, 'byte', '90fb9370e95c72ecfecde80c46b869f7', 6),
    (MANY, 0.2, 'bpe:300', 'e867812f4bd43fa4ad8495dadbc4132f', 6),
    (TINY, 0.02, 'byte', 'fc388213d142ab85f46cb329ec619a4e', 1),
    (SINGLE, 0.02, 'byte', '3839adffc20b0b9f41d173ff15abac1c', 1),
    (UNIFORM, 0.02, 'byte', '94d88b7f0fc91d70a91ffb027c07418b', 8),
]


@pytest.mark.parametrize(('texts', 'fraction', 'tokenizer', 'digest', 'n_documents'), PUBLISHED)
def test_reference_data_names(texts, fraction, tokenizer, digest, n_documents, cfg, tmp_path):
    """Catches a change of the name, by which caches and runs of earlier versions are refused."""
    source = write_texts(tmp_path / 'texts', texts)
    fields = {'source': source, 'validation_fraction': fraction, 'tokenizer': tokenizer}
    ds = open_dataset(cfg(**fields), say=discard_line)
    assert ds.digest == digest
    assert ds.report['validation']['documents'] == n_documents
    if len(texts) > 1:
        threshold = fraction * 2**64
        smallest = min(map(hash64, (text.encode() for text in texts)))
        expected = [t for t in texts if hash64(t.encode()) < max(threshold, smallest + 1)]
        assert read_split(ds, ds.validation) == expected


@pytest.mark.parametrize('fraction', [0.02, 0.1])
@pytest.mark.parametrize('lengths', [(1900, 1700), (2000, 1500, 1100), (1500,) * 4, (1990, 4)])
def test_property_few_books_give_about_the_share(lengths, fraction, cfg, tmp_path):
    """By hash alone, two files give half or more."""
    source, messages = write_books(tmp_path / 'books', lengths), []
    data_cfg = cfg(source=source, validation_fraction=fraction)
    ds = open_dataset(data_cfg, say=messages.append)
    assert fraction / 2 <= validation_share(ds.report) <= 2 * fraction
    texts = [path.read_text() for path in sorted((tmp_path / 'books').iterdir())]
    train, validation = read_split(ds, ds.train), read_split(ds, ds.validation)
    for text in texts:
        heads = [head for head in train if text.startswith(head)]
        assert text in train + validation or any(text[len(head) :] in validation for head in heads)
    assert sum(map(len, train + validation)) == sum(map(len, texts))
    assert all(tail.startswith('line') for tail in validation)
    assert sum('there are few documents, and' in line for line in messages) == 1
    assert not any(line.startswith('NOTE') for line in messages)


def test_cut_data_have_another_name(cfg, tmp_path, monkeypatch):
    """Catches data of an earlier version, with whole documents, that are taken for these."""
    data_cfg = cfg(source=write_books(tmp_path / 'books', (1900, 1700)), validation_fraction=0.02)
    source, plan = open_source(data_cfg.source, 'text'), plan_tokenizer('byte')
    name = prepare.digest(source, plan, data_cfg)
    assert open_dataset(data_cfg, say=discard_line).digest == name
    monkeypatch.setattr(prepare, 'list_cut_hashes', lambda *_: ())
    assert prepare.digest(source, plan, data_cfg) != name


def test_property_few_records_give_about_the_share(cfg, tmp_path):
    """A mixture, too, whose tokenizer is trained on the heads of the documents."""
    lines = [json.dumps({'text': f'{i}\n{BOOK}'}) for i in range(2)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
    write_books(tmp_path / 'books', (1900, 1700))
    mixture = f"{{'a': (1, 'text:{tmp_path}/a.jsonl'), 'b': (1, 'text:{tmp_path}/books/*.txt')}}"
    fields = {'source': '', 'mixture': mixture, 'tokenizer': 'bpe:300'}
    ds = open_dataset(cfg(**fields, validation_fraction=0.05), say=discard_line)
    for report in ds.report['sources'].values():
        assert 0.025 <= validation_share(report) <= 0.1
        assert report['validation']['documents'] == 2


def test_property_copies_are_cut_alike(cfg, tmp_path):
    source = write_texts(tmp_path / 'a', [f'1\n{BOOK}', f'2\n{BOOK}', f'1\n{BOOK}'])
    ds = open_dataset(cfg(source=source, validation_fraction=0.05), say=discard_line)
    first, second, copy = read_split(ds, ds.validation)
    assert first == copy and len(second) == len(first)


def uniform_hashes(n):
    return np.array([int((i + 0.5) / n * 2**64) for i in range(n)], np.uint64)


@pytest.mark.parametrize(
    ('lengths', 'fraction', 'expected'),
    [
        ([10**6] * FEW, 0.001, 0),  # many documents
        ([10**6] * (FEW - 1), 0.001, FEW - 1),
        ([10**6] * 60, 0.02, 0),  # 1 of 60 is near 1 of 50
        ([10**6] * 60, 0.005, 60),
        ([2000, 2000], 0.02, 0),  # 40 bytes are no text
        ([4000, 4000], 0.02, 2),
        ([10**6, 10**6, 100], 0.02, 2),  # not the short one
        ([10**6, 10**6], 0.0, 0),
        ([10**6, 10**6], 0.5, 0),
    ],
)
def test_reference_documents_that_are_cut(lengths, fraction, expected):
    is_cut = select_cut_documents(np.array(lengths), uniform_hashes(len(lengths)), fraction)
    assert is_cut.sum() == expected and not is_cut[expected:].any()


def test_few_documents_are_read_once_for_their_name(cfg, tmp_path, monkeypatch):
    """Catches a corpus that is read again whenever its data are opened."""
    data_cfg = cfg(source=write_books(tmp_path / 'books', (1900, 1700)), validation_fraction=0.02)
    first = open_dataset(data_cfg, say=discard_line)
    monkeypatch.setattr(long_documents, '_read_few_documents', pytest.fail)
    assert open_dataset(data_cfg, say=pytest.fail).digest == first.digest
    halved = dataclasses.replace(data_cfg, validation_fraction=0.5)
    assert open_dataset(halved, say=discard_line).digest != first.digest


def test_notes_on_unexpected_splits(cfg, tmp_path):
    source = write_texts(tmp_path / 'tiny', TINY)
    share, row = opening_notes(cfg(source=source, validation_fraction=0.02, seq_len=100))
    assert '45.58% of' in share and 'instead of 2.00%' in share and 'validation_source' in share
    assert 'has 100 tokens, less than one row of data.seq_len + 1 = 101' in row
    assert opening_notes(cfg(source=source, validation_fraction=0.4)) == []


@pytest.fixture
def apart_cfg(cfg, tmp_path):
    """apart_cfg(field=value, ...) -> the config of 40 texts and three others to validate on."""
    apart = write_texts(tmp_path / 'apart', [f'apart {i} zqzq {document(i)}' for i in range(3)])

    def make(**fields):
        return cfg(**{'validation_source': apart, 'validation_fraction': 0.02} | fields)

    return make


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:300'])
def test_property_validation_source_is_the_validation_split(apart_cfg, tokenizer, tmp_path):
    """The texts are whole, in order, in pieces of any size; the tokenizer reads no validation."""
    messages = []
    ds = open_dataset(apart_cfg(tokenizer=tokenizer), say=messages.append)
    for split, name in (('train', 'corpus'), ('validation', 'apart')):
        texts = [path.read_bytes().decode() for path in sorted((tmp_path / name).iterdir())]
        assert read_split(ds, getattr(ds, split)) == texts
        assert ds.report[split]['bytes'] == sum(len(text.encode()) for text in texts)
    assert not any(line.startswith('NOTE') for line in messages)
    if tokenizer != 'byte':
        assert len(ds.tokenizer.encode('zqzq')) == 4


@pytest.mark.usefixtures('small_pieces')
def test_equivalence_pieces_across_both_sources(apart_cfg, tmp_path):
    ds = open_dataset(apart_cfg(), say=discard_line)
    assert ds.report['train']['documents'] == 40 and ds.report['validation']['documents'] == 3
    assert all('zqzq' in text for text in read_split(ds, ds.validation))


def test_property_digest_depends_on_both_texts(apart_cfg, cfg, tmp_path):
    """Catches a run that resumes on another validation text."""
    first = open_dataset(apart_cfg(), say=discard_line).digest
    corpus = f'text:{tmp_path}/corpus/*.txt'
    swapped = apart_cfg(source=apart_cfg().validation_source, validation_source=corpus)
    digests = [open_dataset(cfg(), say=discard_line).digest]
    digests.append(open_dataset(swapped, say=discard_line).digest)
    # The first validation file becomes the last training file.
    (tmp_path / 'apart' / '0000.txt').rename(tmp_path / 'corpus' / '99.txt')
    digests.append(open_dataset(apart_cfg(), say=discard_line).digest)
    assert len({first, *digests}) == 4


def test_note_on_documents_in_both_texts(apart_cfg, tmp_path):
    (tmp_path / 'apart' / '9.txt').write_bytes(document(7).encode())
    for _ in range(2):  # also for data that are prepared
        (note,) = opening_notes(apart_cfg())
        assert (
            '1 documents of the validation text, text:' in note
            and 'also in the training text' in note
        )


def test_mixture_has_the_validation_source_once(apart_cfg, tmp_path):
    """All text of each source is trained on; catches a mean over copies of one split."""
    write_texts(tmp_path / 'more', [document(i) for i in range(50, 60)])
    apart_cfg()
    sources = {'a': (1, f'text:{tmp_path}/corpus/*.txt'), 'b': (3, f'text:{tmp_path}/more/*.txt')}
    mixture = repr(sources)
    ds = open_dataset(apart_cfg(source='', mixture=mixture, tokenizer='bpe:300'), say=discard_line)
    assert [source.n_documents for source in ds.train.sources] == [40, 10]
    assert ds.validation.n_documents == 3 == ds.report['validation']['documents']
    assert len(ds.tokenizer.encode('zqzq')) == 4


def test_default_fraction_equals_the_default_config():
    assert resolve(default.get_config()).data.validation_fraction == dataset.DEFAULT_FRACTION


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        ({'validation_fraction': 0.1}, 'validation_fraction=0.1 has no effect'),
        ({'validation_source': 'text:none/*.txt'}, 'matches data.validation_source=text:none'),
        ({'validation_source': 'pyton'}, 'data.validation_source must be one of .*pyton'),
    ],
)
def test_errors_before_any_work(fields, says, apart_cfg, tmp_path):
    with pytest.raises(ValueError, match=says):
        check(apart_cfg(**fields))
    assert not (tmp_path / 'cache').exists()


def test_error_for_validation_source_without_text(apart_cfg, tmp_path):
    source = write_texts(tmp_path / 'empty', [''])
    with pytest.raises(ValueError, match=r'data\.validation_source=.* has no text'):
        open_dataset(apart_cfg(validation_source=source), say=discard_line)
    with pytest.raises(ValueError, match=r'data\.source=.* has no text'):
        open_dataset(apart_cfg(source=source), say=discard_line)
