"""W&B: its cloud, a private server, or files that `wandb sync` sends later.

A run has the name in its mark as its id, and `resume='allow'`. The server reports the next step;
offline, the files of earlier processes do. Both know more than the mark if a process was killed.
The step of a point is the step of training.
"""

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from eval.sync.marks import NOTHING, without_password
from eval.sync.records import StepValues, TrackedRun
from lm.storage.files import first_line, open_regular

OFFLINE: Literal['offline'] = 'offline'
# Time for an upload to end; the next session sends the rest.
FINISH_SEC = 120.0
# W&B writes in its own process, which ends two seconds after a killed parent and loses the rows in
# its memory.
SETTLE_SEC = 5.0
# The files are logs of LevelDB: a header of 7 bytes, then blocks of records, each after its CRC,
# length and kind. A record that crosses blocks has a first part, middle parts and a last part.
IDENTITY = b':W&B'  # the first bytes of the header
HEADER, BLOCK, RECORD_HEADER = 7, 1 << 15, struct.Struct('<IHB')
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Wandb:
    """A project; `project` is its name, or ENTITY/NAME, by default $WANDB_PROJECT or evenkeel.

    uri: address of the server, or 'offline'.
    """

    # Opening a session takes seconds, and offline each one makes a folder.
    most_open: ClassVar[int] = 8
    reopen_sec: ClassVar[float] = 300.0
    certain_after: ClassVar[str] = 'close'  # W&B's own process writes and sends until then

    def __init__(self, uri: str | None, project: str | None):
        os.environ.setdefault('WANDB_ERROR_REPORTING', 'false')
        os.environ.pop(
            'WANDB_SERVICE', None
        )  # a W&B process that would end with the process that started it
        import wandb

        self._wandb = wandb
        address = uri or (OFFLINE if os.environ.get('WANDB_MODE') == OFFLINE else None)
        self._mode: Literal['offline'] | None = OFFLINE if address == OFFLINE else None
        options: dict[str, Any] = {} if self._mode or not uri else {'base_url': uri}
        self._settings = wandb.Settings(
            **options,
            console='off',
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=30.0,
            finish_timeout=FINISH_SEC,
            finish_timeout_raises=True,
        )
        entity, _, name = (project or '').rpartition('/')
        self._entity = entity or None
        self._project = name or os.environ.get('WANDB_PROJECT') or 'evenkeel'
        server = address or os.environ.get('WANDB_BASE_URL') or 'https://api.wandb.ai'
        self.destination = f'{without_password(server)} ({project or self._project})'

    def open(self, source: TrackedRun, name: str, began: float) -> 'WandbSession':
        """Opens the run with this id; creates it if the server does not have it.

        Args:
          source: the run.
          name: its name in the mark.
          began: start of its time axis, in seconds since 1970.
        """
        last_step = _read_last_step(source.run.folder, name) if self._mode == OFFLINE else None
        run = self._wandb.init(
            entity=self._entity,
            project=self._project,
            id=name,
            name=source.run.name,
            group=source.run.sweep,
            dir=str(source.run.folder.absolute()),
            mode=self._mode,
            resume='allow',
            reinit='create_new',
            settings=self._settings,
        )
        run.config.update(
            {path: x for path, x in source.config.items() if x is not None}, allow_val_change=True
        )
        return WandbSession(run, began, last_step)


class WandbSession:
    """A run of W&B, open until `close`."""

    def __init__(self, run: Any, began: float, before: int | None):
        self._run, self._began, self._status = run, began, 'stopped'
        self._last_sent = run.step - 1 if before is None else before

    def last_step(self) -> int:
        return self._last_sent

    def send(self, steps: Sequence[StepValues]) -> None:
        for step in steps:
            timestamp = {'_timestamp': self._began + step.seconds}
            self._run.log(step.values | timestamp, step=step.step, commit=True)
        if steps:
            _ = self._run.step  # W&B's process answers once it has the logged rows

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._status = status

    def close(self) -> None:
        self._run.finish(exit_code=int(self._status in ('diverged', 'failed')))


def _read_last_step(folder: Path, name: str) -> int:
    """Returns the last step in the files of a run, or NOTHING; waits for a file being written."""
    paths = list_offline_files(folder, name)
    # A file from the future was written with a wrong clock, and is not waited for.
    while any(0 <= time.time() - path.stat().st_mtime < SETTLE_SEC for path in paths):
        time.sleep(0.1)
    return max((step for path in paths for step, _ in read_points(path)), default=NOTHING)


def list_offline_files(folder: Path, name: str) -> list[Path]:
    """Returns the files that offline sessions have left of a run, oldest first."""
    return sorted((folder / 'wandb').glob(f'offline-run-*-{name}/run-{name}.wandb'))


def read_points(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields (step, numbers by tag) from a file of W&B, up to where it was written.

    Raises ValueError if it is no such file, or for a value that is not JSON.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # ty: ignore[missing-module-member]

    with open_regular(path) as file:
        content = file.read()
    if not content.startswith(IDENTITY[: len(content)]):  # a killed session may leave less
        raise ValueError(f'{path} must be a file of W&B, which begins with {IDENTITY.decode()}')
    for record_bytes in _split_records(content):
        with contextlib.suppress(DecodeError):  # the last record may be truncated
            record = Record.FromString(record_bytes)
            if record.WhichOneof('record_type') == 'history':
                entries = {
                    entry.key or '/'.join(entry.nested_key): entry for entry in record.history.item
                }
                try:
                    values = {key: json.loads(entry.value_json) for key, entry in entries.items()}
                except (ValueError, RecursionError) as error:
                    step = record.history.step.num
                    raise ValueError(
                        f'{path} has a value of step {step} that is not JSON ({first_line(error)})'
                    ) from error
                numbers = {key: x for key, x in values.items() if not key.startswith('_')}
                yield record.history.step.num, numbers


def _split_records(data: bytes) -> Iterator[bytes]:
    position, parts = HEADER, b''
    while position + RECORD_HEADER.size <= len(data):
        block_left = BLOCK - position % BLOCK
        if block_left < RECORD_HEADER.size:  # the rest of the block is padding
            position += block_left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        start, position = position + RECORD_HEADER.size, position + RECORD_HEADER.size + length
        if kind not in (WHOLE, FIRST, MIDDLE, LAST):
            return
        parts = data[start:position] if kind in (WHOLE, FIRST) else parts + data[start:position]
        if kind in (WHOLE, LAST):
            yield parts
