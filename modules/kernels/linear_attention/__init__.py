"""Causal linear attention: `api` has the table of kernels, `base` the specification, which computes
all pairs of tokens, `chunked` the kernel that carries a state. `modules.attention.linear` calls it.
"""

from modules.kernels.linear_attention.api import LINEAR_ATTENTION_KERNELS

__all__ = ['LINEAR_ATTENTION_KERNELS']
