"""Attention layers. To add one, write a file here and register it in `ATTENTIONS`.

Each is a Linen class called on (x [B, T, D], Sequence), a `MultiHead` with its own `mix`. It
declares the fields of `SoftmaxAttention` that it needs, and describes its scores to its kernel in a
`Scores`.
"""

from modules.attention.linear import LinearAttention, NaLaAttention
from modules.attention.recurrent import GatedDeltaAttention, GatedLinearAttention
from modules.attention.softmax import L2Attention, SoftmaxAttention

__all__ = ['ATTENTIONS']

ATTENTIONS = {
    'gated_delta': GatedDeltaAttention,
    'gla': GatedLinearAttention,
    'l2': L2Attention,
    'linear': LinearAttention,
    'nala': NaLaAttention,
    'softmax': SoftmaxAttention,
}
