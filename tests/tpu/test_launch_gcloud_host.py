"""The script that ssh runs on a host of a TPU slice, in the available shells."""

import ast
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tpu.stubs import NASTY, SWEEP, UNTIL_SIGTERM
from tpu import launch
from tpu.launchers import gcloud
from tpu.launchers.base import Job

REQUIRED = {'zone': 'z', 'accelerator_type': 'v6e-16', 'runtime_version': 'r'}
SHELLS = [shell for shell in ('bash', 'dash') if shutil.which(shell)]


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch):
    monkeypatch.setattr(gcloud, 'HOST_SEC', 0.1)


class Host:
    """One host: a home folder with the repository in it, and commands that ssh would run there."""

    def __init__(self, home: Path, trainer: Path, shell: str, flags=NASTY):
        self.home, self.trainer, self.shell = home, trainer, shell
        self.job = Job('job', tuple(flags), python=sys.executable)
        self.options = gcloud.GcloudOptions(**REQUIRED, folder=trainer.name)

    def ssh(self, command: str, hangup=signal.SIG_DFL) -> subprocess.Popen:
        """Runs a command as gcloud does, which splits at blanks, and ssh, which joins the words
        again.

        hangup: the disposition of SIGHUP.
        """
        words = command.split(' ')
        return subprocess.Popen(
            [self.shell, '-c', ' '.join(words)],
            cwd=self.home,
            env={**os.environ, 'HOME': str(self.home)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        )

    def start(self, hangup=signal.SIG_DFL) -> subprocess.Popen:
        return self.ssh(gcloud.host_script(self.job, self.options), hangup)

    def arguments(self) -> list[list[str]]:
        """Returns the arguments of each start of train.py."""
        file = self.trainer / 'arguments'
        lines = file.read_text().splitlines() if file.exists() else []
        return [ast.literal_eval(line) for line in lines]

    def wait_for_trainer(self) -> None:
        while not self.arguments():
            time.sleep(0.02)


@pytest.fixture(params=SHELLS)
def host(request, tmp_path, trainer):
    return Host(tmp_path, trainer, request.param)


def test_flags_survive_ssh(host):
    """Flags may have any characters, and the command any status."""
    (host.trainer / 'then.py').write_text("print('a step'); sys.exit(42)")
    process = host.start()
    stdout, _ = process.communicate(timeout=20)
    assert host.arguments() == [list(NASTY)]
    assert process.returncode == 42
    assert stdout == 'a step\nevenkeel: a host ended with status 42\n'


@pytest.fixture
def gate(host) -> Path:
    """A file; the trainer ends once it exists."""
    gate = host.trainer / 'gate'
    (host.trainer / 'then.py').write_text(
        'import time\n'
        "print('begun', flush=True)\n"
        f'while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)\n'
        "print('ended')\n"
    )
    return gate


@pytest.mark.parametrize('hangup', [signal.SIG_DFL, signal.SIG_IGN], ids=['ends', 'ignored'])
def test_broken_connection_keeps_trainer(host, gate, hangup):
    """A new connection finds the trainer with all of its output, and starts no second one.

    No other process is left, which would hold the pipe that is read to its end here.
    """
    first = host.start(hangup)
    host.wait_for_trainer()
    assert first.stdout.readline() == 'begun\n'
    os.killpg(first.pid, signal.SIGHUP)  # like a lost terminal
    first.kill()
    first.wait(20)  # like its ssh server
    first.communicate(timeout=20)
    second = host.start()
    assert second.stdout.readline() == 'begun\n'
    gate.touch()
    stdout, _ = second.communicate(timeout=20)
    assert stdout == 'ended\nevenkeel: a host ended with status 0\n'
    assert len(host.arguments()) == 1
    third = host.start()  # the trainer has ended, so it is started again
    third.communicate(timeout=20)
    assert len(host.arguments()) == 2


def test_unread_connection_keeps_trainer(host, gate):
    first = host.start(signal.SIG_IGN)
    host.wait_for_trainer()
    first.stdout.close()
    first.stderr.close()
    assert first.wait(20) != 0
    assert not gate.exists()  # the trainer has not ended
    second = host.start()
    assert second.stdout.readline() == 'begun\n'
    gate.touch()
    assert second.communicate(timeout=20)[0].endswith('evenkeel: a host ended with status 0\n')
    assert len(host.arguments()) == 1


def test_stop_script_sends_sigterm(host):
    (host.trainer / 'then.py').write_text(UNTIL_SIGTERM)
    process = host.start()
    assert process.stdout.readline() == 'begun\n'
    assert host.ssh(gcloud.stop_script(host.job)).wait(10) == 0
    stdout, _ = process.communicate(timeout=20)
    assert stdout == 'saved\nevenkeel: a host ended with status 143\n'
    assert process.returncode == 143


def test_missing_folder_is_bad_input(host):
    shutil.rmtree(host.trainer)
    process = host.start()
    stdout, _ = process.communicate(timeout=20)
    assert stdout.endswith('evenkeel: a host ended with status 1\n') and process.returncode == 1


def test_host_is_set_up_once(host):
    """If the setup fails, nothing trains, and it is tried again."""
    moved = host.home / 'not yet'
    host.trainer.rename(moved)
    setup = f"cd '{moved}' && echo \"it's\" >> ../set && cp -r . '{host.trainer}'  # a copy"
    host.options = dataclasses.replace(host.options, setup=f'false; {setup} || exit 7')
    moved.rename(host.home / 'away')
    process = host.start()
    assert process.communicate(timeout=20)[0].endswith('a host ended with status 1\n')
    (host.home / 'away').rename(moved)
    for _ in range(2):
        assert host.start().wait(20) == 0
    assert (host.home / 'set').read_text() == "it's\n" and len(host.arguments()) == 2


def test_command_reaches_trainer(trainer, tmp_path, fake, capfd):
    """All together: ssh runs its command. The trainer ends with 42 at first."""
    (trainer / 'then.py').write_text(
        "tries = len((here / 'arguments').read_text().splitlines())\n"
        "print('try', tries)\n"
        'sys.exit(42 if tries == 1 else 0)\n'
    )
    ssh = (
        f'cd {tmp_path}; HOME={tmp_path}; export HOME; for word; do case $word in '
        '--command=*) sh -c "${word#--command=}"; exit $?;; esac; done'
    )
    fake('gcloud', ssh=[ssh], describe=['echo ACTIVE'])
    flags = [f'--{name}={value}' for name, value in REQUIRED.items()]
    flags += [f'--folder={trainer.name}', f'--python={sys.executable}', '--name=job']
    train = ['train.py', '--config=configs/default.py', '--workdir=/shared/run', SWEEP, *NASTY]
    assert launch.main(['--engine=gcloud', *flags, '--', *train]) == 0
    captured = capfd.readouterr()
    assert captured.out == 'try 1\ntry 2\n' and 'restart 1 of at most 10' in captured.err
    lines = (trainer / 'arguments').read_text().splitlines()
    assert [ast.literal_eval(line) for line in lines] == [train[1:]] * 2
