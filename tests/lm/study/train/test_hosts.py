"""Assignment of cells to hosts; tests with processes: tests/lm/launch/test_hosts_on_loopback.py."""

import contextlib
import dataclasses
import itertools
import json
import types
from typing import NamedTuple

import pytest

from lm.config.fields import MeshConfig
from lm.launch.this_host import CHILD, JOB, TELL, Host
from lm.storage.files import hold_lock, seal_record, write_json
from lm.study.train import hosts
from lm.study.train.groups import Work
from lm.study.train.hosts import OtherHosts, deal_cells, join_sweep, run_host_0_first
from tests.helpers import tiny_config
from tests.xla import ONE_DEVICE

HOST = Host('h:1', num_processes=2, process_id=1, watch_port=2)


@pytest.mark.parametrize('n_hosts', [1, 2, 3, 5, 40])
def test_deal_cells_once_and_evenly(n_hosts, monkeypatch):
    monkeypatch.setattr(hosts, 'estimate_work', lambda recipe: 7)
    groups = [[Dealt(name) for name in names] for names in ('abcde', 'f', 'ghijklmnop')]
    shares = [deal_cells(groups, i, n_hosts) for i in range(n_hosts)]
    flat = [list(itertools.chain(*share)) for share in shares]
    assert [cell.name for cell in itertools.chain(*flat)] == list('abcdefghijklmnop')
    assert {len(share) for share in flat} <= {16 // n_hosts, 16 // n_hosts + 1}
    assert all(part for share in shares for part in share)
    # A program more than there are groups for each border between hosts, at most.
    assert sum(map(len, shares)) <= len(groups) + n_hosts - 1


class Dealt(NamedTuple):
    name: str
    recipe: int = 0


@pytest.mark.parametrize('works', [[8, 4, 2, 1, 1], [1, 1, 2, 4, 8], [1, 1, 1, 1, 9], [5] * 6])
@pytest.mark.parametrize('n_hosts', [2, 3])
def test_deal_cells_balances_work(works, n_hosts, monkeypatch):
    """No host exceeds its share by more than half a cell; dealt by number, a host had up to 12 of
    16.
    """
    monkeypatch.setattr(hosts, 'estimate_work', lambda recipe: recipe)
    groups = [[Dealt(str(i), work)] for i, work in enumerate(works)]
    shares = [deal_cells(groups, i, n_hosts) for i in range(n_hosts)]
    assert [cell for share in shares for group in share for cell in group] == [
        cell for (cell,) in groups
    ]
    host_works = [sum(cell.recipe for group in share for cell in group) for share in shares]
    assert max(host_works) <= sum(works) / n_hosts + max(works)


def test_estimate_work_grows_with_model():
    base = {'model.d_model': 64, 'train.steps': 10}
    narrow, wide, deep, long = (
        hosts.estimate_work(tiny_config(base | changes))
        for changes in (
            {},
            {'model.d_model': 128},
            {'model.n_layers': 9},
            {'train.steps': 20},
        )
    )
    assert long == 2 * narrow and wide > 1.5 * narrow and deep > 1.5 * narrow


def test_estimate_work_counts_chosen_experts():
    """Two of four whole experts are two MLPs; halves are one, and a shared half is half of one."""
    moe = {'model.mlp': 'moe', 'mlp.n_experts': 4, 'mlp.experts_per_token': 2}
    dense, whole, halves, shared = (
        hosts.estimate_work(tiny_config(changes))
        for changes in (
            {},
            moe,
            moe | {'mlp.granularity': 2},
            moe | {'mlp.granularity': 2, 'mlp.shared_experts': 1},
        )
    )
    assert halves == dense and whole - dense == 2 * (shared - dense) > 0


class MeshCell:
    def __init__(self, **mesh):
        self.name = 'cell'
        self.recipe = types.SimpleNamespace(mesh=MeshConfig(**{'data': -1} | mesh))


@pytest.fixture
def second_host_digests(monkeypatch):
    """Makes this process the child of a supervisor, and returns the digests it joins with."""
    joined = []
    monkeypatch.setenv(CHILD, json.dumps(dataclasses.asdict(HOST)))
    monkeypatch.setattr(hosts, 'join', joined.append)
    return joined


@pytest.mark.parametrize(
    ('mesh', 'apart'),
    [({}, True), ({'fsdp': -1, 'data': 1}, True), ({'fsdp': 4}, True), ({'fsdp': 8}, False),
     ({'tensor': 2, 'data': 4}, False)],
)  # fmt: skip
def test_single_host_run_joins_no_other(second_host_digests, monkeypatch, mesh, apart):
    monkeypatch.setattr(hosts, '_count_local_devices', lambda host: 4)
    share = join_sweep([[MeshCell()], [MeshCell(**mesh)]], 'local')
    assert (share, len(second_host_digests)) == (((1, 2), 0) if apart else ((0, 1), 1))


@pytest.mark.full
def test_devices_are_counted_in_another_process(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', f'{ONE_DEVICE} --xla_force_host_platform_device_count=3')
    assert hosts._count_local_devices(HOST) == 3
    assert hosts._count_local_devices(dataclasses.replace(HOST, local_devices=(1,))) == 1


def test_single_host_env_hides_other_tpu_hosts(second_host_digests, monkeypatch):
    monkeypatch.setattr(hosts, 'has_tpu', lambda: True)
    monkeypatch.setenv('MEGASCALE_NUM_SLICES', '2')
    monkeypatch.setenv('TPU_PROCESS_BOUNDS', '2,2,1')
    environment = hosts._single_host_env()
    assert (
        environment['TPU_PROCESS_BOUNDS'] == '1,1,1' and 'MEGASCALE_NUM_SLICES' not in environment
    )


def test_join_sweep_alone_and_with_other_engines(second_host_digests, monkeypatch):
    with pytest.raises(ValueError, match='--engine=ray starts its own processes'):
        join_sweep([[MeshCell()]], 'ray')
    monkeypatch.delenv(CHILD)
    assert join_sweep([[MeshCell()]], 'ray') == (0, 1)


def test_other_hosts_see_host_0_files(monkeypatch, tmp_path):
    """A host that does not see them has another folder with that name."""
    monkeypatch.setattr(hosts, 'MEET_SEC', 0.1)
    monkeypatch.setenv(JOB, 'mine')
    (tmp_path / hosts.MARK).write_text('of the job before')
    with (tmp_path / 'told').open('wb') as file:
        monkeypatch.setenv(TELL, str(file.fileno()))
        with pytest.raises(ValueError, match='is not the same folder on all hosts: host 1'):
            run_host_0_first(tmp_path, 1, 2, lambda: None)
        assert not (tmp_path / 'told').read_bytes()
        assert run_host_0_first(tmp_path, 0, 2, lambda: 'opened') == 'opened'
        assert run_host_0_first(tmp_path, 1, 2, lambda: 'too') == 'too'
        assert (tmp_path / 'told').read_bytes() == b'..'


class Watched:
    """Cells of two other hosts in a folder; `at[i]` is called at the i-th look at it."""

    def __init__(self, folder, at):
        self.work = Work([], folder, [], print, self.look)
        self.cells, self.at, self.looks = [Dealt('a'), Dealt('b')], at, 0
        for cell in self.cells:
            (folder / cell.name).mkdir()

    def look(self):
        self.at.get(self.looks, lambda: None)()
        self.looks += 1

    def end(self, name, status='done'):
        write_json(self.work.workdir / name / 'summary.json', seal_record({'status': status}))

    def wait(self):
        return [cell.name for cell in OtherHosts(self.cells, self.work, lambda: None).wait()]


@pytest.fixture
def at_once(monkeypatch):
    """Lets a host count as lost after three looks."""
    monkeypatch.setattr(hosts, 'POLL_SEC', 0.01)
    monkeypatch.setattr(hosts, 'LOST_SEC', 0.05)


def test_host_waits_for_other_hosts(at_once, tmp_path):
    """The host waits while they hold the cells, however long, and updates the progress display."""
    held = contextlib.ExitStack()
    watched = Watched(tmp_path, {})
    for cell in watched.cells:
        held.enter_context(hold_lock(tmp_path / cell.name / '.lock'))
    watched.at = {20: lambda: watched.end('a'), 40: lambda: (watched.end('b'), held.close())}
    assert watched.wait() == [] and watched.looks == 41


def test_lost_host_returns_its_cells(at_once, tmp_path):
    """Their host is lost. Cells that have ended, or diverged, are not returned."""
    held = contextlib.ExitStack()
    watched = Watched(tmp_path, {5: lambda: watched.end('a', 'diverged'), 10: lambda: held.close()})
    held.enter_context(hold_lock(tmp_path / 'b' / '.lock'))
    assert watched.wait() == ['b'] and watched.looks > 10


def test_no_host_is_lost_without_locks(at_once, tmp_path, monkeypatch):
    """Otherwise a cell of another host would be trained twice, in one folder."""
    monkeypatch.setattr('lm.storage.files._try_lock', lambda *_: None)
    watched = Watched(tmp_path, {30: lambda: [watched.end(name) for name in 'ab']})
    assert watched.wait() == [] and watched.looks == 31


def test_only_failures_in_this_wave_end_the_wait(at_once, tmp_path):
    watched = Watched(
        tmp_path, {3: lambda: watched.end('a'), 6: lambda: watched.end('b', 'failed')}
    )
    watched.end('a', 'failed')
    held = contextlib.ExitStack()
    with held:
        held.enter_context(hold_lock(tmp_path / 'a' / '.lock'))
        assert watched.wait() == [] and watched.looks == 7


def test_signal_ends_the_wait(at_once, tmp_path):
    watched = Watched(tmp_path, {2: lambda: watched.work.caught.append(15)})
    with hold_lock(tmp_path / 'a' / '.lock'):
        assert watched.wait() == [] and watched.looks == 3
