"""Time of a run: its starts (starts.jsonl), its seconds by part, and its goodput.

`goodput = (seconds of steps that were kept) / (seconds since the first start)`. The parts add up to
the denominator. Checkpoints hold the seconds of `PARTS` up to their step. What a kill costs is
known only at the next start, which records it: see `start_record`.
"""

import collections
import contextlib
import datetime
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.record.metrics import FILE, read_rows
from lm.record.names import STARTS, SUMMARY

Row = dict[str, Any]
Seconds = collections.defaultdict[str, float]  # by part

START, DATA, COMPILE, RESTORING = 'start', 'data', 'compile', 'restoring'  # before the first step
STEPS, DATA_WAIT = 'steps', 'data_wait'
EVALUATION, DIAGNOSIS, SAVING = 'evaluation', 'diagnosis', 'saving'
REDONE = 'redone'  # steps that were done again after a kill or a rollback
DOWN = 'down'  # from the last sign of life of a process to the next start
UNCOUNTED = 'uncounted'  # by any part, such as a trace, or evaluations that a kill has lost
PARTS = (
    *(START, DATA, COMPILE, RESTORING, STEPS, DATA_WAIT, EVALUATION, DIAGNOSIS, SAVING),
    *(REDONE, DOWN, UNCOUNTED),
)


def add_seconds(*terms: Mapping[str, float]) -> Seconds:
    """Returns the sum of seconds by part."""
    total = Seconds(float)
    for term in terms:
        for part, sec in term.items():
            total[part] += sec
    return total


class Preparation:
    """The seconds before runs open, by part; runs of one wave share it.

    `began` is the time (since the epoch) when the work for them began, by default now.
    """

    def __init__(self, began: float | None = None):
        self.began = time.time() if began is None else began
        self.seconds = Seconds(float)

    @contextlib.contextmanager
    def time_part(self, part: str) -> Generator[None]:
        """Adds the seconds of the block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def measure(self) -> dict[str, float]:
        """Returns the seconds so far by part; START is what the others leave of the time."""
        elsewhere = sum(self.seconds.values())
        return {**self.seconds, START: max(0.0, time.time() - self.began - elsewhere)}


def process_start() -> float:
    """Returns the time (since the epoch) at which this process began; now where no one tells."""
    present = time.time()
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may have spaces. Field 22 counts from 1.
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        since_boot = int(fields[19]) / os.sysconf('SC_CLK_TCK')
        uptime = float(Path('/proc/uptime').read_text().split()[0])
        return present - max(0.0, uptime - since_boot)
    return present


def last_written(workdir: Path) -> float | None:
    """Returns when a run last wrote a row or its summary; None if it has written neither."""
    times = []
    for name in (FILE, SUMMARY):
        with contextlib.suppress(OSError):
            times.append((workdir / name).stat().st_mtime)
    return max(times, default=None)


def start_record(
    began: float, step: int, status: str | None, last_sign: float | None, dropped: Sequence[Row]
) -> Row:
    """Returns what a line of starts.jsonl says about time.

    Args:
      began: the time of the start.
      step: the last step that is kept.
      status: the status in the summary of the earlier process; None if it was killed.
      last_sign: `last_written` of the earlier process.
      dropped: its rows after `step`.

    Returns:
      `began`, `step`, `redone_steps` and `redone_sec` (steps that are done again), and the seconds
      since the last sign of life: as `down_sec`, or as `idle_sec` after a run that was done, for
      which nobody waited.
    """
    n_redone, redone_sec = 0, 0.0
    for row in dropped:
        if row.get('step_sec') is not None and row['step'] > step + n_redone:
            redone_sec += (row['step'] - step - n_redone) * row['step_sec']
            n_redone = row['step'] - step
    gap = max(0.0, began - last_sign) if last_sign is not None else 0.0
    is_idle = status == 'done'
    return {
        'began': datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(),
        'step': step,
        'redone_steps': n_redone,
        'redone_sec': redone_sec,
        'down_sec': 0.0 if is_idle else gap,
        'idle_sec': gap if is_idle else 0.0,
    }


def append_start(workdir: Path, record: Row) -> None:
    """Appends a line to starts.jsonl. A line that a kill cut short does not damage it."""
    path = workdir / STARTS
    with path.open('ab+') as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b'\n':
                file.write(b'\n')
        file.write(json.dumps(record).encode() + b'\n')


def read_starts(workdir: Path) -> list[Row]:
    """Returns the intact lines of starts.jsonl; [] if there is none, as of an older version."""
    return [row for row in read_rows(workdir / STARTS) if _seconds_since_epoch(row) is not None]


def _seconds_since_epoch(start: Row) -> float | None:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.datetime.fromisoformat(start['began']).timestamp()
    return None


def _sum_numbers(starts: Sequence[Row], name: str) -> float:
    values = [start.get(name) for start in starts]
    return sum(value for value in values if isinstance(value, int | float))


def summarize_time(starts: Sequence[Row], seconds: Mapping[str, float], end: float) -> Row:
    """Returns `goodput`, `elapsed_sec`, `starts` and `seconds` of a run, for its summary.

    Args:
      starts: `read_starts`.
      seconds: the seconds by part that processes have counted.
      end: the time up to which to count.
    """
    if not starts:
        return {}
    first = _seconds_since_epoch(starts[0])
    assert first is not None  # `read_starts` leaves out lines without it
    elapsed = max(0.0, end - first - _sum_numbers(starts, 'idle_sec'))
    counted = add_seconds(seconds)
    counted[REDONE] += _sum_numbers(starts, 'redone_sec')
    counted[DOWN] += _sum_numbers(starts, 'down_sec')
    counted[UNCOUNTED] = max(0.0, elapsed - sum(counted.values()))
    return {
        'goodput': counted[STEPS] / elapsed if elapsed else None,
        'elapsed_sec': elapsed,
        'starts': len(starts),
        'seconds': {part: counted[part] for part in PARTS},
    }


def estimate_goodput(workdir: Path, rows: Sequence[Row]) -> Row:
    """Returns `goodput`, `elapsed_sec` and `starts` of a run without a summary, by its rows."""
    starts, end = read_starts(workdir), last_written(workdir)
    if not starts or end is None:
        return {}
    sec, last = 0.0, 0
    for row in rows:
        if row.get('step_sec') is not None and row['step'] > last:
            sec += (row['step'] - last) * (row['step_sec'] - (row.get('data_wait_sec') or 0.0))
            last = row['step']
    summary = summarize_time(starts, {STEPS: sec}, end)
    del summary['seconds']  # the parts are in the memory of the process that trains
    return summary
