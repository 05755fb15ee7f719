"""Joint decisions of processes: threads stand for processes, and a dict for JAX's service."""

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from lm.launch import distributed
from lm.launch.distributed import (
    broadcast_from_first,
    check_same_everywhere,
    gather_values,
    raise_on_all,
    run_first_then_others,
)
from lm.record import workdir
from lm.record.digests import DamagedCheckpoint
from lm.record.workdir import open_workdir
from tests.helpers import tiny_config

N = 3


class Service:
    """JAX's key-value service: a value may be requested before it is set, and is set once."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values, key
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED: ' + key)
            return self.values[key]


class Numbers:
    """A counter for each thread, as each process has its own."""

    def __init__(self, thread):
        self.own = thread

    def __next__(self):
        return next(self.own.numbers)


@pytest.fixture
def on_each(monkeypatch):
    """on_each(act) returns the value or error of act(process_id) for each of N processes."""
    thread, service = threading.local(), Service()
    monkeypatch.setattr(jax, 'process_count', lambda: N)
    monkeypatch.setattr(jax, 'process_index', lambda: thread.index)
    monkeypatch.setattr(distributed, '_service', lambda: service)
    monkeypatch.setattr(distributed, '_exchange_ids', Numbers(thread))
    monkeypatch.setattr(distributed, 'WAIT_MS', 20)

    def run_process(act, index):
        thread.index, thread.numbers = index, itertools.count()
        try:
            return act(index)
        except Exception as error:
            return error

    def on_each(act):
        service.values.clear()
        with ThreadPoolExecutor(N) as pool:
            return [f.result(20) for f in [pool.submit(run_process, act, i) for i in range(N)]]

    return on_each


def test_gather_values_in_order(on_each):
    values = on_each(lambda i: [gather_values(i * i), gather_values([str(i)])])
    assert values == [[[0, 1, 4], [['0'], ['1'], ['2']]]] * N


def test_broadcast_from_first_returns_first_value(on_each):
    assert (
        on_each(lambda i: [broadcast_from_first({'step': i}), broadcast_from_first(i + 7)])
        == [[{'step': 0}, 7]] * N
    )


def test_run_first_runs_process_0_first(on_each):
    order = []

    def act(i):
        time.sleep(0.0 if i else 0.3)  # in which the others would be before it
        order.append(i)
        return i

    assert on_each(lambda i: run_first_then_others(lambda: act(i))) == [0, 1, 2]
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_raise_on_all_raises_on_each_process(on_each):
    def fail_on_some(i):
        with raise_on_all(DamagedCheckpoint):
            if i == 1:
                raise DamagedCheckpoint('a bit')
            return i

    assert [repr(error) for error in on_each(fail_on_some)] == [
        "DamagedCheckpoint('host 1: a bit')",
        "DamagedCheckpoint('a bit')",
        "DamagedCheckpoint('host 1: a bit')",
    ]


def test_differing_values_are_refused_by_all(on_each):
    assert on_each(lambda i: check_same_everywhere('it', 'same')) == [None] * N
    for error in on_each(lambda i: check_same_everywhere('the digest', 'ab'[i == 2])):
        assert isinstance(error, ValueError)
        lines = str(error).splitlines()
        assert lines[0] == 'the digest must be the same on all hosts:'
        assert [(line.split()[1], line.split()[-1]) for line in lines[1:]] == [
            ('0', 'a'),
            ('1', 'a'),
            ('2', 'b'),
        ]


def test_unshared_folder_is_refused(on_each, tmp_path, monkeypatch):
    """Host 2 has its own folder, with a lock of another time."""
    monkeypatch.setattr(workdir, 'NFS_DELAY_SEC', 0.1)
    config, private = tiny_config(), tmp_path / 'own'
    private.mkdir()
    (private / workdir.LOCK).touch()
    os.utime(private / workdir.LOCK, (1, 1))

    def open_one(i):
        with open_workdir(private if i == 2 else tmp_path / 'run', config, False):
            return i

    for error in on_each(open_one):
        assert isinstance(
            error, ValueError
        ) and 'not the same folder on all hosts: host 2 cannot' in str(error)


def test_shared_folder_is_opened_by_all(on_each, tmp_path):
    def open_one(i):
        with open_workdir(tmp_path / 'run', tiny_config(), False):
            return i

    assert on_each(open_one) == [0, 1, 2]


def test_single_process_sends_nothing(monkeypatch):
    monkeypatch.setattr(distributed, '_service', None)
    assert gather_values(3) == [3] and broadcast_from_first(object) is object
    assert run_first_then_others(lambda: 5) == 5
    check_same_everywhere('it', 'a')
    with pytest.raises(DamagedCheckpoint, match=r'^as it was$'), raise_on_all(DamagedCheckpoint):
        raise DamagedCheckpoint('as it was')
