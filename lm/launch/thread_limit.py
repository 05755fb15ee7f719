"""The limit of a user, or of a container, on the number of threads.

At the limit XLA ends in a segmentation fault, and the reader of prepared data (array_record) waits
for ever for threads that could not start.
"""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS, OWN_CGROUPS = Path('/sys/fs/cgroup'), Path('/proc/self/cgroup')
# A small run has 105 threads on two cores and 96 on one, with the few that run before this check.
THREADS, THREADS_PER_CORE = 84, 9
COUNTED_BELOW = 5000  # to count the threads of a user takes long where there are many


class ThreadLimit(NamedTuple):
    """A limit on threads. name: as a user finds it; n_free: how many more may start."""

    name: str
    n_free: int


def check_thread_limit() -> None:
    """Raises ValueError if training could not start its threads."""
    n_needed = THREADS + THREADS_PER_CORE * count_cores()
    for name, n_free in _list_limits():
        if n_free < n_needed:
            raise ValueError(
                f'training starts about {n_needed} threads here, and {name} leaves {n_free}. Raise '
                'it, or end other programs.'
            )


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count() or 1


def _list_limits() -> Iterator[ThreadLimit]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The limit does not hold for root.
    if os.geteuid() and limit != resource.RLIM_INFINITY and limit < COUNTED_BELOW:
        yield ThreadLimit(f'the limit of this user (ulimit -u {limit})', limit - _count_threads())
    for folder in _list_cgroups():
        try:
            allowed, used = ((folder / f'pids.{name}').read_text() for name in ('max', 'current'))
        except OSError:
            continue
        if allowed.strip().isdigit():
            name = f'the limit of this container ({folder}/pids.max {int(allowed)})'
            yield ThreadLimit(name, int(allowed) - int(used))


def _count_threads() -> int:
    """Returns the number of threads of this user's processes, as far as they can be seen."""
    processes = psutil.process_iter(['uids', 'num_threads'])
    return sum(
        process.info['num_threads'] or 0
        for process in processes
        if process.info['uids'] and process.info['uids'].real == os.getuid()
    )


def _list_cgroups() -> Iterator[Path]:
    """Yields the folders of the control groups of this process that may limit it: of both versions,
    and the top one, which is its own in most containers.
    """
    yield CGROUPS
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(':', 2) for line in lines):
        if controllers in ('', 'pids') and path != '/':
            yield CGROUPS / controllers / path.lstrip('/')
