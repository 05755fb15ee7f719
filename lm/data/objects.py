"""Text of object storage: the objects that a URL with a glob matches, fetched when they are read.

An object is fetched once, into $EVENKEEL_CACHE/text or the user's cache, under a name made of its
URL, tag and size: a replaced object is another text.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lm.data import formats
from lm.data.formats import Documents
from lm.data.globs import Pattern
from lm.data.kinds import KINDS, file_suffix
from lm.data.streams import COMPRESSIONS
from lm.storage.buckets import Bucket, ObjectMeta, cache_folder, join_url, open_bucket
from lm.storage.files import replace_file


@dataclasses.dataclass(frozen=True)
class TextObjects:
    """The matching objects below a URL, in order of their names. metas: by name."""

    bucket: Bucket
    metas: Mapping[str, ObjectMeta]

    @property
    def identity(self) -> str:
        """Names, tags and sizes of the objects, which determine their text."""
        return ' '.join(f'{name} {_describe(meta)}' for name, meta in self.metas.items())

    def documents(self, text_field: str) -> Documents:
        """Yields all documents; fetches each object when its turn comes."""
        for local in self.fetch_files():
            yield from formats.read_documents((local,), text_field)

    def fetch_files(self) -> Iterator[Path]:
        """Yields the local path of each object, and fetches it when its turn comes."""
        return (self._fetch(name) for name in self.metas)

    def _fetch(self, name: str) -> Path:
        """Returns the local copy of an object. Raises ValueError if it has been replaced."""
        url, version = join_url(self.bucket.url, name), _describe(self.metas[name])
        digest = hashlib.blake2b(version.encode(), digest_size=8).hexdigest()
        path = cache_folder(url, 'text') / digest / name.rpartition('/')[2]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as temporary:
                meta = self.bucket.fetch(name, temporary)
                if _describe(meta) != version:
                    raise ValueError(
                        f'{url} was replaced while it was read. Run the command again when the '
                        'upload is complete.'
                    )
        return path


def _describe(meta: ObjectMeta) -> str:
    return f'{meta.e_tag or meta.version} {meta.size}'


def list_objects(url: str) -> TextObjects:
    """Returns the objects that a URL with a glob matches.

    Raises ValueError if there are none, and BucketError if the store does not answer.
    """
    scheme, _, location = url.partition('://')
    prefix = Pattern(location).prefix
    folder, _, _ = prefix.rpartition('/')
    folder = folder or prefix
    pattern = Pattern(location[len(folder) :].strip('/'))
    bucket = open_bucket(f'{scheme}://{folder}', is_root=True)
    listing = bucket.list()
    metas = {name: listing[name] for name in sorted(listing) if pattern.fullmatch(name)}
    if not metas:
        raise ValueError(_explain_no_objects(url, pattern.text, bucket.url, sorted(listing)))
    return TextObjects(bucket, metas)


def _explain_no_objects(url: str, pattern: str, folder: str, names: Sequence[str]) -> str:
    """Returns the error for a URL that matches no object.

    Args:
      url: the URL.
      pattern: its part below the folder.
      folder: the URL that was listed.
      names: the objects there.
    """
    inside = [name for name in names if not pattern or name.startswith(f'{pattern}/')]
    for name in inside:
        path = Path(name)
        if file_suffix(path) in KINDS:
            ending = file_suffix(path) + (path.suffix if path.suffix in COMPRESSIONS else '')
            return (
                f'data.source=text:{url} is a folder. To read its text, set '
                f'data.source=text:{url.rstrip("/")}/**/*{ending}.'
            )
    return (
        f'no object matches data.source=text:{url} ({folder} has {len(names):,} objects; ** '
        'descends into folders).'
    )
