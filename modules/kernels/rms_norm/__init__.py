"""RMSNorm over the last axis.

`api` has the table of kernels, `base` the reference implementation in plain operations, `tpu` and
`gpu` the Pallas kernels. `modules.norms` calls this package; it calls `modules.kernels.common` and
`modules.parallel`.
"""

from modules.kernels.rms_norm.api import RMS_NORM_KERNELS
from modules.kernels.rms_norm.base import inverse_rms, reference

__all__ = ['RMS_NORM_KERNELS', 'inverse_rms', 'reference']
