"""A sweep on several hosts.

Where every run fits on the devices of one host, cells are dealt: each host trains its own as if it
were alone, and a host that is lost costs its own cells. JAX's processes are not joined then, as the
runtime ends all of them when one has gone. Where a run needs the devices of several hosts, all of
them train it, and the runs of a group go one after the other.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from lm.config.recipe import Recipe
from lm.data.tokenizers import vocab_size
from lm.devices.mesh import min_devices
from lm.launch.distributed import MEET_SEC, is_stop_requested, join, run_first_then_others
from lm.launch.this_host import JOB, TELL, Host, child_host, has_tpu
from lm.record.run import Run
from lm.record.workdir import LOCK, SUMMARY, format_not_shared
from lm.storage.buckets import open_bucket
from lm.storage.files import hold_lock, is_locked, write_text
from lm.storage.lease import LEASE
from lm.study.plan.cells import Cell
from lm.study.train.groups import Work

Groups = Sequence[Sequence[Cell]]

# libtpu would wait for all hosts of the slice. Names of several of its versions: pytorch/xla#7714
# and what JAX says of running on some of the chips; not tried on TPUs.
SINGLE_HOST_TPU = {
    'TPU_PROCESS_BOUNDS': '1,1,1',
    'TPU_HOST_BOUNDS': '1,1,1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'CLOUD_TPU_TASK_ID': '0',
}
MARK = '.job'  # a file in the folder of the sweep, once host 0 of this job has opened it
POLL_SEC = 0.2
BUCKET_POLL_SEC = 10.0  # to look takes the lease of the sweep
LOST_SEC = 90.0  # without a sign of life: NFS shows a file after 60, a lease expires after 60


def join_sweep(groups: Groups, engine: str) -> tuple[int, int]:
    """Returns (i, n) for the i-th of n hosts that cells are dealt to; (0, 1) for one that is alone,
    or of several that train every run together. To be called before any device is used.

    Raises ValueError where hosts train together and differ in their cells, and for another engine.
    """
    if (host := child_host()) is None:
        return 0, 1
    if engine != 'local':
        raise ValueError(
            f'--engine={engine} starts processes of its own: give the command once, on one host, '
            'with --num_processes=1.'
        )
    needed = max(min_devices(group[0].recipe.mesh) for group in groups)
    if needed > 1 and needed > _count_local_devices(host):
        names = ' '.join(cell.name for group in groups for cell in group)
        join(hashlib.blake2b(names.encode(), digest_size=4).hexdigest())
        return 0, 1
    alone = _single_host_env()
    os.environ.clear()
    os.environ.update(alone)
    if host.local_devices is not None:  # as `jax.distributed.initialize` does it
        own = ','.join(map(str, host.local_devices))
        jax.config.update('jax_cuda_visible_devices', own)
        jax.config.update('jax_rocm_visible_devices', own)
    return host.process_id, host.num_processes


def _count_local_devices(host: Host) -> int:
    """Counts devices in another process: this one may open none before it has joined."""
    if host.local_devices is not None:
        return len(host.local_devices)
    count = [sys.executable, '-c', 'import jax; print(jax.local_device_count())']
    said = subprocess.run(
        count, env=_single_host_env(), stdout=subprocess.PIPE, text=True, check=True
    )
    return int(said.stdout.split()[-1])


def _single_host_env() -> dict[str, str]:
    """The environment in which libtpu opens the chips of this host alone."""
    if not has_tpu():
        return dict(os.environ)
    kept = {name: text for name, text in os.environ.items() if not name.startswith('MEGASCALE_')}
    return kept | SINGLE_HOST_TPU


def run_host_0_first(workdir: Path, host: int, hosts: int, function: Callable[[], Any]) -> Any:
    """Returns `act()`, which writes to `workdir`, and which host 0 calls before the others. Where
    cells are dealt each host is on its own afterwards; until then an error of one ends all. Raises
    ValueError where cells are dealt, and a host does not see what host 0 writes there.
    """
    if hosts == 1:
        return run_first_then_others(function)
    job, deadline = os.environ[JOB], time.monotonic() + MEET_SEC
    while host > 0 and _read_mark(workdir) != job:
        if time.monotonic() > deadline:
            raise ValueError(format_not_shared(workdir, [f'host {host}']))
        time.sleep(POLL_SEC)
    found = function()
    if host == 0:
        write_text(workdir / MARK, job)
    os.write(int(os.environ[TELL]), b'.')
    return found


class OtherHosts:
    """Cells of a wave that other hosts train, as this host sees them in the folder of the sweep.

    refresh: brings what they have written, where that is in a bucket.
    """

    def __init__(self, cells: Sequence[Cell], work: Work, refresh: Callable[[], None]):
        self._cells, self._work, self._refresh = cells, work, refresh
        self._earlier_failures = {cell.name: self._failure_time(cell) for cell in cells}

    def wait(self) -> list[Cell]:
        """Waits until all cells have ended, one has failed, or somebody asked to stop; returns none
        then. Cells that nobody has trained for LOST_SEC are returned sooner: their host is lost, or
        has not come to them yet.
        """
        since, before = time.monotonic(), None
        while not is_stop_requested(self._work.caught):
            self._refresh()
            left = [cell for cell in self._cells if not self._work.is_final(cell)]
            if not left or any(map(self._has_failed, left)):
                return []
            signs = self._read_activity(left)
            if signs != before or True in signs.values():
                since, before = time.monotonic(), signs
            if time.monotonic() - since > LOST_SEC and _has_locks(self._work):
                return left
            self._pause()
        return []

    def _pause(self) -> None:
        """Waits for POLL_SEC, of a bucket for longer; shows meanwhile what there is."""
        until = time.monotonic() + (POLL_SEC if self._work.url is None else BUCKET_POLL_SEC)
        while time.monotonic() < until and not self._work.caught:
            time.sleep(POLL_SEC)
            self._work.tick()

    def _read_activity(self, waiting: Sequence[Cell]) -> dict[str, Any]:
        """Whether another process holds each cell; in a bucket the tags of their leases, which
        change while these are renewed.
        """
        if self._work.url is None:
            return {cell.name: is_locked(self._work.folder(cell) / LOCK) for cell in waiting}
        listing = open_bucket(self._work.url).list()
        leases = {cell.name: listing.get(f'{cell.name}/{LEASE}') for cell in waiting}
        return {name: found and found.e_tag for name, found in leases.items()}

    def _failure_time(self, cell: Cell) -> int | None:
        """The time of a summary that says that the cell failed, by the clock of the disk."""
        folder = self._work.folder(cell)
        if Run(folder).status != 'failed':
            return None
        with contextlib.suppress(OSError):
            return (folder / SUMMARY).stat().st_mtime_ns
        return None

    def _has_failed(self, cell: Cell) -> bool:
        """Whether it failed in this wave; not of an earlier command, which this one tries again."""
        return self._failure_time(cell) not in (None, self._earlier_failures[cell.name])


def _has_locks(work: Work) -> bool:
    """Whether it can be seen who trains a cell. A bucket has leases, which are asked for then."""
    if work.url is not None:
        return True
    with hold_lock(work.workdir / LOCK) as is_held:
        return is_held


def _read_mark(workdir: Path) -> str | None:
    with contextlib.suppress(OSError):
        return (workdir / MARK).read_text()
    return None


def deal_cells(groups: Groups, host: int, hosts: int) -> list[list[Cell]]:
    """The cells of one of n hosts: consecutive ones, so that few groups are compiled on two hosts,
    with about as much work as each other host has: half of a cell at most is more, or less.

    Cells that have ended are dealt too: hosts that look at different times, and the same command
    again, find the same shares, and with them the same meshes and numbers.
    """
    works = [[estimate_work(cell.recipe) for cell in group] for group in groups]
    total, before, found = sum(map(sum, works)), 0, []
    for group, own in zip(groups, works, strict=True):
        mine = []
        for cell, one in zip(group, own, strict=True):
            if (2 * before + one) * hosts // (2 * total) == host:  # where its middle lies
                mine.append(cell)
            before += one
        found.append(mine)
    return list(filter(None, found))


_vocab_size = functools.cache(vocab_size)  # which may read a large file


def estimate_work(recipe: Recipe) -> int:
    """Returns the products of a run's forward passes, roughly: those of matrices in blocks and
    readout, and of attention, for all its tokens.
    """
    model, data, steps = recipe.model, recipe.data, recipe.train.steps
    block = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff + 2 * data.seq_len * model.d_model
    readout = model.d_model * _vocab_size(data.tokenizer)
    return steps * data.batch_size * data.seq_len * (model.n_layers * block + readout)
