"""Kernels over the rows of a matrix, on any platform: their table rows, checks and shapes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PALLAS = ('tpu', 'gpu')  # platforms with kernels written here
TYPES = ('bfloat16', 'float32')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A row of a table of kernels.

    compute: takes `platform` as a keyword, unless `platforms` is None (any platform).
    is_forward_mode: whether it has a forward-mode derivative. is_plain: whether a loss computes the
    same in plain operations, and needs no kernel. default_platforms: platforms on which it is the
    default, because a compiled step then moves fewer bytes.
    """

    compute: Callable[..., Any]
    platforms: tuple[str, ...] | None = None
    is_forward_mode: bool = True
    is_plain: bool = False
    default_platforms: tuple[str, ...] = ()

    def for_platform(self, platform: str) -> Callable[..., Any]:
        """Returns the kernel for devices of one of its platforms."""
        if self.platforms is None:
            return self.compute
        return functools.partial(self.compute, platform=platform)


def check_types(name: str, *arrays: jax.Array | None) -> None:
    """Raises ValueError for an array of a type that these kernels do not support."""
    for array in arrays:
        if array is not None and array.dtype.name not in TYPES:
            raise ValueError(
                f'{name} supports {" and ".join(TYPES)}; got {array.dtype.name}. Choose reference.'
            )


def check_width(name: str, memory: str, width: int, longest: int) -> None:
    """Raises ValueError for rows that do not fit into a kind of memory.

    Args:
      name: the kernel, as the config names it.
      memory: the kind of memory.
      width: entries of a row.
      longest: the most entries that fit.
    """
    if width > longest:
        raise ValueError(
            f'{name} keeps whole rows in {memory}, which holds at most {longest:,} entries of this '
            f'type; got {width:,}. Choose reference.'
        )


def flatten_rows(x: jax.Array) -> jax.Array:
    """Returns [..., D] as rows [N, D]."""
    return x.reshape(-1, x.shape[-1])


def itemsize(*arrays: Any) -> int:
    """Returns the bytes of one entry of each array, summed."""
    return sum(array.dtype.itemsize for array in arrays)


def broadcast_index(n: Any, lengths: Sequence[int], array_lengths: Sequence[int]) -> Any:
    """Maps a flat index over axes `lengths` to the flat index over axes `array_lengths`.

    Args:
      n: the flat index; may be traced.
      lengths: the lengths of the axes.
      array_lengths: for each axis its length, or 1 if it is broadcast.
    """
    index, stride = 0, 1
    for length, array_length in reversed(list(zip(lengths, array_lengths, strict=True))):
        if array_length > 1:
            index = index + jax.lax.rem(n, length) * stride
            stride *= array_length
        n = jax.lax.div(n, length)
    return index


def merge_runs(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compute` with a `vmap` rule: one call with the rows of all mapped runs.

    Blocks are then as large as for one run, and no block spans an axis of runs. The first axis of
    every array is its rows.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return compute(*arrays)

    @call.def_vmap
    def batch_rule(runs, mapped, *arrays):
        arrays = [
            array if is_mapped else jnp.broadcast_to(array, (runs, *array.shape))
            for array, is_mapped in zip(arrays, mapped, strict=True)
        ]
        # `call`, not `compute`, so that another vmap around this one finds the rule again.
        stacked = call(*(array.reshape(-1, *array.shape[2:]) for array in arrays))
        stacked = jax.tree.map(lambda array: array.reshape(runs, -1, *array.shape[1:]), stacked)
        return stacked, jax.tree.map(lambda _: True, stacked)

    return call
