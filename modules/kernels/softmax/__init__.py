"""Softmax over the last axis: `api` has the table of kernels, `base` the specification in plain
operations, `tpu` and `gpu` the Pallas kernels. Attention with all of its scores at once and routers
of experts call it; fused attention has a softmax of its own.
"""

from modules.kernels.softmax.api import SOFTMAX_KERNELS

__all__ = ['SOFTMAX_KERNELS']
