"""Changed content for each reader, for some minutes, led by the branches that it reaches.

    uv run --with atheris python -m tests.faults.fuzz [READER ...] [--seconds=600] [--out=FOLDER]

Without atheris, content is changed at random. An error that is not clear is printed once per place
in the code, and --out gets the content that caused it. Ends with a table, and with status 1 if
there was such an error, or if a process died.
"""

import argparse
import collections
import gc
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

from tests.faults.changes import LONGEST, change
from tests.faults.readers import READERS

OUTCOMES = READ, REFUSED, UNCLEAR = 'read', 'refused', 'unclear'
SLOW_SEC = 10.0  # of one content
TRACED = ('lm', 'eval', 'modules', 'json', 'yaml')  # coverage counts the branches of these


class Trial:
    """Reads contents, and counts what became of them."""

    def __init__(self, name: str, folder: Path, scratch: str, seconds: float):
        self.name, self.folder, self.start = name, folder, time.monotonic()
        self.seconds, self.counts, self.places = seconds, collections.Counter(), {}
        self.last = folder / f'{name}.last'
        self.reader = READERS[name](Path(scratch))
        self.report()

    def run(self, content: bytes) -> None:
        """Reads the content. An unclear error, or a long wait, is kept with its place."""
        start, error = time.monotonic(), None
        self.last.write_bytes(content)  # if the process dies, this one killed it
        try:
            outcome = READ if self.reader.accepts(content) else REFUSED
        except Exception as raised:  # a fault of the reader, recorded below
            outcome, error = UNCLEAR, raised
        self.counts[outcome] += 1
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            inner = [frame for frame in frames if '/tests/' not in frame.filename][-1:]
            place = ' '.join(f'{Path(f.filename).name}:{f.lineno}' for f in inner)
            self.keep(f'{type(error).__name__} {place}', f'{error}'[:300], content)
        elif (took := time.monotonic() - start) > SLOW_SEC:
            self.keep('slow', f'{took:.0f} s', content)

    def keep(self, place: str, text: str, content: bytes) -> None:
        """Records the first content for a place."""
        if place not in self.places:
            path = self.folder / f'{self.name}-{len(self.places)}'
            path.write_bytes(content)
            self.places[place] = text
            print(f'{self.name}: {place}: {text!r}: {path}', flush=True)

    def report(self) -> None:
        """Writes the counts beside the kept contents."""
        record = {'reader': self.name, 'places': self.places, **self.counts}
        record['seconds'] = time.monotonic() - self.start
        path = self.folder / f'{self.name}.json'
        path.write_text(json.dumps(record, indent=2))

    def change(self, content: bytes, seed: int) -> bytes:
        """Returns changed content; a sample's, if there is none."""
        rng, samples = random.Random(seed), self.reader.samples
        return change(rng, content or rng.choice(samples), rng.choice(samples))


def fuzz_at_random(trial: Trial) -> None:
    for seed in range(sys.maxsize):
        if time.monotonic() - trial.start > trial.seconds:
            return
        trial.run(trial.change(b'', seed))


def fuzz_by_coverage(trial: Trial) -> None:
    """Ends the process, as libFuzzer does."""
    import atheris

    def run(content: bytes) -> None:
        trial.run(content)
        if sum(trial.counts.values()) % 100 == 1:
            trial.report()

    def mutate(content: bytes, max_size: int, seed: int) -> bytes:
        if seed % 3 == 0:
            return atheris.Mutate(content, max_size)
        return trial.change(content if seed % 3 == 1 else b'', seed)[:max_size]

    with tempfile.TemporaryDirectory() as corpus:
        for i, sample in enumerate(trial.reader.samples):
            (Path(corpus) / str(i)).write_bytes(sample)
        for function in gc.get_objects():
            if (
                isinstance(function, types.FunctionType)
                and str(function.__module__).partition('.')[0] in TRACED
            ):
                atheris.instrument_func(function)
        flags = [
            f'-max_total_time={trial.seconds:.0f}',
            f'-max_len={LONGEST}',
            '-rss_limit_mb=8000',
            '-verbosity=0',
        ]
        atheris.Setup([sys.argv[0], *flags, corpus], run, custom_mutator=mutate)
        atheris.Fuzz()


def has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def fuzz(name: str, folder: Path, scratch: str, seconds: float) -> None:
    trial = Trial(name, folder, scratch, seconds)
    (fuzz_by_coverage if has_atheris() else fuzz_at_random)(trial)
    trial.report()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(prog='python -m tests.faults.fuzz')
    parser.add_argument('readers', nargs='*', metavar='READER', help=', '.join(READERS))
    parser.add_argument('--seconds', type=float, default=600.0, help='for each reader')
    parser.add_argument('--out', type=Path, default=Path('runs/fuzz'))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if unknown := {*options.readers} - READERS.keys():
        parser.error(f'unknown readers: {", ".join(sorted(unknown))}; known: {", ".join(READERS)}')
    rows, is_clear = [], True
    for name in options.readers or READERS:
        # libFuzzer ends its process without a cleanup.
        with tempfile.TemporaryDirectory() as scratch:
            process = multiprocessing.get_context('spawn').Process(
                target=fuzz, args=(name, options.out, scratch, options.seconds)
            )
            process.start()
            process.join()
        record = json.loads((options.out / f'{name}.json').read_text())
        counts = [record.get(outcome, 0) for outcome in OUTCOMES]
        died = f'; died with {process.exitcode}' if process.exitcode else ''
        rows.append(f'| {name} | {" | ".join(map(str, counts))} | {len(record["places"])}{died} |')
        is_clear &= not died and not record['places']
    print(f'| reader | {" | ".join(OUTCOMES)} | places |', '|---|---|---|---|---|', *rows, sep='\n')
    sys.exit(not is_clear)
