"""Reads our parameters from tensors of files, a range of indices at a time.

Each process reads only what its own devices hold: a tensor is memory-mapped, brought into our
layout as a view, and a range of that view is copied. If a range takes less than a page (4 KB) of
each row of a tensor, the disk still reads whole pages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from eval.convert import mxfp4, safetensors
from eval.convert.families.family import TensorPlace
from eval.convert.safetensors import StoredTensor
from lm.devices.mesh import param_sharding
from modules.params import ParamSpec

Shapes = Mapping[str, tuple[int, ...]]  # {'layers/mlp/up': (L, D, F), ...}
ALIGNMENT = 64  # bytes


class WeightReader:
    """Reads float32 ranges of our parameters from tensors at `places` in the files.

    shapes: of all our parameters. stored: the tensors by name. packed: 4-bit tensors. factors:
    {path: factor of the array}. constants: {path: fill value}. n_bytes_read: bytes that were read
    from the files so far.
    """

    def __init__(
        self,
        shapes: Shapes,
        places: Sequence[TensorPlace],
        stored: Mapping[str, StoredTensor],
        packed: Mapping[str, StoredTensor],
        factors: Mapping[str, float],
        constants: Mapping[str, float | np.floating],
    ):
        for place in places:
            dtype = stored[place.name].dtype
            if not np.issubdtype(dtype, np.floating) and dtype != ml_dtypes.bfloat16:
                raise ValueError(f'{place.name} is {dtype}; quantised weights are not supported')
        self.shapes, self.n_bytes_read = shapes, 0
        self._stored, self._packed = stored, packed
        self._factors, self._constants = factors, constants
        self._parts: dict[str, list[tuple[TensorPlace, int]]] = {path: [] for path in shapes}
        for place in places:
            for part, path in enumerate(place.row.paths):
                self._parts[path].append((place, part))

    @property
    def file_bytes(self) -> int:
        """The size of all parameters in the files."""
        names = {place.name for parts in self._parts.values() for place, _ in parts}
        unpacked_names = [name for name in names if name + mxfp4.BLOCKS not in self._packed]
        packed_bytes = sum(tensor.n_bytes for tensor in self._packed.values())
        return packed_bytes + sum(self._stored[name].n_bytes for name in unpacked_names)

    def read_array(self, path: str, spec: ParamSpec, mesh: Mesh) -> jax.Array:
        """Returns a parameter sharded over a mesh. All processes of the mesh must call it.

        Args:
          path: of the parameter.
          spec: its axes, which determine the sharding.
          mesh: the devices.
        """
        shape = self.shapes[path]
        sharding = param_sharding(mesh, spec, shape)
        # JAX passes a tuple of slices, though its annotation also allows None.
        return jax.make_array_from_callback(
            shape,
            sharding,
            lambda slices: self.read_block(path, slices),  # ty: ignore[invalid-argument-type]
        )

    def read_block(self, path: str, slices: Sequence[slice]) -> np.ndarray:
        """Returns a range of a parameter. slices: a slice for each axis."""
        ranges = [
            range(n)[index_slice] for n, index_slice in zip(self.shapes[path], slices, strict=True)
        ]
        block = empty_aligned([len(index_range) for index_range in ranges])
        if path in self._constants:
            block[...] = self._constants[path]
        # A place covers a layer and expert; its index has fewer axes than the ranges.
        for place, part in self._parts[path]:
            if all(i in index_range for i, index_range in zip(place.index, ranges, strict=False)):
                index = tuple(
                    i - index_range.start
                    for i, index_range in zip(place.index, ranges, strict=False)
                )
                self._fill(block[index], place, part, ranges[len(index) :])
        if path in self._factors:
            block *= np.float32(self._factors[path])
        return block

    def _fill(
        self, target: np.ndarray, place: TensorPlace, part: int, ranges: Sequence[range]
    ) -> None:
        """Fills the range of a tensor. target: a view of the block."""
        row, array_shapes = place.row, place.shapes(self.shapes)
        if place.name + mxfp4.BLOCKS in self._packed:
            self._unpack(target, place, part, ranges)
        else:
            tensor = safetensors.map_tensor(self._stored[place.name])
            block = row.layout.take(tensor, array_shapes, part, ranges)
            self.n_bytes_read += block.nbytes
            target[...] = block
        if row.offset:
            target += np.float32(row.offset)

    def _unpack(
        self, target: np.ndarray, place: TensorPlace, part: int, ranges: Sequence[range]
    ) -> None:
        """Fills a range [E, I, O] of a 4-bit tensor, expert by expert.

        A byte holds two neighbours along I, and each scale belongs to GROUP of them. Both are
        tensors with a shorter I in the files, and the same layout brings them into ours.
        """
        expert_range, input_range, output_range = ranges
        # Whole groups are read, as a scale belongs to all 32 numbers; the ends are cut below.
        groups = slice(input_range.start // mxfp4.GROUP, -(-input_range.stop // mxfp4.GROUP))
        first = input_range.start - mxfp4.GROUP * groups.start

        def read_end(suffix: str, values_of_group: int) -> np.ndarray:
            whole = safetensors.map_tensor(self._packed[place.name + suffix])
            whole = whole.reshape(*whole.shape[:2], -1).swapaxes(1, 2)
            shapes = [
                (n_experts, values_of_group * (n_inputs // mxfp4.GROUP), n_outputs)
                for n_experts, n_inputs, n_outputs in place.shapes(self.shapes)
            ]
            group_slice = slice(values_of_group * groups.start, values_of_group * groups.stop)
            transposed = place.row.layout.take(whole, shapes, part)
            return transposed[
                expert_range.start : expert_range.stop,
                group_slice,
                output_range.start : output_range.stop,
            ]

        blocks, scales = read_end(mxfp4.BLOCKS, mxfp4.GROUP // 2), read_end(mxfp4.SCALES, 1)
        self.n_bytes_read += blocks.nbytes + scales.nbytes
        for expert in range(len(expert_range)):
            bytes_OGB = blocks[expert].T.reshape(len(output_range), -1, mxfp4.GROUP // 2)
            numbers_OI = mxfp4.dequantise(bytes_OGB, scales[expert].T)
            target[expert] = numbers_OI[:, first : first + len(input_range)].T


def empty_aligned(shape: Sequence[int]) -> np.ndarray:
    """Returns an empty float32 array that JAX on a CPU takes without a copy.

    It must not be changed after it was passed to JAX.
    """
    size = 4 * math.prod(shape)
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(np.float32).reshape(shape)


def read_params(reader: WeightReader, specs: Mapping[str, ParamSpec], mesh: Mesh) -> dict[str, Any]:
    """Returns all parameters {path: array}, sharded over a mesh.

    Args:
      reader: of the files.
      specs: of all parameters, by path.
      mesh: the devices.
    """
    return {path: reader.read_array(path, specs[path], mesh) for path in reader.shapes}
