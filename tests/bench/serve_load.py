"""Waiting times of well-behaved clients of the server, alone and beside misbehaving ones.

    uv run python -m tests.bench.serve_load [--minutes=10] [--clients=200] [--checkpoint=WORKDIR]

Starts `python -m eval.serve`. Half of the clients send requests, read the responses and pause; they
are alone for half of the time. Then the other half disconnects midway, reads slowly or not at all,
or sends nonsense. Ends with an error if the server has printed a traceback, has ended, holds a slot
at the end, or has grown by more than --growth megabytes after its first minute with all clients.
Without --checkpoint the model is a tiny one, trained for a step.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

PROMPTS = ('norm', 'layer head', 'token scale depth width', 'loss ' * 12)
THINK_SEC = 8.0  # mean time between two requests of a client
MOST_TOKENS = 24
GOES_ON_SEC = 30.0  # for the server to be idle when all clients have gone


@dataclasses.dataclass
class WaitTimes:
    """Seconds of well-behaved clients, from their first try, to the first byte and to the end.

    refused: tries rejected by the full queue. failed: responses without text.
    """

    first: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)
    refused: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    asked_by_others: int = 0

    def row(self, name: str) -> str:
        """Returns a row of the table."""
        cells = [f'{quantile(x, q):.3f}' for x in (self.first, self.whole) for q in (0.5, 0.95)]
        counts = [len(self.whole), self.refused, len(self.failed), self.asked_by_others]
        return f'| {name} | {" | ".join([*cells, *map(str, counts)])} |'


HEADER = (
    '| clients | first byte p50, s | p95 | whole p50, s | p95 | answers | refused | failed | of '
    'the others |\n|---|---|---|---|---|---|---|---|---|'
)


def quantile(seconds: list[float], share: float) -> float:
    """Returns a quantile; NaN of fewer than two."""
    if len(seconds) < 2:
        return float('nan')
    return statistics.quantiles(seconds, n=100, method='inclusive')[round(100 * share) - 1]


def request(body: bytes, *headers: str, path: str = '/v1/completions') -> bytes:
    """Returns a POST request with the content length of its body."""
    head = [f'POST {path} HTTP/1.1', 'host: x', f'content-length: {len(body)}', *headers]
    return '\r\n'.join([*head, '', '']).encode() + body


def completion(rng: random.Random, **changes) -> bytes:
    """Returns a request for a text."""
    record = {
        'prompt': rng.choice(PROMPTS),
        'max_tokens': rng.randint(4, MOST_TOKENS),
        'seed': rng.randrange(1000),
        'stream': rng.random() < 0.7,
    }
    return request(json.dumps(record | changes).encode(), 'connection: close')


@contextlib.asynccontextmanager
async def connection(port: int) -> Iterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection('127.0.0.1', port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def asks_and_reads(port: int, rng: random.Random, waits: WaitTimes) -> None:
    """Requests until it gets a text, and records how long that took."""
    sent, start = completion(rng), time.perf_counter()
    while True:
        async with connection(port) as (reader, writer):
            writer.write(sent)
            head = await reader.readuntil(b'\r\n\r\n')
            body = await reader.read(1)
            first = time.perf_counter()
            body += await reader.read()
        status = int(head.split()[1])
        if status == 429:
            waits.refused += 1
            after = next(line for line in head.lower().split(b'\r\n') if b'retry-after' in line)
            await asyncio.sleep(int(after.split(b':')[1]))
            continue
        if status != 200 or b'"error"' in body or not body:
            waits.failed.append(f'{status}: {body[:200]!r}')
        else:
            waits.first.append(first - start)
            waits.whole.append(time.perf_counter() - start)
        return


def reset(writer: asyncio.StreamWriter) -> None:
    """Makes the connection end with a reset, like a killed process's."""
    linger = struct.pack('ii', 1, 0)
    writer.get_extra_info('socket').setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def leaves_midway(port: int, rng: random.Random) -> None:
    async with connection(port) as (reader, writer):
        writer.write(completion(rng, stream=True, max_tokens=MOST_TOKENS))
        await reader.read(200)
        if rng.random() < 0.5:
            reset(writer)


async def leaves_at_once(port: int, rng: random.Random) -> None:
    """Sends a request, or the beginning of one, and disconnects."""
    async with connection(port) as (_, writer):
        sent = completion(rng, stream=False, max_tokens=MOST_TOKENS)
        writer.write(sent[: rng.choice([20, len(sent) - 5, len(sent)])])
        await writer.drain()
        if rng.random() < 0.5:
            reset(writer)


async def reads_slowly(port: int, rng: random.Random) -> None:
    """Reads a few bytes now and then, and finally nothing."""
    async with connection(port) as (reader, writer):
        writer.write(completion(rng, stream=True, n=2, logprobs=20, max_tokens=MOST_TOKENS))
        for _ in range(10):
            await reader.read(16)
            await asyncio.sleep(0.2)


async def says_nothing(port: int, rng: random.Random) -> None:
    """Holds a connection, with or without a part of a request."""
    async with connection(port) as (_, writer):
        writer.write(completion(rng)[: rng.choice([0, 30])])
        await asyncio.sleep(5 + 10 * rng.random())


NONSENSE = (
    b'\x00\xff' * 500,
    b'GET / HTTP/9.9\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n',
    b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{',
    b'GET /' + b'a' * 100_000,
    request(b'nonsense'),
    request(b'\xff\xfe' * 1000),
    request(b'[' * 100_000),
    request(b'{"prompt": "\\ud800"}'),
    request(b'{"prompt": ["a", 1, null]}'),
    request(b'{"prompt": [99999999]}'),
    request(b'{"prompt": "a", "temperature": NaN}'),
    request(b'{"prompt": "a", "n": 1' + b'0' * 5000 + b'}'),
    request(b'{"prompt": "a", "max_tokens": 1e99}'),
    request(b'{"messages": [{"role": "robot"}]}', path='/v1/chat/completions'),
    request(json.dumps({'prompt': 'a' * 3_000_000}).encode()),
    request(b'{"prompt": "a", "max_tokens": 2, "stream": true}') + b'\x00garbage' * 100,
    request(b'{}', path='/v1/models'),
    request(b' ' * 5_000_000),
)


async def sends_nonsense(port: int, rng: random.Random) -> None:
    async with connection(port) as (reader, writer):
        writer.write(rng.choice(NONSENSE))
        await writer.drain()
        writer.write_eof()
        await reader.read()


BAD: tuple[Callable[[int, random.Random], Awaitable[None]], ...] = (
    leaves_midway,
    leaves_at_once,
    reads_slowly,
    says_nothing,
    sends_nonsense,
)


async def load(
    port: int, good: int, bad: int, seconds: float, think_sec: float = THINK_SEC, seed: int = 0
) -> WaitTimes:
    """Runs clients for some seconds, and waits until the good ones have their last responses."""
    waits, end = WaitTimes(), time.perf_counter() + seconds

    async def client(act: Callable[[random.Random], Awaitable[None]], i: int) -> None:
        rng = random.Random(f'{seed} {i}')
        await asyncio.sleep(rng.random() * min(think_sec, seconds / 2))
        while time.perf_counter() < end:
            await act(rng)
            await asyncio.sleep(min(rng.expovariate(1 / think_sec), 5 * think_sec))

    async def behave_badly(rng: random.Random) -> None:
        waits.asked_by_others += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # it is cut off
            async with asyncio.timeout(60):
                await rng.choice(BAD)(port, rng)

    bad_clients = [asyncio.create_task(client(behave_badly, -1 - i)) for i in range(bad)]
    try:
        await asyncio.gather(
            *(client(lambda rng: asks_and_reads(port, rng, waits), i) for i in range(good))
        )
    finally:
        for task in bad_clients:
            task.cancel()
        await asyncio.gather(*bad_clients, return_exceptions=True)
    return waits


async def health(port: int) -> dict:
    async with connection(port) as (reader, writer):
        writer.write(b'GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n')
        return json.loads((await reader.read()).partition(b'\r\n\r\n')[2])


async def idle(port: int, slots: int) -> dict:
    """Returns the server's own report, when all its slots are free or time is up."""
    end = time.perf_counter() + GOES_ON_SEC
    while True:
        state = await health(port)
        if (state['free_slots'], state['waiting']) == (slots, 0) or time.perf_counter() > end:
            return state
        await asyncio.sleep(0.1)


def tiny_checkpoint(folder: Path) -> Path:
    """Trains a model for a step, with rows of 256 tokens."""
    from tests.commands import tiny
    from tests.corpora import write_corpus
    from train import train

    (folder / 'text').mkdir()
    corpus = write_corpus(folder / 'text')
    train(tiny(corpus, train_steps=1, data_seq_len=256), folder / 'run')
    return folder / 'run'


@contextlib.contextmanager
def server(checkpoint: Path, slots: int, log: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """Starts the server; yields it and its port."""
    flags = [f'--checkpoint={checkpoint}', '--port=0', f'--slots={slots}']
    command = [sys.executable, '-m', 'eval.serve', *flags]
    with log.open('w') as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        line = process.stdout.readline()
        if 'http://' not in line:
            raise SystemExit(f'the server does not start: {log.read_text()}')
        yield process, int(line.split('/v1')[0].rpartition(':')[2])
    finally:
        process.terminate()
        process.wait()


async def measure(process: subprocess.Popen, port: int, options: argparse.Namespace) -> list[str]:
    """Prints the table; returns what is wrong."""
    import psutil

    resident: list[float] = []

    async def watch() -> None:
        while True:
            resident.append(psutil.Process(process.pid).memory_info().rss / 1e6)
            await asyncio.sleep(1)

    seconds, half = options.minutes * 30, options.clients // 2
    await load(port, half, 0, min(10, seconds), think_sec=1)  # compiles
    watching = asyncio.create_task(watch())
    print(HEADER)
    failed = []
    for name, bad in ((f'{half} good ones', 0), (f'the same beside {half} bad ones', half)):
        began = len(resident)
        waits = await load(port, half, bad, seconds, options.think)
        failed += waits.failed
        print(waits.row(name), flush=True)
    state = await idle(port, options.slots)
    watching.cancel()
    settled = resident[min(began + 60, (began + len(resident)) // 2) :]
    print(f'resident memory: {describe(resident)} MB; at the end {state}')
    wrong = [f'an answer was {failure}' for failure in failed[:3]]
    if (state['free_slots'], state['waiting']) != (options.slots, 0):
        wrong.append(f'the server is not idle at the end: {state}')
    if settled[-1] - settled[0] > options.growth:
        wrong.append(f'memory went from {settled[0]:.0f} to {settled[-1]:.0f} MB')
    return wrong


def describe(resident: list[float]) -> str:
    """Formats eleven of many numbers."""
    places = [round(i * (len(resident) - 1) / 10) for i in range(11)]
    return ' '.join(f'{resident[i]:.0f}' for i in places)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--checkpoint', type=Path)
    parser.add_argument('--minutes', type=float, default=10)
    parser.add_argument('--clients', type=int, default=200)
    parser.add_argument('--slots', type=int, default=16)
    parser.add_argument('--think', type=float, default=THINK_SEC)
    parser.add_argument('--growth', type=float, default=20, help='megabytes')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / 'stderr'
        checkpoint = options.checkpoint or tiny_checkpoint(Path(folder))
        with server(checkpoint, options.slots, log) as (process, port):
            wrong = asyncio.run(measure(process, port, options))
            if process.poll() is not None:
                wrong.append(f'the server has ended with {process.returncode}')
        printed = log.read_text()
        if 'Traceback' in printed:
            wrong.append(f'the server printed {printed[-2000:]}')
        print(f'the server printed {len(printed.splitlines())} lines')
    if wrong:
        sys.exit('\n'.join(wrong))


if __name__ == '__main__':
    main()
