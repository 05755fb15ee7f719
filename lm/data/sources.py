"""Sources of text: `scheme` or `scheme:argument` names a stream of documents."""

import bisect
import dataclasses
import functools
import glob
import os
import re
import string
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.data import conversations, formats, regression
from lm.data.addresses import explain_address
from lm.data.formats import COMPRESSIONS, FORMATS, Documents, check_field, file_format, to_bytes
from lm.data.globs import Matches, find_files, iterate_paths
from lm.data.hub import open_shards
from lm.data.objects import list_objects
from lm.storage.buckets import ENDPOINTS, is_url
from lm.storage.files import expand_home, first_line
from modules.choices import choose

# Tests are two thirds of the library, and largely tables; packages differ between machines.
PYTHON_EXCLUDED_DIRS = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
# Written by the build of one interpreter: without them, equal versions hold equal corpora.
PYTHON_EXCLUDED_PREFIXES = ('_sysconfigdata', 'config-')

TFDS_SPLITS = ('train', 'validation', 'test')  # that a name may end with; the first is implied
MAX_LISTED = 3  # paths that a note names at most

# Raise when any synthetic document changes: the digest of prepared data depends on it.
SYNTHETIC_VERSION = 1
DOCUMENTS = 400
LENGTH = 2048  # characters of a document, which are bytes since all are ASCII
ALPHABET = np.frombuffer(string.ascii_lowercase[:16].encode(), np.uint8)
COPY_BLOCK = 64
MARKOV_SEED = 1906  # the year of Markov's paper; any other number makes another language


@dataclasses.dataclass(frozen=True)
class Source:
    """A stream of documents, determined by the bytes of `files` and by `identity`.

    Attributes:
      files: read by `documents`.
      identity: the settings that determine the documents, besides the files.
      documents: returns an iterator over the documents.
      origin: a data.source that always means the same text, if the given one does not.
      notes: lines about matched names that are not read.
      is_chat: whether documents are conversations (`lm.data.conversations`).
      validation: the text of the validation split, if it is not a part of this one.
    """

    files: tuple[Path, ...]
    identity: str
    documents: Callable[[], Documents]
    origin: str = ''
    notes: tuple[str, ...] = ()
    is_chat: bool = False
    validation: 'Source | None' = None


def open_source(source: str, text_field: str) -> Source:
    """Returns the source of a config. Raises ValueError for a wrong name or missing files."""
    scheme, _, argument = source.partition(':')
    if scheme not in SOURCES and (explanation := _explain_address(source)):
        raise ValueError(
            f'data.source must begin with its kind, one of {", ".join(sorted(SOURCES))}. '
            f'{explanation}'
        )
    if scheme not in SOURCES and (suggestion := _suggest_source(source)):
        raise ValueError(
            f'data.source must begin with its kind, one of {", ".join(sorted(SOURCES))}; got '
            f'{source!r}. To read the text there, set data.source={suggestion}.'
        )
    # A locale that is not UTF-8 makes surrogates of the bytes of a command line.
    text_field = text_field.encode('utf-8', 'surrogateescape').decode('utf-8', 'replace')
    return choose(SOURCES, scheme, 'data.source')(argument, text_field)


def _explain_address(text: str) -> str:
    """Returns the data.source of an address or a name of the hub; '' for a path or any other."""
    is_path = os.path.exists(expand_home(text)) or (glob.has_magic(text) and '://' not in text)
    return '' if is_path else explain_address(text)


def _suggest_source(path: str) -> str:
    """Returns the data.source of a path without its scheme, or '' if it is no path."""
    expanded = expand_home(path)
    if os.path.isdir(expanded):
        files = map(Path, iterate_paths(f'{glob.escape(expanded)}/**'))
        first = next((file for file in files if file_format(file) in FORMATS), Path('any.txt'))
        compression = first.suffix if first.suffix in COMPRESSIONS else ''
        return f'text:{path.rstrip("/")}/**/*{file_format(first)}{compression}'
    looks_like_path = set(path) & set('/*?') or file_format(Path(path)) in FORMATS
    is_path = os.path.exists(expanded) or (looks_like_path and ':' not in path)
    return f'text:{path}' if is_path else ''


def python(argument: str, text_field: str) -> Source:
    """The standard library of the running interpreter, one document per module."""
    if argument:
        raise ValueError(f"data.source 'python' takes no argument; got 'python:{argument}'.")
    root = Path(sysconfig.get_path('stdlib'))
    names = sorted(_list_modules(root))
    if not names:
        raise ValueError(
            f'data.source is python, and this interpreter holds no .py files in {root} (it may be '
            'frozen or zipped). Name text of your own: data.source=text:GLOB.'
        )

    def read_modules() -> Documents:
        return ((name, ((root / name).read_bytes(),)) for name in names)

    return Source(tuple(root / name for name in names), 'text', read_modules)


def _list_modules(root: Path) -> Iterator[str]:
    for folder, dirs, names in os.walk(root):
        candidates = [name for name in dirs if not name.startswith(PYTHON_EXCLUDED_PREFIXES)]
        dirs[:] = [name for name in candidates if name not in PYTHON_EXCLUDED_DIRS]
        for name in names:
            if name.endswith('.py') and not name.startswith(PYTHON_EXCLUDED_PREFIXES):
                yield (Path(folder) / name).relative_to(root).as_posix()


def text(argument: str, text_field: str) -> Source:
    """The files that match a glob (`**` descends), in order of their paths, or the file of that
    name.

    The glob may be gs://BUCKET/GLOB or s3://BUCKET/GLOB.

    A .txt file is one document. Each line of a .jsonl file and each row of a .parquet file is a
    document, with its text in `text_field`. A .txt or .jsonl file may be compressed (.gz, .zst). A
    file that the glob reaches under several names, by links, is read once.
    """
    if not argument:
        raise ValueError("data.source 'text' needs a glob, such as text:corpus/**/*.txt.")
    if is_url(argument) and argument.partition('://')[0] in ENDPOINTS:
        return _open_bucket_text(argument, text_field)
    matches = find_files(expand_home(argument))
    if not (files := matches.files):
        raise ValueError(_explain_no_files(argument, matches))
    identity = _describe_files(argument, files, text_field)
    read_documents = functools.partial(formats.read_documents, files, text_field)
    return Source(files, identity, read_documents, notes=_describe_skipped(argument, matches))


def _describe_files(argument: str, files: Sequence[Path], text_field: str) -> str:
    """Returns the identity of files by their formats. Raises ValueError for any other format."""
    if unreadable := [path for path in files if file_format(path) not in FORMATS]:
        raise ValueError(
            f'{unreadable[0]} matches data.source=text:{argument}, but only '
            f'{", ".join(FORMATS)} can be read, the first two also as '
            f'{" or ".join(COMPRESSIONS)}. Narrow the glob.{_suggest_jsonl(unreadable[0])}'
        )
    is_text = all(file_format(path) == '.txt' for path in files)
    return 'text' if is_text else f'records of {text_field}'


def _open_bucket_text(url: str, text_field: str) -> Source:
    """Returns the text of objects that a URL with a glob matches; see `lm.data.objects`."""
    objects = list_objects(url)
    identity = _describe_files(url, [Path(name) for name in objects.metas], text_field)
    read_documents = functools.partial(objects.documents, text_field)
    return Source((), f'{identity}: {objects.identity}', read_documents)


def _explain_no_files(argument: str, matches: Matches) -> str:
    """Returns the error for a glob that matches no regular file."""
    flag = f'data.source=text:{argument}'
    if '://' in argument and (explanation := explain_address(argument)):
        return f'{flag} names no file of this machine. {explanation}'
    if os.path.isdir(expand_home(argument)):
        suggestion = _suggest_source(argument)
        return f'{flag} is a folder. To read the text there, set data.source={suggestion}.'
    if matches.non_files:
        return (
            f'{flag} matches {_format_paths(matches.non_files)}, and only regular files are read.'
        )
    return f'no file matches {flag} (looked from {os.getcwd()}; ** descends into folders).'


def _suggest_jsonl(path: Path) -> str:
    """Returns a sentence for names such as those of C4 and Dolma, else ''."""
    if '.json' not in path.suffixes:
        return ''
    name = path.name.replace('.json', '.jsonl')
    return f' If each line of it is an object, give it the name {name}.'


def _describe_skipped(argument: str, matches: Matches) -> tuple[str, ...]:
    """Returns notes on matched names that are not read."""
    prefix, notes = f'NOTE: data.source=text:{argument}', []
    if matches.duplicates:
        notes.append(
            f'{prefix} reaches some files by several names, which are links: each file is read '
            f'once, and not as {_format_paths(matches.duplicates)}'
        )
    if matches.non_files:
        notes.append(
            f'{prefix} matches {_format_paths(matches.non_files)}: only regular files are read'
        )
    return tuple(notes)


def _format_paths(paths: Sequence[str]) -> str:
    """Returns the first paths, and the number of further ones."""
    suffix = f' and {len(paths) - MAX_LISTED:,} more' if len(paths) > MAX_LISTED else ''
    return ', '.join(paths[:MAX_LISTED]) + suffix


def tfds(argument: str, text_field: str) -> Source:
    """A TFDS dataset that is prepared on this machine (TFDS_DATA_DIR): NAME[:VERSION][:SPLIT].

    The split is `train` unless named: `validation` or `test`.
    """
    records, files = _open_tfds_split(argument)
    check_field(text_field, list(records.dataset_info.features), f'tfds:{argument}')
    read_documents = functools.partial(_read_tfds, records, argument, text_field)
    return Source(files, f'tfds {text_field}', read_documents)


def _open_tfds_split(argument: str) -> tuple[Any, tuple[Path, ...]]:
    """Returns (records, files) of NAME[:VERSION][:SPLIT]."""
    if not argument:
        raise ValueError("data.source 'tfds' needs a name, such as tfds:lm1b:1.1.0.")
    name, _, split = argument.rpartition(':')
    name, split = (name, split) if name and split in TFDS_SPLITS else (argument, TFDS_SPLITS[0])
    if re.match(r'[^/:]+:[A-Za-z]', name):
        raise ValueError(
            f'tfds:{argument} names a community dataset, which TFDS would download. Prepare it '
            'first and name what was prepared, or export it to files for text:GLOB.'
        )
    records = _open_tfds(name, split)
    return records, tuple(Path(path) for path in records.dataset_info.splits[split].filepaths)


def chat(argument: str, text_field: str) -> Source:
    """Conversations, whose answers are learned: files as for `text`, `hub:NAME` or `tfds:NAME`.

    Each record has `messages` (or `conversations`, of ShareGPT), or `prompt` and `completion`.
    `data.text_field` is not read.
    """
    if not argument:
        raise ValueError("data.source 'chat' needs a glob, such as chat:chats/*.jsonl.")
    scheme, _, name = argument.partition(':')
    identity = f'chats {conversations.VERSION}'
    if scheme == 'hub':
        shards = open_shards(name)
        files = ' '.join(f'{path} {blob}' for path, blob in shards.blobs.items())

        def read_shards() -> Documents:
            return conversations.read_conversations(shards.fetch_files())

        origin = f'chat:{shards.origin}'
        return Source((), f'{identity} hub: {files}', read_shards, origin, is_chat=True)
    if scheme == 'tfds':
        records, paths = _open_tfds_split(name)

        def read_records() -> Documents:
            for location, record in _read_tfds_records(records, name):
                yield location, (conversations.encode_record(record, location),)

        return Source(paths, f'{identity} tfds', read_records, is_chat=True)
    if is_url(argument) and argument.partition('://')[0] in ENDPOINTS:
        objects = list_objects(argument)

        def read_objects() -> Documents:
            return conversations.read_conversations(objects.fetch_files())

        return Source((), f'{identity} {objects.identity}', read_objects, is_chat=True)
    try:
        source = text(argument, text_field)
    except ValueError as error:
        raise ValueError(str(error).replace('text:', 'chat:')) from error
    return dataclasses.replace(
        source,
        identity=identity,
        documents=functools.partial(conversations.read_conversations, source.files),
        notes=tuple(note.replace('text:', 'chat:') for note in source.notes),
        is_chat=True,
    )


def _open_tfds(name: str, split: str) -> Any:
    import tensorflow_datasets

    data_dir = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
    not_found_errors = (
        tensorflow_datasets.core.DatasetNotFoundError,
        AssertionError,
        KeyError,
        ValueError,
    )
    try:
        return tensorflow_datasets.data_source(name, split=split, download=False)
    except NotImplementedError as error:
        raise ValueError(
            f'tfds:{name} is prepared in a format without random access. Prepare it again as '
            "array_record: tfds.load(NAME, builder_kwargs={'file_format': 'array_record'})."
        ) from error
    except not_found_errors as error:
        raise ValueError(
            f'tfds:{name} with a {split} split is not prepared under {data_dir}, and nothing is '
            f'downloaded during training ({first_line(error)}). Prepare it first, for instance '
            'with `tfds build`, or set TFDS_DATA_DIR to where it is.'
        ) from error


def _read_tfds(records: Any, name: str, text_field: str) -> Documents:
    for location, record in _read_tfds_records(records, name):
        yield location, (to_bytes(record[text_field], text_field, location),)


def _read_tfds_records(records: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for i in range(len(records)):
        location = f'tfds:{name}[{i}]'
        try:
            record = records[i]
        except Exception as error:  # ArrayRecord and TFDS raise what they like
            raise ValueError(f'{location} cannot be read: {first_line(error)}') from error
        yield location, record


def hub(argument: str, text_field: str) -> Source:
    """A data set of the Hugging Face Hub, OWNER/NAME[@REVISION][:SUBSET[:SPLIT]].

    The split is that to train on unless named.

    Its parquet files are fetched when they are read, into the cache of huggingface_hub.
    """
    shards = open_shards(argument)
    files = ' '.join(f'{path} {blob}' for path, blob in shards.blobs.items())
    read_documents = functools.partial(shards.documents, text_field)
    return Source((), f'hub records of {text_field}: {files}', read_documents, shards.origin)


class SyntheticLanguage(NamedTuple):
    """A language whose documents are independent and identically distributed.

    Attributes:
      sample: samples the bytes of a document, all ASCII; every document has the same length.
      bits_per_byte: computes the entropy rate, a lower bound for every model on long documents;
        None if it has no closed form.
      n_documents: number of documents.
    """

    sample: Callable[[np.random.Generator], np.ndarray]
    bits_per_byte: Callable[[], float] | None = None
    n_documents: int = DOCUMENTS


@functools.cache
def _transitions() -> np.ndarray:
    """Returns P[i, j] = p(next = j | current = i), with rows from a peaked Dirichlet
    distribution.
    """
    rng = np.random.default_rng(MARKOV_SEED)
    return rng.dirichlet(np.full(len(ALPHABET), 0.3), size=len(ALPHABET))


def _sample_uniform(rng: np.random.Generator) -> np.ndarray:
    return ALPHABET[rng.integers(len(ALPHABET), size=LENGTH)]


def _sample_markov(rng: np.random.Generator) -> np.ndarray:
    # Without the last bound, because a cumulative sum may round to just under 1.
    bounds = _transitions().cumsum(1)[:, :-1].tolist()
    letters = [int(rng.integers(len(ALPHABET)))]
    for u in rng.random(LENGTH - 1).tolist():
        letters.append(bisect.bisect(bounds[letters[-1]], u))
    return ALPHABET[letters]


def _markov_bits() -> float:
    """Returns the entropy rate -sum_i pi_i sum_j P_ij log2 P_ij, where pi P = pi."""
    P = _transitions()
    pi = np.linalg.matrix_power(P, 1 << 12)[0]
    return float(-(pi[:, None] * P * np.log2(np.maximum(P, 1e-300))).sum())


def _sample_copy(rng: np.random.Generator) -> np.ndarray:
    blocks = rng.integers(len(ALPHABET), size=(LENGTH // (2 * COPY_BLOCK), COPY_BLOCK))
    return ALPHABET[np.concatenate([blocks, blocks], 1).reshape(-1)]


UNIFORM_BITS = float(np.log2(len(ALPHABET)))
SYNTHETIC = {
    'uniform': SyntheticLanguage(_sample_uniform, lambda: UNIFORM_BITS),
    'markov': SyntheticLanguage(_sample_markov, _markov_bits),
    # The first half of a pair of blocks is uniform, the second is its copy and costs nothing.
    'copy': SyntheticLanguage(_sample_copy, lambda: UNIFORM_BITS / 2),
    # A regression each, short, so that there are many.
    **{
        name: SyntheticLanguage(tasks.sample, n_documents=1 << 14)
        for name, tasks in regression.REGRESSIONS.items()
    },
}


def synthetic(argument: str, text_field: str) -> Source:
    """Text with a known distribution; each document is a function of its name and number."""
    language = choose(SYNTHETIC, argument, 'the name in data.source=synthetic:NAME')

    def generate_documents() -> Documents:
        for i in range(language.n_documents):
            yield (
                f'synthetic:{argument}[{i}]',
                (language.sample(np.random.default_rng(i)).tobytes(),),
            )

    return Source((), f'synthetic {argument} {SYNTHETIC_VERSION}', generate_documents)


SOURCES = {
    'python': python,
    'text': text,
    'chat': chat,
    'hub': hub,
    'tfds': tfds,
    'synthetic': synthetic,
}
