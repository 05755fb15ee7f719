"""The code that trains: its commit, and a digest of its sources, which reveals an edit.

A run keeps a list of entries {'step', 'commit', 'sources'}: the code that trained it from `step`
on. The first entry is the code that began the run, at step 0.
"""

import collections
import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.record.machine import ROOT, UNKNOWN, git_commit

PROGRAM, PACKAGES = 'train.py', ('lm', 'modules')  # the code that computes a step
DIGITS = 8  # of a commit and of a digest, in a message

Code = dict[str, Any]


@functools.cache  # read once: this process does not run files that change later
def running_code() -> Code:
    """Returns {'commit', 'sources'} of this process: `git_commit` and `sources_digest`."""
    return {'commit': git_commit(), 'sources': sources_digest(ROOT)}


def sources_digest(root: Path) -> str:
    """Returns a digest of the names and contents of the Python files that train (takes 10 ms)."""
    state = hashlib.blake2b(digest_size=8)
    for path in _list_sources(root):
        # Editors leave dangling links beside a file, and replace files by renaming: a listed path
        # may be unreadable.
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            state.update(f'{path.relative_to(root).as_posix()} {len(content)} '.encode() + content)
    return state.hexdigest()


def _list_sources(root: Path) -> Iterator[Path]:
    yield root / PROGRAM
    for package in PACKAGES:
        yield from sorted((root / package).rglob('*.py'))


def find_other_code(history: Any, summary: Mapping[str, Any]) -> Code | None:
    """Returns the last code that trained a run, if it is known and is not this process's code.

    Args:
      history: the list in the run's counters; None or empty if an older version trained it.
      summary: the run's summary.json; older versions recorded only the commit.
    """
    current = running_code()
    match history:
        case [*_, {'commit': str(), 'sources': str(sources)} as last]:
            return None if sources == current['sources'] else last
    commit = summary.get('git_commit')
    is_known = isinstance(commit, str) and UNKNOWN not in (commit, current['commit'])
    return {'commit': commit} if is_known and commit != current['commit'] else None


def extend_code_history(history: Sequence[Code], step: int) -> list[Code]:
    """Returns the history of a run that this process trains from `step` on."""
    current = running_code()
    if history and history[-1]['sources'] == current['sources']:
        return list(history)
    return [*history, {'step': step, **current}]


def summarize_codes(codes: Iterable[Code | None]) -> str:
    """Returns how many runs each code has trained, as text; '' if no run has another code."""
    counts = collections.Counter(describe_code(code) for code in codes if code is not None)
    return ', '.join(f'{n} by {description}' for description, n in counts.most_common())


def describe_code(code: Mapping[str, Any]) -> str:
    """Returns a text such as 'commit 1a2b3c4d with uncommitted changes (sources 9f8e7d6c)'."""
    commit, _, dirty = code['commit'].partition('-')
    description = 'code without git' if commit == UNKNOWN else f'commit {commit[:DIGITS]}'
    description += ' with uncommitted changes' if dirty else ''
    return (
        f'{description} (sources {code["sources"][:DIGITS]})' if 'sources' in code else description
    )
