"""A sweep as it goes: a line for each group, made from what the runs have written."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from eval.runs import UNREADABLE, Record, gather, write_table
from eval.text import number
from lm.sections import RUN_PATHS
from lm.sweep.cells import Cell

EVERY_SEC = {True: 1.0, False: 30.0}  # by whether a person watches
SHARE = 0.01  # of the time that reading all the records may take
ENDED = ('done', 'diverged', 'failed')


class SweepView:
    """What train.py makes of the records of a sweep (`lm.sweep.training.View`)."""

    def __init__(self, workdir: Path):
        self.workdir = workdir

    @contextlib.contextmanager
    def live(self, groups: list[list[Cell]], console: Console) -> Iterator[Callable[[], None]]:
        with Progress(self.workdir, groups, console) as progress:
            yield progress.tick

    def table(self) -> str:
        return f'{counts(gather(self.workdir))}; {write_table(self.workdir)}'

    def report(self) -> str:
        # It brings Matplotlib and SciPy, which the sweep need not wait for.
        from eval.report.page import report

        return str(report(self.workdir))


class Progress:
    """Reads the workdir, so that it does not matter which process trains what."""

    def __init__(self, workdir: Path, groups: list[list[Cell]], console: Console):
        self.workdir, self.groups, self.console = workdir, groups, console
        self._began, self._next = time.monotonic(), 0.0
        self._steps_before = sum(steps_done(r) for r in gather(workdir))
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_):
        self.tick(force=True)
        if self._live:
            self._live.stop()

    def tick(self, force: bool = False) -> None:
        """Shows the present state, if it was not shown just now."""
        if not force and time.monotonic() < self._next:
            return
        start = time.monotonic()
        lines = self.lines()
        now = time.monotonic()
        self._next = now + max(EVERY_SEC[self.console.is_terminal], (now - start) / SHARE)
        if self._live:
            self._live.update(Text('\n'.join(lines)), refresh=True)
        else:
            self.console.print('\n'.join(lines), markup=False, soft_wrap=True)

    def lines(self) -> list[str]:
        """One a group that has begun, then one for the whole."""
        records = {record['cell']: record for record in gather(self.workdir)}
        lines = []
        for i, group in enumerate(self.groups, start=1):
            own = [records[cell.name] for cell in group]
            if any(record['status'] != 'waiting' for record in own):
                lines.append(f'group {i} of {len(self.groups)}  {group_line(group, own)}')
        mine = [records[cell.name] for group in self.groups for cell in group]
        return [*lines, f'sweep {counts(mine)}  {self._time_left(mine)}']

    def _time_left(self, records: list[Record]) -> str:
        """At the rate of this process so far, as if a step of each run took as long."""
        done = sum(steps_done(record) for record in records)
        rate = (done - self._steps_before) / max(time.monotonic() - self._began, 1e-9)
        left = sum(r['steps'] - steps_done(r) for r in records if r['status'] not in ENDED)
        if not left:
            return ''
        return f'{left / rate / 60:.1f} min left' if rate > 0 else 'time left not known yet'


def steps_done(record: Record) -> int:
    """Steps that need no more work: all of them where the run has ended."""
    return record['steps'] if record['status'] in ENDED else record['step'] or 0


def group_line(group: list[Cell], records: list[Record]) -> str:
    """What the group has in common, where its runs stand, and the best of them."""
    common = caption(group[0], False)
    going = [record for record in records if record['status'] == 'unfinished']
    line = '  '.join([*common, counts(records)])
    if going:
        newest = max(record['step'] or 0 for record in going)
        line += f'  step {newest} of {max(record["steps"] for record in going)}'
    scored = [record for record in records if record['ce'] is not None]
    if scored:
        best = min(scored, key=lambda record: record['ce'])
        (cell,) = [cell for cell in group if cell.name == best['cell']]
        own = caption(cell, True)
        line += f'  best {best["ce"]:.4f} ({" ".join(own)}{" " if own else ""}{cell.name})'
    return line


def caption(cell: Cell, varying: bool) -> list[str]:
    """'optim.lr=0.01': what makes the cell, of what runs of one group may or may not differ in."""
    return [
        f'{path}={number(value)}'
        for path, value in cell.changes.items()
        if (path in RUN_PATHS) == varying
    ]


def counts(records: list[Record]) -> str:
    """'12 of 21 done, 1 diverged'; what went wrong is named, what goes on is not."""
    statuses = [record['status'] for record in records]
    text = f'{statuses.count("done")} of {len(records)} done'
    for status in ('diverged', 'failed', UNREADABLE):
        if status in statuses:
            text += f', {statuses.count(status)} {status}'
    return text
