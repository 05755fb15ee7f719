"""What a signal does: it is put in a list, or where nothing would be lost, it ends the program."""

import os
import signal

import pytest

from lm.run.signals import Interrupted, caught_signals, nothing_to_lose


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_put_in_the_list_and_the_next_would_end_the_process(number):
    before = signal.getsignal(number)
    with caught_signals() as caught:
        os.kill(os.getpid(), number)
        assert caught == [number] and signal.getsignal(number) == signal.SIG_DFL
    assert signal.getsignal(number) == before


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_where_nothing_would_be_lost_it_is_raised_with_its_number(number):
    with caught_signals() as caught:
        with pytest.raises(Interrupted) as raised, nothing_to_lose(caught):
            os.kill(os.getpid(), number)
        assert raised.value.args == (number,) and not caught
        os.kill(os.getpid(), number)
        assert caught == [number]


def test_a_worker_that_catches_none_is_left_alone():
    with nothing_to_lose([]):
        pass
