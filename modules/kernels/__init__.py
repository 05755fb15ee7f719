"""Equal ways to compute the same thing, chosen by name: `kernels.implementation`.

Rows agree to rounding (tests/modules/test_kernels.py); they differ in speed, memory and in what can
be differentiated twice. Nothing falls back from one to another.
"""

import dataclasses
from collections.abc import Callable

import jax

from modules.kernels import attention, matmul


@dataclasses.dataclass(frozen=True)
class Kernels:
    """attention: (q, k, v, segments) -> mixed values. matmul: (x [M, I], w [I, O]) -> [M, O]."""

    attention: Callable[..., jax.Array]
    matmul: Callable[[jax.Array, jax.Array], jax.Array]


IMPLEMENTATIONS = {
    'reference': Kernels(attention.plain, matmul.direct),
    'xla': Kernels(attention.blocked, matmul.direct),
    'xla_cpu': Kernels(attention.blocked, matmul.narrow_first),
}
