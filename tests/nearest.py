"""The tests of a product file: the file's own test by name, or the tests that use it most
directly.
"""

import collections
import functools
import re
from pathlib import PurePosixPath

from tests.dependencies import Dependencies

ROOMS = ('eval', 'lm', 'modules', 'tpu', 'train.py')
MOST = 4  # tests of a file that has none of its own name
SHARE = 0.25  # of the best one's score, below which a test is another file's


class Nearest:
    """Finds the tests of a file in a project."""

    def __init__(self, dependencies: Dependencies, tests: frozenset[str]):
        self.sources, self.readers, self.tests = dependencies.sources, dependencies.readers, tests
        self.product = {path for path in self.sources.python if path.split('/')[0] in ROOMS}

    def rank_tests(self, file: str) -> list[str]:
        """Returns test files, the nearest first.

        These are the test with the file's name in its folder; otherwise the tests that use the
        file's definitions, or the definitions of a file that uses it, and so on; otherwise the
        tests that read it, as by a command, and read the fewest other files. Empty if no test does.
        """
        if (test_file := own_test(file)) in self.tests:
            return [test_file]
        frontier, visited = {file}, {file}
        while frontier:
            if scores := {
                test: score for test in self.tests if (score := self.score(test, frontier))
            }:
                return self.best(scores, file)
            frontier = {
                user for user in self.product for used in frontier if self.uses[user][used]
            } - visited
            visited |= frontier
        reading = {path.partition('::')[0] for path in self.readers.get(file, ())} & self.tests
        return self.best({test: 1 / self.read_by[test] for test in reading}, file)

    def score(self, test: str, files: set[str]) -> float:
        """Returns the share of the files in all product names that a test uses."""
        uses = self.uses[test]
        return sum(uses[file] for file in files) / max(1, uses.total())

    def best(self, scores: dict[str, float], file: str) -> list[str]:
        """Returns the tests by score, then by the number of words that their path shares with a
        file's.
        """
        words, by_words = set(re.findall(r'[a-z]+', file)) - {'py'}, {}
        for test, score in scores.items():
            by_words[test] = score * (1 + len(words & set(re.findall(r'[a-z]+', test)))) ** 2
        order = sorted(scores, key=lambda test: (-by_words[test], test))
        return [test for test in order if by_words[test] >= SHARE * by_words[order[0]]][:MOST]

    @functools.cached_property
    def uses(self) -> dict[str, collections.Counter]:
        """Returns {file: {product file: how often the first uses a name that the second
        defines}}.
        """
        return {path: self._used_in(path) for path in self.product | self.tests}

    @functools.cached_property
    def read_by(self) -> collections.Counter:
        """Returns {file: number of product files that it reads}."""
        pairs = [(reader, path) for path, paths in self.readers.items() for reader in paths]
        return collections.Counter(
            reader.partition('::')[0] for reader, path in pairs if path in self.product
        )

    def _used_in(self, path: str) -> collections.Counter:
        meant, uses = self.sources.read_imports(path), collections.Counter()
        for name in meant.values():
            uses[self.sources.origin(name)[0]] += 1
        for name, count in self.sources.summary(path).body.names.items():
            first, _, attributes = name.partition('.')
            if first in meant:
                name = f'{meant[first]}.{attributes}' if attributes else meant[first]
                uses[self.sources.origin(name)[0]] += count
        return collections.Counter({file: n for file, n in uses.items() if file in self.product})


def own_test(file: str) -> str:
    """Returns the path of a file's test by name: tests/lm/run/test_wave.py for lm/run/wave.py."""
    path = PurePosixPath('tests') / file
    return str(path.with_name(f'test_{path.stem.strip("_")}.py'))
