"""A model that recites the alphabet, in place of a checkpoint, so that every answer is known."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.serve.app import Limits, Service
from eval.serve.chat import build_chat
from eval.serve.connections import abort_connection, bind_socket, build_http_server
from eval.serve.replies import ServedModel
from eval.serve.scheduler import Scheduler
from lm.data.tokenizers import ByteTokenizer
from lm.inference.engine import Engine, Request, RowUpdate, Token

BYTE = ByteTokenizer()
SERVED = ServedModel('letters', 3, 'ab' * 32, 17, 64)
PATIENCE_SEC = 60


def following(token: int) -> int:
    """Returns the next letter: 'a' after anything but a letter, EOS after 'z'."""
    if token == ord('z'):
        return BYTE.eos_id
    return token + 1 if ord('a') <= token < ord('z') else ord('a')


class Letters:
    """An engine that continues each text with the next letter: 'x' with 'yz' and EOS.

    at_once: tokens of each text in a step, which takes `step_sec`. endless: 'a' follows 'z'.
    """

    def __init__(self, slots: int = 2, at_once: int = 1, step_sec: float = 0.0, endless=False):
        self.slots, self.at_once, self.step_sec, self.endless = slots, at_once, step_sec, endless
        self.capacity, self.vocab_size = SERVED.capacity, BYTE.vocab_size
        self.rows: dict[int, list] = {}  # slot: [request, last token, tokens left]
        self.admitted: list[Request] = []
        self.fails_with: Exception | None = None

    @property
    def n_free(self) -> int:
        return self.slots - len(self.rows)

    check = Engine.check

    def admit(self, request: Request) -> int:
        self.check(request)
        assert self.n_free
        slot = next(i for i in range(self.slots) if i not in self.rows)
        self.rows[slot] = [request, request.tokens[-1], request.max_tokens]
        self.admitted.append(request)
        return slot

    def release(self, slot: int) -> None:
        del self.rows[slot]

    def step(self, fail) -> dict[int, RowUpdate]:
        del fail
        if self.fails_with:
            raise self.fails_with
        time.sleep(self.step_sec)
        return {slot: self._update(slot) for slot in list(self.rows)}

    def _update(self, slot: int) -> RowUpdate:
        request, last, n_left = self.rows[slot]
        tokens, finish = [], ''
        while len(tokens) < self.at_once and not finish:
            last = following(last)
            if last == BYTE.eos_id and self.endless:
                last = ord('a')
            if last == BYTE.eos_id:
                finish = 'stop'
                break
            top = ((last, -0.5), (last + 1, -1.5))[: request.top]
            tokens.append(Token(last, -0.5, top))
            n_left -= 1
            finish = '' if n_left else 'length'
        self.rows[slot] = [request, last, n_left]
        if finish:
            del self.rows[slot]
        return RowUpdate(tokens, finish)


def score(rows: Sequence[Sequence[int]], top: int) -> list[list[Token]]:
    """Scores as `PromptScorer`: the next letter has -0.5, and any other token -2."""
    scores = []
    for row in rows:
        likeliest = [following(token) for token in row]
        tokens = [*row[1:], likeliest[-1]]
        scores.append(
            [
                Token(
                    token,
                    -0.5 if token == likeliest_next else -2.0,
                    ((likeliest_next, -0.5), (likeliest_next + 1, -1.5))[:top],
                )
                for token, likeliest_next in zip(tokens, likeliest, strict=True)
            ]
        )
    return scores


def service(
    engine: Letters,
    key: str | None = None,
    queue: int = 8,
    cut=lambda scope: None,
    folder: Path = Path('nowhere'),
    **limits,
) -> Service:
    """Returns the routes over an engine; their lifespan closes it."""
    return Service(
        SERVED,
        BYTE,
        build_chat(BYTE, folder),
        Scheduler(engine, score, queue),
        engine.check,
        Limits(**{'timeout_sec': PATIENCE_SEC, 'longest_scored': SERVED.capacity} | limits),
        key,
        cut,
    )


@contextlib.contextmanager
def on_loopback(engine: Letters, send_buffer: int | None = None, **settings) -> Iterator[int]:
    """Serves an engine in a thread of this process; yields the port."""
    with serving(service(engine, cut=abort_connection, **settings), send_buffer) as port:
        yield port


@contextlib.contextmanager
def serving(
    service: Service, send_buffer: int | None = None, sock: socket.socket | None = None
) -> Iterator[int]:
    """Serves in a thread of this process; yields the port.

    send_buffer: bytes that the system buffers for a client that does not read. sock: bound to an
    address; a new one by default.
    """
    with sock or bind_socket('127.0.0.1', 0) as sock:
        sock.listen()  # a client may come before the server does
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = build_http_server(service.app(), service.refuse_active)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SEC)
            assert not thread.is_alive()


def wait_until(condition, message: str) -> None:
    """Waits until a condition holds; fails with `message` if it never does."""
    deadline = time.monotonic() + PATIENCE_SEC
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)
