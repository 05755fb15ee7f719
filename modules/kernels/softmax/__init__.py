"""Softmax over the last axis. A new kernel is a row in `SOFTMAX_KERNELS`.

Each is (x, mask, sink, causal=, segments=, softcap=) -> p, as `reference` has them. In a model it
is for attention that has all of its scores at once (`kernels.attention=reference`) and for routers
of experts; fused attention has a softmax of its own.
"""

import jax

from modules.kernels.platforms import PALLAS, Kernel
from modules.kernels.softmax import reference


def pallas(
    x: jax.Array,
    mask: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    platform: str,
    **options,
) -> jax.Array:
    """`reference`, which reads x and writes p once, and its gradient as well; on TPUs and GPUs."""
    # Here, as Pallas takes time to import.
    from modules.kernels.softmax.fused import softmax

    return softmax(x, mask, sink, platform=platform, **options)


SOFTMAX_KERNELS = {
    'reference': Kernel(reference.reference),
    'pallas': Kernel(pallas, PALLAS, is_forward_mode=False),
}
