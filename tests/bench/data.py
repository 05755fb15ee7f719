"""Cost of preparing many documents: rate per core beside the `tokenizers` library's own, memory.

    uv run python -m tests.bench.data [--megabytes=2000] [--tokenizers=bpe:4096,byte]

The text is generated: .jsonl files of documents of about WORDS words of `tests.bench.prepare`. Each
tokenizer prepares it in its own process, or with `--processes=N` in several that share the work.
Seconds are of all cores (`getrusage`, all threads) and all processes, memory is of the largest
process. The library's seconds are spent in the very calls of `encode_batch_fast` that preparation
makes, on the same texts at the same time: two separate passes differ by half if other work shares
the cores. A bpe is trained on the text first, which is counted separately.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from configs import default
from lm.config.resolve import resolve
from lm.data import open_dataset, tokenizers
from tests.bench.prepare import generate_words

WORDS, SPREAD = 300, 1.0  # of a document: median and deviation of the logarithm
FILE_BYTES = 100_000_000


def make_documents(folder: Path, megabytes: float) -> tuple[int, int]:
    """Writes files of documents; returns (bytes of text in them, documents)."""
    rng = np.random.default_rng(0)
    waiting, n_bytes, n_documents, batches = [], 0, 0, generate_words(rng)
    while n_bytes < megabytes * 1e6:
        with open(folder / f'{n_documents:09}.jsonl', 'wb') as file:
            while file.tell() < min(FILE_BYTES, megabytes * 1e6 - n_bytes):
                length = int(rng.lognormal(np.log(WORDS), SPREAD)) + 1
                while len(waiting) < length:
                    waiting += next(batches)
                text, waiting = b' '.join(waiting[:length]), waiting[length:]
                file.write(b'{"text": "%s"}\n' % text)
                n_bytes, n_documents = n_bytes + len(text), n_documents + 1
    return n_bytes, n_documents


def seconds() -> float:
    """Returns the seconds of all cores used by this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Seconds of all cores spent in some functions."""

    def __init__(self):
        self.seconds = 0.0

    def time_calls(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = seconds()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += seconds() - start

        return wrapper


@dataclasses.dataclass(frozen=True)
class TimedLibrary:
    """The library's tokenizer with its encoding timed."""

    library: Any
    clock: Clock

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.library, name)
        return self.clock.time_calls(attribute) if name == 'encode_batch_fast' else attribute


def prepare_here(folder: Path, tokenizer: str) -> dict[str, float]:
    import tensorflow_datasets  # noqa: F401 - or its import counts as preparation

    training, library = Clock(), Clock()
    load = tokenizers.load

    def load_timed(path: Path) -> tokenizers.Tokenizer:
        loaded = load(path)
        if not isinstance(loaded, tokenizers.SubwordTokenizer):
            return loaded
        return dataclasses.replace(loaded, library=TimedLibrary(loaded.library, library))

    tokenizers._train_bpe = training.time_calls(tokenizers._train_bpe)
    tokenizers.load = load_timed  # every process encodes with the tokenizer that one has saved
    cfg = dataclasses.replace(
        resolve(default.get_config()).data,
        source=f'text:{folder}/*.jsonl',
        tokenizer=tokenizer,
        cache_dir=str(folder / 'cache'),
    )
    at_start, start = peak(), seconds()
    open_dataset(cfg, say=lambda line: print(line, file=sys.stderr))
    return {
        'all': seconds() - start,
        'training': training.seconds,
        'library': library.seconds,
        'at_start': at_start,
        'peak': peak(),
    }


def prepare_in(n_processes: int, folder: str, tokenizer: str) -> dict[str, float]:
    """Returns the total cost in several processes that start at once."""
    command = [sys.executable, '-m', 'tests.bench.data', f'--folder={folder}']
    processes = [
        subprocess.Popen([*command, f'--tokenizers={tokenizer}'], stdout=subprocess.PIPE, text=True)
        for _ in range(n_processes)
    ]
    reports = [process.communicate()[0] for process in processes]
    if failed := [process.returncode for process in processes if process.returncode]:
        raise RuntimeError(f'{len(failed)} of {n_processes} processes failed')
    costs = [json.loads(report) for report in reports]
    return {
        name: (max if name in ('at_start', 'peak') else sum)(cost[name] for cost in costs)
        for name in costs[0]
    }


def row(n_bytes: int, n_documents: int, tokenizer: str, cost: dict[str, float]) -> str:
    encoding, megabytes = cost['all'] - cost['training'], n_bytes / 1e6
    library = cost['library']
    cells = [
        f'{megabytes:,.0f}',
        f'{n_documents:,}',
        tokenizer,
        f'{megabytes / encoding:.2f}',
        f'{megabytes / library:.2f}' if library else '-',
        f'{library / encoding:.0%}' if library else '-',
        f'{megabytes / cost["training"]:.2f}' if library else '-',
        f'{cost["at_start"] / 1e6:,.0f}',
        f'{cost["peak"] / 1e6:,.0f}',
    ]
    return f'| {" | ".join(cells)} |'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--megabytes', type=float, default=2000)
    parser.add_argument('--tokenizers', default='bpe:4096,byte')
    parser.add_argument('--processes', type=int, default=1, help='that prepare it together')
    parser.add_argument('--folder', type=Path, help='of the text, for the process of a tokenizer')
    arguments = parser.parse_args()
    if arguments.folder:
        print(json.dumps(prepare_here(arguments.folder, arguments.tokenizers)))
        return
    print(
        '| text, MB | documents | tokenizer | MB/s a core | of the library alone | share of it | '
        'of training | at start, MB | peak, MB |\n|---|---|---|---|---|---|---|---|---|'
    )
    with tempfile.TemporaryDirectory() as name:
        size = make_documents(Path(name), arguments.megabytes)
        for tokenizer in arguments.tokenizers.split(','):
            cost = prepare_in(arguments.processes, name, tokenizer)
            print(row(*size, tokenizer, cost), flush=True)


if __name__ == '__main__':
    main()
