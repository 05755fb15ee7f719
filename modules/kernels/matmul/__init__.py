"""Products of activations and weight matrices: `api` has the table of kernels, `wta_crs` the
product whose weight gradients are estimates. `modules.products` calls it.
"""

from modules.kernels.matmul.api import MATMUL_KERNELS, WTACRS, direct, narrow_first

__all__ = ['MATMUL_KERNELS', 'WTACRS', 'direct', 'narrow_first']
