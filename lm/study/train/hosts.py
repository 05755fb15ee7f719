"""A sweep on several hosts.

If every run fits on the devices of one host, the cells are dealt out: each host trains its cells as
if it were alone, and a lost host costs only its own cells. JAX's processes are not joined then,
because the runtime ends all processes when one is lost. If a run needs the devices of several
hosts, all of them train it, and the runs of a group train in sequence.
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
from modules.experts import expert_width

Groups = Sequence[Sequence[Cell]]

# Without these libtpu waits for all hosts of the slice. The names are those of several libtpu
# versions, from pytorch/xla#7714 and JAX's notes on running on some of the chips. Untested on TPUs.
SINGLE_HOST_TPU = {
    'TPU_PROCESS_BOUNDS': '1,1,1',
    'TPU_HOST_BOUNDS': '1,1,1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'CLOUD_TPU_TASK_ID': '0',
}
MARK = '.job'  # host 0 writes the job's name to this file once it has opened the sweep's folder
POLL_SEC = 0.2
BUCKET_POLL_SEC = 10.0  # longer, because each look takes the lease of the sweep
LOST_SEC = 90.0  # without activity a host is lost: NFS shows a file, and a lease expires, after 60


def join_sweep(groups: Groups, engine: str) -> tuple[int, int]:
    """Returns (i, n) for the i-th of n hosts that cells are dealt to.

    Returns (0, 1) for a single host, and if several hosts train every run together. Must be called
    before any device is used. Raises ValueError if hosts train together and differ in their cells,
    and for another engine than 'local'.
    """
    if (host := child_host()) is None:
        return 0, 1
    if engine != 'local':
        raise ValueError(
            f'--engine={engine} starts its own processes. Run the command once, on one host, with '
            '--num_processes=1.'
        )
    needed = max(min_devices(group[0].recipe.mesh) for group in groups)
    if needed > 1 and needed > _count_local_devices(host):
        names = ' '.join(cell.name for group in groups for cell in group)
        join(hashlib.blake2b(names.encode(), digest_size=4).hexdigest())
        return 0, 1
    environment = _single_host_env()
    # Replaces all variables, since those of MEGASCALE, which name other slices, must go.
    os.environ.clear()
    os.environ.update(environment)
    if host.local_devices is not None:  # like `jax.distributed.initialize`
        visible = ','.join(map(str, host.local_devices))
        jax.config.update('jax_cuda_visible_devices', visible)
        jax.config.update('jax_rocm_visible_devices', visible)
    return host.process_id, host.num_processes


def _count_local_devices(host: Host) -> int:
    """Counts devices in another process, as this process may open no device before it has
    joined.
    """
    if host.local_devices is not None:
        return len(host.local_devices)
    count = [sys.executable, '-c', 'import jax; print(jax.local_device_count())']
    finished = subprocess.run(
        count, env=_single_host_env(), stdout=subprocess.PIPE, text=True, check=True
    )
    return int(finished.stdout.split()[-1])


def _single_host_env() -> dict[str, str]:
    """Returns the environment in which libtpu opens only the chips of this host."""
    if not has_tpu():
        return dict(os.environ)
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith('MEGASCALE_')
    }
    return environment | SINGLE_HOST_TPU


def run_host_0_first(workdir: Path, host: int, hosts: int, function: Callable[[], Any]) -> Any:
    """Calls a function that writes to `workdir` on host 0 before the others; returns its value.

    If cells are dealt out, each host is on its own afterwards; until then an error of one ends all.

    Args:
      workdir: folder of the sweep.
      host: number of this host.
      hosts: number of hosts that cells are dealt to.
      function: function to call.

    Returns:
      The function's value on this host.

    Raises:
      ValueError: if cells are dealt out, and a host does not see the files of host 0.
    """
    if hosts == 1:
        return run_first_then_others(function)
    job, deadline = os.environ[JOB], time.monotonic() + MEET_SEC
    # The name of the job, as an earlier job may have left its mark.
    while host > 0 and _read_mark(workdir) != job:
        if time.monotonic() > deadline:
            raise ValueError(format_not_shared(workdir, [f'host {host}']))
        time.sleep(POLL_SEC)
    value = function()
    # After `function`: the mark tells the other hosts that the folder is complete.
    if host == 0:
        write_text(workdir / MARK, job)
    os.write(int(os.environ[TELL]), b'.')  # tells the supervisor that this host is independent
    return value


class OtherHosts:
    """Cells of a wave that other hosts train, as this host sees them in the folder of the sweep.

    refresh: fetches the records of other hosts from a bucket.
    """

    def __init__(self, cells: Sequence[Cell], work: Work, refresh: Callable[[], None]):
        self._cells, self._work, self._refresh = cells, work, refresh
        self._earlier_failures = {cell.name: self._failure_time(cell) for cell in cells}

    def wait(self) -> list[Cell]:
        """Waits until all cells have ended, a cell has failed, or a stop is requested.

        Returns [] then. If cells have shown no activity for LOST_SEC, returns them earlier: their
        host is lost, or has not reached them yet.
        """
        last_change, last_activity = time.monotonic(), None
        while not is_stop_requested(self._work.caught):
            self._refresh()
            waiting = [cell for cell in self._cells if not self._work.is_final(cell)]
            if not waiting or any(map(self._has_failed, waiting)):
                return []
            activity = self._read_activity(waiting)
            # A held lock is activity at any time; a lease only when its tag changes, since a lost
            # host leaves its lease behind.
            if activity != last_activity or True in activity.values():
                last_change, last_activity = time.monotonic(), activity
            if time.monotonic() - last_change > LOST_SEC and _has_locks(self._work):
                return waiting
            self._pause()
        return []

    def _pause(self) -> None:
        """Waits for POLL_SEC, or longer for a bucket, and updates the progress display
        meanwhile.
        """
        deadline = time.monotonic() + (POLL_SEC if self._work.url is None else BUCKET_POLL_SEC)
        while time.monotonic() < deadline and not self._work.caught:
            time.sleep(POLL_SEC)
            self._work.tick()

    def _read_activity(self, waiting: Sequence[Cell]) -> dict[str, Any]:
        """Returns whether another process holds each cell; in a bucket the tags of the leases,
        which change while a process renews them.
        """
        if self._work.url is None:
            return {cell.name: is_locked(self._work.folder(cell) / LOCK) for cell in waiting}
        listing = open_bucket(self._work.url).list()
        leases = {cell.name: listing.get(f'{cell.name}/{LEASE}') for cell in waiting}
        return {name: lease and lease.e_tag for name, lease in leases.items()}

    def _failure_time(self, cell: Cell) -> int | None:
        """Returns when the cell failed, by the clock of the disk; None if its summary has another
        status.
        """
        folder = self._work.folder(cell)
        if Run(folder).status != 'failed':
            return None
        with contextlib.suppress(OSError):
            return (folder / SUMMARY).stat().st_mtime_ns
        return None

    def _has_failed(self, cell: Cell) -> bool:
        """Whether the cell failed in this wave. Failures of an earlier command are retried."""
        return self._failure_time(cell) not in (None, self._earlier_failures[cell.name])


def _has_locks(work: Work) -> bool:
    """Whether this host can see who trains a cell. A bucket has leases instead of locks."""
    if work.url is not None:
        return True
    with hold_lock(work.workdir / LOCK) as is_held:
        return is_held


def _read_mark(workdir: Path) -> str | None:
    """Returns the job that host 0 has written to the folder, or None."""
    with contextlib.suppress(OSError):
        return (workdir / MARK).read_text()
    return None


def deal_cells(groups: Groups, host: int, hosts: int) -> list[list[Cell]]:
    """Returns the cells of one of n hosts, by group.

    The cells are consecutive, so that few groups compile on two hosts. Every host gets about the
    same work, up to half a cell. Cells that have ended are dealt too. Hosts that look at different
    times, and the same command later, then get the same shares, and with them the same meshes and
    numbers.

    Args:
      groups: all cells, by program.
      host: number of this host.
      hosts: number of hosts.

    Returns:
      The cells of this host, by program.
    """
    works = [[estimate_work(cell.recipe) for cell in group] for group in groups]
    total, work_before, shares = sum(map(sum, works)), 0, []
    for group, group_works in zip(groups, works, strict=True):
        mine = []
        for cell, cell_work in zip(group, group_works, strict=True):
            if (2 * work_before + cell_work) * hosts // (
                2 * total
            ) == host:  # where its middle lies
                mine.append(cell)
            work_before += cell_work
        shares.append(mine)
    return list(filter(None, shares))


_vocab_size = functools.cache(vocab_size)  # it may read a large file


def estimate_work(recipe: Recipe) -> float:
    """Estimates the multiplications of a run's forward passes.

    Counts the matrices of blocks and readout, and attention, for all tokens of the run.
    """
    model, data, steps = recipe.model, recipe.data, recipe.train.steps
    # Per token and block: queries, keys, values and output 4 D^2; a gated MLP 3 D F; scores and the
    # mix of values 2 T D. Only ratios between cells matter.
    attention = 4 * model.d_model**2 + 2 * data.seq_len * model.d_model
    hidden = sum(_hidden_width(kind) for kind in recipe.layers)
    blocks = model.n_layers * attention + 3 * model.d_model * hidden
    readout = model.d_model * _vocab_size(data.tokenizer)
    return steps * recipe.mean_batch_tokens * (blocks + readout)


def _hidden_width(kind: Recipe) -> int:
    """Returns the hidden units of an MLP that a token passes through."""
    options, d_ff = kind.mlp.options, kind.model.d_ff
    if 'experts_per_token' not in options:
        return d_ff
    width = expert_width(d_ff, options['granularity'], options['expert_width'])
    return width * (options['experts_per_token'] + options['shared_experts'])
