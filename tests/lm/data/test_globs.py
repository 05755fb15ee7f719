"""Reference: globs of paths against a recursive definition; globs of files against `glob`."""

import functools
import glob
import random
from pathlib import Path

import pytest

from lm.data.globs import MAX_LENGTH, Pattern, find_files

SEGMENTS = ['*', '**', 'a*', '*b', '?', '[ab]', '[!a]x', 'ab', 'a?b*', '[a-c]*', '**x', '{a,*b}']


def expand(pattern):
    """Returns the patterns without braces that a pattern with unnested braces stands for."""
    head, brace, remainder = pattern.partition('{')
    if not brace:
        return [pattern]
    inner, _, tail = remainder.partition('}')
    return [head + alternative + end for alternative in inner.split(',') for end in expand(tail)]


@functools.cache
def is_match(pattern, path):
    """Tries all possibilities, with a cache."""
    if not pattern:
        return not path
    if pattern.startswith('**/'):
        tails = [path, *(path[i + 1 :] for i, c in enumerate(path) if c == '/')]
        return any(is_match(pattern[3:], tail) for tail in tails)
    if pattern.startswith('**'):
        return any(is_match(pattern[2:], path[i:]) for i in range(len(path) + 1))
    if pattern[0] == '*':
        segment = path.partition('/')[0]
        return any(is_match(pattern[1:], path[i:]) for i in range(len(segment) + 1))
    if pattern[0] == '[':
        inner, remainder = pattern[1:].split(']', 1)
        letters = inner.removeprefix('!').replace('a-c', 'abc')
        is_in = path != '' and path[0] != '/' and (path[0] in letters) != inner.startswith('!')
        return is_in and is_match(remainder, path[1:])
    is_same = path != '' and (pattern[0] == path[0] or (pattern[0] == '?' and path[0] != '/'))
    return is_same and is_match(pattern[1:], path[1:])


def test_reference_globs():
    rng, n_matches = random.Random(0), 0
    for _ in range(3000):
        pattern = '/'.join(rng.choices(SEGMENTS, k=rng.randrange(1, 5)))
        names = [''.join(rng.choices('abx', k=rng.randrange(1, 4))) for _ in range(4)]
        path = '/'.join(names[: rng.randrange(1, 5)])
        expected = any(is_match(alternative, path) for alternative in expand(pattern))
        assert Pattern(pattern).fullmatch(path) == expected, (pattern, path)
        assert not expected or path.startswith(Pattern(pattern).prefix)
        n_matches += expected
    assert n_matches > 200


@pytest.mark.parametrize(
    ('pattern', 'path', 'expected'),
    [
        ('a/**/b*.parquet', 'a/b1.parquet', True),
        ('a/**/b*.parquet', 'a/c/d/b.parquet', True),
        ('a/*.parquet', 'a/b/c.parquet', False),
        ('a.b', 'a-b', False),
        ('a/?.[x', 'a/b.[x', True),  # without its other bracket it is a character
        ('{a,{b,c}d}/*', 'cd/x', True),
        ('{a,{b,c}d}/*', 'c/x', False),
        ('a/{b', 'a/{b', True),
        ('a/{b,c', 'a/{b,c', True),
        ('a}/{b}', 'a}/{b}', True),
        ('{**/,x}b', 'a/c/b', True),
        ('*', '', True),
        ('a\nb*', 'a\nbc', True),
    ],
)
def test_reference_single_globs(pattern, path, expected):
    assert Pattern(pattern).fullmatch(path) == expected


def test_errors_too_long_glob():
    with pytest.raises(ValueError, match=f'longer than {MAX_LENGTH} characters'):
        Pattern('a' * (MAX_LENGTH + 1))


GLOBS = ['*', '**', '**/*', '**/*.txt', '*/*.txt', '**/b/**', '**/b/*', '**/**', 'c[[]1]/**']
GLOBS += ['.h/**', '**/.h/*', 'b/**/x.txt', './**/x.*', '**/', 'nowhere/**', '**/[xy].txt', '*.*']


@pytest.mark.parametrize('root', ['', 'absolute'])
def test_reference_files_without_links(root, tmp_path, monkeypatch):
    """The same names in the same order, because these determine the digest of prepared data."""
    rng = random.Random(0)
    folders = ['a', 'b', 'a/b', 'a/b/b', 'b/a/b', '.h/a', 'a/.h', 'c[1]/b', 'ab']
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for folder in ['.', *folders]:
        for name in rng.sample(['x.txt', 'y.txt', '.z.txt', 'x.md', 'b'], k=3):
            if not (tmp_path / folder / name).is_dir():
                (tmp_path / folder / name).touch()
    monkeypatch.chdir(tmp_path)
    for pattern in GLOBS:
        pattern = f'{tmp_path}/{pattern}' if root else pattern
        expected = {p for p in map(Path, sorted(glob.glob(pattern, recursive=True))) if p.is_file()}
        assert expected or pattern.endswith(('**/', 'nowhere/**', '**/b/*'))
        matches = find_files(pattern)
        assert [*matches.files] == sorted(expected, key=str), pattern
        assert matches.duplicates == ()
