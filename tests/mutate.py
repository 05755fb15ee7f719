"""Measures how many small faults, put into a file one at a time, its tests detect.

    uv run python -m tests.mutate modules/mlp.py [...] [--sample=20] [--seed=0]
    uv run python -m tests.mutate --since=HEAD~1

Works in copies of the project. Each fault is put in alone, followed by the tests that
`tests.touched --of` names for the file: the default tier and, with --full, the full tier if they
pass. Prints every undetected fault with its lines, then a table. With --since, faults are in lines
that differ from a commit, in the given files or in all that differ.

A survivor is a place to look at, not a verdict: some faults have no visible effect. Mutation tools
were tried: mutmut forks the process that runs tests, which JAX does not survive, and cosmic-ray's
operators swap no arguments and remove no statement, term or keyword.
"""

import argparse
import ast
import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import ROOT
from tests.touched import git, list_changed_files, read_project

LEFT_OUT = shutil.ignore_patterns('.git', '.venv', 'runs', '__pycache__', '*.egg-info')
PASSED = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED
SECONDS = 60  # that tests may take, on top of several times what they take without a fault
OPERATORS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPOUND = ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda | ast.UnaryOp


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A text with one fault. line: first line of the fault. kind: a kind of `faults`."""

    kind: str
    line: int
    text: str

    def diff(self, text: str) -> list[str]:
        """Returns the lines that differ from the text without the fault."""
        lines = difflib.unified_diff(text.splitlines(), self.text.splitlines(), n=0, lineterm='')
        return [line for line in list(lines)[2:] if not line.startswith('@@')]


def faults(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yields (kind, node, replacement) for each fault of a node, or of its test."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield 'comparison', node, _with(node, ops=[OPERATORS[type(op)]()])
        case ast.BoolOp():
            yield 'boolean', node, _with(node, op=OPERATORS[type(node.op)]())
            yield 'term', node, node.values[0]
        case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node):
            yield 'arithmetic', node, _with(node, op=OPERATORS[type(node.op)]())
            yield 'term', node, node.left
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield 'sign', node, node.operand
        case ast.Constant(value=bool()):
            yield 'constant', node, ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield 'constant', node, ast.Constant(node.value + 1)
        case ast.Call():
            yield from _call_faults(node)
        case ast.If() | ast.IfExp():
            yield 'condition', node.test, ast.UnaryOp(ast.Not(), node.test)
            yield 'guard', node.test, ast.Constant(False)
        case ast.comprehension(ifs=[test]):
            yield 'filter', test, ast.Constant(True)
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            yield 'return', node, ast.Return(ast.Constant(None))
        case ast.Raise() | ast.AugAssign() | ast.Continue() | ast.Expr(value=ast.Call()):
            yield 'statement', node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield 'statement', node, ast.Pass()


def _call_faults(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    if any(isinstance(value, ast.Starred) for value in node.args):
        return
    if len(node.args) == 1 and not node.keywords:
        yield 'call', node, node.args[0]
    if len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        yield 'arguments', node, _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    for keyword in node.keywords:
        remaining = [argument for argument in node.keywords if argument is not keyword]
        yield 'keyword', node, _with(node, keywords=remaining)


def _with(node: ast.AST, **fields) -> ast.AST:
    changed_node = copy.copy(node)
    for name, value in fields.items():
        setattr(changed_node, name, value)
    return changed_node


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(getattr(side, 'value', None), str) for side in sides)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def find_code(node: ast.AST) -> Iterator[ast.AST]:
    """Returns a node and all nodes below it, without code that does not run: annotations, and words
    of errors.
    """
    yield node
    for name, value in ast.iter_fields(node):
        if name in ('annotation', 'returns', 'exc'):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from find_code(child)


def mutants(text: str, lines: set[int] | None = None) -> list[Mutant]:
    """Returns all texts that differ by one fault, in some lines if these are given.

    Only the text of the node changes, so that comments and other lines remain.
    """
    starts, encoded = [0], text.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    by_text = {}
    for node in find_code(ast.parse(text)):
        for kind, place, replacement in faults(node):
            if lines is not None and place.lineno not in lines:
                continue
            start = starts[place.lineno - 1] + place.col_offset
            stop = starts[place.end_lineno - 1] + place.end_col_offset
            words = ast.unparse(ast.fix_missing_locations(replacement))
            words = f'({words})' if isinstance(replacement, COMPOUND) else words
            mutated = (encoded[:start] + words.encode() + encoded[stop:]).decode()
            with contextlib.suppress(SyntaxError):
                ast.parse(mutated)
                by_text.setdefault(mutated, Mutant(kind, place.lineno, mutated))
    return sorted(by_text.values(), key=lambda mutant: mutant.line)


def sample_mutants(mutants: Sequence[Mutant], number: int, seed: str) -> list[Mutant]:
    """Returns a sample of the mutants, the same for the same seed, in the order of lines."""
    chosen = random.Random(seed).sample(range(len(mutants)), min(number, len(mutants)))
    return [mutants[i] for i in sorted(chosen)]


class Project:
    """A copy of a project with one changed file at a time."""

    def __init__(self, root: Path, folder: Path):
        self.folder = folder
        shutil.copytree(root, folder, ignore=LEFT_OUT, symlinks=True)

    def outcome(self, file: str, text: str, commands: Sequence[Sequence[str]], seconds=None) -> str:
        """Returns 'killed', 'survived' or 'timeout' for test commands with another text in a file.

        The file is restored afterwards.
        """
        path = self.folder / file
        before = path.read_text()
        path.write_text(text)
        try:
            for command in commands:
                status = self.status(command, seconds)
                if status not in PASSED:
                    return 'timeout' if status is None else 'killed'
        finally:
            path.write_text(before)
        return 'survived'

    def status(self, command: Sequence[str], seconds: float | None) -> int | None:
        """Returns the exit status of a command; None if it times out, after killing all it has
        started.
        """
        quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=self.folder, start_new_session=True, **quiet)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def commands(tests: Sequence[str], full: bool) -> list[list[str]]:
    """Returns the pytest commands of the default tier, and of the full tier if requested."""
    start = [sys.executable, '-m', 'pytest', '-q', '-x', '-n', '0', '-p', 'no:cacheprovider']
    return [[*start, *tests], *([[*start, '-m', 'full', *tests]] if full else [])]


def differing_lines(root: Path, file: str, commit: str) -> set[int] | None:
    """Returns the numbers of lines that a commit lacks; None, for all, if git lacks the file."""
    if not git(root, 'ls-files', file):
        return None
    lines = set()
    for line in git(root, 'diff', '--unified=0', commit, '--', file):
        if hunk := re.match(r'@@ -\S+ \+(\d+)(?:,(\d+))? @@', line):
            lines |= set(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return lines


def run(
    root: Path, chosen: dict[str, tuple[list[str], list[Mutant]]], jobs: int, full: bool
) -> int:
    """Prints the outcome of the mutants of each file, {file: (its tests, mutants)}.

    Returns the number of survivors. Raises SystemExit if tests fail without a fault.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)  # where someone interrupts it
        projects = queue.SimpleQueue()
        for i in range(jobs):
            projects.put(Project(root, Path(folder) / f'project_{i}'))

        def outcome(file, text, pytest_commands, seconds=None):
            project = projects.get()
            try:
                return project.outcome(file, text, pytest_commands, seconds)
            finally:
                projects.put(project)

        for file, (tests, faulty) in chosen.items():
            text, pytest_commands, start = (
                (root / file).read_text(),
                commands(tests, full),
                time.monotonic(),
            )
            if outcome(file, text, pytest_commands) != 'survived':
                raise SystemExit(
                    f'{file}: tests fail without a fault: {shlex.join(pytest_commands[-1])}'
                )
            limit = SECONDS + 5 * (time.monotonic() - start)
            counts = collections.Counter()
            test_mutant = functools.partial(
                outcome, file, pytest_commands=pytest_commands, seconds=limit
            )
            outcomes = pool.map(test_mutant, [mutant.text for mutant in faulty])
            for mutant, result in zip(faulty, outcomes, strict=True):
                counts[result] += 1
                if result == 'survived':
                    print(f'{file}:{mutant.line}: {mutant.kind}', *mutant.diff(text), sep='\n')
            rows.append((file, len(faulty), counts))
            print(f'{file}: {dict(counts)} by {" ".join(tests)}', flush=True)
    print('\n| file | faults | seen | of these, by running too long | not seen |')
    print('|---|---|---|---|---|')
    for file, number, counts in rows:
        print(f'| {file} | {number} | {number - counts["survived"]} | {counts["timeout"]} ', end='')
        print(f'| {counts["survived"]} |')
    survived, number = sum(row[2]['survived'] for row in rows), sum(row[1] for row in rows)
    print(f'\nof {number} faults in {len(rows)} files, {number - survived} were seen')
    return survived


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='tests.mutate', description=__doc__.splitlines()[0])
    parser.add_argument('files', nargs='*', help='of the product')
    parser.add_argument('--since', metavar='COMMIT', help='lines that differ from it alone')
    parser.add_argument('--sample', type=int, default=10, help='faults of each file')
    parser.add_argument('--seed', default='0', help='another one, another sample')
    parser.add_argument('--full', action='store_true', help='the full tier too')
    parser.add_argument('--jobs', type=int, default=1, help='tests at once')
    parser.add_argument('--list', action='store_true', help='shows the faults and runs nothing')
    arguments = parser.parse_args(argv)
    selector = read_project()
    files = arguments.files or (
        list_changed_files(ROOT, arguments.since) if arguments.since else []
    )
    files = [file for file in files if file in selector.nearest.product]
    if not files:
        parser.error('names no file of the product that is Python; give some, or --since=COMMIT')
    chosen = {}
    for file in files:
        lines = differing_lines(ROOT, file, arguments.since) if arguments.since else None
        text = (ROOT / file).read_text()
        faulty = sample_mutants(mutants(text, lines), arguments.sample, f'{arguments.seed} {file}')
        if faulty:
            chosen[file] = (selector.nearest.rank_tests(file), faulty)
        if arguments.list:
            for mutant in faulty:
                print(f'{file}:{mutant.line}: {mutant.kind}', *mutant.diff(text), sep='\n')
    return 0 if arguments.list else bool(run(ROOT, chosen, arguments.jobs, arguments.full))


if __name__ == '__main__':
    sys.exit(main())
