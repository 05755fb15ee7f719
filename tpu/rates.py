"""Shares of a device's published peak that products reach.

Shares of attention kernels come from public timings. For other products, a shape determines the
share of a TPU's matrix unit that its tiles fill.

The timings, in milliseconds, cover attention over 2 rows of 8,192 tokens in bfloat16 with a causal
mask, equal numbers of key and query heads and 2,048 channels in total. Each is the best for its
shape in openxla/tokamax 783ea95, tokamax/data/autotuning, among calls that return only the results.
A product of queries and keys takes 2 * 2 * 2048 * 8192**2 operations for all pairs of tokens and
half of that with the mask; a forward pass has 2 products, a backward pass 5. In percent of one
device's peak:

    heads of        64   128   256
    v5p             33    62    67
    v6e             14    25    40
    tpu7x           12    22    37, backward 13, 25, 42
    H100            52    64    64, backward 31, 44, 15

Other devices take the shares of a similar device in the table: v5p for v4 and v5e, which have a
matrix unit of the same width, and H100 for A100, H200 and B200. A backward pass without a timing
takes the share of the forward pass.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lm.training.peaks import published_peak

ROWS, LENGTH, CHANNELS = 2, 8192, 2048  # rows, tokens of each, and heads times their width
PRODUCTS = {'forward': 2, 'backward': 5}  # of queries and keys, each 2 operations a pair
CAUSAL = 0.5  # of the pairs of tokens


class Timings(NamedTuple):
    """Milliseconds of attention kernels by the width of a head. kind: the device that was timed."""

    kind: str
    forward: dict[int, float]
    backward: dict[int, float] | None = None


# By a substring of `device_kind`; the first match counts. Forward on an H100 is cuDNN's kernel,
# backward tokamax's Mosaic kernel, as cuDNN's was not timed. On TPUs both are tokamax's splash
# attention, whose times include the transposes around it.
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
# Published peak of products in few bits over that in bfloat16, by a substring of `device_kind` and
# the type of both operands in a compiled program (f8: all float8). The first match counts; types
# that are not listed have the rate of bfloat16. From the makers' data sheets.
FEW_BITS = {
    'TPU v6': {'s8': 2.0},
    'TPU7x': {'f8': 2.0},
    'TPU v5': {'s8': 2.0},
    'A100': {'s8': 2.0},
    'H100': {'s8': 2.0, 'f8': 2.0},
    'H200': {'s8': 2.0, 'f8': 2.0},
    'B200': {'s8': 2.0, 'f8': 2.0},
}
# Side of the matrix unit (jax-ml/scaling-book, tpus.md; of TPU7x MaxText's documentation).
# A GPU's tiles are of 8 and 16, which shapes of models fill.
UNITS = {'TPU v6': 256, 'TPU7x': 256, 'TPU': 128}


def few_bits_factor(kind: str, dtypes: Iterable[str]) -> float:
    """Returns the peak of products of few bits over that of bfloat16.

    Args:
      kind: of the device.
      dtypes: of both operands in the compiled program, such as 's8' and 'f8e4m3fn'.
    """
    rates = next((rates for name, rates in FEW_BITS.items() if name in kind), {})
    types = {'f8' if dtype.startswith('f8') else dtype for dtype in dtypes}
    return min(rates.get(dtype, 1.0) for dtype in types)


def attention_share(kind: str, head_dim: int, phase: str, pairs: float = CAUSAL) -> float:
    """Returns the share of the peak that attention's products reach on a device.

    The share is linear in H between the timed widths. Below the first width it is proportional to
    H, because a narrow head takes the time of a head that fills the unit and has equally many
    exponentials. Above the last width it is constant.

    Args:
      kind: `jax.Device.device_kind`; a kind without timings has share 1.
      head_dim: the width of a head, H.
      phase: 'forward' or 'backward'.
      pairs: share of all pairs of tokens that the caller counts as operations on causal rows of
        LENGTH: the unmasked pairs, or all pairs in blocks with an unmasked pair.
    """
    timings = _lookup_kind(ATTENTION, kind)
    if timings is None:
        return 1.0
    backward = timings.backward if phase == 'backward' else None
    milliseconds, products = (
        (backward, PRODUCTS[phase]) if backward else (timings.forward, PRODUCTS['forward'])
    )
    operations = products * 2 * ROWS * CHANNELS * LENGTH**2 * pairs
    peak = published_peak(timings.kind)
    assert peak is not None  # every timed device has a published peak
    peak_per_ms = 1e-3 * peak
    shares = [operations / peak_per_ms / ms for ms in milliseconds.values()]
    return float(np.interp(head_dim, [0, *milliseconds], [0.0, *shares]))


def tile_fill_share(kind: str, contracted: float, columns: float) -> float:
    """Returns the share of the matrix unit's tiles that a product fills on a device.

    A TPU's unit of side u holds a tile of one operand, K along one side and N along the other, and
    the rows of the other operand stream through: M of them, eight at a time. Both sides are padded
    to whole tiles: the share is K N / (u**2 ceil(K / u) ceil(N / u)), and 1 without padding. Rows
    are many, so their padding is neglected.

    Args:
      kind: `jax.Device.device_kind`.
      contracted: K, the products that are summed for each result, over all contracted dimensions.
      columns: N of the operand that has fewer, over all of its dimensions that are in the result: a
        matrix that produces heads of 128 has the columns of all heads.
    """
    side = _lookup_kind(UNITS, kind)
    if side is None:
        return 1.0
    return math.prod(n / (side * math.ceil(n / side)) for n in (contracted, columns))


def _lookup_kind(table: Mapping[str, Any], kind: str) -> Any:
    """Returns the first row with a key that is a substring of a device's kind, else None."""
    return next((row for key, row in table.items() if key in kind), None)
