"""What a person sees of a run while it trains."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_WIDTH = 160


def quiet_libraries() -> None:
    """Of Orbax, which tells of each file and logs a traceback of each error that it then raises,
    nothing is shown; of other libraries warnings are. A --verbosity that was given is obeyed.
    """
    if not flags.FLAGS['verbosity'].present:
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_logger().addFilter(lambda record: '/orbax/' not in record.pathname)


class Terminal:
    """Live progress where a person watches, one plain line a row otherwise; silent: nothing."""

    def __init__(self, silent: bool = False):
        watched, self._silent = sys.stdout.isatty(), silent
        width = None if watched else LOG_WIDTH
        self.console = Console(highlight=False, width=width, quiet=silent)
        self._progress = None

    @contextlib.contextmanager
    def live(self, steps: int, step: int) -> Iterator[None]:
        """Shows the progress from `step` on while a person watches."""
        if self._silent or not self.console.is_terminal:
            yield
            return
        self._progress = Progress(
            TextColumn('step'),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn('{task.fields[line]}'),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task('', total=steps, completed=step, line='')
        with self._progress:
            yield

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def row(self, row: dict[str, Any], steps: int) -> None:
        line = (
            f'loss {row["loss"]:.4f}  {row["tokens_per_sec"]:,.0f} tokens/s  mfu {row["mfu"]:.1%}'
        )
        if self._progress:
            self._progress.update(self._task, completed=row['step'], line=line)
            return
        left = (steps - row['step']) * row['step_sec'] / 60
        self.say(f'step {row["step"]:>6} of {steps}  {line}  {left:.1f} min left')

    def diverged(self, reason: str) -> None:
        """A run has ended at a step that was not finite."""
        self.say(f'DIVERGED: {reason}')


class CellTerminal(Terminal):
    """What a run of a sweep says: its events, each with its name, and no rows."""

    def __init__(self, name: str, say: Callable[[str], None]):
        self._name, self._say = name, say

    def say(self, text: str) -> None:
        if not text.startswith('step '):
            self._say(f'{self._name}: {text}')

    def row(self, row: dict[str, Any], steps: int) -> None:
        """Rows of many runs would bury the events."""

    def diverged(self, reason: str) -> None:
        self._say(f'{self._name} diverged: {reason}')
