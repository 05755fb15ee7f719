"""Property: the files of a folder that are read, the notes on the rest, and suggestions."""

import json
import os

import pytest

from lm.data.near_files import find_near_pattern
from lm.data.sources import open_source
from tests.lm.data.conftest import opening_notes
from tests.lm.data.test_formats import read_texts, write_lines, write_table


def write_files(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def list_files(source, field='text'):
    """Returns the names of the files that are read, and the notes."""
    opened = open_source(source, field)
    root = source.removeprefix('text:')
    return [os.path.relpath(path, root) for path in opened.files], ' '.join(opened.notes)


LINE = '{"text": "a line"}\n'


def test_folder_is_read_by_path(tmp_path, cfg):
    """A program with its pages: hidden files, pictures and settings are no text."""
    files = {f'src/{i}.py': f'def f{i}(): return {i}\n' * 9 for i in range(9)}
    files |= {'README.md': 'pages', 'Makefile': 'all:', 'z/a.jsonl.gz': b'', 'z/b.TXT': 'text'}
    del files['z/a.jsonl.gz']
    hidden = {'.git/config': 'no', '.git/.x': b'\0', 'src/.cache': 'no'}
    unreadable = {
        'logo.png': b'\x89PNG\0',
        'src/x.pyc': b'\xcb\r\r\n\0',
        'package.json': '{"name": 1}',
    }
    write_files(tmp_path / 'corpus', files | hidden | unreadable)
    names, notes = list_files(f'text:{tmp_path}/corpus')
    assert names == sorted(files)
    for part in (
        'hidden files and folders: 2',
        'files without text: logo.png, src/x.pyc',
        "records without 'text': package.json",
    ):
        assert part in notes
    assert f'text:{tmp_path}/corpus has the files 9 *.py' not in notes and '9 *.py' in notes
    notes = opening_notes(cfg(source=f'text:{tmp_path}/corpus/'))
    assert sum('leaves out' in note for note in notes) == 1


def test_descriptions_beside_records_are_left_out(tmp_path):
    """The card of a data set would be a document, and its test split trained on."""
    parquet = write_table(['a', 'b'], 'parquet')
    write_files(
        tmp_path,
        {
            'README.md': '---\nlicense: mit\n---\n',
            'dataset_infos.json': '{}',
            'data/train-00000-of-00002.parquet': parquet,
            'data/train-00001-of-00002.parquet': parquet,
            'data/test-00000-of-00001.parquet': parquet,
            'data/validation-00000-of-00001.parquet': parquet,
        },
    )
    names, notes = list_files(f'text:{tmp_path}')
    assert names == [f'data/train-0000{i}-of-00002.parquet' for i in (0, 1)]
    assert "'text': dataset_infos.json; descriptions: README.md; other splits: data/test" in notes
    assert read_texts(f'text:{tmp_path}') == ['a', 'b'] * 2
    assert read_texts(f'text:{tmp_path}/data/test*') == ['a', 'b']


CARD = """---
configs:
- config_name: first
  data_files: [{split: train, path: first/train-*}, {split: test, path: first/test-*}]
- config_name: second
  data_files: [{split: train, path: second/*}]
---
a page
"""


def test_subsets_by_the_card(tmp_path):
    """All subsets at once would be several texts, or one text several times."""
    names = ['first/train-0.parquet', 'first/test-0.parquet', 'second/a.parquet']
    write_files(tmp_path, {name: write_table([name], 'parquet') for name in names})
    (tmp_path / 'README.md').write_text(CARD)
    with pytest.raises(ValueError, match=r'several subsets, according to its README') as error:
        read_texts(f'text:{tmp_path}')
    suggestion = str(error.value).rpartition('such as ')[2].removesuffix('.')
    assert read_texts(suggestion) == names[:1]
    (tmp_path / 'README.md').write_text(CARD.replace('name: second', 'name: default'))
    assert read_texts(f'text:{tmp_path}') == names[2:]
    (tmp_path / 'README.md').write_text('---\n[no card\n---\n')
    assert read_texts(f'text:{tmp_path}') == [names[0], names[2]]


@pytest.mark.parametrize(
    ('files', 'expected'),
    [
        (['train/a.jsonl', 'valid/b.jsonl', 'test/c.jsonl'], ['train/a.jsonl']),
        (['test.jsonl', 'validation.jsonl'], ['test.jsonl', 'validation.jsonl']),
        (['wiki.test.tokens', 'wiki.train.tokens'], ['wiki.train.tokens']),
        (['a/train.jsonl', 'b/test.jsonl'], ['a/train.jsonl', 'b/test.jsonl']),
        (
            ['train.jsonl', 'extra.jsonl', 'latest.jsonl'],
            ['extra.jsonl', 'latest.jsonl', 'train.jsonl'],
        ),
    ],
)
def test_splits_beside_a_training_split(files, expected, tmp_path):
    write_files(tmp_path, dict.fromkeys(files, LINE))
    assert list_files(f'text:{tmp_path}')[0] == expected


def save_to_disk(folder, texts_by_file):
    """Writes a folder as `datasets.Dataset.save_to_disk` does."""
    entries = [{'filename': name} for name in texts_by_file]
    state = {'_data_files': entries, '_fingerprint': 'f', '_split': 'train'}
    files = {name: write_table(texts, 'stream') for name, texts in texts_by_file.items()}
    write_files(folder, files | {'state.json': json.dumps(state), 'dataset_info.json': '{}'})


def test_saved_dataset_is_read_in_its_order(tmp_path):
    """cache-*.arrow beside it is an intermediate state, and dataset_info.json no text."""
    save_to_disk(tmp_path / 'set', {'data-00001.arrow': ['a', 'b'], 'data-00000.arrow': ['c']})
    (tmp_path / 'set' / 'cache-1.arrow').write_bytes(write_table(['no'], 'stream'))
    assert read_texts(f'text:{tmp_path}/set') == ['a', 'b', 'c']
    (tmp_path / 'set' / 'data-00000.arrow').unlink()
    with pytest.raises(
        ValueError, match=r'data-00000\.arrow, which .*state\.json lists, is missing'
    ):
        read_texts(f'text:{tmp_path}/set')


def test_saved_dataset_dict_has_splits(tmp_path):
    for split in ('train', 'test'):
        save_to_disk(tmp_path / split, {'data-00000-of-00001.arrow': [f'text to {split}']})
    (tmp_path / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
    assert read_texts(f'text:{tmp_path}') == ['text to train']
    assert f'To read another, set text:{tmp_path}/test.' in list_files(f'text:{tmp_path}')[1]
    assert read_texts(f'text:{tmp_path}/test') == ['text to test']
    (tmp_path / 'dataset_dict.json').write_text('{"splits": ["test"]}')
    with pytest.raises(ValueError, match=rf'data\.source=text:{tmp_path}/test\.'):
        read_texts(f'text:{tmp_path}')


def test_saved_dataset_with_indices_is_refused(tmp_path):
    """Its files hold rows that the data set has not."""
    save_to_disk(tmp_path, {'data-00000.arrow': ['a']})
    state = json.loads((tmp_path / 'state.json').read_text())
    state['_indices_data_files'] = [{'filename': 'indices.arrow'}]
    (tmp_path / 'state.json').write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r'Call \.flatten_indices\(\) and save it again'):
        read_texts(f'text:{tmp_path}')


def test_errors_folder_without_text(tmp_path):
    write_files(tmp_path, {'.hidden': 'x', 'a.png': b'\x89PNG\0'})
    with pytest.raises(
        ValueError, match=r'no readable text files \(except 1 hidden .*\)\. The first .*is an image'
    ):
        read_texts(f'text:{tmp_path}')


def test_folder_with_records_that_lack_the_field(tmp_path):
    """All files would be left out as settings of a program."""
    write_files(tmp_path, {'a.json': '[{"body": "x"}]', 'b.csv': 'body\nx\n'})
    with pytest.raises(ValueError, match=r'a\.json\[0\] has no field .*Set data\.text_field=body'):
        read_texts(f'text:{tmp_path}')
    assert read_texts(f'text:{tmp_path}', 'body') == ['x', 'x']
    write_files(tmp_path, {'a.json': '[{"messages": []}]', 'c.txt': 'text beside chats'})
    with pytest.raises(ValueError, match=r'For chats, replace text: with chat:'):
        read_texts(f'text:{tmp_path}')


NEAR = [
    ('corpus/*.txt', 'corpus/**/*.txt'),
    ('corpus/*.jsonl', 'corpus/*.json.gz'),
    ('corpus/**/*.json', 'corpus/*.json.gz'),
    ('courpus/*.json.gz', 'corpus/*.json.gz'),
    ('Corpus/deep/a.txt', 'corpus/deep/a.txt'),
    ('corpus/deep/a.md', 'corpus/deep/a.txt'),
    ('corpus/deap', 'corpus/deep'),
    ('tables/a.parket', 'tables/a.parquet'),
    ('capitals/*.txt', 'capitals/*.TXT'),
    ('odd[1]/*.text', 'odd[[]1]/*.md'),
    ('*.jsonl', '*.csv'),
    ('elsewhere/*.txt', ''),
    ('pictures/*.txt', ''),
    ('pictures/b.txt', ''),
]


@pytest.mark.parametrize(('pattern', 'expected'), NEAR)
def test_errors_suggest_files_that_are_there(pattern, expected, tmp_path, monkeypatch):
    """A suggestion that fails as well costs a second try."""
    write_files(
        tmp_path,
        {
            'corpus/c4.00.json.gz': b'\x1f\x8b',
            'corpus/deep/a.txt': 'a',
            'capitals/A.TXT': 'a',
            'odd[1]/x.md': 'a',
            'pictures/b.png': b'\x89PNG\0',
            'table.csv': 'text\na\n',
            'tables/a.arrow': 'no',
            'tables/a.parquet': 'no',
        },
    )
    monkeypatch.chdir(tmp_path)
    assert find_near_pattern(pattern) == expected
    with pytest.raises(ValueError, match=r'^no file matches ') as error:
        open_source(f'text:{pattern}', 'text')
    suggestion = (
        str(error.value).partition('To read the text there, set data.source=')[2].removesuffix('.')
    )
    assert suggestion == (expected and f'text:{expected}')
    if suggestion:
        assert open_source(suggestion, 'text').files


def test_lines_in_a_folder_are_read(tmp_path):
    write_files(tmp_path, {'a.jsonl': write_lines(['x', 'y']), 'b.txt': 'z'})
    assert read_texts(f'text:{tmp_path}') == ['x', 'y', 'z']
