"""Requests with changed bytes to a served checkpoint: accepted, or refused with a reason."""

import random

import pytest

from eval.serve.requests import ChatBody, CompletionBody, Refusal, parse_body
from tests.eval.serve.fakes import Letters, service
from tests.eval.serve.hostile import COMPLETIONS, bodies

COUNT, SAMPLES, LONGEST = 2000, 700, 5000  # changed requests of a trial, sound ones, bytes
PIECES = (  # what JSON readers stumble over
    *(b'null', b'1e999', b'-0.0', b'NaN', b'-Infinity', b'9' * 400, b'0x1', b'true'),
    *(b'"\\ud800"', b'\\u0000', b'"\x00"', b'\xf0\x9f', b'[]', b'{}', b',', b':', b'{', b']', b''),
)


def change(rng: random.Random, body: bytes, donor: bytes) -> bytes:
    """Returns a body with one to four changes: a byte, a piece, a cut, or a part of a donor."""
    content = bytearray(body[:LONGEST])
    for _ in range(rng.randint(1, 4)):
        start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        place = rng.randrange(len(donor[:LONGEST]) + 1)
        content[start:end] = rng.choice(
            (
                rng.randbytes(1) + content[start + 1 : end],
                rng.choice(PIECES) + content[start:end],
                rng.choice(PIECES),
                donor[place : place + rng.randrange(60)] + content[start:end],
            )
        )
    return bytes(content)


@pytest.mark.trials(short=1, long=500)
def test_changed_requests_are_accepted_or_refused(trial):
    rng, samples = random.Random(trial), [*bodies(SAMPLES)]
    routes, n_accepted = service(Letters()), 0
    for _ in range(COUNT):
        (path, body), (_, donor) = rng.choice(samples), rng.choice(samples)
        changed = change(rng, body, donor)
        body_type = CompletionBody if path == COMPLETIONS else ChatBody
        try:
            routes.prepare_generation(body_type.parse(parse_body(changed)))
            n_accepted += 1
        except Refusal as refusal:
            assert 400 <= refusal.status < 500 and refusal.message, changed
    assert 0 < n_accepted < COUNT
