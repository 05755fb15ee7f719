"""The recorded numbers of a run: metrics.jsonl, TensorBoard, and throughput."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm.storage.files import UnreadableFile, open_regular, parse_json, write_text

FILE = 'metrics.jsonl'
DAMAGED_LINES = 'metrics_damaged.jsonl'
MAX_READ_BYTES = (
    1 << 20
)  # of lines that `Tail` reads at once: what a run may hold in memory, and its turn
NOT_FINITE = 'not_finite'  # in a line of the file: what the nulls beside it were, by their tags
TIME_FIELDS = ('tokens_per_sec', 'mfu', 'step_sec', 'data_wait_sec')  # differ from run to run


class Recorder:
    """Writes rows of a run that resumes after `step`; `rows` counts those in the file.

    Rows beyond `step` are dropped first, since those steps will be done again; so are all where it
    is 0, whose diagnosis will be too. expected: the number of rows when the checkpoint of `step`
    was made, if known. Damaged lines are moved to metrics_damaged.jsonl. No file is open between
    rows. Raises OSError if one cannot be written.
    """

    def __init__(
        self, workdir: Path, step: int, expected_rows: int | None, say: Callable[[str], None]
    ):
        self._path = workdir / FILE
        lines = list(_read_lines(self._path))
        known = [line for line, row in lines if step and row and row['step'] <= step]
        kept = [line.rstrip() + b'\n' for line in known]
        self.rows = len(kept)
        damaged = [line for line, row in lines if row is None]
        if lines and lines[-1][1] is None and not lines[-1][0].endswith(b'\n'):
            damaged.pop()  # cut short when the process was killed: steps to be done again
        if damaged:
            say(
                f'NOTE: {len(damaged)} of {len(lines)} lines of {self._path} are damaged; moved to '
                f'{DAMAGED_LINES}'
            )
            with (workdir / DAMAGED_LINES).open('ab') as file:
                file.writelines(damaged)
        if expected_rows is not None and self.rows < expected_rows:
            say(
                f'NOTE: {self._path} lacks {expected_rows - self.rows} of the {expected_rows} rows up to '
                f'step {step}; the run itself goes on as if they were there'
            )
        if kept != [line for line, _ in lines] or not lines:
            write_text(self._path, b''.join(kept).decode())
        from lm.record.event_file import EventFile  # it brings tensorboardX

        self._board = EventFile(workdir / 'tensorboard', purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        finite, numbers = replace_non_finite(row), flatten_row(row)
        lost = {tag: str(x) for tag, x in numbers.items() if not math.isfinite(x)}
        with self._path.open('a') as file:
            file.write(json.dumps(finite | ({NOT_FINITE: lost} if lost else {})) + '\n')
        self.rows += 1
        self._board.write(row['step'], {t: x for t, x in numbers.items() if t not in lost})

    def sync(self) -> None:
        """Flushes all rows to the disk, so that they outlast a power cut."""
        with self._path.open('ab') as file:
            os.fsync(file.fileno())


class NoRecorder:
    """The Recorder of all processes but 0: it writes nothing."""

    rows = 0

    def write(self, row: dict[str, Any]) -> None: ...

    def sync(self) -> None: ...


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line of a metrics.jsonl with its row; None for a row that is damaged."""
    if not path.exists():
        return
    with open_regular(path) as file:
        for line in file:
            row = _parse_object(line)
            yield line, row if row and isinstance(row.get('step'), int) else None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Returns the object in a line; None for one that is damaged."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the intact rows of a metrics.jsonl, None for numbers that are not finite; [] if there
    is no file.
    """
    rows = [row for _, row in _read_lines(path) if row]
    for row in rows:
        row.pop(NOT_FINITE, None)
    return rows


class Tail:
    """Reads the lines of a metrics.jsonl as they are appended; no file is open between two reads.

    A run that goes on from a checkpoint writes the file anew, without later rows. It is then read
    from its start, and `restarts` is one more.
    """

    def __init__(self, path: Path):
        self._path, self.restarts = path, 0
        self._offset, self._last_line = 0, b''  # read so far, and the last line of that

    def _restart(self) -> None:
        self._offset, self._last_line = 0, b''
        self.restarts += 1

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns (the objects in new lines, as they stand there; whether more is there). Damaged
        lines are left out. Raises Unreadable where the file cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            self._restart()
            return [], False
        except OSError as error:
            raise UnreadableFile(f'{self._path} cannot be read ({error.strerror})') from error
        with file:
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._restart()
                file.seek(0)
            data = file.read(MAX_READ_BYTES)
            if b'\n' not in data and len(data) == MAX_READ_BYTES:
                data += file.readline()
        whole = data[: data.rfind(b'\n') + 1]
        lines = whole.splitlines(keepends=True)
        if lines:
            self._offset, self._last_line = self._offset + len(whole), lines[-1]
        return [row for line in lines if (row := _parse_object(line)) is not None], len(
            data
        ) >= MAX_READ_BYTES


def replace_non_finite(value: Any) -> Any:
    """Returns the value with None for numbers that are not finite, which JSON cannot spell."""
    if isinstance(value, dict):
        return {name: replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten_row(row: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row, or of a line of the file, by tags such as 'loss' and
    'entropy/layer_0/head_1', without the step. Of a line, those too that are not finite.
    """
    named = {name: value for name, value in row.items() if name not in ('step', NOT_FINITE)}
    lost = {tag: float(text) for tag, text in row.get(NOT_FINITE, {}).items()}
    return dict(_flatten_lists(named, ('layer', 'head'))) | lost


def _flatten_lists(values: dict[str, Any], axes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yields ('name/layer_0/head_1', number) for each number in nested lists with these `axes`."""
    for name, value in values.items():
        if isinstance(value, list):
            inner = {f'{name}/{axes[0]}_{i}': one for i, one in enumerate(value)}
            yield from _flatten_lists(inner, axes[1:])
        elif value is not None:
            yield name, value


class Throughput:
    """Rates of `tokens` and `steps` since `read`, without the time from `pause` to `go_on`."""

    def __init__(self, flops_per_token: float, utilisation: Callable[[float], float]):
        self._flops_per_token, self._utilisation = flops_per_token, utilisation
        self.total_seconds = self.total_tokens = self.total_wait_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        self.tokens = self.wait_seconds = self.seconds = 0.0
        self.steps = 0
        self.resume()

    def resume(self) -> None:
        self._start = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._start

    def add_wait(self, seconds: float) -> None:
        """Adds seconds that were spent waiting for data."""
        self.wait_seconds += seconds

    def read(self) -> dict[str, float]:
        """Returns `TIME_FIELDS`: tokens/s, model FLOP utilisation, seconds and data wait a step."""
        self.pause()
        rate = self.tokens / self.seconds
        mfu = self._utilisation(rate * self._flops_per_token)
        values = (rate, mfu, self.seconds / self.steps, self.wait_seconds / self.steps)
        self.total_seconds += self.seconds
        self.total_tokens += self.tokens
        self.total_wait_seconds += self.wait_seconds
        self.reset()
        return dict(zip(TIME_FIELDS, values, strict=True))
