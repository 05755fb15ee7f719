"""Effects of a signal: it is added to a list or, if nothing would be lost, ends the program."""

import os
import signal
import subprocess
import sys

import pytest

from lm.launch import signals
from lm.launch.signals import Interrupted, catch_signals, interruptible
from tests.commands import ROOT

STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def with_a_terminal():
    """Resets SIGHUP as a shell does, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize('number', STOPS)
def test_first_signal_is_caught_and_echo_ignored(number):
    before = signal.getsignal(number)
    with catch_signals() as caught:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert caught == [number]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_later_signal_ends_process(number, monkeypatch):
    killed, kill = [], os.kill
    with catch_signals() as caught:
        kill(os.getpid(), number)
        caught.first_at -= 2 * signals.ECHO_SEC
        monkeypatch.setattr(os, 'kill', lambda *sent: killed.append(sent))
        kill(os.getpid(), number)
        assert killed == [(os.getpid(), number)]
        assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize('number', STOPS)
def test_interruptible_raises_signal_number(number):
    with catch_signals() as caught:
        with pytest.raises(Interrupted) as raised, interruptible(caught):
            os.kill(os.getpid(), number)
        assert raised.value.args == (number,) and not caught
        os.kill(os.getpid(), number)
        assert caught == [number]


# Sends a signal while the collector runs a callback, and waits for the exception.
DROPPED = """
import contextlib, gc, os, sys, time
from lm.launch.signals import catch_signals, interruptible, raise_on_sigint

def send(phase, info):
    gc.callbacks.clear()
    os.kill(os.getpid(), number)

number, is_caught = map(int, sys.argv[1:])
raise_on_sigint()
with contextlib.ExitStack() as stack:
    if is_caught:
        stack.enter_context(interruptible(stack.enter_context(catch_signals())))
    gc.callbacks.append(send)
    try:
        gc.collect()
        time.sleep(100)
    except KeyboardInterrupt as error:
        print('interrupted', *map(int, error.args))
"""


@pytest.mark.parametrize(('number', 'is_caught'), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_interrupt_during_garbage_collection_is_not_lost(number, is_caught):
    arguments = [str(int(number)), str(is_caught)]
    done = subprocess.run(
        [sys.executable, '-c', DROPPED, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    expected = f'interrupted {int(number)}\n' if is_caught else 'interrupted\n'
    assert (done.stdout, done.stderr) == (expected, '')


def test_repeated_sighup_is_ignored(monkeypatch):
    """A shell forwards SIGHUP later. Catches a second one that ends a checkpoint midway."""
    with catch_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)
        caught.first_at -= 2 * signals.ECHO_SEC
        os.kill(os.getpid(), signal.SIGHUP)
        assert caught == [signal.SIGHUP]


def test_nohup_sighup_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with catch_signals() as caught:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_preserve_handlers_without_handler():
    with interruptible([]):
        pass
