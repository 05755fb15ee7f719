"""The syntax of data.mixture, and the source of each row.

Reference: a slow deal of every row; each message. Property: shares at every prefix, one spelling.
"""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from lm.config.mixture import (
    Ingredient,
    MixedRows,
    Shares,
    mean_by_share,
    parse_mixture,
    split_by_source,
)
from lm.config.resolve import build_config, digest, resolve, resolve_config, to_dict
from tests.helpers import tiny_config, tiny_raw

WEIGHTS = [
    [1.0],
    [0.7, 0.3],
    [1.0, 1.0],
    [0.5, 0.25, 0.25],
    [0.6, 0.3, 0.07, 0.03],
    [8.0, 5.0, 3.0, 2.0, 1.0, 1.0],
    [1e-6, 1.0, 2.0],
    [0.1] * 7,
]


def deal_slowly(weights, n):
    """Yields the source of each row: at each node, the side that is due."""
    tree = [(weight, i, [i]) for i, weight in enumerate(weights)]
    splits = {}
    for tie in itertools.count(len(weights)):
        if len(tree) == 1:
            break
        tree.sort(key=lambda node: node[:2])
        (light, _, second), (heavy, _, first), *tree = tree
        splits[tuple(sorted(first + second))] = heavy / (heavy + light), first, second
        tree.append((light + heavy, tie, first + second))
    n_arrived, n_first = collections.Counter(), collections.Counter()
    for _ in range(n):
        node = tuple(range(len(weights)))
        while len(node) > 1:
            share, first, second = splits[node]
            n_arrived[node] += 1
            due = np.floor(n_arrived[node] * share + 0.5 + 1e-9) > n_first[node]
            n_first[node] += due
            node = tuple(sorted(first if due else second))
        yield node[0]


@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_reference_shares_deal_rows(weights):
    """Checks also the number of each row within its source, and the counts of every prefix."""
    shares, counts = Shares(weights), [0] * len(weights)
    for i, source in enumerate(deal_slowly(weights, 400)):
        assert shares.count_rows(i) == counts
        assert shares.locate_row(i) == (source, counts[source])
        counts[source] += 1


@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_property_every_prefix_has_the_shares(weights):
    """Shares hold up to rounding for any length. Catches shares that are rounded to whole numbers
    first, and numbers beyond the precision of floats.
    """
    shares, bound = Shares(weights), 0.5 if len(weights) <= 2 else 2
    expected = np.array(weights) / sum(weights)
    np.testing.assert_allclose(shares.fractions, expected, rtol=1e-15)
    for n in [*range(300), 10**6 + 7, 10**9 + 1]:
        counts = shares.count_rows(n)
        assert sum(counts) == n
        assert np.abs(np.array(counts) - n * expected).max() <= bound + 1e-6
    far = 10**15 + 3
    source, number = shares.locate_row(far)
    after, before = np.array(shares.count_rows(far + 1)), np.array(shares.count_rows(far))
    assert (after - before).tolist() == [int(k == source) for k in range(len(weights))]
    assert before[source] == number


def test_property_shares_are_decimals():
    """0.7 as a float is less than 7/10: of 10^17 rows its nearest float would have 1 too few."""
    assert Shares([0.7, 0.3]).count_rows(10**17) == [7 * 10**16, 3 * 10**16]


TWO = "{'wiki': (0.75, 'text:a/*.txt'), 'code': (0.25, 'python')}"


def test_mixture_is_parsed():
    assert parse_mixture(TWO) == (
        Ingredient('wiki', 0.75, 'text:a/*.txt'),
        Ingredient('code', 0.25, 'python'),
    )


@pytest.mark.parametrize(
    'spelling',
    [
        "{'wiki':(0.75,'text:a/*.txt'),'code':(0.25,'python')}",
        "{'wiki': (3, 'text:a/*.txt'), 'code': (1, 'python'), }",
        "\n{'wiki': (1.5, 'text:a/*.txt'), 'code': (0.5, 'python')}\n",
    ],
)
def test_property_mixture_spellings_share_a_digest(spelling):
    """The digest ignores the spelling and the sum of the weights."""
    raw = {'data.mixture': TWO, 'data.source': 'python'}
    config, same = (resolve(tiny_raw(raw | {'data.mixture': text})) for text in (TWO, spelling))
    assert config == same and digest(config) == digest(same)
    assert config.data.source == ''
    changed = resolve(tiny_raw(raw | {'data.mixture': TWO.replace('0.75', '0.5')}))
    assert digest(changed) != digest(config)


@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_property_resolving_twice_changes_nothing(weights):
    """Weights that rounding moves each time would make another run of every config.json."""
    mixture = {f's{k}': (weight, f'text:{k}') for k, weight in enumerate(weights)}
    config = resolve(tiny_raw({'data.mixture': repr(mixture), 'data.source': 'python'}))
    assert resolve(to_dict(config)) == config == resolve_config(build_config(to_dict(config)))


BAD = [
    ('wiki', 'data.mixture must be a dict of names; got .*For example: --config'),
    ('', 'data.mixture must be a dict of names'),
    ('{}', 'data.mixture must be a dict of names'),
    ('{wiki: (1, "python")}', 'data.mixture must be a dict of names'),
    ('["python"]', 'data.mixture must be a dict of names'),
    ("{'a': (1, 'python'), 'a': (2, 'text:x')}", 'has the same name twice'),
    ("{'a b': (1, 'python')}", "one word of letters, digits and _, .*got 'a b'"),
    ("{1: (1, 'python')}", 'one word of letters'),
    ("{'infill': (1, 'python')}", "named 'infill', because validation_infill_ce is the loss"),
    ("{'a': 'python'}", r"\(weight, source\) after each name; got 'python' after 'a'"),
    ("{'a': ('python', 1)}", r'\(weight, source\) after each name'),
    ("{'a': (True, 'python')}", r'\(weight, source\) after each name'),
    ("{'a': (1, 'python', 2)}", r'\(weight, source\) after each name'),
    ("{'a': (0, 'python')}", "weight of 'a' .* above 0 and finite; got 0"),
    ("{'a': (-0.5, 'python')}", 'above 0 and finite; got -0.5'),
    ("{'a': (1e999, 'python')}", 'above 0 and finite; got inf'),
    (f"{{'a': (1{'0' * 400}, 'python')}}", 'above 0 and finite'),
    ("{'a': (1, 'python'), 'b': (2, 'python')}", "has 'python' both as 'a' and as 'b'"),
]


@pytest.mark.parametrize(('text', 'says'), BAD)
def test_invalid_mixtures_are_refused(text, says):
    with pytest.raises(ValueError, match=f'(?s){says}'):
        resolve(tiny_raw({'data.mixture': text, 'data.source': 'python'}))


def test_source_with_mixture_is_refused():
    raw = tiny_raw({'data.mixture': TWO, 'data.source': 'text:x.txt'})
    with pytest.raises(ValueError, match=r'data\.source=text:x\.txt has no effect'):
        resolve(raw)


def test_digest_without_mixture_is_unchanged():
    """The digest names the folders of runs that were made before there were mixtures."""
    config = tiny_config()
    assert config.data.mixture is None and config.data.source == 'synthetic:markov'
    assert digest(config) == digest(resolve(_without(to_dict(config))))


def _without(raw):
    raw['data'] = {name: value for name, value in raw['data'].items() if name != 'mixture'}
    return raw


@dataclasses.dataclass(frozen=True)
class NamedRows:
    """Rows (name, number)."""

    name: str
    n: int
    n_tokens: int = 10
    n_bytes: int = 30

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert 0 <= i < self.n
        return self.name, i

    def documents(self, with_marks=False):
        yield f'<{self.name}>' if with_marks else self.name


def test_reference_mixed_rows_in_order():
    mixed = MixedRows(('a', 'b'), Shares([2.0, 1.0]), (NamedRows('a', 4), NamedRows('b', 5)))
    assert len(mixed) == 9 and (mixed.n_tokens, mixed.n_bytes) == (20, 60)
    expected = [('a', 0), ('b', 0), ('a', 1), ('a', 2), ('b', 1), ('a', 3)]
    expected += [('a', 0), ('b', 2), ('a', 1)]  # a begins again
    assert [mixed[i] for i in range(9)] == expected
    assert list(mixed.documents()) == ['a', 'b']
    assert list(mixed.documents(with_marks=True)) == ['<a>', '<b>']
    with pytest.raises(IndexError):
        mixed[9]
    assert split_by_source(mixed.map_sources(len)) == {'a': 4, 'b': 5}
    assert split_by_source(mixed.sources[0]) == {'': mixed.sources[0]}


def test_reference_mean_by_share_uses_names():
    """JAX sorts the keys of a dict: a mean by position would weigh one source by another's
    share.
    """
    mixed = MixedRows(('b', 'a'), Shares([3.0, 1.0]), (NamedRows('b', 1), NamedRows('a', 1)))
    assert mean_by_share({'a': 1.0, 'b': 5.0}, mixed) == 4.0
    assert mean_by_share({'': 3.5}, NamedRows('', 1)) == 3.5
