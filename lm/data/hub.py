"""Data sets of the Hugging Face Hub: which parquet files a name means, fetched as they are read.

Everything goes through the library huggingface_hub, which keeps what it fetches in a cache of its
own and takes HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE from the environment.
"""

import bisect
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.data import formats
from lm.data.formats import Documents
from lm.data.globs import MAX_LENGTH, Pattern
from lm.storage.files import first_line
from modules.choices import suggest_nearest

CARD, TRAIN, DATASET = 'README.md', 'train', 'dataset'
# Words in the names of files of another split, where the card says none.
OTHER_SPLITS = {'test', 'testing', 'eval', 'evaluation', 'dev', 'val', 'valid', 'validation'}
MAX_LISTED = 30  # subsets that an error names at most
LAST_CHARACTER = chr(sys.maxunicode)
MAX_WORK = 10**8  # characters of globs times paths that they may match: half a minute


@dataclasses.dataclass(frozen=True)
class Shards:
    """Parquet files of one commit of a data set, in order of their paths.

    commit: 40 hexadecimal digits. blobs: {path: the hash of its content}.
    """

    name: str
    subset: str
    commit: str
    blobs: Mapping[str, str]

    @property
    def origin(self) -> str:
        """The data.source that means these very files, whatever is committed later."""
        return f'hub:{self.name}@{self.commit}' + (f':{self.subset}' if self.subset else '')

    def documents(self, text_field: str) -> Documents:
        """Yields all documents, and fetches each file when its turn comes."""
        for path in self.blobs:
            with _explain_errors(self.name, path):
                local = _import_hub().hf_hub_download(
                    self.name, path, repo_type=DATASET, revision=self.commit
                )
            yield from formats.read_documents((Path(local),), text_field)


def open_shards(argument: str) -> Shards:
    """Returns the files of NAME[@REVISION][:SUBSET], listed and not yet fetched.

    Raises ValueError without the library, for a data set, revision or subset that is not there, and
    where the hub cannot be asked and the cache does not hold the answer.
    """
    if not argument:
        raise ValueError("data.source 'hub' needs a name, such as hub:OWNER/NAME:SUBSET.")
    if address := re.match(r'https?://[^/]+/datasets/([^/]+/[^/?#]+)', argument):
        raise ValueError(
            f'data.source=hub:{argument} is an address. Write the name in it: hub:{address[1]}.'
        )
    repository, _, subset = argument.partition(':')
    name, _, revision = repository.partition('@')
    library = _import_hub()
    with (
        _explain_errors(name, f'its list of files{f" at {revision}" if revision else ""}'),
        _hide_progress_bars(),
    ):
        about = {'repo_type': DATASET, 'revision': revision or None}
        # The card comes for its subsets; the library then holds the list of all files.
        folder = Path(library.snapshot_download(name, allow_patterns=[CARD, '.git*'], **about))
        listed = library.get_cached_repo_tree(name, repo_type=DATASET, revision=folder.name)
        is_there = (folder / CARD).is_file()
        card = _read_card(name, folder / CARD) if is_there else None
    paths = [file.path for file in listed if file.path.endswith('.parquet')]
    chosen = {*select_files(name, subset, paths, {} if card is None else card)}
    blobs = {file.path: file.blob_id for file in listed if file.path in chosen}
    return Shards(name, subset, folder.name, dict(sorted(blobs.items())))


def _read_card(name: str, path: Path) -> dict[str, Any] | None:
    try:
        return _import_hub().repocard.metadata_load(path)
    except Exception as error:  # yaml raises errors of its own
        raise ValueError(
            f'hub:{name}: its card, {path}, cannot be read: {first_line(error)}'
        ) from error


def select_files(
    name: str, subset: str, paths: Sequence[str], card: Mapping[str, Any]
) -> list[str]:
    """Returns the files of the training split of a subset.

    Subsets are the `configs` of the card, each with patterns of files by split; without them, the
    folders that hold the files.

    Args:
      name: of the data set, for errors.
      subset: one of the subsets; '' is the default one.
      paths: the parquet files of the data set.
      card: the fields at the head of its README.md, as somebody wrote them.

    Raises:
      ValueError: for a subset that is not there, and for a card of another form, by its field.
    """
    if not paths:
        raise ValueError(
            f'hub:{name} has no parquet files. Where the hub has converted it, '
            f'hub:{name}@refs/convert/parquet has some; or fetch it, for text:GLOB.'
        )
    configs = _read_configs(name, card)
    folders = sorted({path.partition('/')[0] for path in paths if '/' in path})
    if configs:
        default = [n for n, config in configs.items() if config.is_default or n == 'default']
        only = [n for n in configs if len(configs) == 1]
        wanted = subset or next(iter([*default, *only]), '')
        files = _select_training_files(paths, configs[wanted], name) if wanted in configs else None
    elif subset:
        files = [path for path in paths if path.startswith(f'{subset}/')] or None
        files = None if files is None else _filter_training_paths(files)
    else:
        files = _filter_training_paths(paths)
    if files is None:
        there = [*(configs or folders)]
        more = f' and {len(there) - MAX_LISTED} more' if len(there) > MAX_LISTED else ''
        what = f'has no subset {subset!r}' if subset else 'has several subsets, and none by default'
        raise ValueError(
            f'hub:{name} {what}; there are {", ".join(there[:MAX_LISTED])}{more}. Write '
            f'hub:{name}:SUBSET.{suggest_nearest(subset, there) if subset else ""}'
        )
    if not files:
        raise ValueError(f'hub:{name}{f":{subset}" if subset else ""} has no split {TRAIN!r}.')
    return files


class HubConfig(NamedTuple):
    """One of a card's `configs`. field: where the card has its data_files, for errors."""

    data_files: Any
    field: str
    is_default: bool


def _read_configs(name: str, card: Any) -> dict[str, HubConfig]:
    """Returns the `configs` of a card that name files, by their names."""
    if not isinstance(card, Mapping):
        raise _card_error(name, 'the head', 'fields', card)
    configs = card.get('configs')
    if not isinstance(configs, list | None):
        raise _card_error(name, 'configs', 'a list', configs)
    by_name = {}
    for i, config in enumerate(configs or ()):
        if not isinstance(config, Mapping):
            raise _card_error(name, f'configs[{i}]', 'fields', config)
        config_name = config.get('config_name')
        # YAML reads names such as 2023, no or 2024-01-01 as other types.
        if isinstance(config_name, list | Mapping | None):
            raise _card_error(name, f'configs[{i}].config_name', 'a name', config_name)
        if (data_files := config.get('data_files')) is not None:
            field, is_default = f'configs[{i}].data_files', bool(config.get('default'))
            by_name[str(config_name)] = HubConfig(data_files, field, is_default)
    return by_name


def _card_error(name: str, field: str, expected: str, value: Any) -> ValueError:
    held = repr(value[:60]) if isinstance(value, str) else type(value).__name__
    return ValueError(
        f'hub:{name}: {field} of its card must be {expected}; got {held}. Its files can be fetched '
        'for data.source=text:GLOB all the same.'
    )


class CardEntry(NamedTuple):
    """Files of a card. field: where the card has their globs; split: None if it names none."""

    field: str
    split: Any
    globs: Any


def _list_entries(config: HubConfig) -> list[CardEntry]:
    """Returns the entries of `data_files`: a glob, {SPLIT: globs}, or a list of globs or of
    {split, path: globs}.
    """
    match config.data_files:
        case {'path': globs, **others} if others.keys() <= {'split'}:
            return [CardEntry(f'{config.field}.path', others.get('split'), globs)]
        case Mapping() as splits:
            return [CardEntry(f'{config.field}.{split}', split, splits[split]) for split in splits]
        case list() as entries:
            return [
                CardEntry(f'{config.field}[{i}].path', one.get('split'), one.get('path'))
                if isinstance(one, Mapping)
                else CardEntry(f'{config.field}[{i}]', None, one)
                for i, one in enumerate(entries)
            ]
        case globs:
            return [CardEntry(config.field, None, globs)]


def _select_training_files(paths: Sequence[str], config: HubConfig, name: str) -> list[str]:
    """Returns the files of the split `train` of one of a card's `configs`; without splits, those
    that look like no other split's.
    """
    entries, patterns = _list_entries(config), []
    has_splits = any(entry.split is not None for entry in entries)
    for field, split, globs in entries:
        if has_splits and not isinstance(split, str):
            raise _card_error(name, field, 'the path of a named split, as others are', split)
        if split in (None, TRAIN):
            patterns += _read_patterns(name, field, globs)
    files = _match_paths(name, config.field, paths, patterns)
    return files if has_splits else _filter_training_paths(files)


def _read_patterns(name: str, field: str, value: Any) -> list[Pattern]:
    """Returns the globs of a path, or list of paths, of a card. None leads out of the data set."""
    patterns = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise _card_error(name, field, 'a path or a list of paths', text)
        text = text.removeprefix('./')
        if text.startswith('/') or '://' in text or '..' in text.split('/'):
            raise _card_error(name, field, 'a path within the data set', text)
        if len(text) > MAX_LENGTH:
            raise _card_error(name, field, f'at most {MAX_LENGTH} characters long', text)
        patterns.append(Pattern(text))
    return patterns


def _match_paths(
    name: str, field: str, paths: Sequence[str], patterns: Sequence[Pattern]
) -> list[str]:
    """Returns the paths that a pattern matches. As for `datasets`, what is hidden, by a dot or in a
    folder that begins with two underscores, is matched by its spelling alone.
    """
    ordered, matched, work = sorted(paths), set(), 0
    for pattern in patterns:
        first = bisect.bisect_left(ordered, pattern.prefix)
        last = bisect.bisect_left(ordered, pattern.prefix + LAST_CHARACTER)
        work += (last - first) * len(pattern.text)
        if work > MAX_WORK:
            raise _card_error(name, field, f'fewer globs for {len(paths):,} files', patterns)
        hidden = _count_hidden(pattern.text)
        matched |= {
            path
            for path in ordered[first:last]
            if _count_hidden(path) == hidden and pattern.fullmatch(path)
        }
    return [path for path in paths if path in matched]


def _count_hidden(path: str) -> int:
    parts = path.split('/')
    return sum(part.startswith('.') for part in parts) + sum(
        part.startswith('__') for part in parts[:-1]
    )


def _filter_training_paths(paths: Sequence[str]) -> list[str]:
    """Returns the files whose path has the word train, or else no word of another split."""
    words = {path: {*re.split(r'[^a-z]+', path.lower())} for path in paths}
    named = [path for path in paths if words[path] & {TRAIN, 'training'}]
    return named or [path for path in paths if not words[path] & OTHER_SPLITS]


def _import_hub() -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.repocard
        import huggingface_hub.utils
    except ImportError as error:
        raise ValueError(
            'data.source=hub:NAME needs huggingface_hub: pip install "evenkeel[hub]", or uv sync '
            '--extra hub'
        ) from error
    return huggingface_hub


@contextlib.contextmanager
def _hide_progress_bars() -> Generator[None]:
    """Shows no bars of progress for the files that are fetched."""
    utils = _import_hub().utils
    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextlib.contextmanager
def _explain_errors(name: str, target: str) -> Generator[None]:
    """Turns the library's errors into one line each."""
    library = _import_hub()
    errors, endpoint = library.errors, library.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f'hub:{name} is for those who have accepted its terms at {endpoint}/datasets/{name}; '
            'do so, and set HF_TOKEN.'
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f'there is no data set {name} at {endpoint}, or it is private and HF_TOKEN opens it '
            'not. Names are OWNER/NAME.'
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f'hub:{name} has no such revision: {first_line(error)}') from error
    except (errors.LocalEntryNotFoundError, errors.CachedRepoTreeNotFoundError) as error:
        cache = library.constants.HF_HUB_CACHE
        why = f'{endpoint} cannot be reached'
        if library.constants.HF_HUB_OFFLINE:
            why = f'HF_HUB_OFFLINE={os.environ.get("HF_HUB_OFFLINE", "")} keeps it from the network'
        raise ValueError(
            f'hub:{name}: {target} is not in the cache {cache}, and {why}. Start once with the '
            'network, or set HF_HOME to where it is.'
        ) from error
    except (OSError, errors.HFValidationError) as error:
        raise ValueError(f'hub:{name}: {target} cannot be fetched: {first_line(error)}') from error
