"""A mixture of sources of text: how `data.mixture` spells it, and which source each row is from.

    {'wiki': (0.7, 'text:wiki/*.txt'), 'code': (0.3, 'text:code/**/*.txt')}

is one text in the config: for each name its weight and its source, as data.source spells one. The
loss of each is recorded as validation_NAME_ce.
"""

import ast
import dataclasses
import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from modules.objectives import OBJECTIVES

EXAMPLE = "{'wiki': (0.7, 'text:wiki/*.txt'), 'code': (0.3, 'text:code/**/*.txt')}"
# configs/default.py has this source, so that it cannot be told from none given.
DEFAULT_SOURCE = 'python'
SUM_TOLERANCE = 1e-9  # weights that sum to 1 within this are left as they are
NAME = re.compile(r'[A-Za-z][A-Za-z0-9_]*')

Row = Mapping[str, Any]


class Ingredient(NamedTuple):
    """A source of a mixture, spelt as data.source, with its weight, above 0."""

    name: str
    weight: float
    source: str


def parse_mixture(text: str) -> tuple[Ingredient, ...]:
    """Returns the sources that `text` names, in its order.

    Raises ValueError for another form, a name that no record can have, a weight that is not above 0
    and finite, and a source that is there twice.
    """
    how = f'Such as --config.data.mixture="{EXAMPLE}".'
    try:
        tree = ast.parse(text.strip(), mode='eval')
        found = ast.literal_eval(tree)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f'data.mixture must be a dict of names; got {text!r}. {how}')
    if len(tree.body.keys) > len(found):
        raise ValueError(f'data.mixture has a name twice: {text}. {how}')
    return tuple(_parse_ingredient(name, value, found, how) for name, value in found.items())


def _parse_ingredient(name: Any, value: Any, mixture: dict, example: str) -> Ingredient:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            'a name in data.mixture is one word of letters, digits and _, after which its loss is '
            f'recorded; got {name!r}. {example}'
        )
    if name in OBJECTIVES:
        raise ValueError(
            f'data.mixture cannot have a source named {name!r}: validation_{name}_ce is the loss '
            'of an objective. Give it another name.'
        )
    match value:
        case (int() | float() as weight, str(source)) if not isinstance(weight, bool):
            pass
        case _:
            raise ValueError(
                f'data.mixture must have (weight, source) behind each name; got {value!r} behind '
                f'{name!r}. {example}'
            )
    if not (weight > 0 and _is_finite(weight)):
        raise ValueError(
            f'the weight of {name!r} in data.mixture must be above 0 and finite; got {weight}. '
            'Leave out what is to have no share.'
        )
    if twice := [
        other for other, (_, text) in _list_pairs(mixture) if text == source and other != name
    ]:
        raise ValueError(
            f'data.mixture has {source!r} both as {name!r} and as {twice[0]!r}. Name it once, with '
            'the sum of the weights.'
        )
    return Ingredient(name, float(weight), source)


def _list_pairs(mixture: dict) -> list[tuple[str, tuple]]:
    return [(name, value) for name, value in mixture.items() if _is_pair(value)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _is_finite(weight: float) -> bool:
    try:
        return math.isfinite(weight)
    except OverflowError:  # an int beyond all floats
        return False


def normalize_mixture(mixture: str, source: str) -> dict[str, Any]:
    """Returns {config path: value} of the normal form: weights sum to 1, data.source is empty.

    Raises ValueError as `parse` does, and where data.source was given too.
    """
    found = parse_mixture(mixture)
    if source not in ('', DEFAULT_SOURCE):
        raise ValueError(
            f'data.source={source} would not be read: data.mixture names the sources. Leave one of '
            f'them out, or add it to the mixture, as in {EXAMPLE}.'
        )
    weights = [one.weight for one in found]
    if abs(sum(map(_to_fraction, weights)) - 1) > SUM_TOLERANCE:  # or rounding would go on for ever
        weights = Shares(weights).fractions
    spelt = {one.name: (weight, one.source) for one, weight in zip(found, weights, strict=True)}
    return {'data.mixture': repr(spelt), 'data.source': ''}


def source_flag(config: Any) -> str:
    """Returns the flag that names the text, for messages."""
    return (
        f'data.source={config.source}'
        if config.mixture is None
        else f'data.mixture={config.mixture}'
    )


class Shares:
    """Deals rows 0, 1, 2, ... so that each source has its share of the first n, for any n.

    In a binary tree over the sources, one side of a node gets round(m p) of the first m rows that
    reach it, p being its part of the node's weight, in exact arithmetic. A row's source, and its
    number among the rows of that source, therefore follow from the row's number alone. The two
    lightest nodes are joined first, as in a Huffman code: each count is within two rows of n times
    its share, and within half a row for two sources.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [_to_fraction(weight) for weight in weights]
        self.fractions = tuple(float(weight / sum(exact)) for weight in exact)
        ties = itertools.count()
        heap = [(weight, next(ties), k) for k, weight in enumerate(exact)]
        heapq.heapify(heap)
        while len(heap) > 1:
            light, _, second = heapq.heappop(heap)
            heavy, _, first = heapq.heappop(heap)
            node = _Node(heavy / (light + heavy), first, second)
            heapq.heappush(heap, (light + heavy, next(ties), node))
        self._root = heap[0][2]

    def locate_row(self, i: int) -> tuple[int, int]:
        """Returns (source of row i, number of earlier rows of that source)."""
        node = self._root
        while isinstance(node, _Node):
            before = node.count_first(i)
            is_first = node.count_first(i + 1) > before
            node, i = (node.first, before) if is_first else (node.second, i - before)
        return node, i

    def count_rows(self, n: int) -> list[int]:
        """Returns the number of rows of each source among the first n."""
        found, waiting = [0] * len(self.fractions), [(self._root, n)]
        while waiting:
            node, m = waiting.pop()
            if isinstance(node, _Node):
                of_first = node.count_first(m)
                waiting += [(node.first, of_first), (node.second, m - of_first)]
            else:
                found[node] = m
        return found


def _to_fraction(weight: float) -> Fraction:
    """Returns 7/10 for 0.7, and not its nearest float."""
    return Fraction(repr(weight))


class _Node(NamedTuple):
    """Two nodes, or numbers of sources; the first gets `part` of the rows."""

    share: Fraction
    first: Any
    second: Any

    def count_first(self, m: int) -> int:
        """Returns round(m part), halves up; with exact integers it grows by 0 or 1 a row."""
        numerator, denominator = self.share.as_integer_ratio()
        return (2 * m * numerator + denominator) // (2 * denominator)


@dataclasses.dataclass(frozen=True)
class MixedRows:
    """Rows of several sources: parts[k] has the rows of names[k], and `shares` deals them.

    mixed[i] is row i of the mixture; each source is read in its own order and starts again at its
    end. len(mixed), n_tokens and n_bytes are sums over the sources.
    """

    names: tuple[str, ...]
    shares: Shares
    sources: tuple[Any, ...]

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, i: int) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(f'row must be in [0, {len(self)}); got {i}.')
        source, number = self.shares.locate_row(i)
        return self.sources[source][number % len(self.sources[source])]

    @property
    def n_tokens(self) -> int:
        return sum(part.n_tokens for part in self.sources)

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.sources)

    def documents(self) -> Iterator[Any]:
        """Iterates over the documents of every source, whatever its share."""
        return itertools.chain.from_iterable(part.documents() for part in self.sources)

    def map_sources(self, function: Callable[[Any], Any]) -> 'MixedRows':
        """Returns the same mixture of function(rows of a source)."""
        return dataclasses.replace(self, sources=tuple(map(function, self.sources)))


def split_by_source(rows: Any) -> dict[str, Any]:
    """Returns {name: rows of that source}; {'': rows} for one source alone."""
    return (
        dict(zip(rows.names, rows.sources, strict=True))
        if isinstance(rows, MixedRows)
        else {'': rows}
    )


def mean_by_share(values: Mapping[str, float], rows: Any) -> float:
    """Returns sum_k share_k value_k, of values by the names of `split_by_source(rows)`."""
    if not isinstance(rows, MixedRows):
        return values['']
    shares = zip(rows.names, rows.shares.fractions, strict=True)
    return math.fsum(share * values[name] for name, share in shares)
