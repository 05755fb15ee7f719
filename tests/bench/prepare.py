"""What preparing one text file takes: peak memory, time, and how often its bytes are read.

    uv run python -m tests.bench.prepare [--megabytes=300] [--tokenizer=byte]

The text is made here: words of Zipf's law from a lexicon of LEXICON, some on each line, all of them
one document. It is prepared in a process of its own, whose memory is the whole process's.
"""

import argparse
import builtins
import dataclasses
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configs import default
from lm.config.resolve import resolve
from lm.data import open_dataset

LEXICON, LETTERS = 100_000, np.frombuffer(b'abcdefghijklmnopqrstuvwxyz', np.uint8)
AT_ONCE, ON_A_LINE = 200_000, 12  # words


def words(rng: np.random.Generator) -> Iterator[list[bytes]]:
    """AT_ONCE at a time, without end."""
    lexicon = [rng.choice(LETTERS, rng.integers(2, 11)).tobytes() for _ in range(LEXICON)]
    weights = 1 / np.arange(1, LEXICON + 1)
    while True:
        yield [lexicon[i] for i in rng.choice(LEXICON, AT_ONCE, p=weights / weights.sum())]


def make_text(path: Path, megabytes: float) -> None:
    made = words(np.random.default_rng(0))
    with open(path, 'wb') as file:
        while file.tell() < megabytes * 1e6:
            found = next(made)
            lines = (found[i : i + ON_A_LINE] for i in range(0, AT_ONCE, ON_A_LINE))
            file.writelines(b' '.join(line) + b'\n' for line in lines)


class Counted(io.FileIO):
    """Counts what is read of all files that are opened through it."""

    n_bytes = 0

    def readinto(self, buffer) -> int:
        found = super().readinto(buffer)
        Counted.n_bytes += found
        return found

    def readall(self) -> bytes:
        found = super().readall()
        Counted.n_bytes += len(found)
        return found


def prepare_here(source: Path, tokenizer: str, cache: str) -> dict[str, float]:
    opened = builtins.open

    def count(path, *args, **kwargs):
        if path == source:
            return io.BufferedReader(Counted(path))
        return opened(path, *args, **kwargs)

    builtins.open = count
    cfg = dataclasses.replace(
        resolve(default.get_config()).data,
        source=f'text:{source}',
        tokenizer=tokenizer,
        cache_dir=cache,
    )
    start = time.perf_counter()
    dataset = open_dataset(cfg, say=lambda line: print(line, file=sys.stderr))
    return {
        'seconds': time.perf_counter() - start,
        'peak': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        'read': Counted.n_bytes,
        'tokens': dataset.report['train']['tokens'],
    }


def measure(megabytes: float, tokenizer: str) -> dict[str, float]:
    """In a process of its own; its text and what it prepares are removed."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / 'text.txt'
        make_text(source, megabytes)
        command = [sys.executable, '-m', 'tests.bench.prepare', f'--source={source}']
        out = subprocess.run(
            [*command, f'--tokenizer={tokenizer}'], check=True, stdout=subprocess.PIPE, text=True
        )
        return {'bytes': source.stat().st_size, **json.loads(out.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--megabytes', type=float, default=300)
    parser.add_argument('--tokenizer', default='byte')
    parser.add_argument('--source', type=Path)
    arguments = parser.parse_args()
    if arguments.source:
        folder = str(arguments.source.parent / 'cache')
        print(json.dumps(prepare_here(arguments.source, arguments.tokenizer, folder)))
        return
    found = measure(arguments.megabytes, arguments.tokenizer)
    print('| text, MB | tokenizer | peak memory, MB | seconds | times read | tokens |')
    print('|---|---|---|---|---|---|')
    print(
        f'| {found["bytes"] / 1e6:,.0f} | {arguments.tokenizer} | {found["peak"] / 1e6:,.0f} | '
        f'{found["seconds"]:.0f} | {found["read"] / found["bytes"]:.2f} | {found["tokens"]:,} |'
    )


if __name__ == '__main__':
    main()
