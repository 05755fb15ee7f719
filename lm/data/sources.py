"""Where text comes from: `scheme` or `scheme:argument` names a stream of documents."""

import dataclasses
import functools
import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm.data import formats, synthetic
from lm.data.formats import (
    COMPRESSIONS,
    FORMATS,
    Documents,
    as_bytes,
    first_line,
    format_of,
    no_field,
)
from modules.choices import choose

# Tests are two thirds of the library, much of them tables; packages vary with the machine.
PYTHON_EXCLUDED_DIRS = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
# Written by the build of one interpreter: without them, equal versions hold equal corpora.
PYTHON_EXCLUDED_PREFIXES = ('_sysconfigdata', 'config-')


@dataclasses.dataclass(frozen=True)
class Source:
    """`documents` are determined by the bytes of `files` and by `identity`."""

    files: tuple[Path, ...]
    identity: str
    documents: Callable[[], Documents]


def open_source(source: str, text_field: str) -> Source:
    """The source a config names; nothing is read yet but names of files.

    Raises ValueError for an unknown scheme, a missing argument, files that are not there.
    """
    scheme, _, argument = source.partition(':')
    if scheme not in SOURCES and (named := _text_at(source)):
        raise ValueError(
            f'data.source must begin with its kind, one of {", ".join(sorted(SOURCES))}; got '
            f'{source!r}. To read the text there, set data.source={named}.'
        )
    return choose(SOURCES, scheme, 'data.source')(argument, text_field)


def _text_at(path: str) -> str:
    """The data.source of a path without its scheme; '' for what looks like no path."""
    there = os.path.expanduser(path)
    if os.path.isdir(there):
        inside = map(Path, glob.iglob(f'{glob.escape(there)}/**', recursive=True))
        first = next((file for file in inside if format_of(file) in FORMATS), Path('any.txt'))
        compression = first.suffix if first.suffix in COMPRESSIONS else ''
        return f'text:{path.rstrip("/")}/**/*{format_of(first)}{compression}'
    looks_like_one = set(path) & set('/*?') or format_of(Path(path)) in FORMATS
    if os.path.exists(there) or (looks_like_one and ':' not in path):
        return f'text:{path}'
    return ''


def python(argument: str, text_field: str) -> Source:
    """The running interpreter's standard library, one document per module."""
    del text_field
    if argument:
        raise ValueError(f"data.source 'python' takes no argument; got 'python:{argument}'.")
    root = Path(sysconfig.get_path('stdlib'))
    names = sorted(_modules(root))
    if not names:
        raise ValueError(
            f'data.source is python, and this interpreter holds no .py files in {root} (it may be '
            'frozen or zipped). Name text of your own: data.source=text:GLOB.'
        )
    files = tuple(root / name for name in names)
    read = functools.partial(_whole_files, tuple(zip(names, files, strict=True)))
    return Source(files, 'text', read)


def _modules(root: Path) -> Iterator[str]:
    for folder, dirs, names in os.walk(root):
        dirs[:] = [
            name
            for name in dirs
            if name not in PYTHON_EXCLUDED_DIRS and not name.startswith(PYTHON_EXCLUDED_PREFIXES)
        ]
        for name in names:
            if name.endswith('.py') and not name.startswith(PYTHON_EXCLUDED_PREFIXES):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _whole_files(names_and_files: tuple[tuple[str, Path], ...]) -> Documents:
    for name, path in names_and_files:
        yield name, (path.read_bytes(),)


def text(argument: str, text_field: str) -> Source:
    """Files that match a glob (`**` descends), in order of their paths.

    A .txt file is one document; a line of .jsonl or a row of .parquet is one, its text in
    `text_field`. A .txt or .jsonl may be compressed: .gz or .zst.
    """
    if not argument:
        raise ValueError("data.source 'text' needs a glob, such as text:corpus/**/*.txt.")
    matches = sorted(glob.glob(os.path.expanduser(argument), recursive=True))
    files = tuple(Path(match) for match in matches if os.path.isfile(match))
    if not files:
        raise ValueError(
            f'no file matches data.source=text:{argument} (looked from {os.getcwd()}; '
            '** descends into folders).'
        )
    for path in files:
        if format_of(path) not in FORMATS:
            raise ValueError(
                f'{path} matches data.source=text:{argument}, but only '
                f'{", ".join(FORMATS)} can be read, the first two also as '
                f'{" or ".join(COMPRESSIONS)}. Narrow the glob.'
            )
    kinds = {format_of(path) for path in files}
    identity = 'text' if kinds == {'.txt'} else f'records of {text_field}'
    return Source(files, identity, functools.partial(formats.documents, files, text_field))


def tfds(argument: str, text_field: str) -> Source:
    """The train split of a TFDS dataset that is prepared on this machine (TFDS_DATA_DIR)."""
    if not argument:
        raise ValueError("data.source 'tfds' needs a name, such as tfds:lm1b:1.1.0.")
    if re.match(r'[^/:]+:[A-Za-z]', argument):
        raise ValueError(
            f'tfds:{argument} names a community dataset, which TFDS would download. Prepare it '
            'first and name what was prepared, or export it to files for text:GLOB.'
        )
    records = _tfds_records(argument)
    split = records.dataset_info.splits['train']
    fields = list(records.dataset_info.features)
    if text_field not in fields:
        raise ValueError(no_field(f'tfds:{argument}', text_field, fields))
    files = tuple(Path(path) for path in split.filepaths)
    read = functools.partial(_tfds_documents, records, argument, text_field)
    return Source(files, f'tfds {text_field}', read)


def _tfds_records(name: str) -> Any:
    import tensorflow_datasets

    where = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
    try:
        return tensorflow_datasets.data_source(name, split='train', download=False)
    except NotImplementedError as error:
        raise ValueError(
            f'tfds:{name} is prepared in a format without random access. Prepare it again as '
            "array_record: tfds.load(NAME, builder_kwargs={'file_format': 'array_record'})."
        ) from error
    except (
        tensorflow_datasets.core.DatasetNotFoundError,
        AssertionError,
        KeyError,
        ValueError,
    ) as error:
        raise ValueError(
            f'tfds:{name} with a train split is not prepared under {where}, and nothing is '
            f'downloaded during training ({first_line(error)}). Prepare it first, for instance '
            'with `tfds build`, or set TFDS_DATA_DIR to where it is.'
        ) from error


def _tfds_documents(records: Any, name: str, text_field: str) -> Documents:
    for i in range(len(records)):
        where = f'tfds:{name}[{i}]'
        try:
            value = records[i][text_field]
        except Exception as error:  # ArrayRecord and TFDS raise what they like
            raise ValueError(f'{where} cannot be read: {first_line(error)}') from error
        yield where, (as_bytes(value, text_field, where),)


def synthetic_text(argument: str, text_field: str) -> Source:
    """Text with a known entropy rate (`synthetic.SYNTHETIC[name].bits_per_byte()`)."""
    del text_field
    choose(synthetic.SYNTHETIC, argument, 'the name in data.source=synthetic:NAME')
    identity = f'synthetic {argument} {synthetic.RECIPE}'
    return Source((), identity, functools.partial(synthetic.documents, argument))


SOURCES = {'python': python, 'text': text, 'tfds': tfds, 'synthetic': synthetic_text}
