"""Property: long work is heard of, short work is not; a terminal has one line of it."""

import contextlib
import io
import threading

import pytest

from lm.data import open_dataset, progress, scan
from tests.lm.data.conftest import discard_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def heard(monkeypatch):
    """heard(file, what_it_does): what is said on stderr, as if seconds were over at once."""

    def said(file, work, first=0.0):
        monkeypatch.setattr(progress, 'FIRST_SEC', first)
        monkeypatch.setattr(progress, 'INTERVAL_SEC', dict.fromkeys((True, False), 0.0))
        monkeypatch.setattr(progress.sys, 'stderr', file)
        work()
        return file.getvalue()

    return said


def two_words():
    """Work that ends once it was said twice how far it is."""
    twice, left = threading.Event(), iter(range(1000000))

    def words():
        if next(left):
            twice.set()
        return 'at work'

    with progress.report_periodically(words):
        assert twice.wait(60)


def test_a_log_has_lines_and_a_terminal_one_line_that_is_gone_in_the_end(heard):
    assert heard(io.StringIO(), two_words).startswith('at work\nat work\n')
    shown = heard(Terminal(), two_words)
    assert shown.startswith('\rat work\033[K\rat work\033[K')
    assert shown.endswith('\r\033[K') and '\n' not in shown


def test_short_work_says_nothing(heard):
    assert not heard(
        io.StringIO(), lambda: list(progress.track_progress('abc', 3, 'letters')), first=60.0
    )


@pytest.fixture
def said(monkeypatch):
    """What would be said, as functions that say it when they are called."""
    found = []

    @contextlib.contextmanager
    def said_meanwhile(words):
        found.append(words)
        yield
        found[found.index(words)] = words()

    for module in (progress, scan):
        monkeypatch.setattr(module, 'report_periodically', said_meanwhile)
    return found


def test_items_are_counted_once_they_are_done(said):
    found = [(item, said[0]()) for item in progress.track_progress('ab', 2, 'letters')]
    assert found == [('a', 'letters: 0 of 2'), ('b', 'letters: 1 of 2')]


def test_a_preparation_says_what_it_reads_and_encodes(said, cfg):
    open_dataset(cfg(tokenizer='bpe:300'), say=discard_line)
    read, used, encoded = said
    assert read == 'data: 40 documents are read, 0 MB'
    assert used == 'data: pieces read for the tokenizer: 1 of 1'
    assert encoded == 'data: pieces encoded: 1 of 1'
