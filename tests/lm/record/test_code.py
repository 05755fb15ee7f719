"""Property: a digest of the sources tells code apart, and what a run says of it is known."""

import pytest

from lm.record import code
from lm.record.code import (
    describe_code,
    find_other_code,
    running_code,
    sources_digest,
    summarize_codes,
)


@pytest.fixture
def checkout(tmp_path):
    for name in ('train.py', 'lm/model/a.py', 'modules/norms/b.py', 'eval/c.py', 'README.md'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize('name', ['train.py', 'lm/model/a.py', 'modules/norms/b.py', 'lm/new.py'])
def test_an_edit_of_what_trains_shows(checkout, name):
    before = sources_digest(checkout)
    (checkout / name).write_text('another line')
    assert sources_digest(checkout) != before


def test_a_file_that_moves_shows(checkout):
    before = sources_digest(checkout)
    (checkout / 'lm/model/a.py').rename(checkout / 'lm/a.py')
    assert sources_digest(checkout) != before


def test_what_does_not_train_counts_for_nothing(checkout):
    """A link to nothing is what an editor leaves beside a file that is open."""
    before = sources_digest(checkout)
    for name in ('README.md', 'eval/c.py', 'lm/model/__pycache__/a.pyc', 'tests/d.py'):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text('another line')
    (checkout / 'lm/model/.#a.py').symlink_to('nobody@nowhere')
    assert sources_digest(checkout) == before


def test_a_checkout_without_git_has_a_digest_alone(monkeypatch):
    monkeypatch.setattr(code, 'git_commit', lambda: 'unknown')
    running_code.cache_clear()
    try:
        now = running_code()
        assert now == {'commit': 'unknown', 'sources': sources_digest(code.ROOT)}
        assert describe_code(now) == f'code without git (sources {now["sources"][:8]})'
        assert find_other_code([{'step': 0, **now}], {}) is None
        assert find_other_code(None, {'git_commit': 'a' * 40}) is None
    finally:
        running_code.cache_clear()


def test_the_sources_decide_and_a_commit_only_of_a_run_of_before(monkeypatch):
    now = {'commit': 'b' * 40, 'sources': '1' * 16}
    monkeypatch.setattr(code, 'running_code', lambda: now)
    other = {'step': 3, 'commit': 'b' * 40 + '-dirty', 'sources': '2' * 16}
    mine = {'step': 0, 'commit': 'a' * 40, 'sources': '1' * 16}
    assert find_other_code([mine, other], {}) == other
    assert find_other_code([other, mine], {'git_commit': 'a' * 40}) is None
    assert find_other_code([], {'git_commit': 'b' * 40}) is None
    assert find_other_code([], {'git_commit': 'c' * 40}) == {'commit': 'c' * 40}
    for nothing in ({}, {'git_commit': 'unknown'}, {'git_commit': 3}):
        assert find_other_code(None, nothing) is None
    for damaged in ('text', [3], [{'sources': 3}], {'sources': '2'}):
        assert find_other_code(damaged, {}) is None
    assert describe_code(other) == 'commit bbbbbbbb with uncommitted changes (sources 22222222)'
    words = summarize_codes([other, None, {'commit': 'c' * 40}, other])
    assert words == f'2 by {describe_code(other)}, 1 by commit cccccccc'
    assert summarize_codes([None, None]) == ''
