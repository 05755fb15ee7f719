"""A crashed process of the tests costs one test, and not the run."""

import os
import subprocess
import sys
from pathlib import Path

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


def session(folder: Path, processes: int) -> subprocess.CompletedProcess:
    """Runs the tests of a folder with the plugin alone, independent of PYTEST_ADDOPTS."""
    words = ['-n', str(processes), '--dist', 'loadgroup', '--max-worker-restart=2']
    options = ['-c', '/dev/null', '-p', 'tests.crashes', '-p', 'no:cacheprovider']
    return subprocess.run(
        [sys.executable, '-m', 'pytest', *words, *options, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name != 'PYTEST_ADDOPTS'},
    )


@pytest.mark.default_rows('1-0-3 passed, 1 rerun')
@pytest.mark.parametrize(
    ('times', 'status', 'message'),
    [(1, 0, '3 passed, 1 rerun'), (2, 1, '1 failed, 3 passed, 1 rerun')],
)
def test_crashed_test_is_retried_once(tmp_path, times, status, message):
    """Dropping the hook fails the first case; always forgiving fails the second."""
    (tmp_path / 'test_dies.py').write_text(DIES.format(times=times))
    ran = session(tmp_path, 1)
    assert message in ran.stdout, ran.stdout
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
def test_passed_tests_are_not_repeated(tmp_path):
    """Each test is a group: passed tests are given to no other process."""
    (tmp_path / 'test_many.py').write_text(MANY)
    ran = session(tmp_path, 2)
    assert '200 passed, 1 rerun' in ran.stdout, ran.stdout
