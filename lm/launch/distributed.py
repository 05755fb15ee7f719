"""Processes of one job: how they join, agree, stop and leave.

A single process sends nothing: every function returns its own values.

Values are exchanged through the service at which JAX's processes meet, not through the devices:
this compiles no program, waits in no collective, and lets signals be handled meanwhile. No wait has
a time-out: if a process ends, the supervisors (`lm.launch.supervisor`) end the others.
"""

import contextlib
import functools
import itertools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.launch.exit_status import BAD_INPUT
from lm.launch.link import COLLECT_SEC, local_addresses
from lm.launch.this_host import HOST_TIMEOUT_SEC, child_host

# The runtime aborts a process, without a reason, if another is silent for so long. Supervisors wait
# less (`lm.launch.link`) and report the reason; JAX's 100 s are for jobs without supervisors. With
# ten seconds less, a process that allocates pinned memory has been taken for dead (jax#23599).
HEARTBEAT_SEC = 30
# Time for the others to end: process 0 closes the records, and its call of git may take ten.
SHUTDOWN_SEC = 30
# Children start together, when all supervisors are there; importing from a slow disk takes minutes.
MEET_SEC = 300
# When process 0 ends, the runtime ends the others, which may have the same error to report. It
# waits longer than supervisors collect ends, so that they can tell errors that its end causes.
LAST_WORDS_SEC = COLLECT_SEC + 1.0
WAIT_MS = 1000  # between looks at signals

_has_private_disks = False  # see `private_disks`
_exchange_ids = (
    itertools.count()
)  # of exchanges: all processes make the same ones in the same order


def define_flags() -> None:
    """Defines the flags that `lm.launch.this_host` reads before JAX is imported, for --help."""
    flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, for several processes.')
    flags.DEFINE_integer('num_processes', None, 'Number of processes; 1: no other processes.')
    flags.DEFINE_integer('process_id', None, 'Number of this process, from 0.')
    flags.DEFINE_integer('watch_port', None, "Port of supervisors; default: coordinator's + 1.")
    flags.DEFINE_string('job_secret_file', None, 'File with a secret text, the same on all hosts.')
    flags.DEFINE_float('host_timeout', HOST_TIMEOUT_SEC, 'Seconds to wait for all hosts to start.')


def join(digest: str) -> None:
    """Joins the other processes of the job, if there are any. Must be called before any device is
    used.

    digest: digest of the config. Raises ValueError if hosts differ in the config or in JAX.
    """
    if (host := child_host()) is None:
        return
    # After an uncaught error JAX's shutdown would wait for processes that wait for this one.
    sys.excepthook = functools.partial(_exit_alone, BAD_INPUT)
    # It would take SIGTERM for itself; which signals end a run is agreed on by `StopAgreement`.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
        coordinator_address=host.coordinator,
        # JAX would listen at every address of this machine.
        coordinator_bind_address=host.coordinator
        if local_addresses(host.watch_address[0])
        else None,
        num_processes=host.num_processes,
        process_id=host.process_id,
        local_device_ids=host.local_devices,
        # The launcher is known (`lm.launch.this_host`). JAX would give a process under SLURM one
        # GPU, also where it is alone on its machine.
        cluster_detection_method='deactivate',
        initialization_timeout=MEET_SEC,
        heartbeat_timeout_seconds=HEARTBEAT_SEC,
        shutdown_timeout_seconds=SHUTDOWN_SEC,
    )
    check_same_everywhere('the version of JAX', jax.__version__)
    check_same_everywhere('the resolved config', digest)
    # Only process 0 writes to the persistent compilation cache, under a key of its own. It would
    # run a saved program while the others run programs that they have just compiled. In a saved
    # program XLA for CPUs does not keep the order between collectives inside a loop and outside it,
    # so that one process enters another collective than the others. Gloo does not notice, and all
    # wait for ever. This happened in 2 of 2 jobs with saved programs (mesh.fsdp=8, jaxlib
    # 0.12.0.1), and in none of 16 (mesh.fsdp=8) and 15 (mesh.tensor=8) without, of 20 steps each.
    if jax.default_backend() == 'cpu':
        jax.config.update('jax_enable_compilation_cache', False)


def leave(status: int) -> None:
    """Ends the process, after waiting for the others unless it ends because of its own error."""
    if jax.distributed.is_initialized():
        if status == BAD_INPUT:
            _exit_alone(status)
        jax.distributed.shutdown()
    sys.exit(status)


def _exit_alone(status: int, *error: Any) -> None:
    """Ends the process without JAX's own shutdown, which would wait for the others."""
    if error:
        traceback.print_exception(*error)
    sys.stdout.flush()
    sys.stderr.flush()
    host = child_host()
    assert host is not None  # a process joins only as the child of a supervisor
    if host.process_id == 0:
        time.sleep(LAST_WORDS_SEC)
    os._exit(status)


def is_multiprocess() -> bool:
    """Whether the job has several processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which writes and decides."""
    return jax.process_index() == 0


@contextlib.contextmanager
def private_disks() -> Generator[None]:
    """Declares that only process 0 sees what it writes within the block, and reads it for all."""
    global _has_private_disks
    _has_private_disks = True
    try:
        yield
    finally:
        _has_private_disks = False


def has_private_disks() -> bool:
    """Whether only process 0 sees what it writes."""
    return _has_private_disks


def gather_values(value: Any) -> list[Any]:
    """Returns the values of all processes, by id. All processes must call it. value: a JSON
    value.
    """
    if not is_multiprocess():
        return [value]
    prefix = f'evenkeel/{next(_exchange_ids)}'
    _service().key_value_set(f'{prefix}/{jax.process_index()}', json.dumps(value))
    return [_await_value(f'{prefix}/{i}') for i in range(jax.process_count())]


def broadcast_from_first(value: Any) -> Any:
    """Returns process 0's value. All processes must call it. value: a JSON value."""
    if not is_multiprocess():
        return value
    key = f'evenkeel/{next(_exchange_ids)}'
    if not is_first():
        return _await_value(key)
    _service().key_value_set(key, json.dumps(value))
    return value


def run_first_then_others(function: Callable[[], Any]) -> Any:
    """Returns `function()`, which process 0 calls before the others do."""
    value = function() if is_first() else None
    broadcast_from_first(None)
    return value if is_first() else function()


@contextlib.contextmanager
def raise_on_all(*kinds: type[Exception]) -> Generator[None]:
    """Raises an error of these kinds on all processes, if the block raises it on any.

    The block may wait for no other process.
    """
    own_error, own_entry = None, None
    try:
        yield
    except kinds as error:
        own_error = error
        own_entry = [isinstance(error, kind) for kind in kinds].index(True), str(error)
    entries = gather_values(own_entry)
    if own_error is not None:
        raise own_error
    for process_id, entry in enumerate(entries):
        if entry is not None:
            raise kinds[entry[0]](f'host {process_id}: {entry[1]}')


def check_same_everywhere(label: str, value: str) -> None:
    """Raises ValueError on all processes if their values differ, with the value of each."""
    host_values = gather_values([socket.gethostname(), value])
    if len({value for _, value in host_values}) > 1:
        lines = ''.join(
            f'\n  host {i} ({name}): {value}' for i, (name, value) in enumerate(host_values)
        )
        raise ValueError(f'{label} must be the same on all hosts:{lines}')


def _await_value(key: str) -> Any:
    """Returns the value of a key once it is set."""
    while True:
        try:
            # Python handles signals only between calls, so that a call must not wait for long.
            return json.loads(_service().blocking_key_value_get(key, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def _service() -> Any:
    """Returns JAX's own service, which has no public name; Orbax takes it from the same place."""
    from jax._src import distributed

    return distributed.global_state.client


class StopAgreement:
    """Lets all processes stop a run at the same step, whichever process caught a signal.

    Several processes take the largest signal number that any of them has caught, one step later.
    They compute it by a program beside the step, over all devices. All processes dispatch it at the
    same position in the same order, so all read the same number at the same step. It costs no wait,
    since the step's metrics are fetched at that time too. A message over the network could arrive
    before a step on one host and after it on another, and an argument of the step would give
    several processes another program than a single one.
    """

    def __init__(self, caught: list[int]):
        self._caught, self._signal = caught, 0
        if is_multiprocess():
            mesh = Mesh(np.array(jax.devices()), ('device',))
            self._sharding = NamedSharding(mesh, PartitionSpec('device'))
            self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def begin_exchange(self) -> jax.Array | None:
        """Starts the program beside a step. `finish_exchange` takes its value, fetched with the
        metrics.
        """
        if not is_multiprocess():
            return None
        number = self._caught[0] if self._caught else 0
        local_numbers = np.full(jax.local_device_count(), number, np.int32)
        return self._largest(jax.make_array_from_process_local_data(self._sharding, local_numbers))

    def finish_exchange(self, answer: np.ndarray | None) -> None:
        """Takes the signal number that all processes agree on; 0 if no process has caught any."""
        if self._signal == 0 and answer is not None and answer > 0:
            self._signal = int(answer)
            self._caught[:] = [self._signal]  # so that all say the same signal, and end with it

    @property
    def should_stop(self) -> bool:
        """Whether the run stops now."""
        return self._signal > 0 if is_multiprocess() else bool(self._caught)


def is_stop_requested(caught: list[int]) -> bool:
    """Whether any process has caught a signal. All processes must call it, between runs."""
    if not is_multiprocess():
        return bool(caught)
    numbers = [number for number in gather_values(caught[0] if caught else 0) if number]
    if numbers:
        caught[:] = [max(numbers)]
    return bool(numbers)
