"""Layouts: how a tensor of a file holds one array of ours, or several.

'(N H) D -> D N H' reads: the file's tensor has two axes, the first of heads times features; ours
has three. A|B|C is an axis of length A in the first array, of B in the second, of C in the third:
in the file they lie one after another. A digit counts arrays that are interleaved there.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Sizes = Mapping[str, int]


class Layout:
    """One axes string, used both ways."""

    def __init__(self, axes: str):
        there, _, ours = axes.partition('->')
        groups = [one.strip('()').split() for one in re.findall(r'\([^)]*\)|\S+', there)]
        self.groups, self.ours = groups, ours.split()

    def _names(self, names: Sequence[str], part: int) -> list[str]:
        return [name.split('|')[part] if '|' in name else name for name in names]

    def axes(self, part: int) -> list[str]:
        """Returns the letters of the axes of our array number `part`."""
        return self._names(self.ours, part)

    def sizes(self, shapes: Sequence[Sequence[int]]) -> list[dict[str, int]]:
        """Returns the length of each axis in each of our arrays, from their shapes."""
        found = []
        for part, shape in enumerate(shapes):
            names = self.axes(part)
            lengths = dict(zip(names, shape, strict=True))
            digits = {name for group in self.groups for name in group if name.isdigit()}
            found.append(lengths | {name: int(name) for name in digits})
        return found

    def _lengths(self, sizes: Sequence[Sizes], part: int) -> list[int]:
        """Returns the shape of the file's tensor as if it held this array alone."""
        lengths = sizes[part]
        named = [self._names(group, part) for group in self.groups]
        return [math.prod(lengths[name] for name in group) for group in named]

    @property
    def _concat_axis(self) -> int | None:
        """Returns the axis of the file along which arrays follow each other."""
        has = [any('|' in name for name in group) for group in self.groups]
        return has.index(True) if any(has) else None

    @property
    def _interleave_axis(self) -> int | None:
        """Returns the axis, with groups split, along which arrays are interleaved."""
        flat = [name for group in self.groups for name in group]
        return next((i for i, name in enumerate(flat) if name.isdigit()), None)

    def file_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the shape of the file's tensor that holds arrays of these shapes."""
        sizes, joined = self.sizes(shapes), self._concat_axis
        shape = self._lengths(sizes, 0)
        if joined is not None:
            shape[joined] = sum(self._lengths(sizes, i)[joined] for i in range(len(shapes)))
        return tuple(shape)

    def take(self, tensor: np.ndarray, shapes: Sequence[Sequence[int]], part: int) -> np.ndarray:
        """Returns our array number `part` of a file's tensor, a view where numpy can make one."""
        sizes, joined, apart = self.sizes(shapes), self._concat_axis, self._interleave_axis
        lengths = self._lengths(sizes, part)
        if joined is not None:
            begin = sum(self._lengths(sizes, i)[joined] for i in range(part))
            tensor = tensor[(slice(None),) * joined + (slice(begin, begin + lengths[joined]),)]
        flat = [n for group in self.groups for n in self._names(group, part)]
        split = tensor.reshape([sizes[part][name] for name in flat])
        if apart is not None:
            split = split[(slice(None),) * apart + (part,)]
            flat = flat[:apart] + flat[apart + 1 :]
        return split.transpose([flat.index(name) for name in self._names(self.ours, part)])

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the file's tensor that holds these arrays: the inverse of `take`."""
        shapes = [array.shape for array in arrays]
        sizes, joined, apart = self.sizes(shapes), self._concat_axis, self._interleave_axis
        split = []
        for part, array in enumerate(arrays):
            flat = [n for group in self.groups for n in self._names(group, part)]
            names = self._names(self.ours, part)
            split.append(array.transpose([names.index(n) for n in flat if not n.isdigit()]))
        if apart is not None:
            return np.stack(split, apart).reshape(self.file_shape(shapes))
        flattened = [s.reshape(self._lengths(sizes, part)) for part, s in enumerate(split)]
        return flattened[0] if joined is None else np.concatenate(flattened, joined)
