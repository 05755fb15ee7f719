"""Parts that kernels share: rows of matrices (`rows`, `tpu_rows`, `gpu_rows`), sums of
exponentials, and which kernel runs on which platform. The rooms of the operations call it; it calls
none of them.
"""
