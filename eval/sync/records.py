"""The records of a run on disk, as a tracker gets them: its config, its steps, its summary."""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm.record.metrics import FILE, by_tag
from lm.record.names import CONFIG, FINAL, SUMMARY, SWEEP
from lm.storage.files import Unreadable, open_regular, parse_json, read_json

MOST_STEPS = 1 << 63  # trackers count them in 64 bits
MOST_SECONDS = 1e10  # three hundred years
MOST_BYTES = 1 << 20  # of a file's lines at once: what a run may hold in memory, and its turn
COMPLETE = (*FINAL, 'stopped')  # a run that failed may have got no further than half of its step


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its config.json has it. began: seconds since 1970, of the tracker's time axis."""

    folder: Path
    config: dict[str, Any]  # by path
    digest: str  # of the config but for the mesh, on which a run may go on
    began: float

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that the run is a cell of."""
        parent = self.folder.absolute().parent
        return parent.name if (parent / SWEEP).exists() else None


def runs_in(workdir: Path) -> list[Path]:
    """Returns the folder of the run, or those of all cells that have begun."""
    if (workdir / CONFIG).exists():
        return [workdir]
    return sorted(path.parent for path in workdir.glob(f'*/{CONFIG}'))


def read_run(folder: Path) -> Run:
    """Reads config.json. Raises Unreadable, naming the file, if it is damaged or no file."""
    try:
        config = flat(read_json(folder / CONFIG))
    except OSError as error:
        raise Unreadable(f'{folder / CONFIG} cannot be read ({error.strerror})') from error
    kept = {path: value for path, value in config.items() if not is_mesh(path)}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    return Run(folder, config, digest, (folder / CONFIG).stat().st_mtime)


def is_mesh(path: str) -> bool:
    """Whether a field says on which devices a run trains: it may change as a run goes on."""
    return path.startswith('mesh.')


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns summary.json by path, lists as JSON text; {} if there is none to be read, or one
    without a status.
    """
    with contextlib.suppress(OSError, Unreadable):
        summary = {
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in flat(read_json(folder / SUMMARY)).items()
            if value not in (None, '', [])
        }
        return summary if isinstance(summary.get('status'), str) else {}
    return {}


def flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Returns {'optim.lr': 0.001, ...}. `lm.config.resolve` has this too, and brings JAX."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        value = in_utf8(value) if isinstance(value, str) else value
        name = in_utf8(name)
        is_section = isinstance(value, Mapping)
        found |= flat(value, f'{prefix}{name}.') if is_section else {f'{prefix}{name}': value}
    return found


def in_utf8(text: str) -> str:
    """Returns a text with escapes for halves of pairs, which JSON may have and no tracker takes."""
    return text.encode(errors='backslashreplace').decode()


@dataclasses.dataclass
class Step:
    """All numbers of one step, by tag. seconds: of training until then, by its own clock."""

    step: int
    seconds: float
    values: dict[str, float]


class Tail:
    """The steps of a metrics.jsonl as they are appended; no file is open between two reads.

    A run that goes on from a checkpoint writes the file anew, without later rows. It is then read
    from its start, and gives steps a second time.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._begin()

    def _begin(self) -> None:
        self._offset, self._line = 0, b''  # read so far, and the last line of that
        self._trained, self._seconds = 0, 0.0
        self._last: Step | None = None  # an evaluation of this step may follow

    def read(self) -> tuple[list[Step], bool]:
        """Returns (steps that are complete, as a later one has begun; whether more is there).
        Damaged lines are left out.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            self._begin()
            return [], False
        except OSError as error:
            raise Unreadable(f'{self._path} cannot be read ({error.strerror})') from error
        with file:
            file.seek(self._offset - len(self._line))
            if file.read(len(self._line)) != self._line:
                self._begin()
                file.seek(0)
            data = file.read(MOST_BYTES)
            if b'\n' not in data and len(data) == MOST_BYTES:
                data += file.readline()
        whole = data[: data.rfind(b'\n') + 1]
        lines = whole.splitlines(keepends=True)
        if lines:
            self._offset, self._line = self._offset + len(whole), lines[-1]
        return list(self._steps(lines)), len(data) >= MOST_BYTES

    def rest(self) -> list[Step]:
        """Returns the last step, which is complete where the run has ended."""
        return [self._last] if self._last else []

    def _steps(self, lines: list[bytes]) -> Iterator[Step]:
        for line in lines:
            try:
                row = parse_json(line)
                step, values = row['step'], _doubles(by_tag(row))
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                continue
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                continue
            if self._last and step > self._last.step:
                yield self._last
            if not self._last or step != self._last.step:
                self._last = Step(step, self._seconds, {})
            seconds = values.get('step_sec', math.nan)
            if 0 <= seconds < MOST_SECONDS:
                self._seconds += seconds * max(0, step - self._trained)
                self._trained = self._last.step
            self._last.seconds = min(self._seconds, MOST_SECONDS)
            self._last.values |= values


def _doubles(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row. Raises OverflowError for one that no double holds."""
    kinds = int, float
    return {
        tag: float(x) for tag, x in values.items() if type(x) in kinds and tag and tag.isprintable()
    }
