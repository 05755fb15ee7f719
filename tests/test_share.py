"""Shares of the tests: each test is in one share, and the rows of a test go to each share in
turn.
"""

import types

import pytest

from tests.conftest import Share


class FakeItem:
    def __init__(self, nodeid, group=None):
        self.nodeid, self.group = nodeid, group

    def get_closest_marker(self, name):
        assert name == 'xdist_group'
        return self.group and types.SimpleNamespace(args=(self.group,))


def split_shares(tests, share):
    """Returns (items that are kept, items that are reported as deselected)."""
    deselected, kept_items = [], list(tests)
    config = types.SimpleNamespace(
        hook=types.SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    )
    Share(share).pytest_collection_modifyitems(config, kept_items)
    return kept_items, deselected


def test_shares_partition_tests_and_keep_groups():
    """Catches a share by files, which gets all rows of a test, and a divided group."""
    rows = [FakeItem(f'tests/a.py::test_rows[{i}]') for i in range(6)]
    tests = [FakeItem('tests/b.py::test_one', 'g'), *rows, FakeItem('tests/c.py::test_two', 'g')]
    shares = [split_shares(tests, f'{i}/3') for i in (1, 2, 3)]
    assert sorted(x.nodeid for kept_items, _ in shares for x in kept_items) == sorted(
        x.nodeid for x in tests
    )
    assert all(
        {*kept_items} | {*deselected} == {*tests} and not {*kept_items} & {*deselected}
        for kept_items, deselected in shares
    )
    assert [len({*kept_items} & {*rows}) for kept_items, _ in shares] == [2, 2, 2]
    assert sorted(sum(x.group == 'g' for x in kept_items) for kept_items, _ in shares) == [0, 0, 2]


def test_other_tests_do_not_move_test_to_another_share():
    """Catches shares dealt over the sorted list, where a test that is added moves all behind it."""
    tests = [FakeItem(f'tests/b.py::test_{i}') for i in range(20)]
    added = [FakeItem('tests/a.py::test_added'), FakeItem('tests/a.py::test_rows[0]')]
    for i in (1, 2, 3):
        before, _ = split_shares(tests, f'{i}/3')
        after, _ = split_shares(added + tests, f'{i}/3')
        assert [test for test in after if test not in added] == before


@pytest.mark.parametrize('share', ['0/3', '4/3', '1', 'a/b'])
def test_invalid_share_is_refused(share):
    with pytest.raises(pytest.UsageError, match='--share'):
        Share(share)
