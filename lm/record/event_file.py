"""Scalars of a run in a file that TensorBoard reads."""

import os
import socket
import struct
import time
from pathlib import Path

# Modules of protocol buffers define their classes at run time.
from tensorboardX.proto.event_pb2 import Event, SessionLog  # ty: ignore[missing-module-member]
from tensorboardX.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """Scalars for TensorBoard, appended event by event.

    The format is TFRecord: length, its CRC, an Event as protocol buffer, its CRC. We do not use the
    SummaryWriter of tensorboardX: its thread dies on a full disk, and the next write waits for
    ever.
    """

    def __init__(self, folder: Path, purge_step: int):
        folder.mkdir(exist_ok=True)
        process = f'{socket.gethostname()}.{os.getpid()}'
        self._path = folder / f'events.out.tfevents.{time.time():.0f}.{process}'
        self._append(Event(wall_time=time.time(), file_version='brain.Event:2'))
        start = SessionLog(status=SessionLog.START)  # from here on, steps replace earlier ones
        self._append(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        payload = event.SerializeToString()
        length = struct.pack('<Q', len(payload))
        sums = (struct.pack('<I', masked_crc32c(part)) for part in (length, payload))
        with self._path.open('ab') as file:
            file.write(length + next(sums) + payload + next(sums))
