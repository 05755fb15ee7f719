"""Sources of text: `scheme` or `scheme:argument` names a stream of documents."""

import bisect
import dataclasses
import functools
import glob
import itertools
import os
import re
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.data import conversations, formats, regression
from lm.data.addresses import explain_address
from lm.data.folders import format_paths, select_files, summarize_names
from lm.data.formats import Documents
from lm.data.globs import Matches, find_files
from lm.data.hub import open_shards
from lm.data.kinds import (
    CSV,
    JSON,
    KINDS,
    TEXT,
    UnreadableKind,
    begins_like_json,
    detect_kind,
    file_suffix,
)
from lm.data.near_files import find_near_pattern
from lm.data.objects import list_objects
from lm.data.standard_library import list_modules, read_docstrings
from lm.data.text_field import check_field, to_bytes
from lm.storage.buckets import ENDPOINTS, is_url
from lm.storage.files import expand_home, first_line
from modules.choices import choose

TFDS_SPLITS = ('train', 'validation', 'test')  # that a name may end with; the first is implied

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
      contents: the files of a folder, for errors.
      is_chat: whether documents are conversations (`lm.data.conversations`).
      validation: the text of the validation split, if it is not a part of this one.
    """

    files: tuple[Path, ...]
    identity: str
    documents: Callable[[], Documents]
    origin: str = ''
    notes: tuple[str, ...] = ()
    contents: str = ''
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
        way = f'To read the text there, set data.source={suggestion}.'
        try:
            if os.path.isdir(folder := expand_home(source)):
                select_files(Path(folder), text_field)
        except ValueError as error:
            way = str(error)
        raise ValueError(
            f'data.source must begin with its kind, one of {", ".join(sorted(SOURCES))}; got '
            f'{source!r}. {way}'
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
    looks_like_path = set(path) & set('/*?') or file_suffix(Path(path)) in KINDS
    is_path = os.path.exists(expanded) or (looks_like_path and ':' not in path)
    return f'text:{path}' if is_path else ''


def python(argument: str, text_field: str) -> Source:
    """The standard library of the running interpreter, one document per module."""
    modules = _list_modules('python', argument)

    def read_modules() -> Documents:
        return ((name, (path.read_bytes(),)) for name, path in modules.items())

    return Source(tuple(modules.values()), 'text', read_modules)


def docstrings(argument: str, text_field: str) -> Source:
    """The docstrings of the standard library, which are English; one document per module."""
    modules = _list_modules('docstrings', argument)

    def read_modules() -> Documents:
        for name, path in modules.items():
            if text := read_docstrings(path.read_bytes()):
                yield name, (text.encode(errors='surrogatepass'),)

    return Source(tuple(modules.values()), 'docstrings', read_modules)


def _list_modules(scheme: str, argument: str) -> dict[str, Path]:
    """Returns the modules of the library; the error names the source."""
    if argument:
        raise ValueError(f"data.source '{scheme}' takes no argument; got '{scheme}:{argument}'.")
    try:
        return list_modules()
    except ValueError as error:
        raise ValueError(f'data.source is {scheme}, but {error}') from error


def text(argument: str, text_field: str) -> Source:
    """The files that match a glob (`**` descends), in order of their paths, or the file or folder
    of that name.

    A file of text is one document. Each record of a file of JSON (lines or an array), CSV, parquet
    or Arrow is a document, with its text in `text_field`. What is not columnar may be compressed
    (.gz, .bz2, .xz, .zst). A file that the glob reaches under several names, by links, is read
    once.

    The glob may be gs://BUCKET/GLOB or s3://BUCKET/GLOB; the suffix then tells the kind of a file.
    """
    if not argument:
        raise ValueError("data.source 'text' needs a glob, such as text:corpus/**/*.txt.")
    if is_url(argument) and argument.partition('://')[0] in ENDPOINTS:
        return _open_bucket_text(argument, text_field)
    path, contents = expand_home(argument), ''
    if os.path.isdir(path):
        selection = select_files(Path(path), text_field)
        files, notes = selection.files, selection.notes
        contents = f' (files: {summarize_names(files)})'
        notes = (f'data: text:{argument} has the files {summarize_names(files)}', *notes)
    else:
        selection, notes = find_files(path), ()
        if not (files := selection.files):
            raise ValueError(_explain_no_files(argument, selection))
    kinds = [_detect_kind(file, argument) for file in files]
    notes += _describe_skipped(argument, selection.duplicates, selection.non_files)
    notes += _describe_unnamed_records(files, kinds, text_field)
    read_documents = functools.partial(formats.read_documents, files, text_field)
    identity = _identify_files(files, kinds, text_field)
    return Source(files, identity, read_documents, notes=notes, contents=contents)


def _detect_kind(file: Path, argument: str) -> str:
    try:
        return detect_kind(file)
    except UnreadableKind as error:
        if str(file) == expand_home(argument):
            raise
        raise ValueError(
            f'{error} It matches data.source=text:{argument}. Narrow the glob, or name the folder, '
            'from which only files with text are read.'
        ) from error


def _describe_unnamed_records(
    files: Sequence[Path], kinds: Sequence[str], text_field: str
) -> tuple[str, ...]:
    """Returns a note if the first text whose name says no kind begins like a record of JSON."""
    pairs = zip(files, kinds, strict=True)
    unnamed = (file for file, kind in pairs if kind == TEXT and file_suffix(file) not in KINDS)
    first = next(unnamed, None)
    if first is None or not begins_like_json(first, text_field):
        return ()
    return (
        f'NOTE: {first} is read as one text because of its name, but it begins like JSON records. '
        'To read the records, rename such files to end with .jsonl.',
    )


def _identify_files(files: Sequence[Path], kinds: Sequence[str], text_field: str) -> str:
    """Returns a text that determines the documents, together with the content of the files.

    Two lists of files may have the same content, and be read as different kinds by their names.
    Identities of earlier versions, which read three suffixes, are as they were.
    """
    if {*kinds} == {TEXT}:
        return 'text'
    identity = f'records of {text_field}'
    if {*kinds} == {JSON} or {*map(file_suffix, files)} <= {'.txt', '.jsonl', '.parquet'}:
        return identity
    readers = [
        kind + file_suffix(file) * (kind == CSV) for kind, file in zip(kinds, files, strict=True)
    ]
    runs = (f'{len([*run])} {reader}' for reader, run in itertools.groupby(readers))
    return f'{identity} in {", ".join(runs)}'


def _open_bucket_text(url: str, text_field: str) -> Source:
    """Returns the text of objects that a URL with a glob matches; see `lm.data.objects`."""
    objects = list_objects(url)
    files = [Path(name) for name in objects.metas]
    if unreadable := [file for file in files if file_suffix(file) not in KINDS]:
        raise ValueError(
            f'{unreadable[0]} matches data.source=text:{url}, but from a bucket only '
            f'{", ".join(KINDS)} files can be read. Narrow the glob.'
        )
    identity = _identify_files(files, [KINDS[file_suffix(file)] for file in files], text_field)
    read_documents = functools.partial(objects.documents, text_field)
    return Source((), f'{identity}: {objects.identity}', read_documents)


def _explain_no_files(argument: str, matches: Matches) -> str:
    """Returns the error for a glob that matches no regular file."""
    flag = f'data.source=text:{argument}'
    if '://' in argument and (explanation := explain_address(argument)):
        return f'{flag} is not a file on this machine. {explanation}'
    if matches.non_files:
        return f'{flag} matches {format_paths(matches.non_files)}, but only regular files are read.'
    near = find_near_pattern(expand_home(argument))
    suggestion = f' To read the text there, set data.source=text:{near}.' if near else ''
    return (
        f'no file matches {flag} (searched from {os.getcwd()}; ** descends into '
        f'folders).{suggestion}'
    )


def _describe_skipped(
    argument: str, duplicates: Sequence[str], non_files: Sequence[str]
) -> tuple[str, ...]:
    """Returns notes on matched names that are not read."""
    prefix, notes = f'NOTE: data.source=text:{argument}', []
    if duplicates:
        notes.append(
            f'{prefix} matches some files under several names, which are links. Each file is read '
            f'once, and not as {format_paths(duplicates)}'
        )
    if non_files:
        notes.append(f'{prefix} matches {format_paths(non_files)}, but only regular files are read')
    return tuple(notes)


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
            f'tfds:{argument} is a community dataset, which TFDS would download. Prepare it first '
            'and name the prepared data set, or export it to files for text:GLOB.'
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
    files, notes = source.files, [note.replace('text:', 'chat:') for note in source.notes]
    if os.path.isdir(expand_home(argument)):
        records = tuple(file for file in files if detect_kind(file) != TEXT)
        if records and (texts := [str(file) for file in files if file not in records]):
            notes.append(f'NOTE: data.source=chat:{argument} leaves out {format_paths(texts)}')
        files = records or files
    return dataclasses.replace(
        source,
        files=files,
        identity=identity,
        documents=functools.partial(conversations.read_conversations, files),
        notes=tuple(notes),
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
            f'tfds:{name} with a {split} split is not prepared in {data_dir}, and training does '
            f'not download it ({first_line(error)}). Prepare it first, for example with `tfds '
            'build`, or set TFDS_DATA_DIR to its folder.'
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
    'docstrings': docstrings,
    'text': text,
    'chat': chat,
    'hub': hub,
    'tfds': tfds,
    'synthetic': synthetic,
}
