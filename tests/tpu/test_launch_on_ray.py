"""On a real Ray cluster of this machine: a training whose host is lost, and a signal."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from lm.record.checkpoint import list_steps
from lm.record.metrics import read_rows
from tests.commands import PATIENCE_SEC
from tests.sweep_helpers import settings, write_corpus
from tpu import launch

ROOT = Path(__file__).parents[2]
ACTOR = 'ray::RayHost'


@pytest.fixture(scope='module')
def cluster():
    """A cluster of one CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # workers import from here
        import ray

        ray.init(num_cpus=1, include_dashboard=False, logging_level='ERROR', log_to_driver=False)
        yield ray
        ray.shutdown()


def list_actors() -> list[psutil.Process]:
    """Returns the processes of Ray actors."""
    actors = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [''])[0].startswith(ACTOR):
                actors.append(process)
        except psutil.NoSuchProcess:
            continue
    return actors


@pytest.mark.full
def test_run_resumes_after_lost_host(cluster, tmp_path, capfd, monkeypatch):
    """A real training; the actor of its host is killed, as if the node were lost."""
    monkeypatch.chdir(ROOT)
    (tmp_path / 'corpus').mkdir()
    corpus = write_corpus(tmp_path / 'corpus')
    workdir = tmp_path / 'run'
    steps = {'train_steps': 300, 'train_eval_every': 300, 'train_checkpoint_every': 20}
    overrides = [f'--config.{path}={value}' for path, value in settings(corpus, **steps).items()]

    def kill():
        deadline = time.monotonic() + PATIENCE_SEC
        while time.monotonic() < deadline:
            if (workdir / 'checkpoints').exists() and list_steps(workdir / 'checkpoints'):
                return [victim.kill() for victim in list_actors()]
            time.sleep(0.02)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    command = ['train.py', '--config=configs/default.py', f'--workdir={workdir}', *overrides]
    assert launch.main(['--engine=ray', '--nodes=1', '--', *command]) == 0
    thread.join()
    captured = capfd.readouterr()
    assert 'host 0 is lost' in captured.err and 'restart 1 of at most 10' in captured.err
    assert 'resuming after step' in captured.out and 'done: ' in captured.out
    steps = sorted({row['step'] for row in read_rows(workdir / 'metrics.jsonl')})
    assert steps == list(range(1, 301))


@pytest.mark.full
def test_sigterm_reaches_the_trainer(trainer, tmp_path):
    """The command runs in a separate process: Ray, which it starts, handles signals itself."""
    (trainer / 'then.py').write_text(
        'import signal, time\n'
        'def stop(number, frame):\n'
        "    print('saved'); sys.exit(128 + number)\n"
        'signal.signal(signal.SIGTERM, stop)\n'
        "(here / 'begun').touch()\n"
        'while True: time.sleep(0.05)\n'
    )
    # A launch builds its config before it starts anything.
    (trainer / 'config.py').write_text('from configs.default import get_config\n')
    command = [sys.executable, '-m', 'tpu.launch', '--engine=ray', '--nodes=1']
    command += [f'--folder={trainer}', '--', 'train.py', f'--config={trainer}/config.py']
    launched = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + PATIENCE_SEC
        while not (trainer / 'begun').exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        launched.send_signal(signal.SIGTERM)
        stdout, error = launched.communicate(timeout=60)
    finally:
        launched.kill()
    assert launched.returncode == 143, error
    assert stdout == 'saved\n' and 'stopping: ' in error
