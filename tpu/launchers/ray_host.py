"""One host of a launch on Ray: the actor that starts train.py there and reads what it says.

JAX is never imported here: the trainer is a process of its own, whose variables are set before.
"""

import ctypes
import os
import platform
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
STALE = 'MEGASCALE_'  # of an earlier job on this host, whose slices are others or gone


def child_env(env: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Without what an earlier job of several slices left: libtpu would wait for it without end."""
    return {k: v for k, v in env.items() if not k.startswith(STALE)} | dict(changes)


def address() -> str:
    """Of this node, as the others of the cluster reach it."""
    import ray

    return ray.util.get_node_ip_address()


class Host:
    """Its methods are called by the launcher, one at a time."""

    def about(self) -> dict:
        """Where other hosts find it, two free ports, and its number within its TPU slice if any."""
        with socket.create_server(('', 0)) as one, socket.create_server(('', 0)) as two:
            ports = one.getsockname()[1], two.getsockname()[1]
        worker = os.environ.get('TPU_WORKER_ID', '')
        return {
            'address': address(),
            'ports': ports,
            'worker': int(worker) if worker.isdigit() else None,
        }

    def start(self, words: Sequence[str], folder: str, changes: Mapping[str, str]) -> None:
        """Starts the trainer; it is asked to stop where this actor is killed."""
        libc = ctypes.CDLL(None) if platform.system() == 'Linux' else None

        def stop_with_actor():
            if libc is not None:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.offset = 0
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=child_env(os.environ, changes),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            preexec_fn=stop_with_actor,
        )

    def read(self) -> tuple[str, int | None]:
        """What the trainer has said since, and its exit status as a shell has it once it ended."""
        code = self.process.poll()  # before the file is read, so that nothing comes after
        end = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), end - self.offset, self.offset)
        self.offset = end
        return text.decode(errors='replace'), code if code is None or code >= 0 else 128 - code

    def stop(self) -> None:
        """SIGTERM: it saves a checkpoint and ends."""
        self.process.send_signal(signal.SIGTERM)
