"""What the processes of one job (`lm.launch.distributed`) know of each other, and decide together.

Words go through the service that JAX's processes meet at, not through the devices: no program is
compiled for them, nothing waits in a collective, and signals are handled meanwhile. No wait here
has an end of its own: where a process ends, the parents (`lm.launch.supervisor`) end the others.

Alone, nothing is sent: every function gives back what it was given.
"""

import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import jax

_has_own_disks = False  # see `disk_of_first`
WAIT_MS = 1000  # between looks at signals
_numbers = itertools.count()  # of exchanges: all processes make the same ones in the same order


def several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that writes and decides: process 0."""
    return jax.process_index() == 0


@contextlib.contextmanager
def disk_of_first() -> Iterator[None]:
    """Within it, process 0 alone sees what it writes, and reads it for the others."""
    global _has_own_disks
    _has_own_disks = True
    try:
        yield
    finally:
        _has_own_disks = False


def has_own_disks() -> bool:
    """Whether what process 0 writes is there for itself alone."""
    return _has_own_disks


def gathered(value: Any) -> list[Any]:
    """What every process gives, by its id; to be called by all. A value is what JSON can hold."""
    if not several():
        return [value]
    prefix = f'evenkeel/{next(_numbers)}'
    _service().key_value_set(f'{prefix}/{jax.process_index()}', json.dumps(value))
    return [_get(f'{prefix}/{i}') for i in range(jax.process_count())]


def from_first(value: Any) -> Any:
    """What process 0 gives, on all; to be called by all. It comes no sooner than process 0 is here.

    value: what JSON can hold; that of the others is not read.
    """
    if not several():
        return value
    key = f'evenkeel/{next(_numbers)}'
    if is_first():
        _service().key_value_set(key, json.dumps(value))
        return value
    return _get(key)


def first_then_others(act: Callable[[], Any]) -> Any:
    """`act()` of each process, of process 0 before the others."""
    found = act() if is_first() else None
    from_first(None)
    return found if is_first() else act()


@contextlib.contextmanager
def raised_by_all(*kinds: type[Exception]) -> Iterator[None]:
    """An error of one of these kinds in the block of one process is raised by all; nothing in the
    block may wait for another process.
    """
    own, said = None, None
    try:
        yield
    except kinds as error:
        if not several():
            raise
        own = error
        said = [isinstance(error, kind) for kind in kinds].index(True), str(error)
    found = gathered(said)
    if own is not None:
        raise own
    for process_id, one in enumerate(found):
        if one is not None:
            raise kinds[one[0]](f'host {process_id}: {one[1]}')


def same_everywhere(what: str, value: str) -> None:
    """Raises ValueError, on all, where it differs between processes: it says who has which."""
    found = gathered([socket.gethostname(), value])
    if len({one for _, one in found}) > 1:
        lines = ''.join(f'\n  host {i} ({name}): {one}' for i, (name, one) in enumerate(found))
        raise ValueError(f'{what} must be the same on all hosts:{lines}')


def _get(key: str) -> Any:
    while True:
        try:
            return json.loads(_service().blocking_key_value_get(key, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def _service() -> Any:
    """JAX's own has no public name; Orbax, which checkpoints are saved with, takes it from here."""
    from jax._src import distributed

    return distributed.global_state.client
