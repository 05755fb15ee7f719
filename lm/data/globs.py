"""Globs over files of this machine, each file once, and over a list of paths, in linear time."""

import dataclasses
import fnmatch
import functools
import glob
import os
import re
import stat
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_LENGTH = 1000  # characters of a pattern, which a stranger may have written
# `**/` is any number of folders if it is one itself; elsewhere `**` is any characters.
TOKEN = re.compile(r'(?<![^/{,])\*\*/|\*\*+|\*|\?|\[!?\]?[^]/]*\]|.', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A glob of paths with slashes.

    `*` stays within a folder, `**` descends, `?` is any character, `[a-z]` a character class,
    `[!a-z]` its complement, `{a,b}` an alternative.

    Matching takes time in proportion to len(text) and to the logarithm of the path's length. Raises
    ValueError for a text of more than MAX_LENGTH characters.
    """

    text: str

    def __post_init__(self):
        if len(self.text) > MAX_LENGTH:
            raise ValueError(
                f'the glob {self.text[:40]!r}... is longer than {MAX_LENGTH} characters'
            )

    @functools.cached_property
    def prefix(self) -> str:
        """The literal characters that begin every match."""
        return re.split(r'[*?\[{]', self.text, maxsplit=1)[0]

    @functools.cached_property
    def nodes(self) -> list:
        return _parse_tokens(TOKEN.findall(self.text))

    def fullmatch(self, path: str) -> bool:
        """Returns whether the pattern matches all of `path`."""
        return bool(_advance(self.nodes, 1, _PathPositions(path)) >> len(path))


def _parse_tokens(tokens: list[str]) -> list:
    """Returns a list of tokens, with a nested list of alternatives for each {a,b}.

    A brace without its counterpart, or without a comma, is a literal character.
    """
    open_groups = [[[]]]  # the alternatives so far of each group that is open
    for token in tokens:
        alternatives = open_groups[-1]
        if token == '{':
            open_groups.append([[]])
        elif token == ',' and len(open_groups) > 1:
            alternatives.append([])
        elif token == '}' and len(open_groups) > 1:
            open_groups.pop()
            is_group = len(alternatives) > 1
            nodes = [alternatives] if is_group else ['{', *alternatives[0], '}']
            open_groups[-1][-1] += nodes
        else:
            alternatives[-1].append(token)
    while len(open_groups) > 1:
        first, *more_alternatives = open_groups.pop()
        open_groups[-1][-1] += [
            '{',
            *first,
            *(node for alternative in more_alternatives for node in (',', *alternative)),
        ]
    return open_groups[0][0]


class _PathPositions:
    """Sets of positions in a path, as bits of an integer: bit i is before character i."""

    def __init__(self, path: str):
        self.path, self.masks = path, {}
        self.all_positions = (2 << len(path)) - 1
        self.slash = self.match_token('/')

    def match_token(self, token: str) -> int:
        """Returns the positions before characters that match `token` (a character, a class
        or '?').
        """
        if token not in self.masks:
            if len(token) == 1 and token != '?':
                is_match = token.__eq__
            else:
                pattern = re.compile(fnmatch.translate(token))
                is_match = lambda c: c != '/' and pattern.match(c)  # noqa: E731
            self.masks[token] = sum(1 << i for i, c in enumerate(self.path) if is_match(c))
        return self.masks[token]

    def extend_to_end(self, positions: int) -> int:
        """Returns all positions from the first of `positions` on."""
        return self.all_positions & ~((positions & -positions) - 1)

    def extend_in_folder(self, positions: int) -> int:
        """Returns the positions that are reached without a slash, by doubling the distance."""
        # The positions that a step of `distance` reaches without crossing a slash.
        can_enter, distance = self.all_positions & ~(self.slash << 1), 1
        while distance <= len(self.path):
            positions |= can_enter & (positions << distance)
            can_enter &= can_enter << distance
            distance *= 2
        return positions


def _advance(nodes: list, positions: int, path: _PathPositions) -> int:
    """Returns the positions where a match of `nodes` that begins at one of `positions` can end."""
    for node in nodes:
        if not positions:
            return 0
        if isinstance(node, list):
            ends = 0
            for alternative in node:
                ends |= _advance(alternative, positions, path)
            positions = ends
        elif node == '*':
            positions = path.extend_in_folder(positions)
        elif node == '**/':
            positions |= (path.extend_to_end(positions) & path.slash) << 1
        elif node.startswith('**'):
            positions = path.extend_to_end(positions)
        else:
            positions = (positions & path.match_token(node)) << 1
    return positions


class Matches(NamedTuple):
    """The regular files that a glob matches, in order of their paths, and everything that is left
    out.

    Attributes:
      files: the files to read.
      duplicates: other names, by links, of entries in `files` and of folders that are searched.
      non_files: pipes, sockets, devices, dangling links, and folders that hold none of `files`.
    """

    files: tuple[Path, ...]
    duplicates: tuple[str, ...]
    non_files: tuple[str, ...]


def find_files(pattern: str) -> Matches:
    """Returns the files that match `pattern`, where `**` descends, or the file of that name.

    A file with several names, by links, appears once, under a name without a link in it if
    possible. Without links, the names and their order equal `glob.glob`.
    """
    # A file of this very name may hold characters that mean something in a pattern.
    duplicates, is_file = [], os.path.isfile(pattern)
    paths = {pattern} if is_file else {*iterate_paths(pattern, duplicates)}
    by_inode, folders, non_files = defaultdict(list), [], []
    for path in sorted(paths):
        try:
            status = os.stat(path)
        except OSError:
            non_files.append(path)
            continue
        if stat.S_ISREG(status.st_mode):
            by_inode[status.st_dev, status.st_ino, status.st_nlink > 1].append(path)
        else:
            (folders if stat.S_ISDIR(status.st_mode) else non_files).append(path)
    files = []
    for (_, _, is_hard_linked), names in by_inode.items():
        files += _drop_links(names, is_hard_linked) if len(names) > 1 else names
    duplicates += {*paths} - {*files, *folders, *non_files}
    parents = {str(parent) for file in files for parent in Path(file).parents}
    if pattern.rpartition('/')[2] != '**':
        non_files += [folder for folder in folders if str(Path(folder)) not in parents]
    return Matches(
        tuple(map(Path, sorted(files))), tuple(sorted(duplicates)), tuple(sorted(non_files))
    )


def _drop_links(names: Iterable[str], is_hard_linked: bool) -> list[str]:
    """Returns one name for each file, from names that share an inode.

    Some network file systems number files by a hash, so that two files may share a number.
    """
    real = {name: os.path.realpath(name) for name in names}
    by_file = defaultdict(list)
    for name in names:
        by_file['' if is_hard_linked else real[name]].append(name)
    return [
        min(aliases, key=lambda name: (real[name] != os.path.abspath(name), name))
        for aliases in by_file.values()
    ]


def iterate_paths(pattern: str, duplicates: list[str] | None = None) -> Iterator[str]:
    """Yields the paths that match, as `glob.glob(pattern, recursive=True)` except for links.

    A folder that `**` reaches under several names is searched once; its other names are appended to
    `duplicates`.
    """
    parts = pattern.split('/')
    if '**' not in parts:
        yield from glob.iglob(pattern)
        return
    first_star = parts.index('**')
    tail = parts[first_star + 1 :]
    while tail[:1] == ['**']:  # twice in a row is once
        del tail[0]
    bases = [''] if first_star == 0 else glob.iglob('/'.join(parts[:first_star]) or '/')
    for base in bases:
        for folder in _walk(base, [] if duplicates is None else duplicates):
            pattern_inside = os.path.join(glob.escape(folder), *(tail or ['*']))
            yield from iterate_paths(pattern_inside, duplicates)


def _walk(base: str, duplicates: list[str]) -> Iterator[str]:
    """Yields `base` and the folders below it, each real folder once; links come last."""
    folders, links = deque([(base, os.path.realpath(base or os.curdir))]), deque()
    visited = set()
    while folders or links:
        folder, real = (folders or links).popleft()
        if real in visited:
            duplicates.append(folder)
            continue
        visited.add(real)
        try:
            with os.scandir(folder or os.curdir) as entries:
                entries = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # no folder, or one that cannot be read: `glob` passes over it, too
            continue
        yield folder
        for entry in entries:
            if entry.name.startswith('.') or not entry.is_dir():
                continue
            path = os.path.join(folder, entry.name)
            if entry.is_symlink():
                links.append((path, os.path.realpath(path)))
            else:
                folders.append((path, os.path.join(real, entry.name)))
