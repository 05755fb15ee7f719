"""Flags for suites: --suite=NAME[,NAME[:VALUE]] and --NAME.OPTION=VALUE."""

import dataclasses
import sys
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from eval.console.listings import first_sentence, format_bounds
from eval.suites import SUITES
from eval.suites.base import Suite
from lm.config.suggestions import parse_literal
from lm.launch.before_jax import docstring
from lm.launch.command import parse_flags
from lm.launch.exit_status import BAD_INPUT
from lm.record.digests import hash_record
from modules.choices import choose, suggest_nearest
from modules.options import OptionDeclaration, coerce_type, declared_options

flags.disclaim_key_flags()  # flags defined here belong to the program that defines suites

DIGITS = 8  # of the digest of options in file names


@dataclasses.dataclass(frozen=True)
class SuiteRequest:
    """A suite with a value for each of its options.

    label: the name of its results: the suite's name, and its VALUE if --suite gives it.
    """

    name: str
    label: str
    options: Mapping[str, Any]

    @property
    def suite(self) -> Suite:
        return SUITES[self.name]

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the options."""
        return hash_record(dict(self.options))[:DIGITS]


class OptionParser(flags.ArgumentParser):
    """Parses the value of an option, and checks its type and bounds."""

    def __init__(self, path: str, declared: OptionDeclaration):
        super().__init__()
        self.path, self.declared = path, declared
        self.syntactic_help = format_bounds(declared.option)

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # the default
        return parse_value(self.path, argument, self.declared)


def parse_value(path: str, text: str, declared: OptionDeclaration) -> Any:
    """Returns the value of an option from text.

    Args:
      path: NAME.OPTION, for errors.
      text: of the flag.
      declared: types and bounds of the option.

    Raises:
      ValueError: if the option cannot have the value.
    """
    if types.NoneType in declared.types and text == 'None':
        return None
    value: Any = text
    if str not in declared.types:
        is_true = {'true': True, 'false': False}.get(text.lower())
        value = parse_literal(text) if is_true is None else is_true
    value = coerce_type(f'--{path}', value, declared.types)
    if value is not None:
        declared.option.check(f'--{path}', value)
    return value


def define_suites(default: str | None = None) -> flags.FlagHolder[str | None]:
    """Defines --suite, and --NAME.OPTION for each option of each suite. Returns --suite."""
    names = (f'{name}:{row.argument.upper()}'.rstrip(':') for name, row in SUITES.items())
    text = f'Suites, separated by commas: {", ".join(names)}. A :VALUE sets that option.'
    holder = flags.DEFINE_string('suite', default, text)
    for name, suite in SUITES.items():
        for option, declared in declared_options(suite.function).items():
            path = f'{name}.{option}'
            description = declared.option.description + (
                ' (NAME:VALUE)' if option == suite.argument else ''
            )
            parser = OptionParser(path, declared)
            flag = flags.Flag(
                parser,
                None,
                path,
                declared.default,
                description,
                boolean=bool in declared.types,
            )
            flags.DEFINE_flag(flag)
    return holder


def parse_suite_flags(argv: list[str]) -> list[str]:
    """Parses flags like `parse_flags`. An unknown option of a suite exits with the nearest name."""
    try:
        check_options(argv)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(BAD_INPUT)
    return parse_flags(argv)


def check_options(argv: Sequence[str]) -> None:
    """Raises ValueError for flags --NAME.OPTION that no suite has, with the nearest name."""
    arguments = argv[1 : argv.index('--') if '--' in argv else None]
    for argument in arguments:
        flag = argument.lstrip('-').partition('=')[0]
        name, dot, option = flag.partition('.')
        if not argument.startswith('--') or not dot:
            continue
        # absl spells a false flag --noNAME.OPTION.
        name = name.removeprefix('no') if name not in SUITES else name
        if name not in SUITES:
            hint = suggest_nearest(name, SUITES)
            raise ValueError(f'--{flag}: no suite is named {name!r}.{hint}')
        suite_options = declared_options(SUITES[name].function)
        if option not in suite_options:
            raise ValueError(
                f'--{flag}: the suite {name} has no option {option!r}. '
                f'Its options: {", ".join(suite_options) or "none"}.'
                f'{suggest_nearest(option, suite_options)}'
            )


def read_option_flags() -> dict[str, Any]:
    """Returns {'NAME.OPTION': value} of the flags on the command line."""
    paths = [
        f'{name}.{option}' for name in SUITES for option in declared_options(SUITES[name].function)
    ]
    return {path: flags.FLAGS[path].value for path in paths if flags.FLAGS[path].present}


def read_suites(text: str, option_values: Mapping[str, Any]) -> list[SuiteRequest]:
    """Returns the suites of --suite=NAME[,NAME[:VALUE]] with their options.

    Text after a comma that is not a suite's name belongs to the VALUE before it.

    Args:
      text: of --suite.
      option_values: by 'NAME.OPTION'; other options have their defaults.

    Raises:
      ValueError: for an unknown suite, with the nearest name; a value for a suite that takes none;
        a suite that occurs twice; and an option of a suite that is not in `text`.
    """
    requests = [read_suite(piece, option_values) for piece in split_suites(text)]
    duplicates = [
        label for label, n in Counter(request.label for request in requests).items() if n > 1
    ]
    if duplicates:
        raise ValueError(f'--suite names {duplicates[0]} twice; name each suite once')
    names = {request.name for request in requests}
    for path in option_values:
        if path.partition('.')[0] not in names:
            raise ValueError(
                f'--{path} belongs to a suite that --suite={text} does not run. Add the suite, or '
                'leave out the option.'
            )
    return requests


def split_suites(text: str) -> list[str]:
    """Returns the NAME or NAME:VALUE of each suite of a text."""
    pieces: list[str] = []
    for piece in text.split(','):
        # A comma inside VALUE: the text after it is not the name of a suite.
        is_continuation = (
            pieces and ':' in pieces[-1] and piece.partition(':')[0].strip() not in SUITES
        )
        if is_continuation:
            pieces[-1] += f',{piece}'
        else:
            pieces.append(piece.strip())
    return pieces


def read_suite(piece: str, option_values: Mapping[str, Any]) -> SuiteRequest:
    """Reads NAME or NAME:VALUE."""
    name, colon, value = piece.partition(':')
    suite = choose(SUITES, name, '--suite')
    suite_options = declared_options(suite.function)
    values = {
        option: option_values.get(f'{name}.{option}', declared.default)
        for option, declared in suite_options.items()
    }
    if colon and not suite.argument:
        raise ValueError(
            f'--suite={piece}: {name} takes no value after a colon. Its options: '
            f'{", ".join(f"--{name}.{option}" for option in suite_options) or "none"}.'
        )
    if colon:
        path = f'{name}.{suite.argument}'
        if path in option_values:
            raise ValueError(f'--suite={piece} and --{path} both set {path}; leave one out')
        values[suite.argument] = parse_value(path, value, suite_options[suite.argument])
    return SuiteRequest(name, piece, values)


def format_suites() -> str:
    """Returns a line for each suite: its name, and the first sentence of its docstring."""
    width = max(map(len, SUITES))
    lines = [(name, first_sentence(docstring(suite.function))) for name, suite in SUITES.items()]
    return '\n'.join(f'  {name:{width}}  {summary}' for name, summary in lines)
