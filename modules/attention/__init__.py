"""Attention layers. A new one is a file here and a row in `ATTENTIONS`.

Each is a Linen class called on (x [B, T, D], Sequence), a `MultiHead` with a `mix` of its own. Of
the fields of `SoftmaxAttention` it has those that it needs; what its kernel has to know of its
scores it says in a `Scores`. What it keeps of tokens read is in `modules.attention.cache`.
"""

from modules.attention.linear import LinearAttention, NaLaAttention
from modules.attention.softmax import L2Attention, SoftmaxAttention

ATTENTIONS = {
    'l2': L2Attention,
    'linear': LinearAttention,
    'nala': NaLaAttention,
    'softmax': SoftmaxAttention,
}
