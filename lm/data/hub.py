"""Data sets of the Hugging Face Hub: which parquet files a name means, fetched as they are read.

Everything goes through the library huggingface_hub, which keeps what it fetches in a cache of its
own and takes HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE from the environment.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.data import formats
from lm.data.formats import Documents
from lm.storage.files import first_line
from modules.choices import nearest

CARD, TRAIN, DATASET = 'README.md', 'train', 'dataset'
# Words in the names of files of another split, where the card says none.
OTHER_SPLITS = {'test', 'testing', 'eval', 'evaluation', 'dev', 'val', 'valid', 'validation'}
LISTED = 30  # subsets that an error names at most


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
            with _explained(self.name, path):
                local = _library().hf_hub_download(
                    self.name, path, repo_type=DATASET, revision=self.commit
                )
            yield from formats.documents((Path(local),), text_field)


def open_shards(argument: str) -> Shards:
    """Returns the files of NAME[@REVISION][:SUBSET], listed and not yet fetched.

    Raises ValueError without the library, for a data set, revision or subset that is not there, and
    where the hub cannot be asked and the cache does not hold the answer.
    """
    if not argument:
        raise ValueError("data.source 'hub' needs a name, such as hub:OWNER/NAME:SUBSET.")
    repository, _, subset = argument.partition(':')
    name, _, revision = repository.partition('@')
    library = _library()
    with _explained(name, f'its list of files{f" at {revision}" if revision else ""}'), _quiet():
        about = {'repo_type': DATASET, 'revision': revision or None}
        # The card comes for its subsets; the library then holds the list of all files.
        folder = Path(library.snapshot_download(name, allow_patterns=[CARD, '.git*'], **about))
        listed = library.get_cached_repo_tree(name, repo_type=DATASET, revision=folder.name)
        is_there = (folder / CARD).is_file()
        card = library.repocard.metadata_load(folder / CARD) if is_there else None
    paths = [file.path for file in listed if file.path.endswith('.parquet')]
    chosen = {*choose_files(name, subset, paths, card or {})}
    blobs = {file.path: file.blob_id for file in listed if file.path in chosen}
    return Shards(name, subset, folder.name, dict(sorted(blobs.items())))


def choose_files(
    name: str, subset: str, paths: Sequence[str], card: Mapping[str, Any]
) -> list[str]:
    """Returns the files of the training split of a subset; '' is the default one.

    Subsets are the `configs` of the card, each with patterns of files by split; without them, the
    folders that hold the files. Raises ValueError for a subset that is not there.
    """
    if not paths:
        raise ValueError(
            f'hub:{name} has no parquet files. Where the hub has converted it, '
            f'hub:{name}@refs/convert/parquet has some; or fetch it, for text:GLOB.'
        )
    configs = {str(one['config_name']): one for one in card.get('configs') or ()}
    configs = {n: one for n, one in configs.items() if 'data_files' in one}
    folders = sorted({path.partition('/')[0] for path in paths if '/' in path})
    if configs:
        default = [n for n, one in configs.items() if one.get('default') or n == 'default']
        only = [n for n in configs if len(configs) == 1]
        wanted = subset or next(iter([*default, *only]), '')
        files = _of_config(paths, configs[wanted]['data_files']) if wanted in configs else None
    elif subset:
        files = [path for path in paths if path.startswith(f'{subset}/')] or None
        files = None if files is None else _of_training(files)
    else:
        files = _of_training(paths)
    if files is None:
        there = [*(configs or folders)]
        more = f' and {len(there) - LISTED} more' if len(there) > LISTED else ''
        what = f'has no subset {subset!r}' if subset else 'has several subsets, and none by default'
        raise ValueError(
            f'hub:{name} {what}; there are {", ".join(there[:LISTED])}{more}. Write '
            f'hub:{name}:SUBSET.{nearest(subset, there) if subset else ""}'
        )
    if not files:
        raise ValueError(f'hub:{name}{f":{subset}" if subset else ""} has no split {TRAIN!r}.')
    return files


def _of_config(paths: Sequence[str], data_files: Any) -> list[str]:
    """Returns the files of the split `train` of one of a card's `configs`; without splits, those
    that look like no other split's.
    """
    splits = data_files if isinstance(data_files, list) else [data_files]
    if all(isinstance(one, Mapping) and 'split' in one for one in splits):
        patterns = [one['path'] for one in splits if one['split'] == TRAIN]
        return _matching(paths, patterns)
    patterns = [one['path'] if isinstance(one, Mapping) else one for one in splits]
    return _of_training(_matching(paths, patterns))


def _matching(paths: Iterable[str], patterns: Iterable[Any]) -> list[str]:
    every = [p for one in patterns for p in (one if isinstance(one, list) else [one])]
    compiled = [as_regex(pattern) for pattern in every]
    return [path for path in paths if any(one.fullmatch(path) for one in compiled)]


def as_regex(pattern: str) -> re.Pattern:
    """Returns what a glob matches: ** any folders, * within one, ? a character, {a,b} either."""
    names = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]', '{': '(?:', '}': ')'}
    parts, depth = [], 0
    for part in re.split(r'(\*\*/|\*\*|[*?{},])', pattern.removeprefix('./')):
        depth += (part == '{') - (part == '}')
        parts.append('|' if part == ',' and depth else names.get(part, re.escape(part)))
    return re.compile(''.join(parts))


def _of_training(paths: Sequence[str]) -> list[str]:
    """Returns the files whose path has the word train, or else no word of another split."""
    words = {path: {*re.split(r'[^a-z]+', path.lower())} for path in paths}
    named = [path for path in paths if words[path] & {TRAIN, 'training'}]
    return named or [path for path in paths if not words[path] & OTHER_SPLITS]


def _library() -> Any:
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
def _quiet() -> Iterator[None]:
    """Shows no bars of progress for the files that are fetched."""
    utils = _library().utils
    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextlib.contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turns the library's errors into one line each."""
    library = _library()
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
            f'hub:{name}: {what} is not in the cache {cache}, and {why}. Start once with the '
            'network, or set HF_HOME to where it is.'
        ) from error
    except (OSError, errors.HFValidationError) as error:
        raise ValueError(f'hub:{name}: {what} cannot be fetched: {first_line(error)}') from error
