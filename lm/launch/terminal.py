"""The terminal of a run: live progress, or lines of a log."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_WIDTH = 160


def quiet_libraries() -> None:
    """Hides what libraries log below warnings, and all of Orbax, which logs every file and the
    traceback of each error that it then raises. A given --verbosity has precedence.
    """
    if not flags.FLAGS['verbosity'].present:
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_logger().addFilter(lambda record: '/orbax/' not in record.pathname)


class Terminal:
    """Live progress where a person watches, one plain line a row otherwise; silent: nothing."""

    def __init__(self, silent: bool = False):
        width = None if sys.stdout.isatty() else LOG_WIDTH
        self.console = Console(highlight=False, width=width, quiet=silent)
        self._silent, self._progress = silent, None

    @contextlib.contextmanager
    def show_progress(self, steps: int, step: int) -> Iterator[None]:
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

    def show_row(self, row: dict[str, Any], steps: int) -> None:
        step, rate = row['step'], row['tokens_per_sec']
        mfu = 'unknown' if math.isnan(row['mfu']) else f'{row["mfu"]:.1%}'
        line = f'loss {row["loss"]:.4f}  {rate:,.0f} tokens/s  mfu {mfu}'
        if self._progress:
            self._progress.update(self._task, completed=step, line=line)
            return
        left = (steps - step) * row['step_sec'] / 60
        self.say(f'step {step:>6} of {steps}  {line}  {left:.1f} min left')

    def show_divergence(self, reason: str) -> None:
        self.say(f'DIVERGED: {reason}')


class CellTerminal(Terminal):
    """Shows the events of a run of a sweep, with its name; rows of many runs would bury them."""

    def __init__(self, name: str, say: Callable[[str], None]):
        self._name, self._say = name, say

    def say(self, text: str) -> None:
        if not text.startswith('step '):
            self._say(f'{self._name}: {text}')

    def show_row(self, row: dict[str, Any], steps: int) -> None:
        pass

    def show_divergence(self, reason: str) -> None:
        self._say(f'{self._name} diverged: {reason}')
