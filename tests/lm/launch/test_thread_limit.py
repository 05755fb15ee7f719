"""Limits on threads, as a user and as a container have them."""

import os
import resource

import pytest

from lm.launch import thread_limit
from lm.launch.thread_limit import check_thread_limit


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes (limit, threads) of a control group below a folder that stands for all of them."""
    monkeypatch.setattr(thread_limit, 'CGROUPS', tmp_path)
    monkeypatch.setattr(thread_limit, 'OWN_CGROUPS', tmp_path / 'own')

    def write(path, allowed, used):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / 'pids.max').write_text(f'{allowed}\n')
        (tmp_path / path / 'pids.current').write_text(f'{used}\n')

    return write


@pytest.mark.parametrize(
    ('groups', 'path'),
    [('', ''), ('0::/a/b\n', 'a/b'), ('4:memory:/x\n8:pids:/job/1\n', 'pids/job/1')],
    ids=['container', 'version 2', 'version 1'],
)
def test_container_limit_is_checked(groups, path, cgroups, tmp_path):
    (tmp_path / 'own').write_text(groups)
    for allowed, used in (('max', 900), (4000, 900)):
        cgroups(path, allowed, used)
        check_thread_limit()
    cgroups(path, 1000, 950)
    with pytest.raises(ValueError, match=r'about \d+ threads here, .*pids\.max 1000\) leaves 50'):
        check_thread_limit()


@pytest.mark.parametrize(('uid', 'limit', 'is_refused'), [(7, 60, True), (0, 60, False)])
def test_user_limit_is_checked(uid, limit, is_refused, cgroups, monkeypatch):
    del cgroups
    monkeypatch.setattr(os, 'geteuid', lambda: uid)
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (limit, limit))
    if is_refused:
        with pytest.raises(ValueError, match='ulimit -u 60'):
            check_thread_limit()
    else:
        check_thread_limit()


def test_user_below_limit_trains(cgroups, monkeypatch):
    del cgroups
    monkeypatch.setattr(os, 'geteuid', lambda: 7)
    monkeypatch.setattr(thread_limit, '_count_threads', lambda: 300)
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (4096, 4096))
    check_thread_limit()
