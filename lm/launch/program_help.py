"""The --help of programs: summary and usage, the program's flags, and the rest of its text."""

import sys
import textwrap
from collections.abc import Sequence

from absl import flags

USAGE = ('    ', 'python -m ')  # how lines of usage begin in docstrings
REPEATED = '; repeat this option'  # what absl adds to the text of a flag
HELP_WIDTH, HELP_COLUMN = 98, 26  # characters of a line, and before the text of a flag


def print_program_help() -> None:
    """Prints the help of the running program and exits, if --help is given."""
    if {'-h', '-help', '--help'} & {*sys.argv[1:]}:
        print(format_help(sys.modules['__main__'].__doc__ or '', list_program_flags()))
        sys.exit()


def list_program_flags() -> list[flags.Flag]:
    """Returns the flags of the running program, without options of suites (NAME.OPTION)."""
    program_flags = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    return [flag for flag in program_flags if '.' not in flag.name]


def format_help(description: str, program_flags: Sequence[flags.Flag]) -> str:
    """Returns the help of a program: summary and usage, its flags, and the rest of the text.

    Args:
      description: docstring of the program.
      program_flags: its flags.
    """
    paragraphs = description.strip().split('\n\n')
    is_usage = [i == 0 or text.startswith(USAGE) for i, text in enumerate(paragraphs)]
    first_rest = is_usage.index(False) if False in is_usage else len(paragraphs)
    settings = {flag: _format_flag(flag) for flag in program_flags}
    column = min(max(map(len, settings.values()), default=0) + 2, HELP_COLUMN)
    lines = []
    for flag, setting in settings.items():
        indent = f'{setting:{column}}' if len(setting) < column else f'{setting}  '
        text = ' '.join((flag.help or '').split()).split(REPEATED)[0]
        lines += textwrap.TextWrapper(HELP_WIDTH, indent, ' ' * column).wrap(text) or [setting]
    blocks = [*paragraphs[:first_rest], '\n'.join(lines), *paragraphs[first_rest:]]
    return '\n\n'.join(filter(None, blocks))


def _format_flag(flag: flags.Flag) -> str:
    """Returns '  --name=DEFAULT', without the default if there is none."""
    if flag.boolean:
        return f'  --[no]{flag.name}' if flag.default else f'  --{flag.name}'
    default = ','.join(flag.default) if isinstance(flag.default, list) else flag.default
    if isinstance(default, float):
        default = f'{default:g}'
    is_short = isinstance(default, str | int) and default != ''
    return f'  --{flag.name}=' + (str(default) if is_short else '...')
