"""Softmax cross-entropy over logits.

`api` has the table of kernels, `base` the reference implementation in plain operations, `tpu` and
`gpu` the Pallas kernels. `modules.losses` calls this package; it calls `modules.kernels.common` and
`modules.parallel`.
"""

from modules.kernels.cross_entropy.api import CROSS_ENTROPY_KERNELS

__all__ = ['CROSS_ENTROPY_KERNELS']
