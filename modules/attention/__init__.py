"""Attention layers. A new one is a file here and a row in `ATTENTIONS`.

Each is a Linen class called on (x [B, T, D], Sequence), a `MultiHead` with a `mix` of its own. It
declares those fields of `SoftmaxAttention` that it needs, and describes its scores to its kernel in
a `Scores`.
"""

from modules.attention.linear import LinearAttention, NaLaAttention
from modules.attention.softmax import L2Attention, SoftmaxAttention

__all__ = ['ATTENTIONS']

ATTENTIONS = {
    'l2': L2Attention,
    'linear': LinearAttention,
    'nala': NaLaAttention,
    'softmax': SoftmaxAttention,
}
