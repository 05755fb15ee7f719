"""How the programs of this room start and fail."""

import signal
import sys
from collections.abc import Callable

from lm.run.terminal import quiet_libraries


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
            sys.exit(1)

    return wrapped
