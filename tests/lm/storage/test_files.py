"""Property: home folders, errors that mean a full disk, and the names and texts in errors."""

import errno
import pwd

import jax
import pytest

from lm.storage.files import (
    check_output,
    describe_full_disk,
    expand_home,
    first_line,
    user_cache,
    write_text,
)


def test_tilde_is_home_folder(monkeypatch):
    monkeypatch.setenv('HOME', '/home/of_a_user')
    assert expand_home('~/x') == '/home/of_a_user/x' and expand_home('~') == '/home/of_a_user'
    for path in ('', 'x', './~', 'a/~b', 'gs://bucket/~a', '/~'):
        assert expand_home(path) == path


@pytest.mark.parametrize('path', ['~no_such_user', '~no_such_user/x'])
def test_unknown_home_is_refused(path):
    with pytest.raises(ValueError, match=rf"there is no user 'no_such_user'.*\./{path} for"):
        expand_home(path)


def test_error_without_home_names_cache_field(monkeypatch):
    """A container's user may be missing in /etc/passwd."""

    def getpwuid(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, 'getpwuid', getpwuid)
    monkeypatch.delenv('HOME', raising=False)
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    with pytest.raises(ValueError, match=r'HOME is not set.*data\.cache_dir, or XDG_CACHE_HOME'):
        user_cache()
    monkeypatch.setenv('XDG_CACHE_HOME', '/cache')
    assert str(user_cache()) == '/cache/evenkeel'


def test_output_needs_a_folder(tmp_path):
    check_output(tmp_path / 'plan.json', '--out')
    for path, message in (
        (tmp_path, r'^--out must be a file in a folder that exists; got .*, which is a folder\.'),
        (tmp_path / 'none' / 'p.json', r'^--out must be .*, but there is no folder .*/none\. Cr'),
    ):
        with pytest.raises(ValueError, match=message):
            check_output(path, '--out')


def make_error(cause: Exception) -> Exception:
    error = RuntimeError('words of a library')
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ('error', 'full'),
    [
        (OSError(errno.ENOSPC, 'any'), 'the disk that holds w is full'),
        (OSError(errno.EDQUOT, 'any'), 'the quota of the disk that holds w is used up'),
        (make_error(OSError(errno.ENOSPC, 'any')), 'the disk that holds w is full'),
        (
            ValueError('RESOURCE_EXHAUSTED: Error writing: No space left on device'),
            'the disk that holds w is full',
        ),
        (OSError(errno.EACCES, 'No space left on device'), ''),
        (make_error(OSError(errno.EIO, 'any')), ''),
        (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes'), ''),
        (OSError('the disk is full of holes'), ''),
    ],
)
def test_error_number_identifies_full_disk(error, full):
    assert describe_full_disk(error, 'w') == full


def test_error_names_the_file_that_was_to_be_written(tmp_path):
    """Not the temporary one, which replaces it at the end."""
    path = tmp_path / 'missing' / 'a.json'
    with pytest.raises(FileNotFoundError) as caught:
        write_text(path, 'x')
    assert caught.value.filename == str(path)


def test_errors_move_no_cursor():
    error = ValueError('a file\x1b[2J with \u2028, \ud800 and é\nin lines')
    assert first_line(error) == r'a file\x1b[2J with \u2028, \ud800 and é'
