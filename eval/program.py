"""How the programs of this room start and fail."""

import sys
from collections.abc import Callable

from absl import flags, logging


def run_main(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """`main` for absl's app.run: quiet libraries, and bad input as one line, not a traceback."""

    def wrapped(argv: list[str]) -> None:
        if not flags.FLAGS['verbosity'].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells of each file at INFO
        try:
            main(argv)
        except (ValueError, OSError) as error:
            print(f'error: {error}', file=sys.stderr)
            sys.exit(1)

    return wrapped
