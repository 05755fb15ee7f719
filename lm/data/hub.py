"""Data sets of the Hugging Face Hub: the parquet files that a name means, fetched when they are
read.

The library huggingface_hub keeps fetched files in its own cache, and takes HF_ENDPOINT, HF_TOKEN,
HF_HOME and HF_HUB_OFFLINE from the environment.
"""

import bisect
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.data import formats
from lm.data.addresses import explain_address
from lm.data.formats import Documents
from lm.data.globs import MAX_LENGTH, Pattern
from lm.storage.files import escape_controls, first_line
from modules.choices import suggest_nearest

CARD, TRAIN, DATASET = 'README.md', 'train', 'dataset'
# Words in the names of files of a split, where the card says none.
SPLIT_WORDS = {
    TRAIN: {TRAIN, 'training'},
    'validation': {'dev', 'val', 'valid', 'validation'},
    'test': {'test', 'testing', 'eval', 'evaluation'},
}
OTHER_SPLITS = SPLIT_WORDS['validation'] | SPLIT_WORDS['test']
MAX_LISTED = 30  # subsets that an error names at most
LAST_CHARACTER = chr(sys.maxunicode)
MAX_WORK = 10**8  # characters of globs times candidate paths: half a minute


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parquet files of a data set at one commit, in order of their paths.

    Attributes:
      name: OWNER/NAME.
      subset: '' for the default one.
      split: the name of the split; '' for the training split.
      commit: 40 hexadecimal digits.
      blobs: {path: hash of its content}.
    """

    name: str
    subset: str
    split: str
    commit: str
    blobs: Mapping[str, str]

    @property
    def origin(self) -> str:
        """The data.source that always means exactly these files."""
        return f'hub:{self.name}@{self.commit}{_format_part(self.subset, self.split)}'

    def documents(self, text_field: str) -> Documents:
        """Yields all documents; fetches each file when its turn comes."""
        for local in self.fetch_files():
            yield from formats.read_documents((local,), text_field)

    def fetch_files(self) -> Iterator[Path]:
        """Yields the local path of each file, and fetches it when its turn comes."""
        for path in self.blobs:
            with _explain_errors(self.name, path):
                local = _import_hub().hf_hub_download(
                    self.name, path, repo_type=DATASET, revision=self.commit
                )
            yield Path(local)


def open_shards(argument: str) -> Shards:
    """Returns the files of NAME[@REVISION][:SUBSET[:SPLIT]], listed but not fetched.

    Raises ValueError without the library, for a missing data set, revision, subset or split, and if
    the hub cannot be reached and the cache lacks the list.
    """
    if not argument:
        raise ValueError("data.source 'hub' needs a name, such as hub:OWNER/NAME:SUBSET.")
    if explanation := explain_address(argument) if '://' in argument else '':
        raise ValueError(
            f'data.source=hub:{argument} must have a name, not an address. {explanation}'
        )
    repository, _, part = argument.partition(':')
    subset, _, split = part.partition(':')
    name, _, revision = repository.partition('@')
    library = _import_hub()
    with (
        _explain_errors(name, f'its list of files{f" at {revision}" if revision else ""}'),
        _hide_progress_bars(),
    ):
        repo_args = {'repo_type': DATASET, 'revision': revision or None}
        # The card lists the subsets. After this call the library has the list of all files.
        folder = Path(library.snapshot_download(name, allow_patterns=[CARD, '.git*'], **repo_args))
        repo_files = library.get_cached_repo_tree(name, repo_type=DATASET, revision=folder.name)
        has_card = (folder / CARD).is_file()
        card = _read_card(name, folder / CARD) if has_card else None
    paths = [file.path for file in repo_files if file.path.endswith('.parquet')]
    chosen = {*select_files(name, subset, paths, {} if card is None else card, split or TRAIN)}
    blobs = {file.path: file.blob_id for file in repo_files if file.path in chosen}
    return Shards(name, subset, split, folder.name, dict(sorted(blobs.items())))


def _format_part(subset: str, split: str) -> str:
    return f':{subset}:{split}' if split else f':{subset}' if subset else ''


def _read_card(name: str, path: Path) -> dict[str, Any] | None:
    try:
        return _import_hub().repocard.metadata_load(path)
    except Exception as error:  # yaml raises errors of its own
        raise ValueError(
            f'hub:{name}: its card, {path}, cannot be read: {first_line(error)}'
        ) from error


def select_files(
    name: str, subset: str, paths: Sequence[str], card: Mapping[str, Any], split: str = TRAIN
) -> list[str]:
    """Returns the files of a split of a subset.

    Subsets are the `configs` of the card, each with patterns of files by split; without them, the
    folders that hold the files.

    Args:
      name: the data set, for errors.
      subset: one of the subsets; '' is the default one.
      paths: the parquet files of the data set.
      card: the fields at the head of its README.md, which may have any form.
      split: the name of a split.

    Raises:
      ValueError: for a missing subset or split, and for a card of another form, with the field.
    """
    if not paths:
        raise ValueError(
            f'hub:{name} has no parquet files. If the Hub has converted it, use '
            f'hub:{name}@refs/convert/parquet; otherwise fetch its files and use text:GLOB.'
        )
    configs = _read_configs(name, card)
    folders = sorted({path.partition('/')[0] for path in paths if '/' in path})
    config_name = subset
    if configs:
        default = [n for n, config in configs.items() if config.is_default or n == 'default']
        single = [n for n in configs if len(configs) == 1]
        config_name = subset or next(iter([*default, *single]), '')
        files = (
            _select_split_files(paths, configs[config_name], name, split)
            if config_name in configs
            else None
        )
    elif subset:
        files = [path for path in paths if path.startswith(f'{subset}/')] or None
        files = None if files is None else _filter_paths(files, split)
    else:
        files = _filter_paths(paths, split)
    if files is None:
        subsets = [*(configs or folders)]
        suffix = f' and {len(subsets) - MAX_LISTED} more' if len(subsets) > MAX_LISTED else ''
        problem = f'has no subset {subset!r}' if subset else 'has several subsets, and no default'
        raise ValueError(
            escape_controls(
                f'hub:{name} {problem}; its subsets are {", ".join(subsets[:MAX_LISTED])}{suffix}. '
                f'Use hub:{name}:SUBSET.{suggest_nearest(subset, subsets) if subset else ""}'
            )
        )
    if not files:
        splits = [s for s in _list_splits(configs.get(config_name)) if s != split]
        listed = f' Its splits are {", ".join(splits[:MAX_LISTED])}.' if splits else ''
        part = _format_part(subset, '')
        raise ValueError(escape_controls(f'hub:{name}{part} has no split {split!r}.{listed}'))
    return files


class HubConfig(NamedTuple):
    """An entry of a card's `configs`. field: its data_files in the card, for errors."""

    data_files: Any
    field: str
    is_default: bool


def _read_configs(name: str, card: Any) -> dict[str, HubConfig]:
    """Returns the `configs` of a card that name files, by name."""
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
    """Returns the error for a field of a card that has another form."""
    got = repr(value[:60]) if isinstance(value, str) else type(value).__name__
    return ValueError(
        f'hub:{name}: {field} of its card must be {expected}; got {got}. You can still fetch its '
        'files and set data.source=text:GLOB.'
    )


class CardEntry(NamedTuple):
    """Files that a card names. field: their globs in the card; split: None if unnamed."""

    field: str
    split: Any
    globs: Any


def _list_entries(config: HubConfig) -> list[CardEntry]:
    """Returns the entries of `data_files`, which has one of four forms.

    They are a glob, {SPLIT: globs}, and a list of globs or of {split, path: globs}.
    """
    match config.data_files:
        case {'path': globs, **others} if others.keys() <= {'split'}:
            return [CardEntry(f'{config.field}.path', others.get('split'), globs)]
        case Mapping() as splits:
            return [CardEntry(f'{config.field}.{split}', split, splits[split]) for split in splits]
        case list() as entries:
            return [
                CardEntry(f'{config.field}[{i}].path', entry.get('split'), entry.get('path'))
                if isinstance(entry, Mapping)
                else CardEntry(f'{config.field}[{i}]', None, entry)
                for i, entry in enumerate(entries)
            ]
        case globs:
            return [CardEntry(config.field, None, globs)]


def _list_splits(config: HubConfig | None) -> list[str]:
    """Returns the names of the splits in a config of a card."""
    entries = [] if config is None else _list_entries(config)
    return [entry.split for entry in entries if isinstance(entry.split, str)]


def _select_split_files(
    paths: Sequence[str], config: HubConfig, name: str, split: str
) -> list[str]:
    """Returns the files of a split in a config of the card.

    Without named splits, returns the files whose names belong to it (`_filter_paths`).
    """
    entries, patterns = _list_entries(config), []
    has_splits = any(entry.split is not None for entry in entries)
    for field, entry_split, globs in entries:
        if has_splits and not isinstance(entry_split, str):
            raise _card_error(
                name, field, 'the path of a named split, like the others', entry_split
            )
        if entry_split in (None, split):
            patterns += _read_patterns(name, field, globs)
    files = _match_paths(name, config.field, paths, patterns)
    return files if has_splits else _filter_paths(files, split)


def _read_patterns(name: str, field: str, value: Any) -> list[Pattern]:
    """Returns the globs of a path, or list of paths, in a card. None leads out of the data set."""
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
    """Returns the paths that match one of the patterns.

    As in `datasets`, hidden paths (with a leading dot, or in a folder with two leading underscores)
    match only a pattern that spells this out.
    """
    ordered, matched, work = sorted(paths), set(), 0
    for pattern in patterns:
        # Only paths with the literal prefix can match, and these are adjacent in sorted order.
        first = bisect.bisect_left(ordered, pattern.prefix)
        last = bisect.bisect_left(ordered, pattern.prefix + LAST_CHARACTER)
        work += (last - first) * len(pattern.text)
        if work > MAX_WORK:
            raise _card_error(name, field, f'fewer globs for {len(paths):,} files', patterns)
        n_hidden = _count_hidden(pattern.text)
        matched |= {
            path
            for path in ordered[first:last]
            if _count_hidden(path) == n_hidden and pattern.fullmatch(path)
        }
    return [path for path in paths if path in matched]


def _count_hidden(path: str) -> int:
    parts = path.split('/')
    return sum(part.startswith('.') for part in parts) + sum(
        part.startswith('__') for part in parts[:-1]
    )


def _filter_paths(paths: Sequence[str], split: str) -> list[str]:
    """Returns the paths with a word of the split.

    Without such paths, the training split is the paths without a word of another split.
    """
    words = {path: {*re.split(r'[^a-z]+', path.lower())} for path in paths}
    split_words = SPLIT_WORDS.get(split, {split.lower()})
    matches = [path for path in paths if words[path] & split_words]
    if matches or split != TRAIN:
        return matches
    return [path for path in paths if not words[path] & OTHER_SPLITS]


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
    """Hides the library's progress bars."""
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
    """Turns the library's errors into ValueErrors of one line. target: what was fetched."""
    library = _import_hub()
    errors, endpoint = library.errors, library.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f'hub:{name} requires that you accept its terms at {endpoint}/datasets/{name}. Do so, '
            'and set HF_TOKEN.'
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f'there is no data set {name} at {endpoint}, or it is private and HF_TOKEN does not '
            'give access. Names have the form OWNER/NAME.'
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f'hub:{name} has no such revision: {first_line(error)}') from error
    except (errors.LocalEntryNotFoundError, errors.CachedRepoTreeNotFoundError) as error:
        cache = library.constants.HF_HUB_CACHE
        reason = f'{endpoint} cannot be reached'
        if library.constants.HF_HUB_OFFLINE:
            reason = f'HF_HUB_OFFLINE={os.environ.get("HF_HUB_OFFLINE", "")} disables the network'
        raise ValueError(
            f'hub:{name}: {target} is not in the cache {cache}, and {reason}. Run once with '
            'network access, or set HF_HOME to the folder that has it.'
        ) from error
    except (OSError, errors.HFValidationError) as error:
        raise ValueError(f'hub:{name}: {target} cannot be fetched: {first_line(error)}') from error
