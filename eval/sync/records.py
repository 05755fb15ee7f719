"""The records of a run on disk, as a tracker gets them: its config, its steps, its summary."""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm.record.metrics import MAX_STEPS, flatten_row
from lm.record.names import CONFIG, FINAL
from lm.record.run import Run
from lm.storage.files import UnreadableFile

MAX_SECONDS = 1e10  # three hundred years
COMPLETE = (*FINAL, 'stopped')  # a failed run's last step may be incomplete


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run in the form that a tracker gets.

    config: by path. digest: of the config without the mesh, which may change when a run resumes.
    began: seconds since 1970, the start of the tracker's time axis.
    """

    run: Run
    config: dict[str, Any]
    digest: str
    began: float


def read_source(run: Run) -> TrackedRun:
    """Reads config.json. Raises UnreadableFile, naming the file, if it is damaged or not a file."""
    path = run.folder / CONFIG
    try:
        config = flatten_tree(run.read_config())
    except OSError as error:
        raise UnreadableFile(f'{path} cannot be read ({error.strerror})') from error
    fields = {path: value for path, value in config.items() if not is_mesh(path)}
    return TrackedRun(run, config, short_digest(fields), path.stat().st_mtime)


def short_digest(record: Mapping[str, Any]) -> str:
    """Returns eight hexadecimal digits of the SHA-256 of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]


def is_mesh(path: str) -> bool:
    """Returns whether a field describes the devices of a run, which may change when it resumes."""
    return path.startswith('mesh.')


def read_summary(run: Run) -> dict[str, Any]:
    """Returns the summary by path, lists as JSON text; {} if it cannot be read or has no status."""
    with contextlib.suppress(OSError):
        summary = {
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in flatten_tree(run.summary).items()
            if value not in (None, '', [])
        }
        return summary if isinstance(summary.get('status'), str) else {}
    return {}


def flatten_tree(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Returns {'optim.lr': 0.001, ...}. `lm.config.resolve` has this too, but imports JAX."""
    fields: dict[str, Any] = {}
    for name, value in tree.items():
        value = escape_surrogates(value) if isinstance(value, str) else value
        name = escape_surrogates(name)
        is_section = isinstance(value, Mapping)
        fields |= (
            flatten_tree(value, f'{prefix}{name}.') if is_section else {f'{prefix}{name}': value}
        )
    return fields


def escape_surrogates(text: str) -> str:
    """Returns a text with lone surrogates escaped.

    JSON may contain them, and no tracker accepts them.
    """
    return text.encode(errors='backslashreplace').decode()


@dataclasses.dataclass
class StepValues:
    """All numbers of a step, by tag. seconds: training time until then, by the run's clock."""

    step: int
    seconds: float
    values: dict[str, float]


class StepTail:
    """The steps of a run as they are appended.

    If the file is written anew, for instance by a run that resumes from a checkpoint, steps are
    returned a second time.
    """

    def __init__(self, run: Run):
        self._rows = run.tail()
        self._begin()

    def _begin(self) -> None:
        self._restarts = self._rows.restarts
        self._trained, self._seconds = 0, 0.0
        self._last: StepValues | None = None  # an evaluation of this step may follow

    def read(self) -> tuple[list[StepValues], bool]:
        """Returns (complete steps, whether there is more).

        A step is complete once a later step has begun.
        """
        rows, has_more = self._rows.read()
        if self._rows.restarts != self._restarts:
            self._begin()
        return list(self._steps(rows)), has_more

    def read_last(self) -> list[StepValues]:
        """Returns the last step, which is complete if the run has ended."""
        return [self._last] if self._last else []

    def _steps(self, rows: Iterable[dict[str, Any]]) -> Iterator[StepValues]:
        for row in rows:
            try:
                step, values = row['step'], _to_floats(flatten_row(row))
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                continue
            if type(step) is not int or not 0 <= step < MAX_STEPS:
                continue
            # A step has several rows: training, evaluation, diagnosis. A later step completes it.
            if self._last and step > self._last.step:
                yield self._last
            if not self._last or step != self._last.step:
                self._last = StepValues(step, self._seconds, {})
            seconds = values.get('step_sec', math.nan)
            if 0 <= seconds < MAX_SECONDS:
                self._seconds += seconds * max(0, step - self._trained)
                self._trained = self._last.step
            self._last.seconds = min(self._seconds, MAX_SECONDS)
            self._last.values |= values


def _to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row. Raises OverflowError for a number that no double holds."""
    kinds = int, float
    return {
        tag: float(x) for tag, x in values.items() if type(x) in kinds and tag and tag.isprintable()
    }
