"""Causal softmax attention: `api` has the table of kernels, `base` what they share and the
specification, `blocked`, `cudnn` and `splash` the other kernels, `observed` the statistics that are
recorded. `modules.attention` calls it; it calls `modules.parallel`.
"""

from modules.kernels.attention.api import (
    ATTENTION_KERNELS,
    attend,
    check_documents,
    check_scores,
)
from modules.kernels.attention.base import Scores

__all__ = ['ATTENTION_KERNELS', 'Scores', 'attend', 'check_documents', 'check_scores']
