"""4-bit weights with a scale for every 32 weights (MXFP4), the format of the gpt-oss files.

A tensor [E, I, O] is stored as two: `_blocks` [E, O, I / 32, 16], with two numbers in each byte,
the lower half first, and `_scales` [E, O, I / 32], exponents of two plus 127. Sources: Open Compute
Project, Microscaling Formats 1.0; for the layout, transformers' integrations/mxfp4.py.
"""

from collections.abc import Mapping

import numpy as np

from eval.convert.safetensors import StoredTensor

BLOCKS, SCALES = '_blocks', '_scales'
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # by the three bits after the sign
TABLE = np.concatenate([NUMBERS, -NUMBERS])
BIAS = 127
GROUP = 32  # numbers that share a scale


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers [..., I] of blocks [..., I / 32, 16] and scales [..., I / 32]."""
    pairs = np.stack([TABLE[blocks & 15], TABLE[blocks >> 4]], -1)
    numbers = pairs.reshape(*scales.shape, -1)
    exact = np.ldexp(numbers, scales.astype(np.int32)[..., None] - BIAS)
    return exact.reshape(*scales.shape[:-1], -1)


def unpack_tensors(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns (the tensors with a float32 tensor for each pair, the tensors of the pairs).

    Raises ValueError for a pair of blocks and scales with incompatible shapes.
    """
    packed = {
        name: stored[name]
        for name in stored
        if name.endswith((BLOCKS, SCALES))
        if {name[:-7] + BLOCKS, name[:-7] + SCALES} <= stored.keys()
    }
    tensors = {name: tensor for name, tensor in stored.items() if name not in packed}
    for name, blocks in packed.items():
        if name.endswith(BLOCKS):
            stem = name.removesuffix(BLOCKS)
            shape = packed[stem + SCALES].shape
            if blocks.shape != (*shape, 16) or len(shape) != 3:
                raise ValueError(
                    f'{name} must have the three axes of its scales and a fourth of 16; got '
                    f'{list(blocks.shape)} and scales {list(shape)}'
                )
            n_experts, n_outputs, groups = shape
            whole = (n_experts, GROUP * groups, n_outputs)
            # Never read as float32: `WeightReader` takes the pair. Only its shape and name count.
            tensors[stem] = StoredTensor(blocks.file, np.dtype(np.float32), whole, blocks.begin)
    return tensors, packed
