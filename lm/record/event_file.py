"""Scalars of a run in a file that TensorBoard reads."""

import functools
import math
import os
import socket
import struct
import time
from pathlib import Path

WIRE_VARINT, WIRE_DOUBLE, WIRE_BYTES, WIRE_FLOAT = 0, 1, 2, 5  # of protocol buffers
CRC_MASK = 0xA282EAD8


class EventFile:
    """Scalars for TensorBoard, appended event by event.

    The format is TFRecord: length, its CRC, an Event as protocol buffer, its CRC. We do not use
    tensorboardX: to import it takes 0.2 to 0.4 s of each start, the thread of its SummaryWriter
    dies on a full disk, and the next write waits for ever.
    """

    def __init__(self, folder: Path, purge_step: int):
        folder.mkdir(exist_ok=True)
        process = f'{socket.gethostname()}.{os.getpid()}'
        self._path = folder / f'events.out.tfevents.{time.time():.0f}.{process}'
        self._append(0, _encode_bytes(3, b'brain.Event:2'))  # file_version
        start = _encode_int(1, 1)  # status=START: from here on, steps replace earlier ones
        self._append(purge_step, _encode_bytes(7, start))  # session_log

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [
            # Of Summary: its values, of these: tag and simple_value.
            _encode_bytes(1, _encode_bytes(1, tag.encode()) + _encode_float(2, value))
            for tag, value in scalars.items()
        ]
        self._append(step, _encode_bytes(5, b''.join(values)))  # summary

    def _append(self, step: int, fields: bytes) -> None:
        """Appends an Event. fields: the encoded fields after wall_time and step."""
        payload = _encode_double(1, time.time()) + (_encode_int(2, step) if step else b'') + fields
        length = struct.pack('<Q', len(payload))
        sums = (struct.pack('<I', masked_crc32c(part)) for part in (length, payload))
        with self._path.open('ab') as file:
            file.write(length + next(sums) + payload + next(sums))


def _encode_varint(number: int) -> bytes:
    """Encodes a number, which is not negative, in groups of seven bits, the lowest first."""
    groups = [number & 0x7F]
    while number := number >> 7:
        groups[-1] |= 0x80
        groups.append(number & 0x7F)
    return bytes(groups)


def _encode_int(field: int, number: int) -> bytes:
    return _encode_varint(field << 3 | WIRE_VARINT) + _encode_varint(number)


def _encode_double(field: int, number: float) -> bytes:
    return _encode_varint(field << 3 | WIRE_DOUBLE) + struct.pack('<d', number)


def _encode_float(field: int, number: float) -> bytes:
    """Encodes a number as float32; one that is too large becomes infinite."""
    try:
        content = struct.pack('<f', number)
    except OverflowError:
        content = struct.pack('<f', math.copysign(math.inf, number))
    return _encode_varint(field << 3 | WIRE_FLOAT) + content


def _encode_bytes(field: int, content: bytes) -> bytes:
    return _encode_varint(field << 3 | WIRE_BYTES) + _encode_varint(len(content)) + content


@functools.cache
def _crc32c_table() -> list[int]:
    """Returns the CRC-32C (Castagnoli, reversed polynomial) of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table


def masked_crc32c(content: bytes) -> int:
    """Returns the CRC-32C, rotated and offset as TFRecord has it."""
    table, crc = _crc32c_table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + CRC_MASK) & 0xFFFFFFFF
