"""Property: long work is reported, short work is not; a terminal shows a single line."""

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
def capture_progress(monkeypatch):
    """capture_progress(file, work) -> the output on stderr, as if seconds passed at once."""

    def run(file, work, first=0.0):
        monkeypatch.setattr(progress, 'FIRST_SEC', first)
        monkeypatch.setattr(progress, 'INTERVAL_SEC', dict.fromkeys((True, False), 0.0))
        monkeypatch.setattr(progress.sys, 'stderr', file)
        work()
        return file.getvalue()

    return run


def report_twice(text='at work'):
    """Work that ends after two messages."""
    second_message, ticks = threading.Event(), iter(range(1000000))

    def message():
        if next(ticks):
            second_message.set()
        return text

    with progress.report_periodically(message):
        assert second_message.wait(60)


def test_logs_get_lines_and_terminals_one_line(capture_progress):
    assert capture_progress(io.StringIO(), report_twice).startswith('at work\nat work\n')
    stdout = capture_progress(Terminal(), report_twice)
    assert stdout.startswith('\rat work\033[K\rat work\033[K')
    assert stdout.endswith('\r\033[K') and '\n' not in stdout


def test_terminal_cuts_long_messages(capture_progress, monkeypatch):
    """Catches a message that wraps, whose first line the next message cannot replace."""
    monkeypatch.setenv('COLUMNS', '10')
    stdout = capture_progress(Terminal(), lambda: report_twice('a' * 30))
    assert stdout.startswith(f'\r{"a" * 9}\033[K')
    assert capture_progress(io.StringIO(), lambda: report_twice('a' * 30)).startswith('a' * 30)


def test_short_work_prints_nothing(capture_progress):
    assert not capture_progress(
        io.StringIO(), lambda: list(progress.track_progress('abc', 3, 'letters')), first=60.0
    )


@pytest.fixture
def recorded_messages(monkeypatch):
    """The messages, as functions until their work ends, then as text."""
    messages = []

    @contextlib.contextmanager
    def record(format_message):
        messages.append(format_message)
        yield
        messages[messages.index(format_message)] = format_message()

    for module in (progress, scan):
        monkeypatch.setattr(module, 'report_periodically', record)
    return messages


def test_elements_are_counted_when_done(recorded_messages):
    counts = [
        (letter, recorded_messages[0]()) for letter in progress.track_progress('ab', 2, 'letters')
    ]
    assert counts == [('a', 'letters: 0 of 2'), ('b', 'letters: 1 of 2')]


def test_preparation_reports_reading_and_encoding(recorded_messages, cfg):
    open_dataset(cfg(tokenizer='bpe:300'), say=discard_line)
    scan_message, training_message, encoding_message = recorded_messages
    assert scan_message == 'data: 40 documents read, 0 MB'
    assert training_message == 'data: pieces read for the tokenizer: 1 of 1'
    assert encoding_message == 'data: pieces encoded: 1 of 1'
