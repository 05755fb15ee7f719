"""When a run of several processes stops: all at the same step, whichever of them was asked."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.launch.agreement import gathered, several


class Stopping:
    """Whether to stop, from the signals in `caught`. Alone that is what has come by now."""

    def __init__(self, caught: list[int]):
        self._caught = caught

    def ask(self) -> jax.Array | None:
        """To be called beside each step; what it gives is fetched with the step's metrics."""
        return None

    def hear(self, answer: np.ndarray | None) -> None:
        """The answer, fetched."""

    @property
    def now(self) -> bool:
        return bool(self._caught)


class StoppingTogether(Stopping):
    """The largest number of a signal that any process has caught, one step later.

    A program beside the step, over all devices: it is dispatched at the same place of the same
    order on all, so all read the same number at the same step, and it costs no wait, as the step's
    metrics are fetched then too. Not a word over the network instead, which would come before a
    step on one host and behind it on another; nor an argument of the step, which would be another
    program than that of one process.
    """

    def __init__(self, caught: list[int]):
        super().__init__(caught)
        mesh = Mesh(np.array(jax.devices()), ('device',))
        self._of_each = NamedSharding(mesh, PartitionSpec('device'))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._heard = 0

    def ask(self) -> jax.Array:
        number = self._caught[0] if self._caught else 0
        own = np.full(jax.local_device_count(), number, np.int32)
        return self._largest(jax.make_array_from_process_local_data(self._of_each, own))

    def hear(self, answer: np.ndarray | None) -> None:
        if self._heard == 0 and answer is not None and answer > 0:
            self._heard = int(answer)
            self._caught[:] = [self._heard]  # so that all say the same signal, and end with it

    @property
    def now(self) -> bool:
        return self._heard > 0


def asked_to_stop(caught: list[int]) -> bool:
    """Whether any process has caught a signal; between runs, to be called by all."""
    if not several():
        return bool(caught)
    numbers = [number for number in gathered(caught[0] if caught else 0) if number]
    if numbers:
        caught[:] = [max(numbers)]
    return bool(numbers)


def stopping(caught: list[int]) -> Stopping:
    return StoppingTogether(caught) if several() else Stopping(caught)
