"""URLs of object storage, and errors of stores that are missing or refuse."""

import http.server
import sys
from pathlib import Path

import pytest

from lm.storage.buckets import (
    BucketError,
    PreconditionFailed,
    RequestRefused,
    Times,
    cache_folder,
    is_url,
    local_name,
    open_bucket,
    parse_local_path,
    parse_url,
    read_times,
)
from tests.object_store import BUCKET, client, free_port, serving

pytestmark = pytest.mark.xdist_group('buckets')


def test_urls_and_paths():
    assert parse_url('s3://b/runs/a/') == ('s3', 'b', 'runs/a')
    assert local_name('gs://b/runs/a [1]') == 'a__1_'
    assert is_url('gs://b/a') and is_url('az://b/a') and not is_url('runs/a')
    for bad in ('s3://b', 's3://b/', 's3:///a', 's3://b/a//c'):
        with pytest.raises(ValueError, match='must name a path in a bucket'):
            parse_url(bad)
    with pytest.raises(ValueError, match='gs://BUCKET/PATH or s3://BUCKET/PATH'):
        parse_url('az://b/a')
    with pytest.raises(ValueError, match='--out=s3://b/a must be a path on this machine'):
        parse_local_path('s3://b/a', '--out')
    assert parse_local_path('a/b.svg', '--out', ('.png', '.svg')) == Path('a/b.svg')
    with pytest.raises(ValueError, match=r'^--out must end in .png, .svg; got a/b.md$'):
        parse_local_path('a/b.md', '--out', ('.png', '.svg'))


def test_each_url_and_endpoint_has_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path))
    folders = {
        cache_folder('s3://b/a', 'runs'),
        cache_folder('s3://b/b', 'runs'),
        cache_folder('gs://b/a', 'runs'),
    }
    assert (
        cache_folder('s3://b/a/', 'runs') in folders
        and cache_folder('s3://b/a', 'reads') not in folders
    )
    monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://elsewhere')
    folders.add(cache_folder('s3://b/a', 'runs'))
    assert len(folders) == 4 and all(folder.is_relative_to(tmp_path) for folder in folders)


def test_environment_sets_times(monkeypatch):
    monkeypatch.setenv('EVENKEEL_BUCKET_PACE_SEC', '2.5')
    assert read_times() == Times(pace=2.5)
    for bad in ('0', 'nan', 'soon'):
        monkeypatch.setenv('EVENKEEL_BUCKET_PACE_SEC', bad)
        with pytest.raises(ValueError, match='EVENKEEL_BUCKET_PACE_SEC must be a positive'):
            read_times()


def test_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'obstore', None)
    with pytest.raises(ValueError, match=r'evenkeel\[buckets\]'):
        open_bucket('s3://b/a')


@pytest.mark.parametrize('kind', ['bucket_url', 'gs_url'])
def test_conditional_writes(kind, request):
    url = request.getfixturevalue(kind)
    bucket = open_bucket(url)
    first = bucket.create('a/x', b'1')
    with pytest.raises(PreconditionFailed):
        bucket.create('a/x', b'2')
    second = bucket.replace('a/x', b'2', first)
    with pytest.raises(PreconditionFailed):
        bucket.replace('a/x', b'3', first)
    content, meta = bucket.read('a/x')
    assert (content, meta) == (b'2', second)
    assert bucket.list()['a/x'].e_tag == second.e_tag
    bucket.delete(['a/x', 'a/y'])
    assert bucket.list() == {}
    with pytest.raises(FileNotFoundError, match=f'there is no {url}/a/x'):
        bucket.read('a/x')


def test_large_file_is_written_in_parts(bucket_url, tmp_path, monkeypatch):
    monkeypatch.setattr('lm.storage.buckets.RANGE_BYTES', 5_000_000)
    content = bytes(range(256)) * (48 << 10)  # 12 MiB: three parts
    (tmp_path / 'a').write_bytes(content)
    bucket = open_bucket(bucket_url)
    written = bucket.write('a', tmp_path / 'a')
    assert bucket.list()['a'].e_tag == written.e_tag and written.e_tag.endswith('-3"')
    bucket.fetch('a', tmp_path / 'b')
    assert (tmp_path / 'b').read_bytes() == content


def put(bucket_url, s3_port, *names):
    """Writes objects as a console does; the library would not write such names."""
    path = parse_url(bucket_url)[2]
    for name in names:
        client(s3_port).put_object(Bucket=BUCKET, Key=f'{path}/{name}', Body=b'')


def test_folder_placeholders_are_not_listed(bucket_url, s3_port):
    bucket = open_bucket(bucket_url)
    bucket.write('checkpoints/8/meta', b'x')
    bucket.write('checkpoints/8/empty', b'')
    put(bucket_url, s3_port, '', 'checkpoints/', 'checkpoints/8/')
    assert sorted(bucket.list()) == ['checkpoints/8/empty', 'checkpoints/8/meta']
    assert sorted(bucket.list('checkpoints')) == ['checkpoints/8/empty', 'checkpoints/8/meta']


@pytest.mark.parametrize('name', ['a//b', '../x', 'a/./b'])
def test_object_without_path_raises_one_line(bucket_url, s3_port, name):
    put(bucket_url, s3_port, name)
    with pytest.raises(
        BucketError, match='contains an object whose name is not a valid path'
    ) as caught:
        open_bucket(bucket_url).list()
    assert '\n' not in str(caught.value)
    # The whole bucket could not be listed any more.
    client(s3_port).delete_object(Bucket=BUCKET, Key=f'{parse_url(bucket_url)[2]}/{name}')


def test_missing_bucket_is_named(bucket_url):
    bucket = open_bucket('s3://no-such-bucket/a')
    for request in (bucket.list, lambda: bucket.read('x'), lambda: bucket.create('x', b'')):
        with pytest.raises(BucketError, match='there is no bucket no-such-bucket for s3://no-such'):
            request()


class RefusingHandler(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does to credentials without permission."""

    status, code = 403, 'AccessDenied'

    def answer(self):
        body = f'<Error><Code>{self.code}</Code><Message>Access BucketError</Message></Error>'
        body = body.encode()
        self.send_response(self.status)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = answer

    def log_message(self, *_):
        """Logs nothing."""


@pytest.mark.parametrize(
    ('status', 'code'), [(403, 'AccessDenied'), (401, 'Unauthorized'), (400, 'ExpiredToken')]
)
def test_refused_request_raises_bucket_error(status, code, monkeypatch, bucket_url):
    monkeypatch.setattr(RefusingHandler, 'status', status)
    monkeypatch.setattr(RefusingHandler, 'code', code)
    with serving(RefusingHandler) as address:
        monkeypatch.setenv('AWS_ENDPOINT_URL', address)
        bucket = open_bucket(bucket_url)
        for request in (bucket.list, lambda: bucket.read('x'), lambda: bucket.write('x', b'')):
            with pytest.raises(RequestRefused, match=r'access refused .* AWS_ACCESS_KEY_ID'):
                request()


@pytest.mark.parametrize(
    'content', [None, '{', '{"private_key": "x", "private_key_id": "1", "client_email": "a@b"}']
)
def test_bad_credentials_file_raises_one_line(content, monkeypatch, tmp_path):
    file = tmp_path / 'key.json'
    if content:
        file.write_text(content)
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(file))
    with pytest.raises(RequestRefused, match='for gs:// GOOGLE_APPLICATION_CREDENTIALS') as caught:
        open_bucket('gs://b/a')
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('address', ['store:9000', 'http://', 'http://a b'])
def test_bad_address_names_its_variable(address, monkeypatch):
    monkeypatch.setenv('AWS_ENDPOINT_URL', address)
    with pytest.raises(ValueError, match='AWS_ENDPOINT_URL must be like https://HOST:PORT'):
        open_bucket('s3://b/a')


def test_unreachable_store_raises_bucket_error(monkeypatch, bucket_url):
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{free_port()}')
    with pytest.raises(BucketError, match=f'{bucket_url} cannot be reached'):
        open_bucket(bucket_url).list()
