"""Cost of preparing one text file: peak memory, time, and how often its bytes are read.

    uv run python -m tests.bench.prepare [--megabytes=300] [--tokenizer=byte]

The text is generated: words of Zipf's law from a lexicon of LEXICON, some on each line, all in one
document. It is prepared in its own process, and the memory is the whole process's.
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


def generate_words(rng: np.random.Generator) -> Iterator[list[bytes]]:
    """Yields AT_ONCE words at a time, without end."""
    lexicon = [rng.choice(LETTERS, rng.integers(2, 11)).tobytes() for _ in range(LEXICON)]
    weights = 1 / np.arange(1, LEXICON + 1)
    while True:
        yield [lexicon[i] for i in rng.choice(LEXICON, AT_ONCE, p=weights / weights.sum())]


def make_text(path: Path, megabytes: float) -> None:
    batches = generate_words(np.random.default_rng(0))
    with open(path, 'wb') as file:
        while file.tell() < megabytes * 1e6:
            batch = next(batches)
            lines = (batch[i : i + ON_A_LINE] for i in range(0, AT_ONCE, ON_A_LINE))
            file.writelines(b' '.join(line) + b'\n' for line in lines)


class CountingFile(io.FileIO):
    """Counts the bytes read from all files opened through it."""

    n_bytes = 0

    def readinto(self, buffer) -> int:
        n_read = super().readinto(buffer)
        CountingFile.n_bytes += n_read
        return n_read

    def readall(self) -> bytes:
        content = super().readall()
        CountingFile.n_bytes += len(content)
        return content


def prepare_here(source: Path, tokenizer: str, cache: str) -> dict[str, float]:
    open_file = builtins.open

    def count(path, *args, **kwargs):
        if path == source:
            return io.BufferedReader(CountingFile(path))
        return open_file(path, *args, **kwargs)

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
        'read': CountingFile.n_bytes,
        'tokens': dataset.report['train']['tokens'],
    }


def measure(megabytes: float, tokenizer: str) -> dict[str, float]:
    """Runs in its own process; its text and the prepared files are removed."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / 'text.txt'
        make_text(source, megabytes)
        command = [sys.executable, '-m', 'tests.bench.prepare', f'--source={source}']
        process = subprocess.run(
            [*command, f'--tokenizer={tokenizer}'], check=True, stdout=subprocess.PIPE, text=True
        )
        return {'bytes': source.stat().st_size, **json.loads(process.stdout)}


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
    report = measure(arguments.megabytes, arguments.tokenizer)
    print('| text, MB | tokenizer | peak memory, MB | seconds | times read | tokens |')
    print('|---|---|---|---|---|---|')
    print(
        f'| {report["bytes"] / 1e6:,.0f} | {arguments.tokenizer} | {report["peak"] / 1e6:,.0f} | '
        f'{report["seconds"]:.0f} | {report["read"] / report["bytes"]:.2f} | {report["tokens"]:,} |'
    )


if __name__ == '__main__':
    main()
