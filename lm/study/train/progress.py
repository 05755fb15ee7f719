"""A sweep as it goes: a line for each group, made from what the runs have written."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lm.config.fields import RUN_PATHS
from lm.study.plan.cells import Cell, describe_ignored
from lm.study.tables.results import UNREADABLE, Record, gather, write_table
from lm.study.tables.text import format_number

INTERVAL_SEC = {True: 1.0, False: 30.0}  # by whether a person watches
READING_SHARE = 0.01  # of the time that reading all the records may take
ENDED = ('done', 'diverged', 'failed')


@contextmanager
def show_progress(
    workdir: Path,
    groups: list[list[Cell]],
    console: Console,
    notes: Sequence[str] = (),
    printed: set[str] | None = None,
) -> Iterator[Callable[[], None]]:
    """Shows a line for each group while the sweep goes; yields what to call now and then.

    Args:
      workdir: of the sweep.
      groups: cells that train now.
      console: where lines go.
      notes: lines that come first, with those on options that only some cells read.
      said: lines that are not said again, as a tuned sweep has several waves; more are added.
    """
    printed = set() if printed is None else printed
    ignored = describe_ignored([cell for group in groups for cell in group])
    for line in (*notes, *(f'NOTE: {words}' for words in ignored)):
        if line not in printed:
            console.print(line, markup=False, soft_wrap=True)
        printed.add(line)
    progress = SweepProgress(workdir, groups, console)
    with progress.screen:
        try:
            yield progress.tick
        finally:
            progress.tick(force=True)


def write_summary(workdir: Path) -> str:
    """Writes the table of all cells; returns how they ended, and its path."""
    return f'{format_statuses(gather(workdir))}; {write_table(workdir)}'


class SweepProgress:
    """Reads the workdir, so that it does not matter which process trains what."""

    def __init__(self, workdir: Path, groups: list[list[Cell]], console: Console):
        self.workdir, self.groups, self.console = workdir, groups, console
        self._began, self._next = time.monotonic(), 0.0
        self._steps_before = sum(steps_done(r) for r in gather(workdir))
        shown = console.is_terminal
        self.screen = Live(console=console, auto_refresh=False) if shown else nullcontext()

    def tick(self, force: bool = False) -> None:
        """Shows the present state, if it was not shown just now."""
        if not force and time.monotonic() < self._next:
            return
        start = time.monotonic()
        text = '\n'.join(self.format_lines())
        now = time.monotonic()
        self._next = now + max(
            INTERVAL_SEC[self.console.is_terminal], (now - start) / READING_SHARE
        )
        if self.console.is_terminal:
            self.screen.update(Text(text), refresh=True)
        else:
            self.console.print(text, markup=False, soft_wrap=True)

    def format_lines(self) -> list[str]:
        """A line for each group that has begun, then one for the whole."""
        records = {record['cell']: record for record in gather(self.workdir)}
        lines = []
        for i, group in enumerate(self.groups, start=1):
            own = [records[cell.name] for cell in group]
            if any(record['status'] != 'waiting' for record in own):
                lines.append(f'group {i} of {len(self.groups)}  {format_group(group, own)}')
        mine = [records[cell.name] for group in self.groups for cell in group]
        return [*lines, f'sweep {format_statuses(mine)}  {self._format_time_left(mine)}']

    def _format_time_left(self, records: list[Record]) -> str:
        """The time left at the rate of this process so far, as if all steps took as long."""
        done = sum(steps_done(record) for record in records)
        rate = (done - self._steps_before) / max(time.monotonic() - self._began, 1e-9)
        left = sum(r['steps'] - steps_done(r) for r in records if r['status'] not in ENDED)
        if not left:
            return ''
        return f'{left / rate / 60:.1f} min left' if rate > 0 else 'time left not known yet'


def steps_done(record: Record) -> int:
    """Steps that need no more work: all of them where the run has ended."""
    return record['steps'] if record['status'] in ENDED else record['step'] or 0


def format_group(group: list[Cell], records: list[Record]) -> str:
    """The line of a group: what its runs share, where they stand, and the best of them."""
    going = [record for record in records if record['status'] == 'unfinished']
    line = '  '.join([*format_changes(group[0], False), format_statuses(records)])
    if going:
        newest = max(record['step'] or 0 for record in going)
        line += f'  step {newest} of {max(record["steps"] for record in going)}'
    scored = [record for record in records if record['ce'] is not None]
    if scored:
        best = min(scored, key=lambda record: record['ce'])
        (cell,) = [cell for cell in group if cell.name == best['cell']]
        line += f'  best {best["ce"]:.4f} ({" ".join([*format_changes(cell, True), cell.name])})'
    return line


def format_changes(cell: Cell, varying: bool) -> list[str]:
    """'optim.lr=0.01': what makes the cell, of what runs of one group may or may not differ in."""
    changes = cell.changes.items()
    return [f'{p}={format_number(value)}' for p, value in changes if (p in RUN_PATHS) == varying]


def format_statuses(records: list[Record]) -> str:
    """'12 of 21 done, 1 diverged'; what went wrong is named, what goes on is not."""
    statuses = [record['status'] for record in records]
    text = f'{statuses.count("done")} of {len(records)} done'
    for status in ('diverged', 'failed', UNREADABLE):
        if status in statuses:
            text += f', {statuses.count(status)} {status}'
    return text
