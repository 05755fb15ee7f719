"""Weights of four bits with a scale for each 32 of them (MXFP4), as gpt-oss is released in.

A tensor [E, I, O] is two in the files: `_blocks` [E, O, I / 32, 16], each byte two numbers, the
lower half first, and `_scales` [E, O, I / 32], exponents of two plus 127. Sources: Open Compute
Project, Microscaling Formats 1.0; the layout is of transformers' integrations/mxfp4.py.
"""

from collections.abc import Mapping

import numpy as np

from eval.convert.safetensors import StoredTensor

BLOCKS, SCALES = '_blocks', '_scales'
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of one sign bit, then these three
TABLE = np.concatenate([NUMBERS, -NUMBERS])
BIAS = 127
GROUP = 32  # numbers that a scale is of


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers [..., I] of blocks [..., I / 32, 16] and scales [..., I / 32]."""
    pairs = np.stack([TABLE[blocks & 15], TABLE[blocks >> 4]], -1)
    numbers = pairs.reshape(*scales.shape, -1)
    exact = np.ldexp(numbers, scales.astype(np.int32)[..., None] - BIAS)
    return exact.reshape(*scales.shape[:-1], -1)


def unpack_tensors(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns (the tensors with one float32 tensor for each pair, the tensors of the pairs).

    Raises ValueError for a pair whose shapes do not agree.
    """
    packed = {
        name: stored[name]
        for name in stored
        if name.endswith((BLOCKS, SCALES))
        if {name[:-7] + BLOCKS, name[:-7] + SCALES} <= stored.keys()
    }
    found = {name: where for name, where in stored.items() if name not in packed}
    for name, blocks in packed.items():
        if name.endswith(BLOCKS):
            stem = name.removesuffix(BLOCKS)
            shape = packed[stem + SCALES].shape
            if blocks.shape != (*shape, 16) or len(shape) != 3:
                raise ValueError(
                    f'{name} is {list(blocks.shape)}, and its scales are {list(shape)}'
                )
            n_experts, outputs, groups = shape
            whole = (n_experts, GROUP * groups, outputs)
            found[stem] = StoredTensor(blocks.file, np.dtype(np.float32), whole, blocks.begin)
    return found, packed
