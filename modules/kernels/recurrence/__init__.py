"""Linear recurrences: a state that decays, and that keys write to and queries read.

`base` has the reference implementation, which reads one token at a time, and `chunked` the form
with matrix products. `modules.attention.recurrent` calls this package.

A kernel takes q, k [B, N, T, K], v [B, N, T, V], g and beta [B, N, T], segments [B, T] or None, and
the state [B, N, K, V] before the first token or None. It returns (out [B, N, T, V], the state after
the last token), both in float32 at least. `token_by_token` defines the operation; the others equal
it to rounding (tests/modules/test_recurrence_kernels.py).
"""

from modules.kernels.recurrence.base import token_by_token
from modules.kernels.recurrence.chunked import chunked_recurrence

__all__ = ['RECURRENCE_KERNELS']

RECURRENCE_KERNELS = {'chunked': chunked_recurrence, 'reference': token_by_token}
