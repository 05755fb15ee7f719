"""Contract: at the published start pairs of choices compute finite numbers, or are refused by name.
Property: the search splits a config that cannot be built without losing another pair.
"""

import itertools

import pytest

from tests import starts
from tests.starts import Search

CHOICES = [('a', 1), ('b', 1), ('b', 2), ('c', 1), ('d', 1)]


@pytest.mark.full  # 25 s: six programs, each with some 190 pairs that no other has
def test_pairs_start_with_finite_numbers():
    """`python -m tests.starts` tries them all, for an hour."""
    search = Search(seed=1)
    for _ in range(6):
        search.run(search.next())
    assert not search.wrong and len(search.tried) > 600, search.report()


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('broken', [{'a': 1, 'c': 1}, {'d': 1}], ids=['pair', 'choice'])
def test_search_isolates_unbuildable_pairs(monkeypatch, broken, seed):
    """Catches pairs that are lost with the refused pairs, and an endless search."""
    monkeypatch.setattr(starts, 'choices', lambda: CHOICES)
    monkeypatch.setattr(starts, 'fits', lambda config: True)
    monkeypatch.setattr(starts, 'builds', lambda config: not broken.items() <= config.items())
    monkeypatch.setattr(starts, 'checked_config', lambda config: config)
    monkeypatch.setattr(starts, 'not_finite', lambda config: '')
    search = Search(seed)
    while search.left:
        search.run(search.next())
    pairs = [p for p in itertools.combinations(range(5), 2) if p != (1, 2)]
    fine = {pair for pair in pairs if not broken.items() <= dict(CHOICES[i] for i in pair).items()}
    assert search.tried == fine
    assert search.refused['when it is built'] == len(pairs) - len(fine)
