"""What preparing many documents takes: rate a core beside the `tokenizers` library's own, memory.

    uv run python -m tests.bench.data [--megabytes=2000] [--tokenizers=bpe:4096,byte]

The text is made here: .jsonl files of documents of about WORDS words of `tests.bench.prepare`. Each
tokenizer prepares it in a process of its own, or with `--processes=N` in several that share the
work. Seconds are those of all cores (`getrusage`, all threads) and all processes, memory is that of
the largest. Those of the library are spent in the very calls of `encode_batch_fast` that
preparation makes, on the same texts at the same time: two passes, one after the other, differ by
half where other work shares the cores. A bpe is trained on the text first, which is counted apart.
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
from tests.bench.prepare import words

WORDS, SPREAD = 300, 1.0  # of a document: median and deviation of the logarithm
FILE_BYTES = 100_000_000


def make_documents(folder: Path, megabytes: float) -> tuple[int, int]:
    """Files of documents; (bytes of text in them, documents)."""
    rng = np.random.default_rng(0)
    waiting, n_bytes, n_documents, made = [], 0, 0, words(rng)
    while n_bytes < megabytes * 1e6:
        with open(folder / f'{n_documents:09}.jsonl', 'wb') as file:
            while file.tell() < min(FILE_BYTES, megabytes * 1e6 - n_bytes):
                length = int(rng.lognormal(np.log(WORDS), SPREAD)) + 1
                while len(waiting) < length:
                    waiting += next(made)
                text, waiting = b' '.join(waiting[:length]), waiting[length:]
                file.write(b'{"text": "%s"}\n' % text)
                n_bytes, n_documents = n_bytes + len(text), n_documents + 1
    return n_bytes, n_documents


def seconds() -> float:
    """Of all cores, by this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Seconds of all cores spent in some functions."""

    def __init__(self):
        self.seconds = 0.0

    def timed(self, function: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            start = seconds()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += seconds() - start

        return called


@dataclasses.dataclass(frozen=True)
class Timed:
    """The library's tokenizer with its encoding timed."""

    library: Any
    clock: Clock

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.library, name)
        return self.clock.timed(own) if name == 'encode_batch_fast' else own


def prepare_here(folder: Path, tokenizer: str) -> dict[str, float]:
    import tensorflow_datasets  # noqa: F401 - or its import counts as preparation

    training, library = Clock(), Clock()
    load = tokenizers.load

    def load_timed(path: Path) -> tokenizers.Tokenizer:
        made = load(path)
        if not isinstance(made, tokenizers.SubwordTokenizer):
            return made
        return dataclasses.replace(made, library=Timed(made.library, library))

    tokenizers._train_bpe = training.timed(tokenizers._train_bpe)
    tokenizers.load = load_timed  # every process encodes with what one of them has saved
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
    """What that many processes, which start at once, take together."""
    command = [sys.executable, '-m', 'tests.bench.data', f'--folder={folder}']
    processes = [
        subprocess.Popen([*command, f'--tokenizers={tokenizer}'], stdout=subprocess.PIPE, text=True)
        for _ in range(n_processes)
    ]
    outs = [process.communicate()[0] for process in processes]
    if failed := [process.returncode for process in processes if process.returncode]:
        raise RuntimeError(f'{len(failed)} of {n_processes} processes failed')
    of_each = [json.loads(out) for out in outs]
    return {
        name: (max if name in ('at_start', 'peak') else sum)(found[name] for found in of_each)
        for name in of_each[0]
    }


def row(n_bytes: int, n_documents: int, tokenizer: str, found: dict[str, float]) -> str:
    encoding, megabytes = found['all'] - found['training'], n_bytes / 1e6
    library = found['library']
    cells = [
        f'{megabytes:,.0f}',
        f'{n_documents:,}',
        tokenizer,
        f'{megabytes / encoding:.2f}',
        f'{megabytes / library:.2f}' if library else '-',
        f'{library / encoding:.0%}' if library else '-',
        f'{megabytes / found["training"]:.2f}' if library else '-',
        f'{found["at_start"] / 1e6:,.0f}',
        f'{found["peak"] / 1e6:,.0f}',
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
            found = prepare_in(arguments.processes, name, tokenizer)
            print(row(*size, tokenizer, found), flush=True)


if __name__ == '__main__':
    main()
