"""Causal softmax attention.

`api` has the table of kernels, `base` the reference implementation and shared helpers.
`blocked`, `cudnn` and `splash` are the other kernels, and `observed` computes recorded statistics.
`modules.attention` calls this package; it calls `modules.parallel`.
"""

from modules.kernels.attention.api import (
    ATTENTION_KERNELS,
    attend,
    check_documents,
    check_scores,
)
from modules.kernels.attention.base import Scores

__all__ = ['ATTENTION_KERNELS', 'Scores', 'attend', 'check_documents', 'check_scores']
