"""Causal linear attention.

`base` has the reference implementation, which computes all pairs of tokens, and `chunked` the
kernel that carries a state. `modules.attention.linear` calls this package.

A kernel takes q_num, q_den [B, N, T, F], k_num, k_den [B, K, T, F] and v [B, K, T, H], with K
dividing N (grouped queries, arXiv:2305.13245), eps, segments [B, T] or None, and `AttentionSums` or
None. It returns (out [B, N, T, H] in the type of v, the `AttentionSums` after the last token).
`quadratic` defines the operation; the others equal it to rounding
(tests/modules/test_linear_attention_kernels.py).
"""

from modules.kernels.linear_attention.base import quadratic
from modules.kernels.linear_attention.chunked import chunked_linear_attention

__all__ = ['LINEAR_ATTENTION_KERNELS']

LINEAR_ATTENTION_KERNELS = {'chunked': chunked_linear_attention, 'quadratic': quadratic}
