"""The terminal of a run: live progress, or lines of a log."""

import contextlib
import math
import sys
import textwrap
from collections.abc import Callable, Generator
from typing import Any

from absl import flags, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LOG_WIDTH = 160
BAR_WIDTH, MIN_BAR_WIDTH = 16, 4
# The longest text beside the bar, 'loss 10.8855  113,011 tokens/s  mfu 56.7%  23.8 min left', and
# two characters for the ^C that a terminal prints: if it breaks the line, a part stays visible.
ROW_WIDTH = 60


def quiet_libraries() -> None:
    """Hides log messages of libraries below warnings, and all messages of Orbax.

    Orbax logs every file, and the traceback of each error that it then raises. A given --verbosity
    has precedence.
    """
    if not flags.FLAGS['verbosity'].present:
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_logger().addFilter(lambda record: '/orbax/' not in record.pathname)


def format_duration(seconds: float) -> str:
    """Returns '45 s', '3.8 min' or '2.1 h'."""
    if seconds < 59.5:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.1f} min' if seconds < 3570 else f'{seconds / 3600:.1f} h'


def wrap_text(text: str, width: int) -> str:
    """Breaks lines that are longer than `width` between words, and indents their continuation.

    A longer word, such as a path, is not broken.
    """

    def wrap_line(line: str) -> str:
        indent = ' ' * (len(line) - len(line.lstrip()) + 2)
        options: dict[str, Any] = {'break_long_words': False, 'break_on_hyphens': False}
        return textwrap.fill(line, width, subsequent_indent=indent, **options)

    return '\n'.join(wrap_line(line) if len(line) > width else line for line in text.split('\n'))


def print_line(console: Console, text: str) -> None:
    """Prints a text without markup, wrapped between words if the console is a terminal."""
    text = wrap_text(text, console.width) if console.is_terminal else text
    console.print(text, markup=False, soft_wrap=True)


class Terminal:
    """Live progress on a terminal, one plain line for each row otherwise; silent: no output.

    Rows show tokens per second, MFU and the time left once an interval between rows is long enough
    to measure them: the first row contains the start of the program, and the last interval may be
    a few steps, whose time is mostly not their own.
    """

    def __init__(self, silent: bool = False):
        width = None if sys.stdout.isatty() else LOG_WIDTH
        self.console = Console(highlight=False, width=width, quiet=silent)
        self._silent, self._progress = silent, None
        self._logged_step: int | None = None
        self._longest_interval = 0

    @contextlib.contextmanager
    def show_progress(self, steps: int, step: int) -> Generator[None]:
        """Shows the progress bar from `step` on, on a terminal. It is removed at the end."""
        if self._silent or not self.console.is_terminal:
            yield
            return
        bar_width = min(BAR_WIDTH, self.console.width - len(f'step {steps}/{steps} ') - ROW_WIDTH)
        self._progress = Progress(
            TextColumn('step'),
            MofNCompleteColumn(),
            *([BarColumn(bar_width=bar_width)] if bar_width >= MIN_BAR_WIDTH else []),
            TextColumn('{task.fields[line]}'),
            console=self.console,
            transient=True,
        )
        self._task = self._progress.add_task('', total=steps, completed=step, line='')
        with self._progress:
            yield

    def say(self, text: str) -> None:
        """Prints a line."""
        print_line(self.console, text)

    def show_row(self, row: dict[str, Any], steps: int, remaining_sec: float) -> None:
        """Shows a logged row, in the progress bar or as a line.

        Args:
          row: the row.
          steps: the steps of the run.
          remaining_sec: estimated seconds until the run ends.
        """
        step = row['step']
        line = f'loss {row["loss"]:.4f}'
        if self._is_representative(step):
            mfu = 'unknown' if math.isnan(row['mfu']) else f'{row["mfu"]:.1%}'
            line += f'  {row["tokens_per_sec"]:,.0f} tokens/s  mfu {mfu}'
            if step < steps:
                line += f'  {format_duration(remaining_sec)} left'
        if self._progress:
            self._progress.update(self._task, completed=step, line=line)
        else:
            self.say(f'step {step:>6} of {steps}  {line}')

    def _is_representative(self, step: int) -> bool:
        """Returns whether the interval that ends at `step` is at least half the longest."""
        previous, self._logged_step = self._logged_step, step
        if previous is None:
            return False
        interval = step - previous
        self._longest_interval = max(interval, self._longest_interval)
        return 0 < self._longest_interval <= 2 * interval

    def show_divergence(self, reason: str) -> None:
        """Prints that the run diverged."""
        self.say(f'DIVERGED: {reason}')


class CellTerminal(Terminal):
    """Prints the events of a run of a sweep with its name, but not the rows, which would be too
    many.
    """

    def __init__(self, name: str, say: Callable[[str], None]):
        self._name, self._say = name, say

    def say(self, text: str) -> None:
        """Prints a line, unless it is a row."""
        if not text.startswith('step '):
            self._say(f'{self._name}: {text}')

    def show_row(self, row: dict[str, Any], steps: int, remaining_sec: float) -> None:
        """Shows nothing."""
        pass

    def show_divergence(self, reason: str) -> None:
        """Prints that the run diverged."""
        self._say(f'{self._name} diverged: {reason}')
