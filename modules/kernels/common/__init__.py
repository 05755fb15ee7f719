"""Parts that kernels share: rows of tables and of matrices (`rows`, `tpu_rows`, `gpu_rows`), and
sums of exponentials. The rooms of the operations call it; it calls none of them.
"""
