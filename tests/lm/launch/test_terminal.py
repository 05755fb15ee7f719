"""Property: lines on a terminal break between words and lose nothing; lines of a log stay whole."""

import io

import pytest
from rich.console import Console

from lm.launch import terminal as terminal_module
from lm.launch.terminal import Terminal, wrap_text

LINE = 'NOTE: the run has 60 steps, but optim.schedule=warmup_cosine needs more than 100 [of them]'


def make_terminal(is_terminal: bool, width: int = 80) -> tuple[Terminal, io.StringIO]:
    terminal, file = Terminal(), io.StringIO()
    terminal.console = Console(
        file=file, force_terminal=is_terminal, width=width, highlight=False, color_system=None
    )
    return terminal, file


@pytest.mark.parametrize('width', [20, 40, 80, 200])
def test_wrapped_text_keeps_its_words_within_the_width(width):
    text = f'{LINE}\n  {LINE}\n\nshort'
    lines = wrap_text(text, width).split('\n')
    assert ' '.join(lines).split() == text.split()
    words = max(map(len, text.split()))
    assert max(map(len, lines)) <= max(width, words + 4)
    if width == 200:
        assert lines == text.split('\n')


def test_continuation_is_indented_and_long_words_stay_whole():
    path = '/a-long/path-without/any-space'
    assert wrap_text(f'  name: {path}, x', 20) == f'  name:\n    {path},\n    x'


@pytest.mark.parametrize('is_terminal', [True, False])
def test_only_terminal_lines_are_wrapped(is_terminal):
    terminal, file = make_terminal(is_terminal)
    terminal.say(LINE)
    lines = file.getvalue().splitlines()
    assert lines == (wrap_text(LINE, 80).split('\n') if is_terminal else [LINE])
    assert len(lines) == 1 + is_terminal


@pytest.mark.parametrize(('steps', 'width'), [(1500, 80), (20_000, 80), (1_000_000, 80), (60, 200)])
def test_progress_line_leaves_room_for_an_interrupt(steps, width):
    """A line that ^C breaks in two stays on the screen."""
    terminal, file = make_terminal(True, width)
    row = {'loss': 10.8855, 'tokens_per_sec': 113_011.0, 'mfu': 0.567}
    with terminal.show_progress(steps, 0):
        for step in (steps - 2, steps - 1):
            terminal.show_row(row | {'step': step}, steps, 1428.0)
        terminal._progress.refresh()
        line = file.getvalue().split('\x1b[2K')[-1]
    assert 'tokens/s' in line and line.endswith('23.8 min left')
    assert f'/{steps}' in line and len(line) + len('^C') <= width
    assert ('━' in line) == (steps < 20_000)


def test_log_width_does_not_depend_on_the_terminal(monkeypatch):
    monkeypatch.setattr(terminal_module.sys.stdout, 'isatty', lambda: False, raising=False)
    assert Terminal().console.width == terminal_module.LOG_WIDTH
