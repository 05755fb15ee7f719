"""Kernels on several devices: XLA cannot cut a Pallas call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec


def over_devices(
    compute: Callable[..., Any], arrays: Sequence[Any], of_rows: Sequence[bool], out_of_rows: Any
) -> Any:
    """compute(*arrays), on each device for its own rows.

    XLA cannot cut a kernel. Under `jax.sharding.use_abstract_mesh` the arrays that are `of_rows`
    are cut along their first axis over the mesh axis `data`, and so are the results that
    `out_of_rows` has True for, which are put together along theirs; others are whole on each
    device. A first axis that does not divide (one row, to make parameters) is not cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if all(mesh.shape[name] == 1 for name in free):
        return compute(*arrays)
    lengths = {
        leaf.shape[0]
        for array, is_of_rows in zip(arrays, of_rows, strict=True)
        for leaf in jax.tree.leaves(array)
        if is_of_rows
    }
    cut = 'data' in free and all(length % mesh.shape['data'] == 0 for length in lengths)
    rows = PartitionSpec('data' if cut else None)

    def specs(which):
        return jax.tree.map(lambda is_of_rows: rows if is_of_rows else PartitionSpec(), which)

    return jax.shard_map(
        compute,
        in_specs=specs(tuple(of_rows)),
        out_specs=specs(out_of_rows),
        axis_names=set(free),
        check_vma=False,  # Pallas calls do not say over which axes their results vary
    )(*arrays)
