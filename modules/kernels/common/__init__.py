"""Parts that kernels share.

`rows`, `tpu_rows` and `gpu_rows` are for kernels over the rows of a matrix, `exponentials` is for
sums of exponentials. The packages of the operations call this package; it calls none of them.
"""
