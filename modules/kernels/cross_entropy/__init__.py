"""Softmax cross-entropy over logits. A new kernel is a row in `CROSS_ENTROPY_KERNELS`.

Each is (logits [M, V], labels [M], z_loss, label_smoothing) -> {'objective', 'ce', 'z_loss'}, [M]
each, as `modules.losses.cross_entropy` has them, which `reference` stands for in a model.
"""

from typing import Any

import jax

from modules.kernels.cross_entropy import reference
from modules.kernels.platforms import PALLAS, Kernel


def pallas(
    logits_MV: jax.Array, labels_M: jax.Array, z_loss: Any, label_smoothing: Any, *, platform: str
) -> dict[str, jax.Array]:
    """`reference`, which reads the logits once forward and once backward; on TPUs and GPUs.

    Their gradient is written over them, where nothing else reads them.
    """
    # Here, as Pallas takes time to import.
    from modules.kernels.cross_entropy.fused import cross_entropy

    return cross_entropy(logits_MV, labels_M, z_loss, label_smoothing, platform=platform)


CROSS_ENTROPY_KERNELS = {
    'reference': Kernel(reference.cross_entropy, is_plain=True),
    'pallas': Kernel(pallas, PALLAS, is_forward_mode=False),
}
