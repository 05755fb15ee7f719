"""Reference: globs of paths, against the definition by recursion."""

import functools
import random

import pytest

from lm.data.globs import LONGEST, Pattern

SEGMENTS = ['*', '**', 'a*', '*b', '?', '[ab]', '[!a]x', 'ab', 'a?b*', '[a-c]*', '**x', '{a,*b}']


def expand(pattern):
    """The patterns of one with braces that do not nest."""
    head, brace, rest = pattern.partition('{')
    if not brace:
        return [pattern]
    inner, _, tail = rest.partition('}')
    return [head + one + end for one in inner.split(',') for end in expand(tail)]


@functools.cache
def is_match(pattern, path):
    """Tries every way: exponential but for what is cached."""
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
        inner, rest = pattern[1:].split(']', 1)
        letters = inner.removeprefix('!').replace('a-c', 'abc')
        is_in = path != '' and path[0] != '/' and (path[0] in letters) != inner.startswith('!')
        return is_in and is_match(rest, path[1:])
    is_same = path != '' and (pattern[0] == path[0] or (pattern[0] == '?' and path[0] != '/'))
    return is_same and is_match(pattern[1:], path[1:])


def test_reference_globs():
    rng, n_matches = random.Random(0), 0
    for _ in range(3000):
        pattern = '/'.join(rng.choices(SEGMENTS, k=rng.randrange(1, 5)))
        names = [''.join(rng.choices('abx', k=rng.randrange(1, 4))) for _ in range(4)]
        path = '/'.join(names[: rng.randrange(1, 5)])
        wanted = any(is_match(one, path) for one in expand(pattern))
        assert Pattern(pattern).fullmatch(path) == wanted, (pattern, path)
        assert not wanted or path.startswith(Pattern(pattern).prefix)
        n_matches += wanted
    assert n_matches > 200


@pytest.mark.parametrize(
    ('pattern', 'path', 'wanted'),
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
def test_reference_single_globs(pattern, path, wanted):
    assert Pattern(pattern).fullmatch(path) == wanted


def test_errors_of_a_glob_that_is_too_long():
    with pytest.raises(ValueError, match=f'longer than {LONGEST} characters'):
        Pattern('a' * (LONGEST + 1))
