"""Object storage by URL: gs://BUCKET/PATH and s3://BUCKET/PATH, through the library obstore.

A store holds objects by name, each written whole or not at all. A write may have a condition: that
there is no such object yet, or that it is still the one that was read. There are no folders and no
locks, and nothing is renamed; what is built on that is in `lm.storage.complete_folders`, `lm.storage.lease` and
`lm.record.remote.mirror`.

Credentials and endpoint of s3:// are those of the usual environment variables (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL) or of the machine's role;
those of gs:// are Google's application default credentials.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from lm.storage.files import user_cache

SCHEMES = ('gs', 's3')
FORM = 'gs://BUCKET/PATH or s3://BUCKET/PATH'
AT_ONCE = 16  # requests of one job
TRY_SEC = 20.0  # of one request with its repetitions by the library
REQUEST_SEC = 30.0  # of one of them, which moves a part at most
PART_BYTES = 5 << 20  # the least that S3 takes
MOST_PARTS = 9_000  # S3 takes 10,000 of an object
PARTS_AT_ONCE = 4  # of an object that is written
READS = 5  # of one that is replaced all the time
RANGE_BYTES = 16 << 20  # of an object that is read, at once
ROLES = '169.254.169.254'  # knows the role of a machine in a cloud; asked when all is unset
REFUSALS = ('401 Unauthorized', '403 Forbidden')
MOST_SAID = 300  # characters of the library's error


class BucketError(OSError):
    """The store did not do what it was asked to."""


class Denied(BucketError):
    """It refused: these credentials may not, or there are none."""


class NoBucket(BucketError):
    """There is no such bucket."""


class Changed(BucketError):
    """The condition of a write does not hold: the object is another one by now."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds; $EVENKEEL_BUCKET_PACE_SEC sets `pace`, and so on.

    pace: between looks at the local folder of a run. retry: for how long a bucket that is out of
    reach is tried again. lease: after so long without a word of the process that trains in a
    workdir, another one may take it.
    """

    pace: float = 15.0
    retry: float = 180.0
    lease: float = 60.0


def times() -> Times:
    """Raises ValueError for a variable that is no positive number."""
    found = {}
    for field in dataclasses.fields(Times):
        name = f'EVENKEEL_BUCKET_{field.name.upper()}_SEC'
        if text := os.environ.get(name):
            try:
                found[field.name] = float(text)
            except ValueError:
                found[field.name] = 0.0
            if not 0.0 < found[field.name] < 1e6:
                raise ValueError(f'{name} must be a positive number of seconds; got {text!r}')
    return Times(**found)


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is known of an object without reading it. `version` is for `Bucket.replace`."""

    size: int
    e_tag: str | None
    version: str | None


def is_url(path: str | Path) -> bool:
    """Whether a path names a store, of whatever kind, rather than a folder."""
    return isinstance(path, str) and re.match(r'[A-Za-z][\w+.-]*://', path) is not None


def local_path(path: str | Path, name: str) -> Path:
    """Raises ValueError for a URL, where only a folder or file of this machine will do."""
    if is_url(path):
        raise ValueError(
            f'{name}={path}: give a path on this machine. In object storage may be workdirs, the '
            'checkpoints in them, and data.cache_dir.'
        )
    return Path(path)


def parse(url: str) -> tuple[str, str, str]:
    """(scheme, bucket, path). Raises ValueError for what is no URL of a path in a bucket."""
    scheme, _, rest = url.partition('://')
    bucket, _, path = rest.partition('/')
    path = path.strip('/')
    if scheme not in SCHEMES:
        raise ValueError(f'{url}: folders in object storage are {FORM}, others are plain paths.')
    if not bucket or not path or '//' in path:
        raise ValueError(f'{url} names no path in a bucket: give {FORM}.')
    return scheme, bucket, path


def below(url: str, *names: str | int) -> str:
    return '/'.join([url.rstrip('/'), *map(str, names)])


def place(url: str, kind: str) -> Path:
    """The folder of this machine that stands for a URL: $EVENKEEL_CACHE/KIND/DIGEST, without that
    variable under the user's cache. Its last part is for what the URL holds: `local_name`.
    """
    scheme, bucket, path = parse(url)
    name = hashlib.blake2b(
        f'{_endpoint(scheme)} {scheme}://{bucket}/{path}'.encode(), digest_size=8
    ).hexdigest()
    given = os.environ.get('EVENKEEL_CACHE')
    root = Path(given).expanduser().absolute() if given else user_cache() / 'buckets'
    return root / kind / name


def local_name(url: str) -> str:
    """The last part of the path, without what a local path may not hold."""
    return re.sub(r'[^\w.-]', '_', parse(url)[2].split('/')[-1])


def each(act: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """`act` of every item, AT_ONCE of them at a time; after an error no further one is begun."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        return list(pool.map(act, items))
    finally:
        pool.shutdown(cancel_futures=True)


class Bucket:
    """The objects below a URL, by names relative to it.

    Everything raises BucketError, in words, where the store cannot be reached or refuses, and
    FileNotFoundError for an object that is not there.
    """

    def __init__(self, url: str, store: Any):
        self.url, self._store = url.rstrip('/'), store

    def list(self, folder: str = '') -> dict[str, Stored]:
        """All objects, or those below a folder, as they are now: nothing is remembered."""
        import obstore

        with self._errors(folder):
            found = obstore.list(self._store, folder or None, chunk_size=1000).collect()
        return {one['path']: _stored(one) for one in found}

    def read(self, name: str) -> tuple[bytes, Stored]:
        import obstore

        with self._errors(name):
            found = obstore.get(self._store, name)
            stored = _stored(found.meta)
            return bytes(found.bytes()), stored

    def fetch(self, name: str, path: Path) -> Stored:
        """Reads an object into a file; again where it is replaced meanwhile."""
        for _ in range(READS - 1):
            with contextlib.suppress(Changed):
                return self._fetch(name, path)
        return self._fetch(name, path)

    def _fetch(self, name: str, path: Path) -> Stored:
        import obstore

        with path.open('wb') as file, self._errors(name):
            found = obstore.get(self._store, name)
            stored = _stored(found.meta)
            if stored.size <= RANGE_BYTES:
                file.write(found.bytes())
                return stored
            for start in range(0, stored.size, RANGE_BYTES):  # all of the same object
                part = start, min(start + RANGE_BYTES, stored.size)
                same = {'range': part, 'if_match': stored.e_tag}
                file.write(obstore.get(self._store, name, options=same).bytes())
        return stored

    def write(self, name: str, content: bytes | Path) -> Stored:
        """Bytes, or a file."""
        if isinstance(content, Path):
            part = max(PART_BYTES, -(-content.stat().st_size // MOST_PARTS))
            return self._put(name, content, chunk_size=part, max_concurrency=PARTS_AT_ONCE)
        return self._put(name, content)

    def create(self, name: str, content: bytes) -> Stored:
        """Raises Changed where it is there already."""
        return self._put(name, content, mode='create')

    def replace(self, name: str, content: bytes, before: Stored) -> Stored:
        """Raises Changed where the object is not `before` any more."""
        known = {'e_tag': before.e_tag, 'version': before.version}  # GCS goes by the latter
        how = {key: value for key, value in known.items() if value is not None}
        return self._put(name, content, mode=how)

    def _put(self, name: str, content: bytes | Path, **how: Any) -> Stored:
        import obstore

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        with self._errors(name):
            found = obstore.put(self._store, name, content, **how)
        return Stored(size, found.get('e_tag'), found.get('version'))

    def delete(self, names: Iterable[str]) -> None:
        """One that is not there is no error."""
        import obstore

        def one(name: str) -> None:
            with contextlib.suppress(FileNotFoundError), self._errors(name):
                obstore.delete(self._store, name)

        each(one, names)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """The library's errors as ours, with the URL and one line of what it says."""
        from obstore import exceptions

        where = below(self.url, name) if name else self.url
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Changed(f'{where} has been changed by another process') from error
        except (exceptions.BaseError, FileNotFoundError) as error:
            # Of a listing all errors have one type, and what the store answered in their text.
            said = str(error)
            if 'NoSuchBucket' in said:
                raise NoBucket(no_bucket(self.url)) from error
            if ROLES in said:
                raise Denied(denied(where, 'none were found')) from error
            if any(status in said for status in REFUSALS):
                raise Denied(denied(where, _line(error))) from error
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f'there is no {where}') from error
            raise BucketError(f'{where} cannot be reached ({_line(error)})') from error


def no_bucket(url: str) -> str:
    return f'there is no bucket {parse(url)[1]} for {url}: make it, or correct the URL.'


def denied(where: str, said: str) -> str:
    return (
        f'{where}: these credentials may not do that, or there are none ({said}). For s3:// set '
        'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for gs:// GOOGLE_APPLICATION_CREDENTIALS, to '
        'those of an account that may list, read, write and delete there.'
    )


def open_bucket(url: str) -> Bucket:
    """Raises ValueError for what is no URL of a path in a bucket, and where obstore is missing;
    nothing is asked of the store yet.
    """
    scheme, bucket, path = parse(url)
    try:
        from obstore import store
    except ImportError as error:
        raise ValueError(
            f'{url} needs obstore: pip install "evenkeel[buckets]", or uv sync --extra buckets'
        ) from error
    kinds = {'s3': store.S3Store, 'gs': store.GCSStore}
    options = {
        'timeout': timedelta(seconds=REQUEST_SEC),
        'allow_http': _endpoint(scheme).startswith('http://'),
    }
    retries = {
        'max_retries': 100,
        'retry_timeout': timedelta(seconds=min(TRY_SEC, times().lease / 3, times().retry)),
        'backoff': {
            'init_backoff': timedelta(seconds=0.1),
            'max_backoff': timedelta(seconds=5),
            'base': 2,
        },
    }
    opened = kinds[scheme](bucket, prefix=path, client_options=options, retry_config=retries)
    return Bucket(url, opened)


def _endpoint(scheme: str) -> str:
    """Where it is not the usual one."""
    return os.environ.get({'s3': 'AWS_ENDPOINT_URL', 'gs': 'GOOGLE_BASE_URL'}[scheme], '')


def _stored(meta: Any) -> Stored:
    return Stored(meta['size'], meta.get('e_tag'), meta.get('version'))


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [''])[0][:MOST_SAID]
