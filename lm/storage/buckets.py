"""Object storage by URL: gs://BUCKET/PATH and s3://BUCKET/PATH, through the library obstore.

A store holds objects by name, each written whole or not at all. A write may be conditional: there
is no such object yet, or it is still the one that was read. There are no folders, locks or renames.

Credentials and endpoint of s3:// come from the usual environment variables (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL) or the machine's role.
Credentials of gs:// are Google's application default credentials.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from lm.storage.files import expand_home, first_line, user_cache

# Environment variables with the address of a store other than Google's or Amazon's.
ENDPOINTS = {'gs': 'GOOGLE_BASE_URL', 's3': 'AWS_ENDPOINT_URL'}
FORM = 'gs://BUCKET/PATH or s3://BUCKET/PATH'
CONCURRENT_REQUESTS = 16  # per job
TRY_SEC = 20.0  # for a request with the library's repetitions
REQUEST_SEC = 30.0  # for one repetition, which moves at most one part
PART_BYTES = 5 << 20  # the smallest part that S3 accepts
MAX_PARTS = 9_000  # S3 accepts 10,000 for an object
CONCURRENT_PARTS = 4  # while an object is written
READ_ATTEMPTS = 5  # an object may be replaced while it is read
RANGE_BYTES = 16 << 20  # read in one request
# The library asks this address for a cloud machine's role if it finds no other credentials.
METADATA_ADDRESS = '169.254.169.254'
# Amazon answers 400 to an expired token. Google's credential files are read before any request.
REFUSAL_PATTERNS = (
    '401 Unauthorized',
    '403 Forbidden',
    'ExpiredToken',
    'InvalidToken',
    'service account',
    'pem file',
)
MAX_ERROR_CHARS = 300  # characters of the library's error


class BucketError(OSError):
    """The store did not carry out a request."""


class RequestRefused(BucketError):
    """The store refuses a request for good: wrong credentials, or no such bucket."""


class PreconditionFailed(BucketError):
    """The condition of a write does not hold: another process has written the object."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds; $EVENKEEL_BUCKET_PACE_SEC sets `pace`, and so on."""

    pace: float = 15.0  # between pushes of a run's local folder
    retry: float = 180.0  # for retrying an unreachable bucket
    lease: float = 60.0  # without renewal until another process may take a workdir


def read_times() -> Times:
    """Returns the times that the environment sets. Raises ValueError unless they are positive."""
    seconds = {}
    for field in dataclasses.fields(Times):
        name = f'EVENKEEL_BUCKET_{field.name.upper()}_SEC'
        text = os.environ.get(name) or field.default
        try:
            seconds[field.name] = float(text)  # ty: ignore[invalid-argument-type] - has a default
        except ValueError:
            seconds[field.name] = 0.0
        if not 0.0 < seconds[field.name] < 1e6:
            raise ValueError(f'{name} must be a positive number of seconds; got {text!r}')
    return Times(**seconds)


@dataclasses.dataclass(frozen=True)
class ObjectMeta:
    """Metadata of an object. `version` is for `Bucket.replace`."""

    size: int
    e_tag: str | None
    version: str | None


def is_url(path: str | Path) -> TypeGuard[str]:
    """Returns whether a path names a store, of any kind, rather than a folder."""
    return isinstance(path, str) and re.match(r'[A-Za-z][\w+.-]*://', path) is not None


def parse_local_path(path: str | Path, name: str, endings: Sequence[str] = ()) -> Path:
    """Returns the value of a flag as a path.

    Args:
      path: the value.
      name: the flag, such as '--out'.
      endings: endings that the path may have; (): any.

    Raises:
      ValueError: for a URL, and for another ending.
    """
    if is_url(path):
        raise ValueError(
            f'{name}={path} must be a path on this machine. Only workdirs and their checkpoints, '
            'data.cache_dir, and the files of data.source=text:URL may be in object storage.'
        )
    if endings and Path(path).suffix not in endings:
        raise ValueError(f'{name} must end in {", ".join(endings)}; got {path}')
    return Path(path)


def parse_url(url: str, is_root: bool = False) -> tuple[str, str, str]:
    """Returns (scheme, bucket, path). Raises ValueError for any other kind of URL.

    is_root: whether the path may be empty.
    """
    scheme, _, location = url.partition('://')
    bucket, _, path = location.partition('/')
    path = path.strip('/')
    if scheme not in ENDPOINTS:
        raise ValueError(f'{url} must be {FORM}, or a plain path for a folder on a disk.')
    if not bucket or not (path or is_root) or '//' in path:
        raise ValueError(f'{url} must name a path in a bucket: {FORM}.')
    return scheme, bucket, path


def join_url(url: str, *names: str | int) -> str:
    """Returns a URL with names appended to its path."""
    return '/'.join([url.rstrip('/'), *map(str, names)])


def cache_folder(url: str, kind: str) -> Path:
    """Returns the local folder of a URL.

    It is $EVENKEEL_CACHE/KIND/DIGEST, or a folder in the user's cache.
    """
    scheme, bucket, path = parse_url(url)
    endpoint = os.environ.get(ENDPOINTS[scheme], '')
    identity = f'{endpoint} {scheme}://{bucket}/{path}'
    cache = os.environ.get('EVENKEEL_CACHE')
    root = Path(expand_home(cache)).absolute() if cache else user_cache() / 'buckets'
    return root / kind / hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def local_name(url: str) -> str:
    """Returns the last part of a URL's path, with _ in place of special characters."""
    return re.sub(r'[^\w.-]', '_', parse_url(url)[2].split('/')[-1])


def for_each(function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """Calls `function` on each argument, CONCURRENT_REQUESTS at a time.

    After an error no further call is started.
    """
    pool = ThreadPoolExecutor(CONCURRENT_REQUESTS)
    try:
        return list(pool.map(function, arguments))
    finally:
        pool.shutdown(cancel_futures=True)


class Bucket:
    """The objects under a URL, by names relative to it.

    Every method raises BucketError if the store cannot be reached or refuses, and FileNotFoundError
    for an object that does not exist.
    """

    def __init__(self, url: str, store: Any):
        self.url, self._store = url.rstrip('/'), store

    def list(self, folder: str = '') -> dict[str, ObjectMeta]:
        """Returns all current objects, or those in a folder.

        The empty objects by which consoles show folders are left out.
        """
        with self._translate_errors(folder):
            metas = self._store.list(folder or None, chunk_size=1000).collect()
        objects = {meta['path']: _parse_meta(meta) for meta in metas}
        folders = {'', *(str(parent) for name in objects for parent in PurePosixPath(name).parents)}
        return {name: meta for name, meta in objects.items() if meta.size or name not in folders}

    def read(self, name: str) -> tuple[bytes, ObjectMeta]:
        """Returns the content and the metadata of an object."""
        with self._translate_errors(name):
            response = self._store.get(name)
            meta = _parse_meta(response.meta)
            return bytes(response.bytes()), meta

    def fetch(self, name: str, path: Path) -> ObjectMeta:
        """Reads an object into a file, and repeats this if the object is replaced meanwhile."""
        for _ in range(READ_ATTEMPTS - 1):
            with contextlib.suppress(PreconditionFailed):
                return self._fetch(name, path)
        return self._fetch(name, path)

    def _fetch(self, name: str, path: Path) -> ObjectMeta:
        with path.open('wb') as file, self._translate_errors(name):
            response = self._store.get(name)
            meta = _parse_meta(response.meta)
            if meta.size <= RANGE_BYTES:
                file.write(response.bytes())
                return meta
            for start in range(
                0, meta.size, RANGE_BYTES
            ):  # `if_match`: all ranges of the same object
                part = start, min(start + RANGE_BYTES, meta.size)
                options = {'range': part, 'if_match': meta.e_tag}
                file.write(self._store.get(name, options=options).bytes())
        return meta

    def write(self, name: str, content: bytes | Path) -> ObjectMeta:
        """Writes bytes, or the content of a file."""
        if isinstance(content, Path):
            part = max(PART_BYTES, -(-content.stat().st_size // MAX_PARTS))
            return self._put(name, content, chunk_size=part, max_concurrency=CONCURRENT_PARTS)
        return self._put(name, content)

    def create(self, name: str, content: bytes) -> ObjectMeta:
        """Writes a new object. Raises PreconditionFailed if it exists."""
        return self._put(name, content, mode='create')

    def replace(self, name: str, content: bytes, before: ObjectMeta) -> ObjectMeta:
        """Overwrites an object.

        Args:
          name: the name of the object.
          content: the new content.
          before: the metadata of the content to replace.

        Returns:
          The new metadata.

        Raises:
          PreconditionFailed: if the object is no longer `before`.
        """
        conditions = {'e_tag': before.e_tag, 'version': before.version}  # GCS compares the version
        mode = {key: value for key, value in conditions.items() if value is not None}
        return self._put(name, content, mode=mode)

    def _put(self, name: str, content: bytes | Path, **options: Any) -> ObjectMeta:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        with self._translate_errors(name):
            response = self._store.put(name, content, **options)
        return ObjectMeta(size, response.get('e_tag'), response.get('version'))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; an object that does not exist is no error."""

        def delete_object(name: str) -> None:
            with contextlib.suppress(FileNotFoundError), self._translate_errors(name):
                self._store.delete(name)

        for_each(delete_object, names)

    @contextlib.contextmanager
    def _translate_errors(self, name: str) -> Generator[None]:
        """Raises the library's errors as ours, with the URL and one line of its text."""
        from obstore import exceptions

        url = join_url(self.url, name) if name else self.url
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise PreconditionFailed(f'{url} has been changed by another process') from error
        except (exceptions.BaseError, FileNotFoundError) as error:
            # Errors of a listing all have one type, so the store's answer is found in their text.
            message, line = str(error), first_line(error, MAX_ERROR_CHARS)
            if 'NoSuchBucket' in message:
                raise RequestRefused(
                    f'there is no bucket {parse_url(self.url, is_root=True)[1]} for {self.url}: '
                    'create it, or correct the URL.'
                ) from error
            if 'invalid path' in message:
                raise BucketError(
                    f'{url} contains an object whose name is not a valid path ({line}). Delete it: '
                    'the store cannot list the folder with it.'
                ) from error
            if METADATA_ADDRESS in message or any(status in message for status in REFUSAL_PATTERNS):
                # The metadata server may answer later; other refusals are final.
                kind = BucketError if METADATA_ADDRESS in message else RequestRefused
                raise kind(
                    f'{url}: access refused '
                    f'({"no credentials found" if METADATA_ADDRESS in message else line}). Set the '
                    'credentials of an account that may list, read, write and delete there: '
                    'for s3:// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if it has one, '
                    'AWS_SESSION_TOKEN; for gs:// GOOGLE_APPLICATION_CREDENTIALS.'
                ) from error
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f'there is no {url}') from error
            raise BucketError(f'{url} cannot be reached ({line})') from error


def open_bucket(url: str, is_root: bool = False) -> Bucket:
    """Opens a store without a request.

    is_root: whether the URL may be a whole bucket.

    Raises ValueError for another URL, a wrong address in the environment, or without obstore, and
    RequestRefused for a damaged file of credentials.
    """
    scheme, bucket, path = parse_url(url, is_root)
    try:
        from obstore import store
    except ImportError as error:
        raise ValueError(
            f'{url} needs obstore: pip install "evenkeel[buckets]", or uv sync --extra buckets'
        ) from error
    kinds = {'s3': store.S3Store, 'gs': store.GCSStore}
    endpoint = os.environ.get(ENDPOINTS[scheme], '')
    if endpoint and not re.match(r'https?://[^/\s]+[^\s]*$', endpoint):
        raise ValueError(f'{ENDPOINTS[scheme]} must be like https://HOST:PORT; got {endpoint!r}')
    is_plain = endpoint.startswith('http://')
    options = {'timeout': timedelta(seconds=REQUEST_SEC), 'allow_http': is_plain}
    backoff = {'init_backoff': timedelta(seconds=0.1), 'max_backoff': timedelta(seconds=5)}
    try_time = timedelta(seconds=min(TRY_SEC, read_times().lease / 3, read_times().retry))
    retries = {'max_retries': 100, 'retry_timeout': try_time, 'backoff': backoff | {'base': 2}}
    opened = Bucket(url, None)
    with opened._translate_errors(''):
        configs = {'client_options': options, 'retry_config': retries}
        opened._store = kinds[scheme](bucket, prefix=path or None, **configs)
    return opened


def _parse_meta(meta: Any) -> ObjectMeta:
    return ObjectMeta(meta['size'], meta.get('e_tag'), meta.get('version'))
