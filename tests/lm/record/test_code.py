"""Property: a digest of the sources distinguishes code, and notes of a run name it."""

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
def test_edited_training_code_changes_digest(checkout, name):
    before = sources_digest(checkout)
    (checkout / name).write_text('another line')
    assert sources_digest(checkout) != before


def test_moved_file_changes_digest(checkout):
    before = sources_digest(checkout)
    (checkout / 'lm/model/a.py').rename(checkout / 'lm/a.py')
    assert sources_digest(checkout) != before


def test_other_files_do_not_change_digest(checkout):
    """Editors leave a dangling link beside an open file."""
    before = sources_digest(checkout)
    for name in ('README.md', 'eval/c.py', 'lm/model/__pycache__/a.pyc', 'tests/d.py'):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text('another line')
    (checkout / 'lm/model/.#a.py').symlink_to('nobody@nowhere')
    assert sources_digest(checkout) == before


def test_checkout_without_git_has_only_digest(monkeypatch):
    monkeypatch.setattr(code, 'git_commit', lambda: 'unknown')
    running_code.cache_clear()
    try:
        current = running_code()
        assert current == {'commit': 'unknown', 'sources': sources_digest(code.ROOT)}
        assert describe_code(current) == f'code without git (sources {current["sources"][:8]})'
        assert find_other_code([{'step': 0, **current}], {}) is None
        assert find_other_code(None, {'git_commit': 'a' * 40}) is None
    finally:
        running_code.cache_clear()


def test_sources_identify_code_and_commits_only_old_runs(monkeypatch):
    current = {'commit': 'b' * 40, 'sources': '1' * 16}
    monkeypatch.setattr(code, 'running_code', lambda: current)
    other_code = {'step': 3, 'commit': 'b' * 40 + '-dirty', 'sources': '2' * 16}
    same_code = {'step': 0, 'commit': 'a' * 40, 'sources': '1' * 16}
    assert find_other_code([same_code, other_code], {}) == other_code
    assert find_other_code([other_code, same_code], {'git_commit': 'a' * 40}) is None
    assert find_other_code([], {'git_commit': 'b' * 40}) is None
    assert find_other_code([], {'git_commit': 'c' * 40}) == {'commit': 'c' * 40}
    for summary in ({}, {'git_commit': 'unknown'}, {'git_commit': 3}):
        assert find_other_code(None, summary) is None
    for damaged in ('text', [3], [{'sources': 3}], {'sources': '2'}):
        assert find_other_code(damaged, {}) is None
    assert (
        describe_code(other_code) == 'commit bbbbbbbb with uncommitted changes (sources 22222222)'
    )
    text = summarize_codes([other_code, None, {'commit': 'c' * 40}, other_code])
    assert text == f'2 by {describe_code(other_code)}, 1 by commit cccccccc'
    assert summarize_codes([None, None]) == ''
