"""The answers of train.py to published command lines of other programs, followed to their end.

python -m tests.lm.config.published    writes published_answers.md anew
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from absl.testing import flagsaver

import train
from lm.config.fields import FIELDS
from lm.config.resolve import resolve
from lm.config.suggestions import check_flags
from lm.launch.command import check_names, parse_flags
from lm.model.check import check
from lm.study.plan.cells import split_sweep

FOLDER = Path(__file__).parent
SNAPSHOT = FOLDER / 'published_answers.md'
CONFIG = '--config=configs/default.py'
REFUSED = re.compile(
    r'^(.*?) (?:is not a flag|are not flags) here\.(?: A similar name .*)?$', re.MULTILINE
)
BUT = re.compile(r'(\S+) is not a flag here\. Its counterpart is \S+, but ')


class Published(NamedTuple):
    """A command line of another program."""

    program: str
    place: str
    arguments: str


class Walk(NamedTuple):
    """The answers to a command line, each given after the advice of the one before, and the end.

    last: the arguments that have no answer. unanswered: those that an answer gives no advice on.
    """

    answers: tuple[str, ...]
    last: tuple[str, ...]
    unanswered: tuple[str, ...]


def read_commands() -> Iterator[Published]:
    """Yields the command lines of published_commands.toml."""
    table = tomllib.loads((FOLDER / 'published_commands.toml').read_text(encoding='utf-8'))
    for page in table['pages']:
        for arguments in page['commands']:
            yield Published(page['program'], page['place'], arguments)


def split_arguments(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the arguments: a flag with its values, or a word before any flag."""
    arguments: list[tuple[str, ...]] = []
    for word in words:
        is_value = arguments and arguments[-1][0].startswith('-') and '=' not in arguments[-1][0]
        if is_value and not word.startswith('--') and '=' not in word:
            arguments[-1] += (word,)
        else:
            arguments.append((word,))
    return arguments


def find_refusal(words: Sequence[str]) -> str:
    """Returns what train.py answers to arguments that it does not take; '' if it takes them."""
    try:
        check_names(['train.py', *words])
        check_flags(['train.py', *words], FIELDS)
    except ValueError as error:
        return str(error)
    return ''


def follow(words: Sequence[str], answer: str) -> tuple[str, ...]:
    """Returns the arguments that a reader of an answer gives next."""
    ours = [argument for argument in split_arguments(words) if not find_refusal(argument)]
    _, _, written = answer.rpartition('Write ')
    proposed = shlex.split(written) if 'Write ' in answer else []
    proposed += re.findall(r'Did you mean (--\S+)\?', answer)
    proposed += re.findall(r'^--\S+ may mean (--config\.\S+) or ', answer, re.MULTILINE)
    proposed += [f'--config={file}' for file in re.findall(r'such as (configs/\w+\.py)', answer)]
    return (*(word for argument in ours for word in argument), *proposed)


def walk(arguments: str) -> Walk:
    """Follows the answers to a command line, as often as it has arguments at most."""
    words: tuple[str, ...] = tuple(shlex.split(arguments))
    answers: list[str] = []
    while (answer := find_refusal(words)) and len(answers) <= len(words):
        answers.append(answer)
        words = follow(words, answer)
    text = '\n'.join(answers)
    refused = [name for names in REFUSED.findall(text) for name in names.split(', ')]
    return Walk(tuple(answers), words, (*refused, *BUT.findall(text)))


def list_proposals(answer: str) -> set[tuple[str, str]]:
    """Returns the (field, value) that an answer proposes, without placeholders such as SIZE."""
    pairs = re.findall(r"--config\.(\w+\.\w+)=([^\s,;']+)", answer)
    pairs = [(path, text.rstrip('?.')) for path, text in pairs]
    return {(path, text) for path, text in pairs if not re.search('[A-Z]{2}', text)}


def assert_trains(words: Sequence[str]) -> None:
    """Asserts that arguments parse, and that their config can be trained."""
    if not any(word.startswith('--config=') for word in words):
        words = (CONFIG, *words)
    arguments = ['train.py', *words]
    with flagsaver.flagsaver(), mock.patch.object(sys, 'argv', arguments):
        assert parse_flags(arguments) == ['train.py'], words
        check(resolve(split_sweep(train.CONFIG.value)[0]))


def render(walk_from: Callable[[str], Walk] = walk) -> str:
    """Returns the page of all command lines with their answers."""
    lines = ['# Answers to published command lines', '']
    program = ''
    for published in read_commands():
        if published.program != program:
            program = published.program
            lines += [f'## {program}', '']
        lines += [f'    train.py {published.arguments}', '']
        for answer in walk_from(published.arguments).answers:
            lines += [*(f'- {line}' for line in answer.splitlines()), '']
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.argv = ['train.py']
    SNAPSHOT.write_text(render(), encoding='utf-8')
