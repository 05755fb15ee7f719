"""Hosts of a Ray cluster whose actors run in this process: commands, environments and outcomes.

tests/tpu/test_launch_on_ray.py uses a real cluster.
"""

import os
import shlex
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.tpu.conftest import signal_soon
from tpu import launch
from tpu.launchers import ray as engine


class LostActor(Exception):
    """Stands for the error that Ray raises if an actor is gone."""


class Actor:
    """An actor in this process; a method raises LostActor once its name is in `lost`."""

    def __init__(self, kind, lost):
        self.of, self.lost = kind(), lost

    def __getattr__(self, name):
        def remote(*arguments):
            if name in self.lost:
                self.lost.remove(name)
                return LostActor('the node is gone\nand more')
            return getattr(self.of, name)(*arguments)

        return SimpleNamespace(remote=remote)


class Group:
    def __init__(self, bundles):
        self.bundle_specs = bundles

    def ready(self):
        return self


class Ray:
    """The part of Ray that the engine uses: a cluster of 2 CPUs."""

    def __init__(self):
        self.lost, self.removed, self.slices = [], [], {}
        self.exceptions = SimpleNamespace(RayError=LostActor)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, i: i)
        self.util = SimpleNamespace(
            scheduling_strategies=strategies,
            placement_group=lambda bundles, strategy: Group(bundles),
            remove_placement_group=self.removed.append,
            tpu=SimpleNamespace(slice_placement_group=self.slice_placement_group),
        )

    def slice_placement_group(self, *names, **options):
        self.slices.update(names=names, **options)
        return SimpleNamespace(
            slice_placement_group=Group([{'CPU': 1.0}] * 2), shutdown=lambda: self.removed.append(0)
        )

    def remote(self, kind):
        actor = SimpleNamespace(remote=lambda: Actor(kind, self.lost))
        return SimpleNamespace(options=lambda **_: actor)

    def get(self, value, timeout=None):
        if isinstance(value, LostActor):
            raise value
        return value

    def wait(self, groups, timeout):
        time.sleep(min(timeout, 0.01))
        return ([], groups) if len(groups[0].bundle_specs) > 2 else (groups, [])

    def cluster_resources(self):
        return {'CPU': 2.0, 'node:here': 1.0}


@pytest.fixture
def cluster(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(engine, '_connect', lambda address: ray)
    monkeypatch.setattr(engine, 'LOOK_SEC', 0.0)
    monkeypatch.setattr(engine, 'node_address', lambda: '10.0.0.1')
    return ray


def run_stub(trainer, code, *flags, hosts=('--nodes=2',)):
    """Runs a train.py with the given code; `me` is the process number there."""
    (trainer / 'then.py').write_text(
        "import os, signal, time\nme = int(sys.argv[-1].partition('=')[2])\n" + code
    )
    (trainer / 'config.py').touch()
    train = ['train.py', f'--config={trainer}/config.py', *flags]
    return launch.main(['--engine=ray', *hosts, f'--folder={trainer}', '--name=job', '--', *train])


def test_hosts_get_their_process_numbers(cluster, trainer, capfd):
    code = "print('host', me, 'of', sys.argv[-2]); print(sys.argv[2:5])\n"
    sweep = "--config.sweep={'optim.lr': (1e-3, 3e-3)}"
    assert run_stub(trainer, code, sweep, 'a  b') == 0
    stdout = capfd.readouterr().out
    assert stdout.startswith('host 0 of --num_processes=2\n') and 'host 1' not in stdout
    lines = (trainer / 'arguments').read_text().splitlines()
    (first, second) = sorted(lines, key=lambda line: line[-4])
    assert first.replace('process_id=0', 'process_id=1') == second
    for part in ('--coordinator=', '--watch_port=', "'a  b'", '1e-3, 3e-3'):
        assert part in first


@pytest.mark.parametrize(('code', 'status'), [('sys.exit(me)', 1), ('sys.exit(2)', 2)])
def test_final_status_is_returned(code, status, cluster, trainer, capfd):
    assert run_stub(trainer, f"print('why', me); {code}") == status
    captured = capfd.readouterr()
    assert captured.out == 'why 0\n' and 'host 1 said last:\nwhy 1' in captured.err
    assert len((trainer / 'arguments').read_text().splitlines()) == 2


def test_ended_run_is_restarted(cluster, trainer, capfd):
    """The run ends with 42, then by a signal, and is then done."""
    code = (
        "tries = len((here / 'arguments').read_text().splitlines())\n"
        'tries <= 1 and sys.exit(42)\n'
        'tries <= 2 and os.kill(os.getpid(), signal.SIGKILL)\n'
        "print('done')\n"
    )
    assert run_stub(trainer, code, hosts=['--nodes=1']) == 0
    captured = capfd.readouterr()
    assert captured.out == 'done\n'
    assert 'status 42: restart 1' in captured.err and 'status 137: restart 2' in captured.err
    assert len(cluster.removed) == 3


def test_lost_host_is_replaced(cluster, trainer, capfd):
    cluster.lost.append('read')
    assert run_stub(trainer, "print('done')", hosts=['--nodes=1']) == 0
    captured = capfd.readouterr()
    assert captured.out == 'done\n' and 'host 0 is lost: the node is gone\n' in captured.err
    assert 'status 42: restart 1' in captured.err and len(cluster.removed) == 2


def test_sigterm_reaches_every_host(cluster, trainer, capfd):
    code = (
        'def stop(number, frame):\n'
        "    (here / f'saved{me}').touch()\n"
        '    sys.exit(128 + number)\n'
        'signal.signal(signal.SIGTERM, stop)\n'
        "(here / f'begun{me}').touch()\n"
        'while True: time.sleep(0.05)\n'
    )

    def stop():
        while len(list(trainer.glob('begun*'))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert run_stub(trainer, code) == 143
    assert {path.name for path in trainer.glob('saved*')} == {'saved0', 'saved1'}


def test_stale_slice_variables_are_dropped():
    """libtpu would wait for the slices that they name, which are gone."""
    env = {'MEGASCALE_COORDINATOR_ADDRESS': 'old', 'MEGASCALE_NUM_SLICES': '2', 'PATH': 'p'}
    assert engine.child_env(env, {}) == {'PATH': 'p'}
    assert engine.child_env(env, {'MEGASCALE_SLICE_ID': '1'}) == {
        'PATH': 'p',
        'MEGASCALE_SLICE_ID': '1',
    }


def test_slices_have_their_own_variables():
    first = {'address': '10.0.0.1', 'ports': (1, 2)}
    assert engine.slice_env(first, 1, 0) == {}
    env = engine.slice_env(first, 3, 2)
    assert env['MEGASCALE_COORDINATOR_ADDRESS'] == '10.0.0.1'
    assert (env['MEGASCALE_NUM_SLICES'], env['MEGASCALE_SLICE_ID']) == ('3', '2')


def test_processes_are_numbered_by_slice():
    hosts = [{'worker': worker} for worker in (1, 0, 1, 0)]
    assert engine.order_bundles(hosts, slices=2) == [1, 0, 3, 2]
    assert engine.order_bundles([{'worker': None}] * 3, slices=1) == [0, 1, 2]


def test_actor_takes_its_bundle():
    assert engine.actor_options({'CPU': 1.0, 'TPU': 4.0}) == {
        'num_cpus': 1.0,
        'resources': {'TPU': 4.0},
    }
    assert engine.actor_options({'GPU': 8.0}) == {'num_cpus': 0, 'num_gpus': 8.0, 'resources': {}}


@pytest.mark.full
def test_whole_tpu_slice_is_requested(cluster, trainer):
    """Each of several slices has its own variables."""
    code = (
        'with open(here / "slices", "a") as file:\n'
        '    print(os.environ["MEGASCALE_SLICE_ID"], sys.argv[-1], file=file)\n'
    )
    hosts = ['--topology=4x4', '--accelerator_version=v6e', '--slices=2']
    assert run_stub(trainer, code, hosts=hosts) == 0
    assert cluster.slices == {'names': ('4x4', 'v6e'), 'num_slices': 2, 'name': 'job'}
    lines = sorted((trainer / 'slices').read_text().splitlines())
    assert lines == ['0 --process_id=0', '1 --process_id=1']
    assert cluster.removed == [0]


def test_waiting_for_nodes_is_reported(cluster, trainer, capfd):
    signal_soon(signal.SIGTERM)
    assert run_stub(trainer, '', hosts=['--nodes=3']) == 143
    assert "waiting for 3 nodes with {'CPU': 1.0}; in all, {'CPU': 2.0}" in capfd.readouterr().err


def test_dry_run_prints_group_and_command(capsys, monkeypatch):
    monkeypatch.setattr(engine, 'ACCELERATORS', ())
    flags = ['--topology=4x4', '--accelerator_version=v6e', '--slices=2', '--dry_run']
    config = 'configs/default.py'
    assert launch.main(['--engine=ray', *flags, '--', 'train.py', f'--config={config}']) == 0
    stdout = capsys.readouterr().out
    assert "# ray.util.tpu.slice_placement_group('4x4', 'v6e', num_slices=2)" in stdout
    assert f'{sys.executable} train.py --config={config} --coordinator=HOST0:PORT' in stdout


@pytest.mark.parametrize('is_installed', [True, False])
@pytest.mark.parametrize(
    ('options', 'extra'),
    [
        ({'resources': 'CPU=8,GPU=8'}, 'cuda'),
        ({'resources': 'CPU=8,TPU=4'}, 'tpu'),
        ({'topology': '4x4'}, 'tpu'),
        ({'resources': 'CPU=8'}, ''),
    ],
)
def test_missing_extra_is_installed_on_hosts(options, extra, is_installed, monkeypatch):
    spec = object() if is_installed else None
    monkeypatch.setattr(engine.importlib.util, 'find_spec', lambda name: spec)
    words = f'uv run --extra {extra}' if extra and not is_installed else shlex.quote(sys.executable)
    assert engine.select_python(engine.RayOptions(**options)) == words
