"""Shares of a device's published peak that products reach: kernels of attention what public timings
of them say, and others what their shapes fill of the tiles of a TPU's matrix unit.

Timings are of attention over 2 rows of 8,192 tokens in bfloat16 under a causal mask, as many key
heads as query heads and 2,048 channels in all, in milliseconds: the best of each shape in
openxla/tokamax 783ea95, tokamax/data/autotuning, where the kernel returns its results alone. A
product of queries and keys is 2 * 2 * 2048 * 8192**2 operations for all pairs of tokens, and half
as many under the mask; forward has 2 of them, backward 5. Of the peak of one device, in percent:

    heads of        64   128   256
    v5p             33    62    67
    v6e             14    25    40
    tpu7x           12    22    37, backward 13, 25, 42
    H100            52    64    64, backward 31, 44, 15

Kernels that are not in that table take their nearest kin's share of their own peak: v4 and v5e that
of v5p, whose matrix unit is as wide, and A100, H200 and B200 that of H100. A backward pass without
a timing has the share of the forward pass.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lm.training.flops import published_peak

ROWS, LENGTH, CHANNELS = 2, 8192, 2048  # rows, tokens of each, and heads times their width
PRODUCTS = {'forward': 2, 'backward': 5}  # of queries and keys, each 2 operations a pair
CAUSAL = 0.5  # of the pairs of tokens


class Timings(NamedTuple):
    """Milliseconds of kernels of attention by the width of a head. kind: the device they ran on."""

    kind: str
    forward: dict[int, float]
    backward: dict[int, float] | None = None


# By a part of `device_kind`; the first fits. Forward on an H100 is cuDNN's, backward tokamax's
# Mosaic kernel, as cuDNN's was not timed; on TPUs both are tokamax's splash attention, whose times
# have the transposes around it in them.
ATTENTION = {
    'TPU v6': Timings('TPU v6 lite', {64: 4.335, 128: 2.432, 256: 1.502}),
    'TPU7x': Timings(
        'TPU7x', {64: 4.076, 128: 2.139, 256: 1.291}, {64: 9.117, 128: 4.711, 256: 2.859}
    ),
    'TPU': Timings('TPU v5', {64: 3.595, 128: 1.923, 256: 1.794}),
    'NVIDIA': Timings(
        'NVIDIA H100', {64: 1.070, 128: 0.873, 256: 0.862}, {64: 4.476, 128: 3.135, 256: 9.134}
    ),
}
# Side of the matrix unit (jax-ml/scaling-book, tpus.md; of TPU7x MaxText's documentation).
# A GPU's tiles are of 8 and 16, which shapes of models fill.
UNITS = {'TPU v6': 256, 'TPU7x': 256, 'TPU': 128}


def attention_share(kind: str, head_dim: int, phase: str, pairs: float = CAUSAL) -> float:
    """Returns the share of the peak at which a device of `kind` computes products of attention.

    The share is linear in H between the widths that were timed. Below the first it is in proportion
    to H, as a narrow head takes as long as one that fills the unit and has as many exponentials;
    above the last it stays.

    Args:
      kind: `jax.Device.device_kind`; one that no timings are for has 1.
      head_dim: the width of a head, H.
      phase: 'forward' or 'backward'.
      pairs: the share of all pairs of tokens that a kernel's operations are counted for on causal
        rows of LENGTH: those under the mask, or those of the blocks that it lies in.
    """
    timings = _lookup_kind(ATTENTION, kind)
    if timings is None:
        return 1.0
    own = timings.backward if phase == 'backward' else None
    took, products = (own, PRODUCTS[phase]) if own else (timings.forward, PRODUCTS['forward'])
    operations = products * 2 * ROWS * CHANNELS * LENGTH**2 * pairs
    whole = 1e-3 * published_peak(timings.kind)  # operations of a millisecond
    shares = [operations / whole / ms for ms in took.values()]
    return float(np.interp(head_dim, [0, *took], [0.0, *shares]))


def tile_fill_share(kind: str, contracted: float, columns: int) -> float:
    """Returns the share of the matrix unit's tiles that a product fills on a device of `kind`.

    A TPU's unit of side u holds a tile of one operand, K along one side and N along the other, and
    the rows of the other operand stream through: M of them, eight at a time. Both sides are padded
    to whole tiles, as K N / (u**2 ceil(K / u) ceil(N / u)); rows are many, and count as they are.
    1 where nothing is padded.

    Args:
      kind: `jax.Device.device_kind`.
      contracted: K, the products that are summed for each result, over all contracted dimensions.
      columns: N, of the operand that has fewer, over all of its dimensions that are in the result:
        a matrix that makes heads of 128 has the columns of all heads.
    """
    side = _lookup_kind(UNITS, kind)
    if side is None:
        return 1.0
    return math.prod(n / (side * math.ceil(n / side)) for n in (contracted, columns))


def _lookup_kind(table: Mapping[str, Any], kind: str) -> Any:
    """Returns the first row whose key is a part of a device's kind, else None."""
    return next((row for part, row in table.items() if part in kind), None)
