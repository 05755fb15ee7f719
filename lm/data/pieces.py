"""Who prepares what of a source: all processes that start on one cache share the work, and what a
killed one has done stays.

Beside the folder NAME that is to be made lies NAME.pieces, of folders that are renamed when whole:

    scan          a copy of the text, and the table of its documents
    built         the tokenizer
    piece-000000  the tokens of the first piece of the copy; and so on

Each process goes through three stages. With the lock of NAME, it scans and builds what is not there
yet. Then it takes a piece that is not there and that no other process holds the lock of, until all
are there: which process encodes a piece does not change its tokens. With the lock of NAME again, it
writes the records from the pieces in their order, unless another process has.

Whatever was there before is looked at before it is used: documents of the copy by their hashes, the
rest by the hashes in its contents.json. What is damaged is made again.

A lock goes with its process, so nobody waits for one that was killed. Where there are no locks,
work is done twice, and the first folder of a name stays. NAME.pieces is removed when NAME is there,
or when the text turns out not to be one that can be prepared. Until then the disk holds the text
and its tokens once more.
"""

import contextlib
import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.config.fields import DataConfig
from lm.data import cache, prepare, prepared, split, tokenizers
from lm.data.prepared import REPORT, TOKENIZER
from lm.data.scan import Damaged, Scan, opened, scan
from lm.data.sources import Source
from lm.data.tokenizers import Plan, Tokenizer
from lm.storage.files import POLL_SEC, InUse, locked, write_json

# Renamed when what is in them changes: a version may go on from where an older one was killed.
SCAN, BUILT, PIECE = 'scan', 'built', 'piece'
TRIES = 10  # of a process whose pieces are removed while it works
WRITING = 'data: another process writes the records of the same data'


def made_together(
    source: Source, plan: Plan, cfg: DataConfig, name: str, say: Callable, wait: bool = True
) -> Path:
    """The folder of what has the digest `name`, prepared unless it is there.

    Memory grows by about 40 bytes a document, and not with the size of files or documents; a bpe
    that is trained holds the distinct words of the text besides. Raises ValueError for a corpus
    that cannot be split, is not UTF-8, or changes while it is read; InUse, where `wait` is False,
    once other processes do all that is left to be done.
    """
    task = Task(source, plan, cfg, name, say, wait)
    is_suspect, tries = False, 0
    while not task.path.is_dir() or prepared.damage(task.path):
        try:
            with cache.disk_full_explained(task.path.parent):
                task.begin(is_suspect)
                task.take_part()
                break
        except Exception as error:
            tries += 1
            if isinstance(error, InUse) or tries > TRIES:
                raise
            if task.is_removed() or isinstance(error, FileNotFoundError):
                continue
            if isinstance(error, Damaged) and not is_suspect:
                say(f'NOTE: {error}: what is damaged is made again')
                is_suspect = True
                continue
            if isinstance(error, ValueError):
                cache.discard(task.path.parent, task.pieces.name)
            raise
    cache.discard(task.path.parent, f'{name}.*')
    return task.path


@dataclasses.dataclass(frozen=True)
class Task:
    """Of one process: what is to be prepared, and its part in it."""

    source: Source
    plan: Plan
    cfg: DataConfig
    name: str
    say: Callable[[str], None]
    wait: bool

    @property
    def path(self) -> Path:
        return cache.root(self.cfg.cache_dir) / self.name

    @property
    def pieces(self) -> Path:
        return self.path.with_name(f'{self.name}.pieces')

    def is_removed(self) -> bool:
        """Whether another process has removed the pieces: all is done, or was in vain."""
        return self.path.is_dir() or not self.pieces.is_dir()

    def begin(self, is_suspect: bool) -> None:
        """The scan and the tokenizer. A scan that is suspect is read through, and made again where
        it is damaged.
        """
        with cache.alone(self.path, cache.SAME, self.say, self.wait) as is_locked:
            if self.path.is_dir():
                if not (reason := prepared.damage(self.path)):
                    return
                self.say(cache.again(self.path, reason))
                shutil.rmtree(self.path)
            self.pieces.mkdir(exist_ok=True)
            damage = _damage_of_scan if is_suspect else _none
            cache.filled(self.pieces / SCAN, self._scan, damage, self.say, is_locked)
            cache.filled(self.pieces / BUILT, self._build, _damage_of_built, self.say, is_locked)

    def _scan(self, folder: Path) -> None:
        scan(self.source, self.cfg, folder)
        prepare.check_unchanged(self.source, self.plan, self.cfg, self.name)
        with opened(folder) as found:
            prepare.describe(found, self.cfg, self.say)

    def _build(self, folder: Path) -> None:
        with opened(self.pieces / SCAN) as found:
            if self.plan.is_trained:
                for piece in found.pieces:
                    found.check(piece)
            texts = prepare.training_texts(found, self.cfg.validation_fraction)
            tokenizer = self.plan.build(texts)
            prepare.warn_of_whole(tokenizer, found, self.say)
        tokenizer.save(folder / TOKENIZER)
        prepared.seal(folder)

    def take_part(self) -> None:
        """Encodes what is free, waits for the rest, and writes the records."""
        if self.path.is_dir():
            return
        with opened(self.pieces / SCAN) as found:
            tokenizer = tokenizers.load(self.pieces / BUILT / TOKENIZER)
            rule = split.rule(found, self.cfg.validation_fraction)
            shared = Shared(self, found, rule, tokenizer)
            for _ in prepare.tracked(shared.done(), len(found.pieces), 'encoding'):
                pass
            with cache.alone(self.path, WRITING, self.say, self.wait) as is_locked:
                cache.filled(self.path, shared.write, prepared.damage, self.say, is_locked)


@dataclasses.dataclass(frozen=True)
class Shared:
    """The pieces of a task."""

    task: Task
    found: Scan
    rule: split.Rule
    tokenizer: Tokenizer

    def done(self) -> Iterator[None]:
        """Comes back with each piece that is there, by this process or by another."""
        left = [i for i in range(len(self.found.pieces)) if not self._path(i).is_dir()]
        if n_there := len(self.found.pieces) - len(left):
            self.task.say(f'data: {n_there:,} of {len(self.found.pieces):,} pieces are encoded')
        # Without locks, those that begin at the same place would do the same all along.
        begin, is_said = random.randrange(len(left) or 1), False
        left = left[begin:] + left[:begin]
        yield from [None] * n_there
        while left:
            for i in left:
                with contextlib.suppress(InUse):
                    self._make(i, _none, wait=False)
                    break
            else:
                if not self.task.wait:
                    raise InUse
                if not is_said:
                    self.task.say('data: other processes encode the last pieces')
                is_said = True
                time.sleep(POLL_SEC)
                continue
            left.remove(i)
            yield

    def _path(self, i: int) -> Path:
        return self.task.pieces / f'{PIECE}-{i:06}'

    def _make(self, i: int, damage: Callable[[Path], str], wait: bool) -> None:
        """Raises InUse where another process makes it and `wait` is False."""
        path, until = self._path(i), {} if wait else {'wait_until': 0.0}
        with locked(path.with_name(f'{path.name}.lock'), waiting='', say=_none, **until) as held:
            cache.filled(path, lambda folder: self._encode(i, folder), damage, self.task.say, held)

    def _encode(self, i: int, folder: Path) -> None:
        prepare.encode(self.found, self.rule, self.found.pieces[i], self.tokenizer, folder)

    def write(self, folder: Path) -> None:
        """What is to be the folder NAME."""
        counts = prepare.write(folder, self._whole(), prepare.dtype_of(self.tokenizer))
        shutil.copytree(self.task.pieces / BUILT / TOKENIZER, folder / TOKENIZER)
        self.task.say(
            f'data: {counts["train"]["tokens"]:,} tokens to train on, '
            f'{counts["validation"]["tokens"]:,} to validate on'
        )
        found = self.found
        invalid = {'documents': found.invalid_documents, 'bytes': found.invalid_bytes}
        report = {**counts, 'empty_documents': found.empty, 'invalid_utf8': invalid}
        write_json(folder / REPORT, report)
        prepared.seal(folder)

    def _whole(self) -> Iterator[Path]:
        """The pieces in order, each encoded again where it is not as it was written."""
        for i in range(len(self.found.pieces)):
            self._make(i, _damage_of_piece, wait=True)
            yield self._path(i)


def _none(_: object) -> str:
    """No damage is looked for; nothing is said."""
    return ''


def _damage_of_scan(folder: Path) -> str:
    try:
        with opened(folder) as found:
            for piece in found.pieces:
                found.check(piece)
    except Damaged as error:
        return str(error)
    return ''


def _damage_of_built(folder: Path) -> str:
    return prepared.damage(folder, (TOKENIZER, prepared.CONTENTS))


def _damage_of_piece(folder: Path) -> str:
    return prepared.damage(folder, prepare.PIECE_FILES)
