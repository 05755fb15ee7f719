"""Selects the files of a folder that are read as one source."""

import functools
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.data import hub
from lm.data.formats import has_texts
from lm.data.globs import find_files
from lm.data.hub import OTHER_SPLITS, SPLIT_WORDS, TRAIN
from lm.data.kinds import CSV, JSON, TEXT, UnreadableKind, detect_kind, file_suffix
from lm.data.streams import COMPRESSIONS
from lm.storage.files import UnreadableFile, read_json

# Of a folder that `datasets` has saved: the splits of several, and the files of one.
SPLITS_FILE, STATE_FILE = 'dataset_dict.json', 'state.json'
# Files beside records that describe them.
DESCRIPTION = re.compile(r'(readme|license|licence|citation|dataset_infos?\.json)', re.IGNORECASE)
MAX_LISTED = 3  # paths that a note names at most


class FolderFiles(NamedTuple):
    """Files to read, in order.

    Attributes:
      files: the files.
      notes: lines about files that are left out.
      duplicates, non_files: as in `Matches`.
    """

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    duplicates: tuple[str, ...] = ()
    non_files: tuple[str, ...] = ()


def select_files(folder: Path, text_field: str) -> FolderFiles:
    """Returns the files of a folder, in order of their paths.

    A folder that `datasets` has saved is read as it says. Of another folder, all files with text
    are read, at any depth, but for hidden ones, descriptions beside records, and the splits beside
    a training split.

    Args:
      folder: the folder.
      text_field: data.text_field.

    Raises:
      ValueError: if nothing in it can be read.
    """
    if (folder / SPLITS_FILE).is_file():
        return _select_split(folder, text_field)
    if (folder / STATE_FILE).is_file() and (files := _list_saved_files(folder)):
        return FolderFiles(files, ())
    matches = find_files(f'{glob.escape(str(folder))}/**')
    kinds, unreadable = {}, []
    for path in matches.files:
        try:
            kinds[path] = detect_kind(path)
        except UnreadableKind as error:
            unreadable.append((path, str(error)))
    n_hidden, left_out = _count_hidden(folder), {}
    rules = {
        'further subsets and splits': lambda: _list_further_subsets(folder, kinds),
        f'records without {text_field!r}': lambda: _list_foreign_records(kinds, text_field),
        'descriptions': lambda: _list_descriptions(folder, kinds),
        'other splits': lambda: _list_further_splits(folder, [*kinds]),
    }
    for name, list_paths in rules.items():
        paths = list_paths()
        if files := [path for path in kinds if path not in paths]:
            left_out[name] = [path for path in kinds if path in paths]
            kinds = {path: kinds[path] for path in files}
    left_out['files without text'] = [path for path, _ in unreadable]
    if not kinds:
        reason = f' The first file: {unreadable[0][1]}' if unreadable else ''
        hidden = f' (except {n_hidden} hidden files and folders)' if n_hidden else ''
        raise ValueError(f'data.source=text:{folder} has no readable text files{hidden}.{reason}')
    notes = [*_describe_left_out(folder, left_out, n_hidden)]
    return FolderFiles(tuple(kinds), tuple(notes), matches.duplicates, matches.non_files)


def _select_split(folder: Path, text_field: str) -> FolderFiles:
    """Returns the files of the training split of a saved DatasetDict."""
    splits = _read_object(folder / SPLITS_FILE).get('splits')
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise ValueError(f'{folder / SPLITS_FILE} must have a list of splits.')
    further = [split for split in splits if split != TRAIN]
    if TRAIN not in splits:
        choices = ' or '.join(f'text:{folder}/{split}' for split in further) or 'another folder'
        raise ValueError(
            f'data.source=text:{folder} has no split {TRAIN!r}. Set data.source={choices}.'
        )
    selection = select_files(folder / TRAIN, text_field)
    note = (
        f'NOTE: data.source=text:{folder} has the splits {", ".join(splits)}; {TRAIN} is used. To '
        f'read another, set text:{folder}/{further[-1]}.'
        if further
        else ''
    )
    return selection._replace(notes=tuple(filter(None, [note, *selection.notes])))


def _list_saved_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a saved Dataset in order; none if the folder is not one."""
    state = _read_object(folder / STATE_FILE)
    entries = state.get('_data_files')
    if not isinstance(entries, list):
        return ()
    if state.get('_indices_data_files') or state.get('_indices_files'):
        raise ValueError(
            f'according to {folder / STATE_FILE}, only some rows of the files belong to the data '
            'set. Call .flatten_indices() and save it again.'
        )
    names = [entry.get('filename') if isinstance(entry, dict) else None for entry in entries]
    files = tuple(folder / name for name in names if isinstance(name, str))
    for file in files:
        if not file.is_file():
            raise ValueError(f'{file}, which {folder / STATE_FILE} lists, is missing.')
    return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except UnreadableFile as error:
        raise ValueError(f'{path} cannot be read: {error}') from error
    return content if isinstance(content, dict) else {}


def _split_words(name: str) -> set[str]:
    return {*re.split(r'[^a-z]+', name.lower())}


def _list_further_subsets(folder: Path, kinds: dict[Path, str]) -> set[Path]:
    """Returns the records that the card of a data set does not name for its default subset.

    Raises ValueError if it names several subsets, and none by default.
    """
    card = _read_card(folder / hub.CARD)
    paths = {path.relative_to(folder).as_posix(): path for path in kinds if kinds[path] != TEXT}
    if not paths or not card.get('configs'):
        return set()
    select = functools.partial(hub.select_files, folder.name, paths=[*paths], card=card)
    try:
        names = select(subset='')
    except ValueError as error:
        if place := _find_first_subset(select, card):
            raise ValueError(
                f'data.source=text:{folder} has several subsets, according to its {hub.CARD}, and '
                'no default. Name the folder or the files of one subset, such as '
                f'text:{(folder / place).parent}.'
            ) from error
        return set()
    return {path for name, path in paths.items() if name not in names}


def _find_first_subset(select: Callable[..., list[str]], card: dict[str, Any]) -> str:
    """Returns the first file of the first subset of a card, or '' if it has none."""
    try:
        return select(subset=str(card['configs'][0]['config_name']))[0]
    except (ValueError, LookupError, TypeError):
        return ''


def _read_card(path: Path) -> dict[str, Any]:
    """Returns the fields at the head of the card of a data set; none if it has no such head."""
    import yaml

    try:
        text = path.read_text(encoding='utf-8')
        card = yaml.safe_load(text.split('---\n')[1]) if text.startswith('---\n') else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return card if isinstance(card, dict) else {}


def _list_further_splits(folder: Path, paths: Sequence[Path]) -> set[Path]:
    """Returns the paths below a name with the word of another split, beside one with 'train'."""
    parts = {path: path.relative_to(folder).parts for path in paths}
    places = {names[: i + 1] for names in parts.values() for i in range(len(names))}
    training = {place for place in places if _split_words(place[-1]) & SPLIT_WORDS[TRAIN]}
    parents = {place[:-1] for place in training}
    further = {
        place
        for place in places - training
        if place[:-1] in parents and _split_words(place[-1]) & OTHER_SPLITS
    }
    return {
        path
        for path, names in parts.items()
        if any(names[: i + 1] in further for i in range(len(names)))
    }


def _list_descriptions(folder: Path, kinds: dict[Path, str]) -> set[Path]:
    """Returns the descriptions in the folder itself, if it has records."""
    described = {path for path in kinds if path.parent == folder and DESCRIPTION.match(path.name)}
    return described if any(kinds[path] != TEXT for path in kinds.keys() - described) else set()


def _list_foreign_records(kinds: dict[Path, str], text_field: str) -> set[Path]:
    """Returns the .json and .csv files without texts or chats: settings, tables."""
    return {
        path
        for path, kind in kinds.items()
        if (kind == CSV or (kind == JSON and file_suffix(path) == '.json'))
        and not has_texts(path, text_field)
    }


def _count_hidden(folder: Path) -> int:
    """Returns the number of hidden files and folders, without the files in these."""
    n_hidden = 0
    for _, folders, files in os.walk(folder):
        n_hidden += sum(name.startswith('.') for name in itertools.chain(folders, files))
        folders[:] = [name for name in folders if not name.startswith('.')]
    return n_hidden


def _describe_left_out(
    folder: Path, left_out: dict[str, list[Path]], n_hidden: int
) -> Iterator[str]:
    prefix = f'NOTE: data.source=text:{folder} leaves out'
    parts = [
        f'{name}: {format_paths([str(path.relative_to(folder)) for path in paths])}'
        for name, paths in left_out.items()
        if paths
    ]
    parts += [f'hidden files and folders: {n_hidden:,}'] if n_hidden else []
    if parts:
        yield (
            f'{prefix} {"; ".join(parts)}. To select other files, use a glob: '
            f'text:{folder}/**/*.SUFFIX'
        )


def format_paths(paths: Sequence[str]) -> str:
    """Returns the first paths, and the number of further ones."""
    suffix = f' and {len(paths) - MAX_LISTED:,} more' if len(paths) > MAX_LISTED else ''
    return ', '.join(paths[:MAX_LISTED]) + suffix


def summarize_names(files: Iterable[Path]) -> str:
    """Returns '2 *.jsonl.gz, 1 *.txt' for three files."""
    counts = Counter(f'*{full_suffix(path)}' for path in files)
    return ', '.join(f'{n:,} {name}' for name, n in sorted(counts.items()))


def full_suffix(path: Path) -> str:
    """Returns '.jsonl.gz' for 'a.b.jsonl.gz', and '.jsonl' for 'a.jsonl'."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    return ''.join(path.suffixes[-2:]) if is_compressed else path.suffix
