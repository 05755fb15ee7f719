"""Mixtures of text sources: the syntax of `data.mixture`, and the assignment of rows to sources.

    {'wiki': (0.7, 'text:wiki/*.txt'), 'code': (0.3, 'text:code/**/*.txt')}

is a mixture in the config: each name has a weight and a source, spelt as in data.source. The loss
of each source is recorded as validation_NAME_ce.
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
CHAT = 'chat:'  # begins the name of a source of conversations
NAME = re.compile(r'[A-Za-z][A-Za-z0-9_]*')

Row = Mapping[str, Any]


class Ingredient(NamedTuple):
    """A source of a mixture, spelt as in data.source, with its positive weight."""

    name: str
    weight: float
    source: str


def parse_mixture(text: str) -> tuple[Ingredient, ...]:
    """Returns the sources that `text` names, in its order.

    Raises ValueError for another form, a name that no record can have, a weight that is not
    positive and finite, and a duplicate source.
    """
    example = f'For example: --config.data.mixture="{EXAMPLE}".'
    mixture = parse_dict('data.mixture', text, example)
    return tuple(
        _parse_ingredient(name, value, mixture, example) for name, value in mixture.items()
    )


def parse_dict(path: str, text: str, advice: str) -> dict[Any, Any]:
    """Returns the dict that the value of a field describes; its keys may be anything.

    Args:
      path: the field, for errors.
      text: its value.
      advice: a sentence that ends errors.

    Raises:
      ValueError: for another form, an empty dict, and a key that stands twice.
    """
    try:
        tree = ast.parse(text.strip(), mode='eval')
        values = ast.literal_eval(tree)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        values = None
    if not isinstance(values, dict) or not values:
        raise ValueError(f'{path} must be a dict of names; got {text!r}. {advice}')
    assert isinstance(tree.body, ast.Dict)
    if len(tree.body.keys) > len(values):
        raise ValueError(f'{path} has the same name twice: {text}. {advice}')
    return values


def _parse_ingredient(name: Any, value: Any, mixture: dict, example: str) -> Ingredient:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            'a name in data.mixture must be one word of letters, digits and _, because its loss '
            f'is recorded under this name; got {name!r}. {example}'
        )
    if name in OBJECTIVES:
        raise ValueError(
            f'data.mixture cannot have a source named {name!r}, because validation_{name}_ce is '
            'the loss of an objective. Choose another name.'
        )
    match value:
        case (int() | float() as weight, str(source)) if not isinstance(weight, bool):
            pass
        case _:
            raise ValueError(
                f'data.mixture must have (weight, source) after each name; got {value!r} after '
                f'{name!r}. {example}'
            )
    if not (weight > 0 and _is_finite(weight)):
        raise ValueError(
            f'the weight of {name!r} in data.mixture must be above 0 and finite; got {weight}. To '
            'exclude a source, leave it out.'
        )
    if duplicates := [
        other_name
        for other_name, (_, text) in _list_pairs(mixture)
        if text == source and other_name != name
    ]:
        raise ValueError(
            f'data.mixture has {source!r} both as {name!r} and as {duplicates[0]!r}. List it once, '
            'with the sum of the weights.'
        )
    return Ingredient(name, float(weight), source)


def _list_pairs(mixture: dict) -> list[tuple[str, tuple]]:
    """Returns (name, value) of the entries that have the form (weight, source)."""
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

    Raises ValueError as `parse_mixture` does, and if data.source was set too.
    """
    ingredients = parse_mixture(mixture)
    if source not in ('', DEFAULT_SOURCE):
        raise ValueError(
            f'data.source={source} has no effect with data.mixture, which names the sources. Leave '
            f'one of them out, or add this source to the mixture, as in {EXAMPLE}.'
        )
    weights = [ingredient.weight for ingredient in ingredients]
    # Weights near 1 stay as they are: normalizing them again would change the last digit each time.
    if abs(sum(map(_to_fraction, weights)) - 1) > SUM_TOLERANCE:
        weights = Shares(weights).fractions
    normal_form = {
        ingredient.name: (weight, ingredient.source)
        for ingredient, weight in zip(ingredients, weights, strict=True)
    }
    return {'data.mixture': repr(normal_form), 'data.source': ''}


def source_flag(config: Any) -> str:
    """Returns the flags that name the text, for messages. config: section `data`."""
    training = (
        f'data.source={config.source}'
        if config.mixture is None
        else f'data.mixture={config.mixture}'
    )
    apart = config.validation_source
    return training + (f' with data.validation_source={apart}' if apart else '')


def reads_chats(config: Any) -> bool:
    """Whether a source of the config holds conversations. config: section `data`."""
    mixture = () if config.mixture is None else parse_mixture(config.mixture)
    sources = [config.source, config.validation_source, *(part.source for part in mixture)]
    return any(source.startswith(CHAT) for source in sources)


class Shares:
    """Deals rows 0, 1, 2, ... to sources so that each has its share of the first n, for any n.

    In a binary tree over the sources, one child of a node gets round(m p) of the first m rows that
    reach the node, where p is its part of the node's weight in exact arithmetic. The source of a
    row, and its number among the rows of that source, therefore depend only on the row's number. As
    in a Huffman code, the two lightest nodes are joined first: each count is within two rows of n
    times its share, and within half a row for two sources.
    """

    def __init__(self, weights: Sequence[float]):
        """Builds the tree. `fractions` are the weights, normalized to sum 1."""
        exact = [_to_fraction(weight) for weight in weights]
        self.fractions = tuple(float(weight / sum(exact)) for weight in exact)
        # The counter breaks ties between equal weights, so that nodes are never compared.
        ties = itertools.count()
        heap: list[tuple[Fraction, int, Any]] = [
            (weight, next(ties), k) for k, weight in enumerate(exact)
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            light, _, second = heapq.heappop(heap)
            heavy, _, first = heapq.heappop(heap)
            node = _Node(heavy / (light + heavy), first, second)
            heapq.heappush(heap, (light + heavy, next(ties), node))
        self._root = heap[0][2]

    def locate_row(self, i: int) -> tuple[int, int]:
        """Returns (source of row i, number of earlier rows from that source)."""
        node = self._root
        while isinstance(node, _Node):
            before = node.count_first(i)
            is_first = node.count_first(i + 1) > before
            node, i = (node.first, before) if is_first else (node.second, i - before)
        return node, i

    def count_rows(self, n: int) -> list[int]:
        """Returns the number of rows from each source among the first n."""
        counts, pending = [0] * len(self.fractions), [(self._root, n)]
        while pending:
            node, m = pending.pop()
            if isinstance(node, _Node):
                n_first = node.count_first(m)
                pending += [(node.first, n_first), (node.second, m - n_first)]
            else:
                counts[node] = m
        return counts


def _to_fraction(weight: float) -> Fraction:
    """Returns the decimal value of a float: 7/10 for 0.7 instead of its nearest binary fraction."""
    return Fraction(repr(weight))


class _Node(NamedTuple):
    """An inner node. The first child gets `share` of the rows; children are nodes or source
    indices.
    """

    share: Fraction
    first: Any
    second: Any

    def count_first(self, m: int) -> int:
        """Returns round(m share), halves up. With exact integers it grows by 0 or 1 per row."""
        numerator, denominator = self.share.as_integer_ratio()
        return (2 * m * numerator + denominator) // (2 * denominator)


@dataclasses.dataclass(frozen=True)
class MixedRows:
    """Rows of several sources: sources[k] has the rows of names[k], dealt by `shares`.

    mixed[i] is row i of the mixture. Each source is read in its own order and restarts at its end.
    len(mixed), n_tokens and n_bytes are sums over the sources.
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

    def documents(self, with_marks: bool = False) -> Iterator[Any]:
        """Iterates over the documents of every source, regardless of its share."""
        return itertools.chain.from_iterable(part.documents(with_marks) for part in self.sources)

    def map_sources(self, function: Callable[[Any], Any]) -> 'MixedRows':
        """Returns the same mixture with `function` applied to the rows of each source."""
        return dataclasses.replace(self, sources=tuple(map(function, self.sources)))


def split_by_source(rows: Any) -> dict[str, Any]:
    """Returns {name: rows of that source}, or {'': rows} for a single source."""
    return (
        dict(zip(rows.names, rows.sources, strict=True))
        if isinstance(rows, MixedRows)
        else {'': rows}
    )


def mean_by_share(values: Mapping[str, float], rows: Any) -> float:
    """Returns sum_k share_k value_k.

    values: keyed like `split_by_source(rows)`.
    """
    if not isinstance(rows, MixedRows):
        return values['']
    shares = zip(rows.names, rows.shares.fractions, strict=True)
    return math.fsum(share * values[name] for name, share in shares)
