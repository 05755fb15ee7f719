"""Layouts: the order of our arrays in a tensor of a file.

'(N H) D -> D N H' means that the file's tensor has two axes, heads times features and model width,
and that our array has three. A|B|C is an axis of length A in the first array, B in the second and C
in the third; the file concatenates the arrays along it. A digit is the number of arrays that the
file interleaves.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Sizes = Mapping[str, int]


class Layout:
    """The layout given by an axes string, in both directions."""

    def __init__(self, axes: str):
        theirs, _, ours = axes.partition('->')
        groups = [group.strip('()').split() for group in re.findall(r'\([^)]*\)|\S+', theirs)]
        self.groups, self.ours = groups, ours.split()

    def _names(self, names: Sequence[str], part: int) -> list[str]:
        return [name.split('|')[part] if '|' in name else name for name in names]

    def axes(self, part: int) -> list[str]:
        """Returns the letters of the axes of our array number `part`."""
        return self._names(self.ours, part)

    def sizes(self, shapes: Sequence[Sequence[int]]) -> list[dict[str, int]]:
        """Returns the length of each axis in each of our arrays, given their shapes."""
        sizes = []
        for part, shape in enumerate(shapes):
            names = self.axes(part)
            lengths = dict(zip(names, shape, strict=True))
            digits = {name for group in self.groups for name in group if name.isdigit()}
            sizes.append(lengths | {name: int(name) for name in digits})
        return sizes

    def _lengths(self, sizes: Sequence[Sizes], part: int) -> list[int]:
        """Returns the shape of the file's tensor if it held only this array."""
        lengths = sizes[part]
        named = [self._names(group, part) for group in self.groups]
        return [math.prod(lengths[name] for name in group) for group in named]

    @property
    def _concat_axis(self) -> int | None:
        """The axis of the file along which arrays are concatenated."""
        has = [any('|' in name for name in group) for group in self.groups]
        return has.index(True) if any(has) else None

    @property
    def _interleave_axis(self) -> int | None:
        """The axis, with groups split, along which arrays are interleaved."""
        flat = [name for group in self.groups for name in group]
        return next((i for i, name in enumerate(flat) if name.isdigit()), None)

    def file_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the shape of the file's tensor that holds arrays of these shapes."""
        sizes, concat_axis = self.sizes(shapes), self._concat_axis
        shape = self._lengths(sizes, 0)
        if concat_axis is not None:
            shape[concat_axis] = sum(
                self._lengths(sizes, i)[concat_axis] for i in range(len(shapes))
            )
        return tuple(shape)

    def take(self, tensor: np.ndarray, shapes: Sequence[Sequence[int]], part: int) -> np.ndarray:
        """Returns array number `part` from a file's tensor, as a view if possible.

        Args:
          tensor: of the file.
          shapes: of all our arrays in it.
          part: number of the array.
        """
        sizes, concat_axis, interleave_axis = (
            self.sizes(shapes),
            self._concat_axis,
            self._interleave_axis,
        )
        lengths = self._lengths(sizes, part)
        if concat_axis is not None:
            begin = sum(self._lengths(sizes, i)[concat_axis] for i in range(part))
            # Cuts this array out of the concatenation.
            tensor = tensor[
                (slice(None),) * concat_axis + (slice(begin, begin + lengths[concat_axis]),)
            ]
        flat = [n for group in self.groups for n in self._names(group, part)]
        split = tensor.reshape([sizes[part][name] for name in flat])
        if interleave_axis is not None:
            # Picks this array from the interleaved arrays.
            split = split[(slice(None),) * interleave_axis + (part,)]
            flat = flat[:interleave_axis] + flat[interleave_axis + 1 :]
        return split.transpose([flat.index(name) for name in self._names(self.ours, part)])

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the file's tensor that holds these arrays. The inverse of `take`."""
        shapes = [array.shape for array in arrays]
        sizes, concat_axis, interleave_axis = (
            self.sizes(shapes),
            self._concat_axis,
            self._interleave_axis,
        )
        split = []
        for part, array in enumerate(arrays):
            flat = [n for group in self.groups for n in self._names(group, part)]
            names = self._names(self.ours, part)
            # Axes in the order of the file; a digit is no axis of the array.
            split.append(array.transpose([names.index(n) for n in flat if not n.isdigit()]))
        if interleave_axis is not None:
            return np.stack(split, interleave_axis).reshape(self.file_shape(shapes))
        flattened = [s.reshape(self._lengths(sizes, part)) for part, s in enumerate(split)]
        return flattened[0] if concat_axis is None else np.concatenate(flattened, concat_axis)
