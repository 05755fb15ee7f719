"""Globs: files of this machine, each of them once, and paths of a list, in linear time."""

import dataclasses
import fnmatch
import functools
import re

LONGEST = 1000  # characters of a pattern of somebody else's
# `**/` is any number of folders if it is one itself; elsewhere `**` is any characters.
TOKEN = re.compile(r'(?<![^/{,])\*\*/|\*\*+|\*|\?|\[!?\]?[^]/]*\]|.', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A glob of paths between slashes: `*` stays within a folder, `**` descends, `?` is a
    character, `[a-z]` one of a class, `[!a-z]` one of none, `{a,b}` either.

    A match takes time in proportion to len(text) and to the logarithm of a path's length. Raises
    ValueError for a text of more than LONGEST characters.
    """

    text: str

    def __post_init__(self):
        if len(self.text) > LONGEST:
            raise ValueError(f'the glob {self.text[:40]!r}... is longer than {LONGEST} characters')

    @functools.cached_property
    def prefix(self) -> str:
        """The characters that all matches begin with."""
        return re.split(r'[*?\[{]', self.text, maxsplit=1)[0]

    @functools.cached_property
    def nodes(self) -> list:
        return _parse(TOKEN.findall(self.text))

    def fullmatch(self, path: str) -> bool:
        """Whether the pattern matches all of `path`."""
        return bool(_advance(self.nodes, 1, _Places(path)) >> len(path))


def _parse(tokens: list[str]) -> list:
    """Returns a list of tokens and, for each {a,b}, of the list of its alternatives.

    A brace without its other one, or without a comma, is a character.
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
        first, *others = open_groups.pop()
        open_groups[-1][-1] += ['{', *first, *(node for o in others for node in (',', *o))]
    return open_groups[0][0]


class _Places:
    """Sets of places in a path, as the bits of an integer: bit i is before character i."""

    def __init__(self, path: str):
        self.path, self.masks = path, {}
        self.all = (2 << len(path)) - 1
        self.slash = self.before('/')

    def before(self, token: str) -> int:
        """Returns the places before the characters that match `token`: one, a class or '?'."""
        if token not in self.masks:
            if len(token) == 1 and token != '?':
                is_match = token.__eq__
            else:
                one = re.compile(fnmatch.translate(token))
                is_match = lambda c: c != '/' and one.match(c)  # noqa: E731
            self.masks[token] = sum(1 << i for i, c in enumerate(self.path) if is_match(c))
        return self.masks[token]

    def from_first(self, places: int) -> int:
        """Returns all places from the first of `places` on."""
        return self.all & ~((places & -places) - 1)

    def within_folder(self, places: int) -> int:
        """Returns the places that are reached without a slash, by doubling the distance."""
        can_enter, distance = self.all & ~(self.slash << 1), 1
        while distance <= len(self.path):
            places |= can_enter & (places << distance)
            can_enter &= can_enter << distance
            distance *= 2
        return places


def _advance(nodes: list, places: int, path: _Places) -> int:
    """Returns the places where a match of `nodes` can end that begins at one of `places`."""
    for node in nodes:
        if not places:
            return 0
        if isinstance(node, list):
            ends = 0
            for alternative in node:
                ends |= _advance(alternative, places, path)
            places = ends
        elif node == '*':
            places = path.within_folder(places)
        elif node == '**/':
            places |= (path.from_first(places) & path.slash) << 1
        elif node.startswith('**'):
            places = path.from_first(places)
        else:
            places = (places & path.before(node)) << 1
    return places
