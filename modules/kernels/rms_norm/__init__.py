"""RMSNorm over the last axis: `api` has the tables of kernels, `base` the specification in plain
operations, `tpu` and `gpu` the Pallas kernels. `modules.norms` calls it; it calls
`modules.kernels.common` and `modules.parallel`.
"""

from modules.kernels.rms_norm.api import ADD_RMS_NORM_KERNELS, RMS_NORM_KERNELS
from modules.kernels.rms_norm.base import inverse_rms, reference

__all__ = ['ADD_RMS_NORM_KERNELS', 'RMS_NORM_KERNELS', 'inverse_rms', 'reference']
