"""Reads our parameters from tensors of files, an index range at a time.

Each process reads what its own devices hold: a tensor is mapped into memory, brought into our
layout as a view, and of that view a range is copied. Where a range takes less than a page (4 KB) of
each row of a tensor, the disk reads whole pages all the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from eval.convert import mxfp4, safetensors
from eval.convert.hf_families import TensorPlace
from eval.convert.safetensors import StoredTensor
from lm.devices.mesh import param_sharding
from modules.params import ParamSpec

Shapes = Mapping[str, tuple[int, ...]]  # {'layers/mlp/up': (L, D, F), ...}
ALIGNMENT = 64  # bytes


class WeightReader:
    """Reads float32 ranges of our parameters, which lie in `places` of the files.

    shapes: of all our parameters. packed: tensors of four bits. factors: {path: what the array is
    multiplied by}. constants: {path: what fills it}. n_bytes: of the files, read until now.
    """

    def __init__(
        self,
        shapes: Shapes,
        places: Sequence[TensorPlace],
        stored: Mapping[str, StoredTensor],
        packed: Mapping[str, StoredTensor],
        factors: Mapping[str, float],
        constants: Mapping[str, float],
    ):
        for place in places:
            dtype = stored[place.name].dtype
            if not np.issubdtype(dtype, np.floating) and dtype != ml_dtypes.bfloat16:
                raise ValueError(f'{place.name} is {dtype}: quantised weights are not read')
        self.shapes, self.n_bytes_read = shapes, 0
        self._stored, self._packed = stored, packed
        self._factors, self._constants = factors, constants
        self._parts: dict[str, list[tuple[TensorPlace, int]]] = {path: [] for path in shapes}
        for place in places:
            for part, path in enumerate(place.row.paths):
                self._parts[path].append((place, part))

    @property
    def file_bytes(self) -> int:
        """Returns the bytes of all parameters in the files."""
        names = {place.name for parts in self._parts.values() for place, _ in parts}
        whole = [name for name in names if name + mxfp4.BLOCKS not in self._packed]
        of_packed = sum(tensor.n_bytes for tensor in self._packed.values())
        return of_packed + sum(self._stored[name].n_bytes for name in whole)

    def read_array(self, path: str, spec: ParamSpec, mesh: Mesh) -> jax.Array:
        """Returns a parameter laid over a mesh; all processes of the mesh must call it."""
        shape = self.shapes[path]
        sharding = param_sharding(mesh, spec, shape)
        return jax.make_array_from_callback(shape, sharding, lambda at: self.read_block(path, at))

    def read_block(self, path: str, slices: Sequence[slice]) -> np.ndarray:
        """Returns the range `at` of a parameter."""
        ranges = [range(n)[one] for n, one in zip(self.shapes[path], slices, strict=True)]
        block = empty_aligned([len(one) for one in ranges])
        if path in self._constants:
            block[...] = self._constants[path]
        for place, part in self._parts[path]:
            if all(i in one for i, one in zip(place.index, ranges, strict=False)):
                index = tuple(i - one.start for i, one in zip(place.index, ranges, strict=False))
                self._fill(block[index], place, part, ranges[len(index) :])
        if path in self._factors:
            block *= np.float32(self._factors[path])
        return block

    def _fill(
        self, target: np.ndarray, place: TensorPlace, part: int, ranges: Sequence[range]
    ) -> None:
        """Fills the range of one tensor; target: a view of the block."""
        row, ours = place.row, place.shapes(self.shapes)
        if place.name + mxfp4.BLOCKS in self._packed:
            self._unpack(target, place, part, ranges)
        else:
            tensor = row.layout.take(safetensors.map_tensor(self._stored[place.name]), ours, part)
            found = tensor[tuple(slice(one.start, one.stop) for one in ranges)]
            self.n_bytes_read += found.nbytes
            target[...] = found
        if row.offset:
            target += np.float32(row.offset)

    def _unpack(
        self, target: np.ndarray, place: TensorPlace, part: int, ranges: Sequence[range]
    ) -> None:
        """Fills a range [E, I, O] of a tensor of four bits, an expert at a time.

        A byte has two neighbours along I, and a scale GROUP of them: both lie in the files as
        tensors with a shorter I, which the same layout brings into ours.
        """
        experts, inputs, outputs = ranges
        groups = slice(inputs.start // mxfp4.GROUP, -(-inputs.stop // mxfp4.GROUP))
        first = inputs.start - mxfp4.GROUP * groups.start

        def of(end: str, values_of_group: int) -> np.ndarray:
            whole = safetensors.map_tensor(self._packed[place.name + end])
            whole = whole.reshape(*whole.shape[:2], -1).swapaxes(1, 2)
            shapes = [
                (n_experts, values_of_group * (n_inputs // mxfp4.GROUP), n_outputs)
                for n_experts, n_inputs, n_outputs in place.shapes(self.shapes)
            ]
            along = slice(values_of_group * groups.start, values_of_group * groups.stop)
            taken = place.row.layout.take(whole, shapes, part)
            return taken[experts.start : experts.stop, along, outputs.start : outputs.stop]

        blocks, scales = of(mxfp4.BLOCKS, mxfp4.GROUP // 2), of(mxfp4.SCALES, 1)
        self.n_bytes_read += blocks.nbytes + scales.nbytes
        for expert in range(len(experts)):
            bytes_OGB = blocks[expert].T.reshape(len(outputs), -1, mxfp4.GROUP // 2)
            numbers_OI = mxfp4.dequantise(bytes_OGB, scales[expert].T)
            target[expert] = numbers_OI[:, first : first + len(inputs)].T


def empty_aligned(shape: Sequence[int]) -> np.ndarray:
    """Returns an empty float32 array where JAX takes arrays as they are, on a CPU: no copy is made.

    It must not be changed after it was handed over.
    """
    size = 4 * math.prod(shape)
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(np.float32).reshape(shape)


def read_params(reader: WeightReader, specs: Mapping[str, ParamSpec], mesh: Mesh) -> dict[str, Any]:
    """Returns all parameters {path: array} laid over a mesh."""
    return {path: reader.read_array(path, specs[path], mesh) for path in reader.shapes}
