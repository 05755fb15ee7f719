"""Processes of one job: how they join, agree, stop and leave. One that is alone sends nothing:
every function gives back what it was given.

Words go through the service that JAX's processes meet at, not through the devices: no program is
compiled for them, nothing waits in a collective, and signals are handled meanwhile. No wait has a
time-out of its own: where a process ends, the supervisors (`lm.launch.supervisor`) end the others.
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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.launch.exit_status import BAD_INPUT
from lm.launch.link import COLLECT_SEC, local_addresses
from lm.launch.this_host import HOST_TIMEOUT_SEC, child_host

# The runtime aborts a process that hears nothing from another for so long, without saying why.
# Supervisors wait less (`lm.launch.link`) and say it; JAX's 100 s are for jobs without them. With
# ten seconds less, allocating pinned memory has been taken for death (jax#23599).
HEARTBEAT_SEC = 30
# For the others to come to the end: process 0 closes the records, in which git may take ten.
SHUTDOWN_SEC = 30
# Children start together, when all supervisors are there; importing from a slow disk takes minutes.
MEET_SEC = 300
# As process 0 ends, the runtime ends the others, which may have the same error to report. Longer
# than supervisors collect ends, so that an error that follows from its end is known as such.
LAST_WORDS_SEC = COLLECT_SEC + 1.0
WAIT_MS = 1000  # between looks at signals

_has_private_disks = False  # see `private_disks`
_exchange_ids = (
    itertools.count()
)  # of exchanges: all processes make the same ones in the same order


def define_flags() -> None:
    """Defines the flags that `lm.launch.this_host` reads before JAX is imported, for --help."""
    flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, in a job of several.')
    flags.DEFINE_integer('num_processes', None, 'Processes of the job; 1: this one is alone.')
    flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.')
    flags.DEFINE_integer('watch_port', None, 'Where supervisors meet; default: the port after it.')
    flags.DEFINE_string('job_secret_file', None, 'File with a text that the hosts alone know.')
    flags.DEFINE_float('host_timeout', HOST_TIMEOUT_SEC, 'Seconds to wait for all hosts at first.')


def join(digest: str) -> None:
    """Joins the other processes of the job, if there are any; before any device is used. digest:
    of the config. Raises ValueError where hosts differ in the config or in JAX.
    """
    if (host := child_host()) is None:
        return
    sys.excepthook = functools.partial(_exit_alone, BAD_INPUT)
    # It would take SIGTERM for itself; which signals end a run is agreed on by `StopAgreement`.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
        coordinator_address=host.coordinator,
        # JAX's default is every address of this machine.
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
    check_same_everywhere('the config, as its file resolves to it,', digest)
    # Process 0 alone writes to the persistent compilation cache, under a key that is its own: it
    # would run a saved program beside others that have compiled theirs. XLA for CPUs keeps no
    # order, in a saved program, between collectives inside of a loop and those around it. So one
    # process is in another collective than the others, which Gloo does not notice: all wait for
    # ever. Seen in 2 of 2 jobs with saved programs (mesh.fsdp=8, jaxlib 0.12.0.1), and without in
    # none of 16 of mesh.fsdp=8 and 15 of mesh.tensor=8, of 20 steps each.
    if jax.default_backend() == 'cpu':
        jax.config.update('jax_enable_compilation_cache', False)


def leave(status: int) -> None:
    """Ends the process; waits for the others first, unless it ends for an error of its own."""
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
    if child_host().process_id == 0:
        time.sleep(LAST_WORDS_SEC)
    os._exit(status)


def is_multiprocess() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which writes and decides."""
    return jax.process_index() == 0


@contextlib.contextmanager
def private_disks() -> Iterator[None]:
    """Says that process 0 alone sees what it writes within the block, and reads it for all."""
    global _has_private_disks
    _has_private_disks = True
    try:
        yield
    finally:
        _has_private_disks = False


def has_private_disks() -> bool:
    """Whether process 0 alone sees what it writes."""
    return _has_private_disks


def gather_values(value: Any) -> list[Any]:
    """Returns the values of all processes, by id; all must call it. value: what JSON can hold."""
    if not is_multiprocess():
        return [value]
    prefix = f'evenkeel/{next(_exchange_ids)}'
    _service().key_value_set(f'{prefix}/{jax.process_index()}', json.dumps(value))
    return [_await_value(f'{prefix}/{i}') for i in range(jax.process_count())]


def broadcast_from_first(value: Any) -> Any:
    """Returns process 0's value, once it is here; all must call it. value: what JSON can hold."""
    if not is_multiprocess():
        return value
    key = f'evenkeel/{next(_exchange_ids)}'
    if not is_first():
        return _await_value(key)
    _service().key_value_set(key, json.dumps(value))
    return value


def run_first_then_others(function: Callable[[], Any]) -> Any:
    """Returns `act()`, which process 0 calls before the others do."""
    found = function() if is_first() else None
    broadcast_from_first(None)
    return found if is_first() else function()


@contextlib.contextmanager
def raise_on_all(*kinds: type[Exception]) -> Iterator[None]:
    """Raises an error of these kinds in the block of one process on all; the block may wait for no
    other process.
    """
    own, said = None, None
    try:
        yield
    except kinds as error:
        own = error
        said = [isinstance(error, kind) for kind in kinds].index(True), str(error)
    found = gather_values(said)
    if own is not None:
        raise own
    for process_id, one in enumerate(found):
        if one is not None:
            raise kinds[one[0]](f'host {process_id}: {one[1]}')


def check_same_everywhere(label: str, value: str) -> None:
    """Raises ValueError on all processes where they have different values, with each one's."""
    found = gather_values([socket.gethostname(), value])
    if len({one for _, one in found}) > 1:
        lines = ''.join(f'\n  host {i} ({name}): {one}' for i, (name, one) in enumerate(found))
        raise ValueError(f'{label} must be the same on all hosts:{lines}')


def _await_value(key: str) -> Any:
    while True:
        try:
            return json.loads(_service().blocking_key_value_get(key, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def _service() -> Any:
    """JAX's own service, which has no public name; Orbax takes it from here too."""
    from jax._src import distributed

    return distributed.global_state.client


class StopAgreement:
    """Whether a run stops: all processes at the same step, whichever of them caught a signal.

    Several processes take the largest number that any of them has caught, one step later, by a
    program beside the step, over all devices: all dispatch it at the same place of the same order,
    so all read the same number at the same step, and it costs no wait, as the step's metrics are
    fetched then too. A message over the network would come before a step on one host and behind it
    on another; an argument of the step would make its program another than that of one process.
    """

    def __init__(self, caught: list[int]):
        self._caught, self._signal = caught, 0
        if is_multiprocess():
            mesh = Mesh(np.array(jax.devices()), ('device',))
            self._sharding = NamedSharding(mesh, PartitionSpec('device'))
            self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def begin_exchange(self) -> jax.Array | None:
        """Starts the program beside a step; `finish_exchange` takes its result, fetched with the metrics."""
        if not is_multiprocess():
            return None
        number = self._caught[0] if self._caught else 0
        own = np.full(jax.local_device_count(), number, np.int32)
        return self._largest(jax.make_array_from_process_local_data(self._sharding, own))

    def finish_exchange(self, answer: np.ndarray | None) -> None:
        if self._signal == 0 and answer is not None and answer > 0:
            self._signal = int(answer)
            self._caught[:] = [self._signal]  # so that all say the same signal, and end with it

    @property
    def should_stop(self) -> bool:
        return self._signal > 0 if is_multiprocess() else bool(self._caught)


def is_stop_requested(caught: list[int]) -> bool:
    """Whether any process has caught a signal; for use between runs, where all call it."""
    if not is_multiprocess():
        return bool(caught)
    numbers = [number for number in gather_values(caught[0] if caught else 0) if number]
    if numbers:
        caught[:] = [max(numbers)]
    return bool(numbers)
