"""A process of the tests that dies costs a test, and not the run."""

import subprocess
import sys

import pytest

DIES = """
import os, pathlib, signal

def test_first():
    pass

def test_dies():
    deaths = pathlib.Path(__file__).with_name('deaths')
    deaths.touch()
    if deaths.stat().st_size < {times}:
        deaths.write_bytes(deaths.read_bytes() + b'x')
        os.kill(os.getpid(), signal.SIGKILL)

def test_last():
    pass
"""


@pytest.mark.default_rows('1-0-3 passed, 1 rerun')
@pytest.mark.parametrize(
    ('times', 'status', 'said'),
    [(1, 0, '3 passed, 1 rerun'), (2, 1, '1 failed, 3 passed, 1 rerun')],
)
def test_a_test_has_two_lives(tmp_path, times, status, said):
    """Dropping the hook fails the first case; one that always forgives fails the second."""
    (tmp_path / 'test_dies.py').write_text(DIES.format(times=times))
    words = ['-n', '1', '--dist', 'loadgroup', '--max-worker-restart=2', '-c', '/dev/null']
    plugins = ['-p', 'tests.crashes', '-p', 'no:cacheprovider']
    command = [sys.executable, '-m', 'pytest', *words, *plugins, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said in ran.stdout, ran.stdout
    assert ran.returncode == status
    assert f'{times} x the process of a test died' in ran.stdout


MANY = """
import os, pathlib, pytest, signal, time

@pytest.mark.parametrize('number', range(200))
def test_one(number):
    died = pathlib.Path(__file__).with_name('died')
    if number == 60 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number > 60:  # until another process has come
        time.sleep(0.02)
"""


@pytest.mark.full
def test_what_has_passed_is_not_waited_for(tmp_path):
    """Each test is a group: those that have passed are given to no other process."""
    (tmp_path / 'test_many.py').write_text(MANY)
    words = ['-n', '2', '--dist', 'loadgroup', '--max-worker-restart=2', '-c', '/dev/null']
    plugins = ['-p', 'tests.crashes', '-p', 'no:cacheprovider']
    command = [sys.executable, '-m', 'pytest', *words, *plugins, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert '200 passed, 1 rerun' in ran.stdout, ran.stdout
