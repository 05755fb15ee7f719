"""Hosts of a Ray cluster: a real one on this machine, and what TPU slices are asked for."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from lm.record.metrics import read_rows
from tests.sweep_helpers import settings, write_corpus
from tpu import launch
from tpu.launchers import ray as engine
from tpu.launchers.base import Job
from tpu.launchers.ray_host import child_env

ROOT = Path(__file__).parents[2]
ACTOR = 'ray::Host'


@pytest.fixture(scope='module')
def cluster():
    """Of two CPUs, on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
        patch.chdir(ROOT)
        import ray

        ray.init(num_cpus=2, include_dashboard=False, logging_level='ERROR', log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    monkeypatch.setattr(engine, 'LOOK_SEC', 0.05)


def actors():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [''])[0].startswith(ACTOR):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def run(folder, *flags, nodes=2, name='job'):
    return launch.main(
        ['--engine=ray', f'--nodes={nodes}', f'--folder={folder}', f'--name={name}', '--', *flags]
    )


def stub_run(trainer, then, *flags, nodes=2):
    """Of a train.py that does `then`; it has its own number as `me`."""
    (trainer / 'then.py').write_text(
        "import os, signal, time\nme = int(sys.argv[-1].partition('=')[2])\n" + then
    )
    config = trainer / 'config.py'
    config.touch()
    return run(trainer, 'train.py', f'--config={config}', *flags, nodes=nodes)


def test_a_run_goes_on_after_its_host_is_lost(cluster, tmp_path, capfd, monkeypatch):
    """A real training; the actor of its host is killed as the node would be."""
    monkeypatch.chdir(ROOT)
    (tmp_path / 'corpus').mkdir()
    corpus = write_corpus(tmp_path / 'corpus')
    workdir = tmp_path / 'run'
    steps = {'train_steps': 400, 'train_eval_every': 200, 'train_checkpoint_every': 20}
    overrides = [f'--config.{k}={v}' for k, v in settings(corpus, **steps).items()]

    def kill():
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            rows = read_rows(workdir / 'metrics.jsonl')
            if rows and rows[-1]['step'] > 40:
                return [victim.kill() for victim in actors()]
            time.sleep(0.02)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    command = ['train.py', '--config=configs/default.py', f'--workdir={workdir}', *overrides]
    assert run(ROOT, *command, nodes=1) == 0
    thread.join()
    captured = capfd.readouterr()
    assert 'host 0 is lost' in captured.err and 'restart 1 of at most 10' in captured.err
    assert 'resuming after step' in captured.out and 'done: ' in captured.out
    steps = sorted({row['step'] for row in read_rows(workdir / 'metrics.jsonl')})
    assert steps == list(range(1, 401))


def test_each_host_is_told_which_it_is(cluster, trainer, capfd):
    then = "print('host', me, 'of', sys.argv[-2]); print(sys.argv[2:5])\n"
    sweep = "--config.sweep={'optim.lr': (1e-3, 3e-3)}"
    assert stub_run(trainer, then, sweep, 'a  b') == 0
    out = capfd.readouterr().out
    assert out.startswith('host 0 of --num_processes=2\n') and 'host 1' not in out
    lines = (trainer / 'arguments').read_text().splitlines()
    (first, second) = sorted(lines, key=lambda line: line[-4])
    assert first.replace('process_id=0', 'process_id=1') == second
    for part in ('--coordinator=', '--watch_port=', "'a  b'", '1e-3, 3e-3'):
        assert part in first


@pytest.mark.parametrize(('then', 'status'), [('sys.exit(me)', 1), ('sys.exit(2)', 2)])
def test_a_final_status_is_returned(then, status, cluster, trainer, capfd):
    assert stub_run(trainer, f"print('why', me); {then}") == status
    captured = capfd.readouterr()
    assert captured.out == 'why 0\n' and 'host 1 said last:\nwhy 1' in captured.err
    assert len((trainer / 'arguments').read_text().splitlines()) == 2


def test_a_lost_host_is_started_again(cluster, trainer, capfd):
    """42 at first, and a signal, and then it is done."""
    then = (
        "tries = len((here / 'arguments').read_text().splitlines())\n"
        'tries <= 1 and sys.exit(42)\n'
        'tries <= 2 and os.kill(os.getpid(), signal.SIGKILL)\n'
        "print('done')\n"
    )
    assert stub_run(trainer, then, nodes=1) == 0
    captured = capfd.readouterr()
    assert captured.out == 'done\n'
    assert 'status 42: restart 1' in captured.err and 'status 137: restart 2' in captured.err


def test_sigterm_is_sent_to_every_host(cluster, trainer, capfd):
    then = (
        'def stop(number, frame):\n'
        "    (here / f'saved{me}').touch()\n"
        '    sys.exit(128 + number)\n'
        'signal.signal(signal.SIGTERM, stop)\n'
        "print('begun', flush=True)\n"
        'while True: time.sleep(0.05)\n'
    )

    def stop():
        while len((capfd.readouterr().out, *trainer.glob('arguments'))) < 2:
            time.sleep(0.05)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert stub_run(trainer, then) == 143
    assert {path.name for path in trainer.glob('saved*')} == {'saved0', 'saved1'}


def test_what_earlier_slices_left_is_not_handed_on():
    """libtpu waits for the slices that they name, which are gone."""
    env = {'MEGASCALE_COORDINATOR_ADDRESS': 'old', 'MEGASCALE_NUM_SLICES': '2', 'PATH': 'p'}
    assert child_env(env, {}) == {'PATH': 'p'}
    assert child_env(env, {'MEGASCALE_SLICE_ID': '1'}) == {'PATH': 'p', 'MEGASCALE_SLICE_ID': '1'}


def test_slices_have_their_own_variables():
    first = {'address': '10.0.0.1', 'ports': (1, 2)}
    assert engine.slice_env(first, 1, 0) == {}
    env = engine.slice_env(first, 3, 2)
    assert env['MEGASCALE_COORDINATOR_ADDRESS'] == '10.0.0.1'
    assert (env['MEGASCALE_NUM_SLICES'], env['MEGASCALE_SLICE_ID']) == ('3', '2')


def test_processes_are_numbered_as_in_their_slices():
    hosts = [{'worker': worker} for worker in (1, 0, 1, 0)]
    assert engine.order(hosts, slices=2) == [1, 0, 3, 2]
    assert engine.order([{'worker': None}] * 3, slices=1) == [0, 1, 2]


def test_an_actor_takes_its_bundle():
    assert engine.actor_options({'CPU': 1.0, 'TPU': 4.0}) == {
        'num_cpus': 1.0,
        'resources': {'TPU': 4.0},
    }
    assert engine.actor_options({'GPU': 8.0}) == {'num_cpus': 0, 'num_gpus': 8.0, 'resources': {}}


def test_a_tpu_slice_is_asked_for_as_a_whole(cluster, monkeypatch):
    """A bundle a host: a stand-in, as there is no slice here."""
    asked = {}

    class Slices:
        slice_placement_group = cluster.util.placement_group([{'CPU': 1}])

        def shutdown(self):
            asked['shutdown'] = True

    def slice_placement_group(*names, **more):
        asked.update(names=names, **more)
        return Slices()

    monkeypatch.setattr('ray.util.tpu.slice_placement_group', slice_placement_group)
    options = engine.Options(topology='4x4', accelerator_version='v6e', slices=2)
    launched = engine.Launch(Job('job', ()), options, [], print)
    launched._reserve()
    launched.close()
    assert asked == {'names': ('4x4', 'v6e'), 'num_slices': 2, 'name': 'job', 'shutdown': True}


def test_what_is_waited_for_is_said(cluster, trainer, capfd):
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert stub_run(trainer, '', nodes=3) == 143
    assert "waiting for 3 nodes with {'CPU': 1.0}; in all, {'CPU': 2.0}" in capfd.readouterr().err


def test_dry_run(capsys):
    flags = ['--topology=4x4', '--accelerator_version=v6e', '--slices=2', '--dry_run']
    config = ROOT / 'configs' / 'default.py'
    assert launch.main(['--engine=ray', *flags, '--', 'train.py', f'--config={config}']) == 0
    said = capsys.readouterr().out
    assert "# ray.util.tpu.slice_placement_group('4x4', 'v6e', num_slices=2)" in said
    assert f'{sys.executable} train.py --config={config} --coordinator=HOST0:PORT' in said
