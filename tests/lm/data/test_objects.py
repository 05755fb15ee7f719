"""Text of buckets. Equivalence: objects are prepared like the same files of this machine."""

import re

import pytest

from lm.data import open_dataset
from lm.data.objects import TextObjects
from lm.data.sources import open_source
from lm.storage.buckets import open_bucket
from tests.lm.data.conftest import discard_line, document
from tests.lm.data.test_prepare import read_split

pytestmark = pytest.mark.xdist_group('buckets')

NAMES = ['a/b/2.txt', 'a/1.txt', 'a/3.txt', 'other/4.txt']


@pytest.fixture(params=['bucket_url', 'gs_url'])
def url(request):
    """Returns a URL with texts below it."""
    url = request.getfixturevalue(request.param)
    bucket = open_bucket(url)
    for i, name in enumerate(NAMES):
        bucket.write(name, document(i).encode())
    bucket.write('a/notes.md', b'no text')
    return url


def read_names(url):
    return [name.rpartition('/')[2] for name, _ in open_source(f'text:{url}', 'text').documents()]


def test_reference_globs(url):
    assert read_names(f'{url}/a/*.txt') == ['1.txt', '3.txt']
    assert read_names(f'{url}/a/**/*.txt') == ['1.txt', '3.txt', '2.txt']
    assert read_names(f'{url}/**/*.txt') == ['1.txt', '3.txt', '2.txt', '4.txt']
    assert read_names(f'{url}/other/4.txt') == ['4.txt']
    assert read_names(f'{url}/a/[13].txt') == ['1.txt', '3.txt']


def test_equivalence_objects_and_files(url, cfg, tmp_path, monkeypatch):
    """Fetches each object once, and none for data that are prepared; another text has another name.

    Catches objects that are fetched again by each pass over the text.
    """
    files, fetched = tmp_path / 'files', []
    files.mkdir()
    for i, name in enumerate(NAMES):
        (files / f'{sorted(NAMES).index(name)}.txt').write_bytes(document(i).encode())
    options = {'validation_fraction': 0.5, 'seq_len': 16, 'tokenizer': 'bpe:300'}
    expected = open_dataset(cfg(source=f'text:{files}/*.txt', **options), say=discard_line)
    bucket_type = type(open_bucket(url))
    fetch = bucket_type.fetch

    def record(bucket, name, path):
        fetched.append(name)
        return fetch(bucket, name, path)

    monkeypatch.setattr(bucket_type, 'fetch', record)
    data_cfg = cfg(source=f'text:{url}/**/*.txt', **options)
    first = open_dataset(data_cfg, say=discard_line)
    for split in ('train', 'validation'):
        texts = read_split(first, getattr(first, split))
        assert texts == read_split(expected, getattr(expected, split))
    assert [name.rpartition('/')[2] for name in fetched] == ['1.txt', '3.txt', '2.txt', '4.txt']
    assert open_dataset(data_cfg, say=discard_line).digest == first.digest and len(fetched) == 4
    open_bucket(url).write('other/4.txt', b'something else entirely')
    assert open_dataset(data_cfg, say=discard_line).digest != first.digest and len(fetched) == 5


def test_error_for_replaced_object(url):
    """The listing describes another text than the object that is read."""
    source = open_source(f'text:{url}/a/*.txt', 'text')
    open_bucket(url).write('a/1.txt', b'another text')
    with pytest.raises(ValueError, match=r'a/1\.txt was replaced while it was read'):
        list(source.documents())


@pytest.mark.parametrize(
    ('ending', 'says'),
    [
        ('/a', 'is a folder. To read its text, set data.source=text:{}/a/**/*.txt.'),
        ('', 'is a folder. To read its text, set data.source=text:{}/**/*.txt.'),
        ('/b/*.txt', 'no object matches data.source=text:{0}/b/*.txt ({0}/b has 0 objects'),
        ('/a/*.jsonl', 'no object matches data.source=text:{0}/a/*.jsonl ({0}/a has 4 objects'),
        ('/a/*', 'notes.md matches data.source=text:{}/a/*, but '),
    ],
)
def test_errors_name_the_way(ending, says, url):
    with pytest.raises(ValueError, match=re.escape(says.format(url))):
        open_source(f'text:{url}{ending}', 'text')


def test_whole_bucket_may_be_searched(bucket_url):
    """Catches a URL that needs a folder."""
    root = '/'.join(bucket_url.split('/')[:3])
    bucket = open_bucket(root, is_root=True)
    bucket.write('at_the_root_of_all.txt', b'text')
    assert read_names(f'{root}/at_the_root*.txt') == ['at_the_root_of_all.txt']
    assert isinstance(bucket.list(), dict) and TextObjects(bucket, {}).identity == ''
    bucket.delete(['at_the_root_of_all.txt'])
