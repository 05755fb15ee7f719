"""Progress of a sweep: a line for each group, from the records of the runs."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lm.launch.terminal import format_duration, print_line, wrap_text
from lm.record.names import SWEEP
from lm.study.plan.cells import Cell, describe_ignored, program_key
from lm.study.tables.results import UNREADABLE, Record, gather, write_table
from lm.study.tables.text import format_number

INTERVAL_SEC = {True: 1.0, False: 30.0}  # on a terminal, and in a log
READING_SHARE = 0.01  # share of the time that reading all records may take
ENDED = ('done', 'diverged', 'failed')


@contextmanager
def show_progress(
    workdir: Path,
    groups: list[list[Cell]],
    console: Console,
    printed: set[str] | None = None,
    list_compiled: Callable[[], Mapping[tuple, float]] = dict,
) -> Generator[Callable[[], None]]:
    """Shows a line for each group while the sweep trains; yields a function that updates it.

    Notes on options that only some cells read are printed first.

    Args:
      workdir: folder of the sweep.
      groups: cells that train now.
      console: console that shows the lines.
      printed: notes that are not printed again, since a tuned sweep has several waves; printed
        notes are added.
      list_compiled: returns the programs that this process has compiled, as {`program_key`:
        seconds}.

    Yields:
      A function to call now and then.
    """
    printed = set() if printed is None else printed
    ignored_notes = describe_ignored([cell for group in groups for cell in group])
    for note in ignored_notes:
        if note not in printed:
            print_line(console, f'NOTE: {note}')
        printed.add(note)
    progress = SweepProgress(workdir, groups, console, list_compiled)
    with progress.screen:
        try:
            yield progress.tick
        finally:
            progress.tick(force=True)


def write_summary(workdir: Path) -> str:
    """Writes the table of all cells; returns their statuses, and its path."""
    records = gather(workdir)
    return f'{format_statuses(records)}; {write_table(workdir, records)}'


class SweepProgress:
    """Progress of a sweep, read from the workdir, so that any process may train any run."""

    def __init__(
        self,
        workdir: Path,
        groups: list[list[Cell]],
        console: Console,
        list_compiled: Callable[[], Mapping[tuple, float]] = dict,
    ):
        self.workdir, self.groups, self.console = workdir, groups, console
        self._list_compiled = list_compiled
        self._compiled_before = set(list_compiled())
        self._program_keys = [program_key(group[0]) for group in groups]
        self._began, self._next = time.monotonic(), 0.0
        # Steps of an earlier command took none of this process's time, and are no part of its rate.
        names = {cell.name for group in groups for cell in group}
        records = [record for record in gather(workdir) if record['cell'] in names]
        self._steps_before = sum(map(steps_done, records))
        is_terminal = console.is_terminal
        self.screen = Live(console=console, auto_refresh=False) if is_terminal else nullcontext()

    def tick(self, force: bool = False) -> None:
        """Shows the present state, unless it was shown just now."""
        if not force and time.monotonic() < self._next:
            return
        start = time.monotonic()
        text = '\n'.join(self.format_lines())
        finished = time.monotonic()
        self._next = finished + max(
            INTERVAL_SEC[self.console.is_terminal], (finished - start) / READING_SHARE
        )
        if isinstance(self.screen, Live):
            self.screen.update(Text(wrap_text(text, self.console.width)), refresh=True)
        else:
            print_line(self.console, text)

    def format_lines(self) -> list[str]:
        """Returns a line for each group that has begun, then a line for the whole sweep."""
        records = {record['cell']: record for record in gather(self.workdir)}
        by_group = [[records.get(cell.name) for cell in group] for group in self.groups]
        listed = [[record for record in group if record] for group in by_group]
        lines = []
        for i, (group, group_records) in enumerate(zip(self.groups, listed, strict=True), start=1):
            if any(record['status'] != 'waiting' for record in group_records):
                lines.append(
                    f'group {i} of {len(self.groups)}  {format_group(group, group_records)}'
                )
        sweep_records = [record for group in listed for record in group]
        lines.append(f'sweep {format_statuses(sweep_records)}  {self._format_time_left(listed)}')
        if dropped := sum(map(len, by_group)) - len(sweep_records):
            lines.append(
                f'NOTE: {self.workdir / SWEEP} no longer lists {dropped} of these runs, because '
                'another command trains another sweep in this folder, or it was moved. Run this '
                'command again afterwards'
            )
        return lines

    def _format_time_left(self, groups: Sequence[Sequence[Record]]) -> str:
        """Returns the time left at the rate of this process so far, as if all steps took equally
        long. Programs that are not compiled yet take as long to compile as the others on average.

        groups: records by group.
        """
        steps_left = [sum(r['steps'] - steps_done(r) for r in group) for group in groups]
        if not sum(steps_left):
            return ''
        compiled = self._list_compiled()
        compile_sec = sum(s for key, s in compiled.items() if key not in self._compiled_before)
        done = sum(steps_done(r) for group in groups for r in group) - self._steps_before
        rate = done / max(time.monotonic() - self._began - compile_sec, 1e-9)
        if rate <= 0:
            return 'time left unknown'
        mean_compile_sec = sum(compiled.values()) / max(1, len(compiled))
        remaining = zip(self._program_keys, steps_left, strict=True)
        to_compile = sum(steps > 0 and key not in compiled for key, steps in remaining)
        seconds = sum(steps_left) / rate + to_compile * mean_compile_sec
        return f'{format_duration(seconds)} left'


def steps_done(record: Record) -> int:
    """Returns the steps that need no more work: all steps if the run has ended."""
    return record['steps'] if record['status'] in ENDED else record['step'] or 0


def format_group(group: list[Cell], records: list[Record]) -> str:
    """Returns the line of a group: the values its runs share, their statuses, and the best run."""
    unfinished = [record for record in records if record['status'] == 'unfinished']
    line = '  '.join([*format_changes(group[0], False), format_statuses(records)])
    if unfinished:
        newest = max(record['step'] or 0 for record in unfinished)
        line += f'  step {newest} of {max(record["steps"] for record in unfinished)}'
    scored = [record for record in records if record['ce'] is not None]
    if scored:
        best = min(scored, key=lambda record: record['ce'])
        (cell,) = [cell for cell in group if cell.name == best['cell']]
        line += f'  best {best["ce"]:.4f} ({", ".join([*format_changes(cell, True), cell.name])})'
    return line


def format_changes(cell: Cell, varying: bool) -> list[str]:
    """Returns changes of a cell such as 'optim.lr=0.01'.

    varying: whether to return the fields in which runs of one group may differ, or the others.
    """
    changes, run_paths = cell.changes.items(), cell.recipe.run_paths
    return [f'{p}={format_number(value)}' for p, value in changes if (p in run_paths) == varying]


def format_statuses(records: list[Record]) -> str:
    """Returns '12 of 21 done, 1 diverged'. Failures are named; unfinished runs are not."""
    statuses = [record['status'] for record in records]
    text = f'{statuses.count("done")} of {len(records)} done'
    for status in ('diverged', 'failed', UNREADABLE):
        if status in statuses:
            text += f', {statuses.count(status)} {status}'
    return text
