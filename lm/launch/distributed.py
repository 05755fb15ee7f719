"""How a process joins the others of its job, and leaves. One that is alone does neither.

A parent watches each of them (`lm.launch.supervisor`), so that every wait of theirs may be without end.
"""

import os
import sys
import time
import traceback

import jax
from absl import flags

from lm.launch.agreement import same_everywhere
from lm.launch.exit_status import BAD_INPUT
from lm.launch.link import COLLECT_SEC
from lm.launch.this_host import HOST_TIMEOUT_SEC, child_host

# After so long without a word from another the runtime aborts the process, without saying why.
# Longer than parents wait (`lm.launch.link`), who say it; JAX's 100 s are for jobs without them.
# Ten seconds less, and allocating pinned memory has been taken for death (jax#23599).
HEARTBEAT_SEC = 30
# For the others to come to the end: process 0 closes the records, in which git may take ten.
SHUTDOWN_SEC = 30
# The children start together, when all parents are there; importing from a slow disk takes minutes.
MEET_SEC = 300
# As process 0 ends, the runtime ends the others, which may have the same error to tell. Longer than
# parents collect ends in, so that an error which its end gives the others is known as such.
LAST_WORDS_SEC = COLLECT_SEC + 1.0


def define_flags() -> None:
    """They are read before JAX is imported (`lm.launch.this_host`); here they get their words."""
    flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, in a job of several.')
    flags.DEFINE_integer('num_processes', None, 'Processes of the job; 1: this one is alone.')
    flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.')
    flags.DEFINE_integer('watch_port', None, 'Where parents meet; default: the port after it.')
    flags.DEFINE_float('host_timeout', HOST_TIMEOUT_SEC, 'Seconds to wait for all hosts at first.')


def join(digest: str) -> None:
    """Before any device is used, where this is one of several processes.

    digest: of the config. Raises ValueError where hosts differ in the config or in JAX.
    """
    host = child_host()
    if host is None:
        return
    sys.excepthook = _end_with_traceback
    # It would take SIGTERM for itself; which signals end a run is agreed on by `lm.launch.stopping`.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
        coordinator_address=host.coordinator,
        num_processes=host.num_processes,
        process_id=host.process_id,
        local_device_ids=host.local_devices,
        # What is to be known of a launcher is known (`lm.launch.launchers`). JAX would give a process
        # under SLURM one GPU, also where it is alone on its machine.
        cluster_detection_method='deactivate',
        initialization_timeout=MEET_SEC,
        heartbeat_timeout_seconds=HEARTBEAT_SEC,
        shutdown_timeout_seconds=SHUTDOWN_SEC,
    )
    same_everywhere('the version of JAX', jax.__version__)
    same_everywhere('the config, as its file resolves to it,', digest)
    _without_saved_programs()


def _without_saved_programs() -> None:
    """Turns JAX's persistent compilation cache off between processes of CPUs.

    Process 0 alone writes to it, under a key that is its own: it would run a program that was saved
    beside others that have compiled theirs. XLA for CPUs keeps no order, in a saved program,
    between collectives inside of a loop and those around it. So one process is in another
    collective than the others, which Gloo does not notice: all wait for ever. Seen in 2 of 2 jobs
    with saved programs (mesh.fsdp=8, jaxlib 0.12.0.1), and without in none of 16 of mesh.fsdp=8 and
    15 of mesh.tensor=8, of 20 steps each.
    """
    if jax.default_backend() == 'cpu':
        jax.config.update('jax_enable_compilation_cache', False)


def leave(status: int) -> None:
    """Ends the process, once all have come here where it is not for an error of its own."""
    if jax.distributed.is_initialized():
        if status == BAD_INPUT:
            _end_here(status)
        jax.distributed.shutdown()
    sys.exit(status)


def _end_with_traceback(kind, error, trace) -> None:
    traceback.print_exception(kind, error, trace)
    _end_here(BAD_INPUT)


def _end_here(status: int) -> None:
    """Without JAX's own end, which would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child_host().process_id == 0:
        time.sleep(LAST_WORDS_SEC)
    os._exit(status)
