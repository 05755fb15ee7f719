"""Changes that make nearly valid content out of a sample."""

import contextlib
import json
import random

from lm.storage.files import seal_record

LONGEST = 20_000  # bytes of content that `change` keeps
PIECES = (  # that readers of JSON and YAML stumble over
    *(b'null', b'1e999', b'-0.0', b'NaN', b'-Infinity', b'9' * 400, b'0x1', b'true', b'2023-13-45'),
    *(b'"\\ud800"', b'\\u0000', b'"\x00"', b'\xf0\x9f', b'[]', b'{}', b',', b':', b'{', b']', b''),
    *(b'-1', b'1.5', b'"x"', b'"', b'\n', b'- ', b'&a *a', b'!!python/none', b'\xff\xff\xff\xff'),
)
VALUES = (None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, 1e308, '', 'x', '../x', '\x1b[2J', [], {})


def change(rng: random.Random, content: bytes, donor: bytes) -> bytes:
    """Returns content with one to four changes: of a value if it is JSON, else of bytes.

    Args:
      rng: draws the changes.
      content: a valid sample.
      donor: another sample, whose parts may be inserted.

    Returns:
      The changed content.
    """
    for _ in range(rng.randint(1, 4)):
        content = (rng.random() < 0.5 and change_value(rng, content)) or change_bytes(
            rng, content, donor
        )
    return content


def change_bytes(rng: random.Random, content: bytes, donor: bytes) -> bytes:
    """Changes a byte, inserts or replaces by a piece, cuts, or takes a part of a donor.

    Args:
      rng: draws the change.
      content: a sample.
      donor: another sample.

    Returns:
      The changed content.
    """
    changed = bytearray(content[:LONGEST])
    start = rng.randrange(len(changed) + 1)
    end = min(len(changed), start + int(rng.expovariate(1 / 20)))
    place = rng.randrange(len(donor) + 1)
    changed[start:end] = rng.choice(
        (
            rng.randbytes(1) + changed[start + 1 : end],
            rng.choice(PIECES) + changed[start:end],
            rng.choice(PIECES),
            donor[place : place + rng.randrange(60)] + changed[start:end],
        )
    )
    return bytes(changed)


def change_value(rng: random.Random, content: bytes) -> bytes:
    """Replaces, removes or adds a value of a JSON object; returns b'' if it is not one."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return b''
    place, key, inner = None, None, record
    while isinstance(inner, dict | list) and inner and (place is None or rng.random() < 0.8):
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        place, inner = inner, inner[key]
    if place is None:
        return b''
    if rng.random() < 0.2:
        del place[key]
    elif rng.random() < 0.2:
        place[key] = {'x': inner} if rng.random() < 0.5 else [inner]
    else:
        place[key] = rng.choice(VALUES)
    return json.dumps(record).encode()


def seal_again(content: bytes) -> bytes:
    """Returns a record with the seal that fits it, as a stranger could write it."""
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        record = json.loads(content)
        if isinstance(record, dict):
            record.pop('sha256', None)
            return json.dumps(seal_record(record)).encode()
    return content
