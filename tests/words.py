"""Counts names and sentences that say little, so that a check can hold the counts.

    python -m tests.words lm modules eval tpu [--places]

Per 1,000 lines, names bound to a word that says nothing alone: EMPTY (`found`, `own`) and the
field's own, USUAL (`result`, `item`). Shares of functions that are a bare participle (`drawn`) or
have `of` in their name (`of_rms`). Per 1,000 words of docstrings, "what" as a noun. Classes that
are defined twice. In optax, nanodo, big_vision, equinox and torchtitan: 0.1 to 0.9 empty names, at
most 1.2% participles, 0.3% with "of" and 0.5 "what".
"""

import ast
import collections
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests import ROOT

EMPTY = frozenset(
    'found own one given asked said told there kept known shown made wanted others now least most '
    'then alone here back more rest each every both other these those how who where read seen '
    'drawn taken left'.split()
)
USUAL = frozenset(
    'res ret result results out output outputs tmp temp val vals item items obj data info stuff '
    'thing things elem element arr lst dct misc cur curr new old foo res_'.split()
)
# English that ends like a participle and is none.
NOUNS = frozenset('embed need speed feed seed then shed bed fed hidden token open'.split())
PARTICIPLE = re.compile(
    r'[a-z]+(ed|awn|own|ept|eld|aid|ade|old|ealt|ound|ought|iven|aken|een|oken)'
)
OF = re.compile(r'(^|_)of($|_)')
WHAT = re.compile(
    r'\b(?:of|by|in|with|is|are|to|from|on|and|has|have|says?|does|makes?) what\b|^What\b'
)


class Counts(NamedTuple):
    """Counts over files. classes: {name: the files that define it}."""

    lines: int
    functions: int
    docstring_words: int
    empty: collections.Counter[str]
    usual: collections.Counter[str]
    participles: list[str]
    with_of: list[str]
    what: int
    classes: dict[str, list[str]]

    @property
    def empty_per_1000_lines(self) -> float:
        return 1000 * self.empty.total() / self.lines

    @property
    def usual_per_1000_lines(self) -> float:
        return 1000 * self.usual.total() / self.lines

    @property
    def participle_percent(self) -> float:
        return 100 * len(self.participles) / self.functions

    @property
    def of_percent(self) -> float:
        return 100 * len(self.with_of) / self.functions

    @property
    def what_per_1000_words(self) -> float:
        return 1000 * self.what / max(self.docstring_words, 1)

    @property
    def defined_twice(self) -> dict[str, list[str]]:
        """Public classes with more than one definition."""
        return {
            name: paths
            for name, paths in self.classes.items()
            if len(paths) > 1 and not name.startswith('_')
        }


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yields the name that a node binds: a variable or an argument."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def count_words(sources: Iterable[tuple[str, str]]) -> Counts:
    """Counts over (path, source) pairs of Python files."""
    lines = functions = docstring_words = what = 0
    empty, usual = collections.Counter(), collections.Counter()
    participles, with_of, classes = [], [], collections.defaultdict(list)
    for path, source in sources:
        lines += source.count('\n')
        for node in ast.walk(ast.parse(source)):
            for name in bound_names(node):
                empty[name] += name in EMPTY
                usual[name] += name in USUAL
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name.strip('_')
                if not node.name.startswith('__'):
                    functions += 1
                    place = f'{path}:{node.lineno} {node.name}'
                    if PARTICIPLE.fullmatch(name) and name not in NOUNS:
                        participles.append(place)
                    if OF.search(name):
                        with_of.append(place)
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                docstring = ast.get_docstring(node) or ''
                docstring_words += len(docstring.split())
                what += len(WHAT.findall(docstring))
    return Counts(
        lines, functions, docstring_words, +empty, +usual, participles, with_of, what, dict(classes)
    )


def read_sources(roots: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (path, source) of the Python files below the roots, which are relative to the tree."""
    for root in roots:
        path = ROOT / root
        for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
            yield str(file.relative_to(ROOT)), file.read_text()


def main(arguments: list[str]) -> None:
    roots = [argument for argument in arguments if not argument.startswith('--')]
    counts = count_words(read_sources(roots))
    often = ', '.join(f'{name} {n}' for name, n in counts.empty.most_common(8))
    print(
        f'{counts.lines} lines: {counts.empty_per_1000_lines:.1f} empty names per 1,000 ({often}), '
        f'{counts.usual_per_1000_lines:.1f} usual ones\n'
        f'{counts.functions} functions: {counts.participle_percent:.1f}% bare participles, '
        f'{counts.of_percent:.1f}% with "of"\n'
        f'docstrings: {counts.what_per_1000_words:.1f} "what" per 1,000 words\n'
        f'defined twice: {", ".join(counts.defined_twice) or "no class"}'
    )
    for place in [*counts.participles, *counts.with_of] if '--places' in arguments else []:
        print(f'  {place}')


if __name__ == '__main__':
    main(sys.argv[1:])
