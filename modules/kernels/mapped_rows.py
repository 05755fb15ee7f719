"""How kernels over rows are mapped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def by_rows(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays whose first axis is rows; those of mapped runs are more rows.

    So blocks are as large as for one run, and an axis of runs is never within a block.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return compute(*arrays)

    @call.def_vmap
    def of_runs(runs, mapped, *arrays):
        arrays = [
            array if is_mapped else jnp.broadcast_to(array, (runs, *array.shape))
            for array, is_mapped in zip(arrays, mapped, strict=True)
        ]
        found = call(*(array.reshape(-1, *array.shape[2:]) for array in arrays))
        found = jax.tree.map(lambda array: array.reshape(runs, -1, *array.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return call
