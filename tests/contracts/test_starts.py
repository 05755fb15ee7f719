"""Contract: at the published start pairs of choices compute numbers, or are refused by name."""

import pytest

from tests.starts import Search


@pytest.mark.full  # 25 s: six programs, each with some 190 pairs that no other has
def test_pairs_of_choices_start_with_numbers():
    """`python -m tests.starts` tries them all, for an hour."""
    search = Search(seed=1)
    for _ in range(6):
        search.run(search.next())
    assert not search.wrong and len(search.tried) > 600, search.report()
