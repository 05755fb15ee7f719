"""Finds the files that a pattern without matches may have meant."""

import glob
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lm.data.folders import full_suffix
from lm.data.globs import find_files, iterate_paths
from lm.data.kinds import detect_kind
from modules.choices import closest_names

MAX_VISITED = 10_000  # paths that are looked at for a suggestion


def find_near_pattern(pattern: str) -> str:
    """Returns a pattern near to one without matches, such that all its matches can be read; '' if
    there is none.

    It corrects names that are misspelt, capitals, suffixes, and folders that are a level deeper.
    """
    names = pattern.split('/')
    is_pattern = [
        glob.has_magic(name) and not os.path.lexists('/'.join(names[: i + 1]))
        for i, name in enumerate(names)
    ]
    n_literal = [*is_pattern, True].index(True)
    base = _correct_path(names[:n_literal])
    tail = names[n_literal:]
    if base is None:
        return ''
    if not tail:
        is_folder = os.path.isdir(base)
        return base if _is_readable(f'{glob.escape(base)}/**' if is_folder else base) else ''
    candidates = _iterate_near_tails(glob.escape(base), tail)
    return next((candidate for candidate in candidates if _is_readable(candidate)), '')


def _correct_path(names: list[str]) -> str | None:
    """Returns the path of the names that exist, or else of those nearest; None without such."""
    base = ''
    for i, name in enumerate(names):
        path = os.path.join(base, name) if i or name else '/'
        if not os.path.lexists(path):
            entries = sorted(entry for entry in _list_names(base) if not entry.startswith('.'))
            same = [entry for entry in entries if entry.lower() == name.lower()]
            # A file of the same name with another suffix is nearer than one with the same suffix.
            same += [
                entry
                for entry in entries
                if i == len(names) - 1 and entry.partition('.')[0] == name.partition('.')[0]
            ]
            nearest = closest_names(name, same) or same or closest_names(name, entries)
            if not nearest:
                return None
            path = os.path.join(base, nearest[0])
        base = path
    return base


def _list_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder or os.curdir)
    except OSError:
        return []


def _iterate_near_tails(base: str, tail: list[str]) -> Iterator[str]:
    """Yields patterns in a folder: as they are, at any depth, with another suffix."""
    join = lambda *names: os.path.join(base, *names)  # noqa: E731
    yield join(*tail)
    is_wide = os.path.realpath(base or os.curdir) in ('/', os.path.expanduser('~'))
    depths = ((),) if is_wide else ((), ('**',))
    for depth in depths:
        yield join(*depth, tail[-1])
    pattern_suffix = full_suffix(Path(tail[-1])).lower()
    for depth in depths:
        paths = itertools.islice(iterate_paths(join(*depth, '*')), MAX_VISITED)
        counts = Counter(full_suffix(Path(path)) for path in paths if os.path.isfile(path))
        suffixes = sorted(filter(None, counts), key=lambda suffix: (-counts[suffix], suffix))
        near = [suffix for suffix in suffixes if suffix.lower() == pattern_suffix]
        near += [
            suffix
            for suffix in suffixes
            if pattern_suffix and suffix.lower().startswith(pattern_suffix)
        ]
        for suffix in dict.fromkeys([*near, *suffixes]):
            yield join(*depth, f'*{glob.escape(suffix)}')


def _is_readable(pattern: str) -> bool:
    """Returns whether a pattern matches files, and all of them can be read."""
    if not (files := find_files(pattern).files):
        return False
    try:
        for path in files[:MAX_VISITED]:
            detect_kind(path)
    except ValueError:
        return False
    return True
