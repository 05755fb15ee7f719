"""How commands start, read their flags, and fail."""

import re
import signal
import sys
from collections.abc import Callable

from absl import flags

from lm.hints import check_flags, field_hint, flag_refusal
from lm.run.statuses import BAD_INPUT
from lm.run.terminal import quiet_libraries
from lm.sections import FIELDS


def run_main(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """`main` for absl's app.run: quiet libraries, and bad input as one line, not a traceback."""

    def wrapped(argv: list[str]) -> None:
        quiet_libraries()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a start may have set another
        try:
            main(argv)
        except KeyboardInterrupt:
            print('\nSIGINT', file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except (ValueError, OSError) as error:
            print(f'error: {error}', file=sys.stderr)
            sys.exit(BAD_INPUT)

    return wrapped


def parse_flags(argv: list[str]) -> list[str]:
    """absl's own parsing, but what is wrong with a flag of the config is one line."""
    try:
        check_flags(argv, FIELDS)
        return flags.FLAGS(argv)
    except flags.Error as error:
        match = re.match(r'flag --config\.([\w.]+)=(.*?): ', str(error), re.DOTALL)
        path, text = match.groups() if match else ('', '')
        said = flag_refusal(path, text, FIELDS[path].types) if path in FIELDS else str(error)
    except AttributeError as error:
        unknown = re.search(r'Key "(\w+)" does not exist', str(error))  # in the config file
        if unknown is None:
            raise  # another mistake in it: its traceback helps
        said = f'the config has no field {unknown[1]}.{field_hint(unknown[1], FIELDS)}'
    except ValueError as error:
        said = str(error)
    print(f'error: {said}', file=sys.stderr)
    sys.exit(BAD_INPUT)
