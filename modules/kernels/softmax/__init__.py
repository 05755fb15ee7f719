"""Softmax over the last axis.

`api` has the table of kernels, `base` the reference implementation in plain operations, `tpu` and
`gpu` the Pallas kernels. Reference attention and the routers of experts call them; fused attention
has its own softmax.
"""

from modules.kernels.softmax.api import SOFTMAX_KERNELS

__all__ = ['SOFTMAX_KERNELS']
