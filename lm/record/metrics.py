"""The recorded numbers of a run: metrics.jsonl, TensorBoard, and throughput."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm.storage.files import UnreadableFile, open_regular, parse_json, write_text

FILE = 'metrics.jsonl'
DAMAGED_LINES = 'metrics_damaged.jsonl'
# `Tail` reads so much at a time, which bounds the memory and the turn of a run.
MAX_READ_BYTES = 1 << 20
# JSON has no NaN and no infinity: a line has null instead, and the number's text by tag in here.
NOT_FINITE = 'not_finite'
MAX_STEPS = 2**63  # tables and trackers store steps as int64
HUGE_INTEGER = re.compile(
    rb'(?<![\d.])\d{309}'
)  # at least 1e308, which is about the largest double
TIME_FIELDS = ('tokens_per_sec', 'mfu', 'step_sec', 'data_wait_sec')  # not reproducible


class Recorder:
    """Writes the rows of a run that resumes after `step`.

    Rows after `step` are dropped first, since those steps will be repeated. If `step` is 0, all
    rows are dropped, since the diagnosis before the first step is repeated too. Damaged lines are
    moved to metrics_damaged.jsonl. The file is not kept open between rows. Raises OSError if it
    cannot be written.

    Args:
      workdir: the folder of the run.
      step: the last step to keep.
      expected_rows: the number of rows when the checkpoint of `step` was made, if known.
      say: prints a line.

    `rows` counts the rows in the file, and `dropped` holds the rows that were dropped.
    """

    def __init__(
        self, workdir: Path, step: int, expected_rows: int | None, say: Callable[[str], None]
    ):
        self._path = workdir / FILE
        lines = list(_read_lines(self._path))
        intact = [line for line, row in lines if step and row and row['step'] <= step]
        rewritten = [line.rstrip() + b'\n' for line in intact]
        self.rows = len(rewritten)
        self.dropped = [row for _, row in lines if row and not (step and row['step'] <= step)]
        damaged = [line for line, row in lines if row is None]
        if lines and lines[-1][1] is None and not lines[-1][0].endswith(b'\n'):
            # Cut short when the process was killed, which is no damage: the step is repeated.
            damaged.pop()
        if damaged:
            say(
                f'NOTE: {len(damaged)} of {len(lines)} lines of {self._path} are damaged; moved to '
                f'{DAMAGED_LINES}'
            )
            with (workdir / DAMAGED_LINES).open('ab') as file:
                file.writelines(damaged)
        if expected_rows is not None and self.rows < expected_rows:
            say(
                f'NOTE: {self._path} lacks {expected_rows - self.rows} of the {expected_rows} rows '
                f'up to step {step}; this does not affect training'
            )
        if rewritten != [line for line, _ in lines] or not lines:
            write_text(self._path, b''.join(rewritten).decode())
        from lm.record.event_file import EventFile  # imports tensorboardX

        # TensorBoard hides earlier events from this step on, which are written again.
        self._board = EventFile(workdir / 'tensorboard', purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        finite, numbers = replace_non_finite(row), flatten_row(row)
        non_finite = {tag: str(x) for tag, x in numbers.items() if not math.isfinite(x)}
        with self._path.open('a') as file:
            file.write(json.dumps(finite | ({NOT_FINITE: non_finite} if non_finite else {})) + '\n')
        self.rows += 1
        self._board.write(row['step'], {t: x for t, x in numbers.items() if t not in non_finite})

    def sync(self) -> None:
        """Flushes all rows to the disk, so that they outlast a power cut."""
        with self._path.open('ab') as file:
            os.fsync(file.fileno())


class NoRecorder:
    """The Recorder of all processes but process 0: it writes nothing."""

    rows, dropped = 0, ()

    def write(self, row: dict[str, Any]) -> None: ...

    def sync(self) -> None: ...


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line of a metrics.jsonl with its row; None for a row that is damaged."""
    if not path.exists():
        return
    with open_regular(path) as file:
        for line in file:
            row = _parse_object(line)
            yield line, row if row and _has_step(row) else None


def _has_step(row: dict[str, Any]) -> bool:
    step = row.get('step')
    return type(step) is int and 0 <= step < MAX_STEPS


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None if the line is damaged."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if HUGE_INTEGER.search(line):  # readers divide numbers, and tables store them as doubles
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the intact rows of a metrics.jsonl; [] if there is no file.

    Numbers that are not finite are None.
    """
    rows = [row for _, row in _read_lines(path) if row]
    for row in rows:
        row.pop(NOT_FINITE, None)
    return rows


class Tail:
    """Reads the lines of a metrics.jsonl as they are appended.

    The file is not kept open between reads. A run that resumes from a checkpoint rewrites the file
    without its later rows. The file is then read from its start, and `restarts` increases by one.
    """

    def __init__(self, path: Path):
        self._path, self.restarts = path, 0
        self._offset, self._last_line = 0, b''  # bytes read so far, and their last line

    def _restart(self) -> None:
        self._offset, self._last_line = 0, b''
        self.restarts += 1

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Reads the new lines. Damaged lines are left out.

        Returns:
          (objects, has_more): the objects in the new lines, unchanged, and whether the file holds
            more.

        Raises:
          UnreadableFile: if the file cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            self._restart()
            return [], False
        except OSError as error:
            raise UnreadableFile(f'{self._path} cannot be read ({error.strerror})') from error
        with file:
            # A file that was written anew has another line before the offset.
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._restart()
                file.seek(0)
            chunk = file.read(MAX_READ_BYTES)
            # A line longer than the limit is read whole, or reading would never pass it.
            if b'\n' not in chunk and len(chunk) == MAX_READ_BYTES:
                chunk += file.readline()
        whole = chunk[: chunk.rfind(b'\n') + 1]
        lines = whole.splitlines(keepends=True)
        if lines:
            self._offset, self._last_line = self._offset + len(whole), lines[-1]
        return [row for line in lines if (row := _parse_object(line)) is not None], len(
            chunk
        ) >= MAX_READ_BYTES


def replace_non_finite(value: Any) -> Any:
    """Returns the value with None for numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: replace_non_finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten_row(row: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row by tags such as 'loss' and 'entropy/layer_0/head_1'.

    The step is left out. A line of the file is accepted too, and its numbers that are not finite
    are restored.
    """
    values = {name: value for name, value in row.items() if name not in ('step', NOT_FINITE)}
    non_finite = {tag: float(text) for tag, text in row.get(NOT_FINITE, {}).items()}
    return dict(_flatten_lists(values, ('layer', 'head'))) | non_finite


def _flatten_lists(values: dict[str, Any], axes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yields ('name/layer_0/head_1', number) for each number in nested lists with these `axes`."""
    for name, value in values.items():
        if isinstance(value, list):
            inner = {f'{name}/{axes[0]}_{i}': element for i, element in enumerate(value)}
            yield from _flatten_lists(inner, axes[1:])
        elif value is not None:
            yield name, value


class Throughput:
    """Rates of `tokens` and `steps` since the last `read`.

    Time between `pause` and `resume` is excluded. `extra_flops` are operations beyond
    `flops_per_token` of each token.
    """

    def __init__(self, flops_per_token: float, utilisation: Callable[[float], float]):
        self._flops_per_token, self._utilisation = flops_per_token, utilisation
        self.total_seconds = self.total_tokens = self.total_wait_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        self.tokens = self.extra_flops = self.wait_seconds = self.seconds = 0.0
        self.steps = 0
        self.resume()

    def resume(self) -> None:
        self._start, self._is_paused = time.perf_counter(), False

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._start
        self._is_paused = True

    def spent(self) -> tuple[float, float]:
        """Returns all seconds so far, and those that were spent waiting for data."""
        since = 0.0 if self._is_paused else time.perf_counter() - self._start
        seconds = self.total_seconds + self.seconds + since
        return seconds, self.total_wait_seconds + self.wait_seconds

    def add_wait(self, seconds: float) -> None:
        """Adds seconds that were spent waiting for data."""
        self.wait_seconds += seconds

    def read(self) -> dict[str, float]:
        """Returns `TIME_FIELDS`: tokens/s, FLOP utilisation, seconds and data wait per step."""
        self.pause()
        rate = self.tokens / self.seconds
        extra = self.extra_flops / self.seconds
        mfu = self._utilisation(rate * self._flops_per_token + extra)
        values = (rate, mfu, self.seconds / self.steps, self.wait_seconds / self.steps)
        self.total_seconds += self.seconds
        self.total_tokens += self.tokens
        self.total_wait_seconds += self.wait_seconds
        self.reset()
        return dict(zip(TIME_FIELDS, values, strict=True))
