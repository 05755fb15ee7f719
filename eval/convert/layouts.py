"""Layouts: the order of our arrays in a tensor of a file.

'(N H) D -> D N H' means that the file's tensor has two axes, heads times features and model width,
and that our array has three. A|B|C is an axis of length A in the first array, B in the second and C
in the third; the file concatenates the arrays along it. A digit is the number of arrays that the
file interleaves; 1 is an axis of length 1 in the file alone.

H~R is an axis H whose first R features are in pairs in the file, x0 y0 x1 y1 ..., and in halves in
our array, x0 x1 ... y0 y1 ...; the other features are in the same order. Rotary positions of some
models turn neighbours, ours features that are R / 2 apart. R is no axis of an array:
`Layout.with_lengths` sets it.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Sizes = Mapping[str, int]


class Layout:
    """The layout given by an axes string, in both directions. lengths: of paired features."""

    def __init__(self, axes: str, lengths: Sizes | None = None):
        theirs, _, ours = axes.partition('->')
        self.string, self.lengths = axes, lengths or {}
        # {'H': 'R'} for the axis H~R
        self.paired = dict(re.findall(r'(\w+)~(\w+)', theirs))
        theirs = re.sub(r'~\w+', '', theirs)
        groups = [group.strip('()').split() for group in re.findall(r'\([^)]*\)|\S+', theirs)]
        self.groups, self.ours = groups, ours.split()

    @property
    def needed_lengths(self) -> set[str]:
        """The lengths that `with_lengths` must set."""
        return {*self.paired.values()}

    def with_lengths(self, lengths: Sizes) -> 'Layout':
        """Returns the layout with the numbers of features in pairs, {'R': 64}."""
        return Layout(self.string, lengths)

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
        return next((i for i, name in enumerate(flat) if name.isdigit() and name != '1'), None)

    def file_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the shape of the file's tensor that holds arrays of these shapes."""
        sizes, concat_axis = self.sizes(shapes), self._concat_axis
        shape = self._lengths(sizes, 0)
        if concat_axis is not None:
            shape[concat_axis] = sum(
                self._lengths(sizes, i)[concat_axis] for i in range(len(shapes))
            )
        return tuple(shape)

    def _file_order(self, name: str, length: int) -> np.ndarray:
        """Returns the places in the file of the features of an axis, in our order."""
        # An axis of length 1 stands for a matrix that is the same for all features.
        half = self.lengths[self.paired[name]] // 2 if length > 1 else 0
        first = 2 * np.arange(half)
        return np.concatenate([first, first + 1, np.arange(2 * half, length)])

    def take(
        self,
        tensor: np.ndarray,
        shapes: Sequence[Sequence[int]],
        part: int,
        ranges: Sequence[range] | None = None,
    ) -> np.ndarray:
        """Returns array number `part` from a file's tensor, as a view unless features are in pairs.

        Args:
          tensor: of the file.
          shapes: of all our arrays in it.
          part: number of the array.
          ranges: of the array along each axis; None: the whole array.
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
        split = split.squeeze(tuple(i for i, name in enumerate(flat) if name == '1'))
        flat = [name for name in flat if name != '1']
        names = self.axes(part)
        array = split.transpose([flat.index(name) for name in names])
        if ranges is not None:
            # Paired axes stay whole: their features come from places all over the range.
            array = array[
                tuple(
                    slice(None) if name in self.paired else slice(r.start, r.stop)
                    for name, r in zip(names, ranges, strict=True)
                )
            ]
        for axis, name in enumerate(names):
            if name in self.paired:
                order = self._file_order(name, sizes[part][name])
                array = np.take(array, order if ranges is None else order[ranges[axis]], axis)
        return array

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
            for axis, name in enumerate(names):
                if name in self.paired:
                    order = self._file_order(name, array.shape[axis])
                    array = np.take(array, np.argsort(order), axis)
            # Axes in the order of the file; a digit is no axis of the array.
            split.append(array.transpose([names.index(n) for n in flat if not n.isdigit()]))
        if interleave_axis is not None:
            return np.stack(split, interleave_axis).reshape(self.file_shape(shapes))
        flattened = [s.reshape(self._lengths(sizes, part)) for part, s in enumerate(split)]
        return flattened[0] if concat_axis is None else np.concatenate(flattened, concat_axis)


class GroupedLayout(Layout):
    """Arrays that a file interleaves by groups of neighbouring heads (Qwen3-Next).

    The file's tensor is [G * M, D]. For each of the G groups it has the heads of the first array in
    this group, then those of the second, and so on. Our arrays are [D, N, H], or [D, N], with heads
    N that may differ, each a multiple of G.
    """

    def __init__(self, axes: str, group: str, lengths: Sizes | None = None):
        # `axes` describes the arrays, side by side: 'D P|P|W Q|Q|U'.
        super().__init__(f'({" ".join(axes.split()[1:])}) D -> {axes}', lengths)
        self.array_axes, self.group = axes, group

    @property
    def needed_lengths(self) -> set[str]:
        return {self.group}

    def with_lengths(self, lengths: Sizes) -> 'GroupedLayout':
        return GroupedLayout(self.array_axes, self.group, lengths)

    def _widths(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """Returns the rows of the file in a group, for each array."""
        return [math.prod(shape[1:]) // self.lengths[self.group] for shape in shapes]

    def take(
        self,
        tensor: np.ndarray,
        shapes: Sequence[Sequence[int]],
        part: int,
        ranges: Sequence[range] | None = None,
    ) -> np.ndarray:
        widths, groups = self._widths(shapes), self.lengths[self.group]
        begin = sum(widths[:part])
        grouped = tensor.reshape(groups, sum(widths), tensor.shape[1])
        array = grouped[:, begin : begin + widths[part]].transpose(2, 0, 1).reshape(shapes[part])
        return array if ranges is None else array[tuple(slice(r.start, r.stop) for r in ranges)]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        groups, d_model = self.lengths[self.group], len(arrays[0])
        parts = [array.reshape(d_model, groups, -1) for array in arrays]
        return np.concatenate(parts, 2).transpose(1, 2, 0).reshape(-1, d_model)
