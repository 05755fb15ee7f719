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

from lm.data import formats, regression
from lm.data.formats import COMPRESSIONS, FORMATS, Documents, check_field, file_format, to_bytes
from lm.data.globs import Matches, find_files, iterate_paths
from lm.data.hub import open_shards
from lm.storage.files import expand_home, first_line
from modules.choices import choose

# Tests are two thirds of the library, much of them tables; packages vary with the machine.
PYTHON_EXCLUDED_DIRS = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
# Written by the build of one interpreter: without them, equal versions hold equal corpora.
PYTHON_EXCLUDED_PREFIXES = ('_sysconfigdata', 'config-')

MAX_LISTED = 3  # paths that a note names at most

# Synthetic text. Raise RECIPE when any document changes: prepared data is kept under it.
SYNTHETIC_VERSION = 1
DOCUMENTS = 400
LENGTH = 2048  # characters of a document, and bytes, for all are ASCII
ALPHABET = np.frombuffer(string.ascii_lowercase[:16].encode(), np.uint8)
COPY_BLOCK = 64
MARKOV_SEED = 1906  # the year of Markov's paper; any other number makes another language


@dataclasses.dataclass(frozen=True)
class Source:
    """`documents` are determined by the bytes of `files` and by `identity`.

    origin: a data.source that means the same text for ever, where the one given does not.
    notes: lines about what the name matches, and is not read.
    """

    files: tuple[Path, ...]
    identity: str
    documents: Callable[[], Documents]
    origin: str = ''
    notes: tuple[str, ...] = ()


def open_source(source: str, text_field: str) -> Source:
    """Returns the source of a config. Raises ValueError for a wrong name or missing files."""
    scheme, _, argument = source.partition(':')
    if scheme not in SOURCES and (named := _suggest_source(source)):
        raise ValueError(
            f'data.source must begin with its kind, one of {", ".join(sorted(SOURCES))}; got '
            f'{source!r}. To read the text there, set data.source={named}.'
        )
    # A locale that is not UTF-8 makes surrogates of the bytes of a command line.
    text_field = text_field.encode('utf-8', 'surrogateescape').decode('utf-8', 'replace')
    return choose(SOURCES, scheme, 'data.source')(argument, text_field)


def _suggest_source(path: str) -> str:
    """Returns the data.source of a path without its scheme; '' for what looks like no path."""
    there = expand_home(path)
    if os.path.isdir(there):
        inside = map(Path, iterate_paths(f'{glob.escape(there)}/**'))
        first = next((file for file in inside if file_format(file) in FORMATS), Path('any.txt'))
        compression = first.suffix if first.suffix in COMPRESSIONS else ''
        return f'text:{path.rstrip("/")}/**/*{file_format(first)}{compression}'
    looks_like_one = set(path) & set('/*?') or file_format(Path(path)) in FORMATS
    is_path = os.path.exists(there) or (looks_like_one and ':' not in path)
    return f'text:{path}' if is_path else ''


def python(argument: str, text_field: str) -> Source:
    """The running interpreter's standard library, one document per module."""
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
        kept = [name for name in dirs if not name.startswith(PYTHON_EXCLUDED_PREFIXES)]
        dirs[:] = [name for name in kept if name not in PYTHON_EXCLUDED_DIRS]
        for name in names:
            if name.endswith('.py') and not name.startswith(PYTHON_EXCLUDED_PREFIXES):
                yield (Path(folder) / name).relative_to(root).as_posix()


def text(argument: str, text_field: str) -> Source:
    """Files that match a glob (`**` descends), in order of their paths; or the file of that name.

    A .txt file is one document; a line of .jsonl or a row of .parquet is one, its text in
    `text_field`. A .txt or .jsonl may be compressed: .gz or .zst. A file that the glob reaches by
    several names, by links, is read once.
    """
    if not argument:
        raise ValueError("data.source 'text' needs a glob, such as text:corpus/**/*.txt.")
    matches = find_files(expand_home(argument))
    if not (files := matches.files):
        raise ValueError(_explain_no_files(argument, matches))
    if unreadable := [path for path in files if file_format(path) not in FORMATS]:
        raise ValueError(
            f'{unreadable[0]} matches data.source=text:{argument}, but only '
            f'{", ".join(FORMATS)} can be read, the first two also as '
            f'{" or ".join(COMPRESSIONS)}. Narrow the glob.{_suggest_jsonl(unreadable[0])}'
        )
    is_text = all(file_format(path) == '.txt' for path in files)
    identity = 'text' if is_text else f'records of {text_field}'
    read = functools.partial(formats.read_documents, files, text_field)
    return Source(files, identity, read, notes=_describe_skipped(argument, matches))


def _explain_no_files(argument: str, matches: Matches) -> str:
    what = f'data.source=text:{argument}'
    if os.path.isdir(expand_home(argument)):
        return f'{what} is a folder. To read the text there, set data.source={_suggest_source(argument)}.'
    if matches.non_files:
        return (
            f'{what} matches {_format_paths(matches.non_files)}, and only regular files are read.'
        )
    return f'no file matches {what} (looked from {os.getcwd()}; ** descends into folders).'


def _suggest_jsonl(path: Path) -> str:
    """Returns a sentence for names such as those of C4 and Dolma, else ''."""
    if '.json' not in path.suffixes:
        return ''
    name = path.name.replace('.json', '.jsonl')
    return f' If each line of it is an object, give it the name {name}.'


def _describe_skipped(argument: str, matches: Matches) -> tuple[str, ...]:
    what, notes = f'NOTE: data.source=text:{argument}', []
    if matches.duplicates:
        notes.append(
            f'{what} reaches some files by several names, which are links: each file is read once, '
            f'and not as {_format_paths(matches.duplicates)}'
        )
    if matches.non_files:
        notes.append(
            f'{what} matches {_format_paths(matches.non_files)}: only regular files are read'
        )
    return tuple(notes)


def _format_paths(paths: Sequence[str]) -> str:
    """Returns the first paths, and how many more there are."""
    more = f' and {len(paths) - MAX_LISTED:,} more' if len(paths) > MAX_LISTED else ''
    return ', '.join(paths[:MAX_LISTED]) + more


def tfds(argument: str, text_field: str) -> Source:
    """The train split of a TFDS dataset that is prepared on this machine (TFDS_DATA_DIR)."""
    if not argument:
        raise ValueError("data.source 'tfds' needs a name, such as tfds:lm1b:1.1.0.")
    if re.match(r'[^/:]+:[A-Za-z]', argument):
        raise ValueError(
            f'tfds:{argument} names a community dataset, which TFDS would download. Prepare it '
            'first and name what was prepared, or export it to files for text:GLOB.'
        )
    records = _open_tfds(argument)
    check_field(text_field, list(records.dataset_info.features), f'tfds:{argument}')
    files = tuple(Path(path) for path in records.dataset_info.splits['train'].filepaths)
    read = functools.partial(_read_tfds, records, argument, text_field)
    return Source(files, f'tfds {text_field}', read)


def _open_tfds(name: str) -> Any:
    import tensorflow_datasets

    where = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
    missing = tensorflow_datasets.core.DatasetNotFoundError, AssertionError, KeyError, ValueError
    try:
        return tensorflow_datasets.data_source(name, split='train', download=False)
    except NotImplementedError as error:
        raise ValueError(
            f'tfds:{name} is prepared in a format without random access. Prepare it again as '
            "array_record: tfds.load(NAME, builder_kwargs={'file_format': 'array_record'})."
        ) from error
    except missing as error:
        raise ValueError(
            f'tfds:{name} with a train split is not prepared under {where}, and nothing is '
            f'downloaded during training ({first_line(error)}). Prepare it first, for instance '
            'with `tfds build`, or set TFDS_DATA_DIR to where it is.'
        ) from error


def _read_tfds(records: Any, name: str, text_field: str) -> Documents:
    for i in range(len(records)):
        where = f'tfds:{name}[{i}]'
        try:
            value = records[i][text_field]
        except Exception as error:  # ArrayRecord and TFDS raise what they like
            raise ValueError(f'{where} cannot be read: {first_line(error)}') from error
        yield where, (to_bytes(value, text_field, where),)


def hub(argument: str, text_field: str) -> Source:
    """The training split of a data set of the Hugging Face Hub, OWNER/NAME[@REVISION][:SUBSET].

    Its parquet files are fetched as they are read, into the cache of huggingface_hub.
    """
    shards = open_shards(argument)
    files = ' '.join(f'{path} {blob}' for path, blob in shards.blobs.items())
    read = functools.partial(shards.documents, text_field)
    return Source((), f'hub records of {text_field}: {files}', read, shards.origin)


class SyntheticLanguage(NamedTuple):
    """A language: documents are drawn alike and apart.

    sample: draws the bytes of a document, all ASCII, as many in each. bits_per_byte: gives the
    entropy rate, which no model beats on long documents; None where it has no closed form.
    """

    sample: Callable[[np.random.Generator], np.ndarray]
    bits_per_byte: Callable[[], float] | None = None
    n_documents: int = DOCUMENTS


@functools.cache
def _transitions() -> np.ndarray:
    """Returns P[i, j] = p(next = j | current = i), rows from a peaked Dirichlet distribution."""
    rng = np.random.default_rng(MARKOV_SEED)
    return rng.dirichlet(np.full(len(ALPHABET), 0.3), size=len(ALPHABET))


def _sample_uniform(rng: np.random.Generator) -> np.ndarray:
    return ALPHABET[rng.integers(len(ALPHABET), size=LENGTH)]


def _sample_markov(rng: np.random.Generator) -> np.ndarray:
    # The last bound is left out, for a cumulative sum may round to just under 1.
    bounds = _transitions().cumsum(1)[:, :-1].tolist()
    letters = [int(rng.integers(len(ALPHABET)))]
    for u in rng.random(LENGTH - 1).tolist():
        letters.append(bisect.bisect(bounds[letters[-1]], u))
    return ALPHABET[letters]


def _markov_bits() -> float:
    """Returns -sum_i pi_i sum_j P_ij log2 P_ij, where pi P = pi."""
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
    """Text whose law is known; each document is a function of its name and number."""
    made = choose(SYNTHETIC, argument, 'the name in data.source=synthetic:NAME')

    def generate_documents() -> Documents:
        for i in range(made.n_documents):
            yield f'synthetic:{argument}[{i}]', (made.sample(np.random.default_rng(i)).tobytes(),)

    return Source((), f'synthetic {argument} {SYNTHETIC_VERSION}', generate_documents)


SOURCES = {'python': python, 'text': text, 'hub': hub, 'tfds': tfds, 'synthetic': synthetic}
